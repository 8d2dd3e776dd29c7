"""Programs for a CPU: compiled once, found again, and rebuilt whenever the stored ones cannot be trusted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from warpline.errors import KernelError
from warpline.kernels.cpu import machine
from warpline.kernels.cpu.library import Build

NAMES = ("fp32", "fp32", "relu")


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Compile once for all tests that do not test compiling."""
    file = tmp_path_factory.mktemp("code") / "x.o"
    command = [sys.executable, "-m", "warpline.kernels.cpu.build", str(file), *NAMES]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    return file.read_bytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path))
    return tmp_path / "cpu"


def put(folder: Path, code: bytes) -> Path:
    """Store a file where the library looks for it."""
    folder.mkdir()
    file = folder / f"{'-'.join(NAMES)}-{machine.key()}.o"
    file.write_bytes(code)
    return file


def test_what_is_kept_is_found_and_what_is_damaged_is_not_used(
    code: bytes, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(folder, code)
    made = Build(*NAMES)
    assert made._compiler is None
    assert made.function() is made.function()
    for damage in (code[:-40], code[:30], b"", b"x" * len(code)):
        file.write_bytes(damage)
        caplog.clear()
        assert machine.kept(file) is None
        assert "is damaged: compiling again" in caplog.text
    file.write_bytes(code)
    triple, cpu, features = machine._host()
    monkeypatch.setattr(machine, "_host", lambda: (triple, cpu, features.replace("+sse2", "-sse2")))
    assert machine.key.__wrapped__() not in file.name  # of another CPU


def test_two_processes_compile_at_once(folder: Path) -> None:
    words = f"from warpline.kernels.cpu.library import Build; Build(*{NAMES}).function()"
    both = [subprocess.Popen([sys.executable, "-c", words], env=dict(os.environ)) for _ in range(2)]
    assert [process.wait(timeout=200) for process in both] == [0, 0]
    (file,) = folder.iterdir()
    assert machine.kept(file)


def test_a_folder_that_cannot_be_written_to_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path / "taken"))
    assert callable(Build(*NAMES).function())
    assert "every start compiles again: set WARPLINE_CACHE_DIR" in caplog.text


def test_a_process_that_ends_before_it_is_compiled_leaves_it_to_the_next(folder: Path) -> None:
    words = f"import os; from warpline.kernels.cpu.library import Build; Build(*{NAMES}); os._exit(0)"
    subprocess.run([sys.executable, "-c", words], check=True, env=dict(os.environ), timeout=100)
    deadline = time.monotonic() + 200
    while not (folder.exists() and list(folder.glob("*.o"))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert Build(*NAMES)._compiler is None


def test_what_cannot_be_compiled_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match=r"compiling for this CPU failed \(KeyError: 'nonsense'\): use --executor"):
        Build("fp32", "fp32", "nonsense").function()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(KernelError, match="cannot start '/nowhere/python' to compile for this CPU"):
        Build(*NAMES)
    assert not folder.exists()


def test_compiled_code_needs_the_c_library_alone(code: bytes, folder: Path) -> None:
    """So that it can be loaded without importing numba."""
    put(folder, code)
    words = (
        f"import sys; from warpline.kernels.cpu.library import Build; b = Build(*{NAMES}); "
        "assert b._compiler is None and 'numba' not in sys.modules; b.function()"
    )
    subprocess.run([sys.executable, "-c", words], check=True, env=dict(os.environ), timeout=100)


def test_code_of_other_sources_has_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade nothing stale is loaded."""
    before = machine.key.__wrapped__()
    for path in Path(machine.__file__).parent.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert machine.key.__wrapped__() == before
    (tmp_path / "decode.py").write_text("# changed")
    assert machine.key.__wrapped__() != before
