"""Kernels compile on a machine without a GPU, for every GPU, and the cache survives damage and concurrent use."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from warpline.errors import ConfigError, KernelError
from warpline.hardware import ARCH_LIMITS, KNOWN_GPUS, resident_blocks
from warpline.kernels import compile as compiler
from warpline.kernels.catalog import CATALOG, find
from warpline.kernels.catalog.rows import LAYERNORM
from warpline.kernels.compile import SOURCE, Binary, compile_many, compile_one
from warpline.kernels.decode_plan import Extents
from warpline.kernels.persistent import DecodeProgram
from warpline.kernels.spec import KernelSpec, Variant

HEADERS = sorted(SOURCE.rglob("*.cuh"))
ALLOWED = {"cuda_fp16.h", "cuda_bf16.h"}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path))
    compiler._warned.clear()
    return tmp_path / "kernels"


def variant(columns: int = 96, dtype: str = "fp16") -> Variant:
    return Variant.of(LAYERNORM, dtype, {"rows": 1, "columns": columns}, "sm_80")


#: All shapes are compiled for these; the others have the same limits or the same paths, and get one shape.
WHOLE = ("sm_75", "sm_80", "sm_90", "sm_120")


@pytest.mark.parametrize("arch", ARCH_LIMITS)
@pytest.mark.parametrize("spec", CATALOG.values(), ids=CATALOG)
def test_every_kernel_compiles_for_every_gpu(spec: KernelSpec, arch: str) -> None:
    shapes = spec.bench_dims if arch in WHOLE else spec.bench_dims[:1]
    variants = {Variant.of(spec, dtype, d, arch) for dtype in spec.dtypes if spec.runs_on(dtype, arch) for d in shapes}
    for binary in compile_many([(v, arch) for v in variants]):
        report, label = binary.report, binary.program.label
        assert binary.code[:4] == b"\x7fELF"
        assert report.spill_bytes == 0, label
        assert report.stack_bytes == 0, label
        assert report.registers is not None
        assert report.shared_bytes is not None
        launch = binary.program.smallest_launch
        assert resident_blocks(arch, launch.block, report.registers, report.shared_bytes + launch.shared_bytes), label


@pytest.mark.parametrize("spec", CATALOG.values(), ids=CATALOG)
def test_odd_shapes_compile_without_spills(spec: KernelSpec) -> None:
    arch = "sm_75" if spec.runs_on("fp16", "sm_75") else "sm_90"
    jobs = {(Variant.of(spec, "fp16", dims, arch), arch) for dims in spec.test_dims}
    assert [b.program.label for b in compile_many(list(jobs)) if b.report.spill_bytes] == []


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_every_header_compiles_alone(header: Path) -> None:
    name = header.relative_to(SOURCE)
    code, _ = compiler._nvrtc(f'#include "{name}"\nextern "C" __global__ void k() {{}}\n', "sm_75", str(name))
    assert code


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_device_code_knows_no_host(header: Path) -> None:
    assert set(re.findall(r"#include\s+<([^>]+)>", header.read_text())) <= ALLOWED


@pytest.mark.parametrize(
    "spec", [s for s in CATALOG.values() if "group" in s.header or "flash" in s.header], ids=lambda s: s.name
)
def test_products_of_warpgroups_do_not_wait_for_each_other(spec: KernelSpec) -> None:
    """ptxas reports if it has put a wait after each, as it does where it does not see where they begin and end."""
    for dims in (spec.bench_dims[0], spec.bench_dims[-1]):
        variant = Variant.of(spec, "fp16", dims, "sm_90", overlapping=True)
        _, log = compiler._nvrtc(variant.translation_unit(), "sm_90", variant.label)
        assert "registers" in log
        assert "serialized" not in log


def test_compiling_leaves_pythons_own_objects_alone() -> None:
    """An empty compiler log is one byte long; written into a shared object it would change b" " everywhere."""
    compiler._nvrtc('extern "C" __global__ void k() {}', "compute_75", "empty")
    assert [bytes([value])[0] for value in range(256)] == list(range(256))
    assert b" ".hex() == "20"


def test_ptx_for_the_turing_path() -> None:
    binary = compile_one(variant(), "compute_75")
    assert b".target sm_75" in binary.code
    assert binary.report.registers is None


def test_translation_unit_is_short_and_says_what_it_is() -> None:
    unit = variant(768).translation_unit()
    assert unit.startswith("// layernorm fp16 columns=768 block=128 row_warps=1\n")
    assert "warpline::layernorm<__half, 768, 128, 1>(x, weight, bias, y, rows, epsilon);" in unit
    assert len(unit.splitlines()) <= 10


def test_second_time_comes_from_the_cache(cache: Path) -> None:
    first, second = compile_one(variant(), "sm_80"), compile_one(variant(), "sm_80")
    assert not first.report.cached
    assert second.report.cached
    assert second.code == first.code
    assert second.report.registers == first.report.registers
    assert [path.suffix for path in cache.iterdir()] == [".bin"]


def test_whatever_changes_the_result_changes_the_key(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unit = variant().translation_unit()
    keys = {compiler._key(unit, "sm_80"), compiler._key(unit, "sm_90"), compiler._key(unit + " ", "sm_80")}
    flags = compiler.FLAGS
    monkeypatch.setattr(compiler, "FLAGS", (*flags, "--use_fast_math"))
    keys.add(compiler._key(unit, "sm_80"))
    monkeypatch.setattr(compiler, "FLAGS", flags)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "99.0")
    keys.add(compiler._key(unit, "sm_80"))
    monkeypatch.undo()
    copy = tmp_path / "cuda"
    shutil.copytree(SOURCE, copy)
    monkeypatch.setattr(compiler, "SOURCE", copy)
    header = copy / "common.cuh"  # included by an included header
    header.write_text("// a comment\n" + header.read_text() + "    // another\n")
    assert compiler._key(unit, "sm_80") in keys
    header.write_text(header.read_text() + "constexpr int CHANGED = 1;\n")
    keys.add(compiler._key(unit, "sm_80"))
    assert len(keys) == 6


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign"])
def test_damaged_entries_are_made_anew(cache: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    good = compile_one(variant(), "sm_80")
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    flipped = whole[:-10] + bytes([whole[-10] ^ 1]) + whole[-9:]
    path.write_bytes({"truncate": whole[:-100], "flip": flipped, "empty": b"", "foreign": b"[1, 2]\nhello"}[damage])
    again = compile_one(variant(), "sm_80")
    assert again.code == good.code
    assert not again.report.cached
    assert "is damaged" in caplog.text
    assert compile_one(variant(), "sm_80").report.cached


def test_unwritable_cache_costs_only_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path / "file"))
    compiler._warned.clear()
    with caplog.at_level(logging.WARNING):
        assert compile_one(variant(), "sm_80").code
        assert compile_one(variant(97), "sm_80").code
    assert caplog.text.count("cannot be kept") == 1
    assert "WARPLINE_CACHE_DIR" in caplog.text


def test_full_disk_leaves_nothing_behind(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        real(self, data[:50])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert compile_one(variant(), "sm_80").code
    assert "No space left on device" in caplog.text
    assert list(cache.iterdir()) == []


def test_two_processes_at_once(cache: Path) -> None:
    code = (
        "from warpline.kernels.catalog.rows import LAYERNORM\nfrom warpline.kernels.compile import compile_many\n"
        "from warpline.kernels.spec import Variant\n"
        "dims = [{'rows': 1, 'columns': c} for c in (8, 16, 24, 32)]\n"
        "jobs = [(Variant.of(LAYERNORM, 'fp16', d, 'sm_80'), 'sm_80') for d in dims]\n"
        "print(sum(len(b.code) for b in compile_many(jobs)))"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {process.communicate(timeout=120)[0] for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(printed) == 1
    assert len(list(cache.iterdir())) == 4


def test_headers_that_nvrtc_brings_itself(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No toolkit and no runtime package: NVRTC 13.3 and newer unpack their own headers, once."""
    if tuple(map(int, compiler.nvrtc_version().split("."))) < (13, 3):
        pytest.skip("this NVRTC brings no headers")
    found = compiler._cuda_headers()
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda _: None)
    for function in (compiler._include_folder, compiler._cuda_headers):
        function.cache_clear()
    try:
        assert compiler._include_folder().is_relative_to(cache.parent)
        assert compile_one(variant(), "sm_75").report.spill_bytes == 0
        compiler._include_folder.cache_clear()
        monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcInstallBundledHeaders", None)  # not needed a second time
        assert (compiler._include_folder() / "cuda_fp16.h").exists()
    finally:
        monkeypatch.undo()
        for function in (compiler._include_folder, compiler._cuda_headers):
            function.cache_clear()
    assert compiler._cuda_headers() == found


def test_mistake_in_device_code_is_shown(cache: Path) -> None:
    with pytest.raises(KernelError, match=r"nonsense does not compile for sm_80 with NVRTC \d+\.\d+") as caught:
        compiler._nvrtc('extern "C" __global__ void k() { undeclared = 1; }', "sm_80", "nonsense")
    assert "undeclared" in str(caught.value)


def test_wrong_calls_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'layernorm'"):
        find("layernrm")
    with pytest.raises(ConfigError, match="tunables are block, row_warps"):
        Variant.of(LAYERNORM, "fp16", {"rows": 1, "columns": 8}, "sm_80", {"block": 128})
    with pytest.raises(ConfigError, match="weight has columns=9, elsewhere it is 8"):
        LAYERNORM.dims_of([(2, 8), (9,), (8,)])
    with pytest.raises(ConfigError, match=r"x has 1 dimensions, expected \(rows, columns\)"):
        LAYERNORM.dims_of([(2,), (9,), (8,)])


def test_bf16_is_not_compiled_for_turing() -> None:
    assert not LAYERNORM.runs_on("bf16", "sm_75")
    assert LAYERNORM.runs_on("bf16", "sm_80")
    assert LAYERNORM.bytes({"rows": 4, "columns": 8}, "fp16") == 2 * (2 * 32 + 16)


def test_only_what_is_touched_counts_as_moved() -> None:
    last = find("last_rows").bytes({"rows": 1024, "lanes": 3, "columns": 8}, "fp16")
    assert last == 3 * 8 * 2 * 4 + 3 * 8  # two rows in and two out per lane, and the lane's index
    few, many = ({"slots": 9, "capacity": 40, "vocab": 50, "places": 50, "columns": 8, "rows": n} for n in (5, 40))
    found = [find("prompt_embedding").bytes(dims, "fp32") for dims in (few, many)]
    assert found == [3 * 5 * 8 + 3 * 5 * 8 * 4, 3 * 40 * 8 + 3 * 40 * 8 * 4]
    alone, beside = ({"batch": 2, "heads": 3, "positions": 5, "depth": 8, "slots": slots} for slots in (2, 9))
    assert find("append_attention").bytes(alone, "fp16") == find("append_attention").bytes(beside, "fp16")
    small = {"rows": 9, "columns": 1, "vocab": 2, "places": 3}  # a row that is requested twice moves once
    assert find("embedding").bytes(small, "fp32") == 2 * 9 * 8 + 4 * (2 + 3 + 9)


def test_binary_remembers_its_variant(cache: Path) -> None:
    binary: Binary[Variant] = compile_one(variant(), "sm_90")
    assert (binary.program, binary.arch) == (variant(), "sm_90")


#: The kernels to generate with gpt2, for decoding and for prefill.
GPT2 = [
    ("embedding", {"rows": 1, "columns": 768, "vocab": 50257, "places": 1024}),
    ("layernorm", {"rows": 1024, "columns": 768}),
    ("layernorm_matvec_bias", {"rows": 1, "outputs": 2304, "inputs": 768}),
    ("matvec_bias_residual", {"rows": 1, "outputs": 768, "inputs": 768}),
    ("layernorm_matvec_bias_gelu", {"rows": 1, "outputs": 3072, "inputs": 768}),
    ("matvec_bias_residual", {"rows": 1, "outputs": 768, "inputs": 3072}),
    ("decode_attention", {"batch": 1, "heads": 12, "positions": 1024, "depth": 64}),
    ("head_argmax", {"rows": 1, "outputs": 50257, "inputs": 768}),
    ("matvec", {"rows": 1, "outputs": 50257, "inputs": 768}),
    ("sample", {"rows": 1, "vocab": 50257, "capacity": 1024, "entries": 50257}),
    ("flash_attention", {"batch": 1, "heads": 12, "queries": 1024, "keys": 1024, "depth": 64}),
    ("matmul_bias", {"rows": 1024, "outputs": 2304, "inputs": 768}),
    ("matmul_bias_gelu", {"rows": 1024, "outputs": 3072, "inputs": 768}),
    ("matmul_bias_residual", {"rows": 1024, "outputs": 768, "inputs": 3072}),
]


@pytest.mark.alone
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_a_models_kernels_are_there_in_seconds(cache: Path, arch: str, slowness: float) -> None:
    """About 2 s on two cores the first time, no time after that."""
    jobs = [(Variant.of(find(name), "fp16", dims, arch), arch) for name, dims in GPT2]
    start = time.perf_counter()
    compile_many(jobs)
    cold = time.perf_counter() - start
    assert all(binary.report.cached for binary in compile_many(jobs))
    warm = time.perf_counter() - start - cold
    assert cold < 6 * slowness, cold
    assert warm < 0.4 * slowness, warm


#: Multiprocessors of a GPU of each generation.
MULTIPROCESSORS = {gpu.arch: gpu.units or 0 for gpu in KNOWN_GPUS}


def test_persistent_decode_can_cooperate_everywhere() -> None:
    """Every generation with one sequence in fp16; the narrowest and the widest with the largest possible request."""
    one = {arch: Extents("fp16", 768, 3072, 12, 12, 50257, 1, MULTIPROCESSORS[arch], arch) for arch in ARCH_LIMITS}
    wanted = list(one.values())
    for arch in ("sm_75", "sm_90"):
        full = replace(one[arch], dtype="fp32")
        wanted += [replace(e, rows=e.most_rows, filters=True) for e in (one[arch], full)]
    for binary in compile_many([(DecodeProgram(extents), extents.arch) for extents in wanted]):
        report, program = binary.report, binary.program
        assert report.registers is not None
        assert report.shared_bytes is not None
        shared = report.shared_bytes + program.extents.shared_bytes
        assert resident_blocks(binary.arch, program.threads, report.registers, shared) >= 1, program.label
