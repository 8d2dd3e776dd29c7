"""Stored choices: which shapes share one, which one comes first, and stale, damaged and contested files."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpline.errors import ConfigError
from warpline.kernels import choices
from warpline.kernels.catalog import CATALOG, find
from warpline.kernels.choices import PROJECTED, Choice, shape_class
from warpline.kernels.compile import header_digest
from warpline.kernels.spec import KernelSpec

LAYERNORM = find("layernorm")
GPU = "NVIDIA Imaginary 1"
DIMS = {"rows": 1000, "columns": 768}
WIDE = {"block": 512, "row_warps": 2}


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(choices, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    choices.forget()


def choice(tunables: dict[str, int] | None = WIDE, **changes: str) -> Choice:
    values = {"kernel": "layernorm", "dtype": "fp16", "shape": shape_class(LAYERNORM, DIMS)}
    return Choice(**{**values, "digest": header_digest(LAYERNORM.header), **changes}, tunables=tunables)


def ship(*made: Choice) -> None:
    choices.shipped_file(GPU).write_text(choices.text(GPU, made))


extent = st.integers(1, 1 << 20)


@given(rows=extent, others=extent, columns=extent)
def test_a_class_is_exact_in_what_is_compiled_in_and_a_power_of_two_otherwise(
    rows: int, others: int, columns: int
) -> None:
    one = shape_class(LAYERNORM, {"rows": rows, "columns": columns})
    assert one == shape_class(LAYERNORM, {"columns": columns, "rows": rows})
    assert one != shape_class(LAYERNORM, {"rows": rows, "columns": columns + 1})
    same = one == shape_class(LAYERNORM, {"rows": others, "columns": columns})
    assert same == ((rows - 1).bit_length() == (others - 1).bit_length())


def test_a_class_is_named_after_its_largest_shape() -> None:
    assert shape_class(LAYERNORM, DIMS) == "columns=768 rows<=1024"
    assert shape_class(LAYERNORM, {"rows": 1, "columns": 768}) == "columns=768 rows<=1"


def test_extents_that_are_only_looked_up_do_not_count() -> None:
    small, large = ({"rows": 4, "columns": 768, "vocab": v, "places": v, "capacity": v} for v in (50, 50000))
    for name in ("embedding", "newest_embedding"):
        assert shape_class(find(name), small) == shape_class(find(name), large) == "columns=768 rows<=4"


@pytest.mark.parametrize("spec", CATALOG.values(), ids=CATALOG)
def test_bench_shapes_have_the_class_that_a_call_asks_for(spec: KernelSpec) -> None:
    for dims in spec.bench_dims:
        asked = spec.dims_of([buffer.shape(dims) for buffer in spec.inputs])
        assert shape_class(spec, dims) == shape_class(spec, asked)


def test_no_choice_is_the_default() -> None:
    assert choices.stored(LAYERNORM, "fp16", DIMS, GPU) is None


def test_the_users_come_before_the_shipped() -> None:
    ship(choice({"block": 256, "row_warps": 1}), choice({"block": 256, "row_warps": 1}, dtype="fp32"))
    choices.remember(GPU, [choice()])
    assert choices.stored(LAYERNORM, "fp16", DIMS, GPU) == WIDE
    assert choices.stored(LAYERNORM, "fp16", {"rows": 513, "columns": 768}, GPU) == WIDE
    assert choices.stored(LAYERNORM, "fp16", {"rows": 512, "columns": 768}, GPU) is None
    assert choices.stored(LAYERNORM, "fp32", DIMS, GPU) == {"block": 256, "row_warps": 1}
    assert choices.stored(LAYERNORM, "fp16", DIMS, "another GPU") is None


def test_a_confirmed_default_replaces_a_shipped_choice() -> None:
    ship(choice())
    choices.remember(GPU, [choice(None)])
    assert choices.stored(LAYERNORM, "fp16", DIMS, GPU) is None


def test_a_stale_choice_is_not_used_and_counted() -> None:
    ship(choice(basis=PROJECTED), choice(dtype="fp32"))
    choices.remember(GPU, [choice(digest="of other code"), choice(kernel="forgotten")])
    assert choices.stored(LAYERNORM, "fp16", DIMS, GPU) == WIDE  # the shipped one
    found = choices.summary(GPU)
    assert (found.swept, found.shipped, found.projected, found.stale) == (0, 2, 1, 2)
    assert found.file == str(choices.user_file(GPU))


def test_shipped_choices_count_unless_they_are_stale_or_replaced() -> None:
    ship(choice(), choice(dtype="fp32"), choice(dtype="bf16", digest="of other code"))
    choices.remember(GPU, [choice()])
    found = choices.summary(GPU)
    assert (found.swept, found.shipped, found.stale) == (1, 1, 1)


@pytest.mark.parametrize("tunables", [{"block": 512}, {"block": 513, "row_warps": 2}, {"block": 128, "row_warps": 8}])
def test_a_choice_that_the_spec_does_not_have_is_not_used(tunables: dict[str, int]) -> None:
    choices.remember(GPU, [choice(tunables)])
    assert choices.stored(LAYERNORM, "fp16", DIMS, GPU) is None


def test_files_are_read_once() -> None:
    assert choices.stored(LAYERNORM, "fp16", DIMS, GPU) is None
    choices.remember(GPU, [choice()])
    assert choices.stored(LAYERNORM, "fp16", DIMS, GPU) is None
    choices.forget()
    assert choices.stored(LAYERNORM, "fp16", DIMS, GPU) == WIDE


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"gpu": "x"}', '{"gpu": "another", "choices": []}', "\x00"])
def test_a_damaged_file_is_named_once_and_replaced(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = choices.user_file(GPU)
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert choices.stored(LAYERNORM, "fp16", DIMS, GPU) is None
        assert choices.stored(LAYERNORM, "fp16", DIMS, GPU) is None
    assert [record.getMessage().startswith(f"cannot use {path}") for record in caplog.records] == [True]
    choices.remember(GPU, [choice()])
    assert choices.read(path, GPU) == [choice()]


def test_two_writers_lose_nothing() -> None:
    code = (
        "import sys\n"
        "from warpline.kernels.choices import Choice, remember\n"
        "for i in range(20):\n"
        f"    remember({GPU!r}, [Choice(sys.argv[1], 'fp16', f'rows<={{i}}', 'x', None)])\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in ("one", "two")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert len(choices.read(choices.user_file(GPU), GPU)) == 40


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set WARPLINE_CACHE_DIR"):
        choices.remember(GPU, [choice()])


@pytest.mark.parametrize("change", [{"tunables": "x"}, {"tunables": {"block": "512"}}, {"basis": "a guess"}])
def test_choices_that_are_not_whole_are_not_used(change: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    made = json.loads(choices.text(GPU, [choice()]))
    made["choices"][0] |= change
    choices.shipped_file(GPU).write_text(json.dumps(made))
    choices.forget()
    assert choices.stored(LAYERNORM, "fp16", DIMS, GPU) is None
    assert "delete it, or run 'warpline tune' again" in caplog.text
