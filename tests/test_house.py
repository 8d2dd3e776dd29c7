"""The rules of the house that a machine can check."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import warpline

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "warpline"

#: A room may import itself and the rooms listed for it. "base" is config, hardware, errors and the other single files.
ALLOWED = {
    "base": {"base"},
    "model": {"base", "model"},
    "kernels": {"base", "kernels"},
    "engine": {"base", "model", "kernels", "engine"},
    "bench": {"base", "model", "kernels", "engine", "serve", "bench"},  # serve: servers are measured as well
    "tune": {"base", "kernels", "bench", "tune"},
    "profile": {"base", "model", "kernels", "engine", "bench", "profile"},
    "hf": {"base", "model", "kernels", "engine", "bench", "hf"},
    "serve": {"base", "model", "engine", "serve"},
    "scale": {"base", "model", "engine", "serve", "scale"},
    "cli": {"base", "model", "kernels", "engine", "profile", "bench", "tune", "hf", "serve", "scale", "cli"},
}

SILENT_IMPORT = (
    f"SOURCE = {str(SOURCE)!r}"
    + """
import os, sys, time

class Watched(dict):
    def __getitem__(self, key): raise AssertionError("read environment variable " + key)
    get = __contains__ = __getitem__

prefixes = (os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix), os.path.realpath(SOURCE))
opened = []
def hook(event, args):
    if event in ("open", "subprocess.Popen", "socket.connect"):
        path = os.path.realpath(os.fspath(args[0])) if isinstance(args[0], (str, bytes, os.PathLike)) else str(args[0])
        if not str(path).startswith(prefixes) or not str(path).endswith((".py", ".pyc")):
            opened.append((event, path))
sys.addaudithook(hook)
real, os.environ = os.environ, Watched()
start = time.perf_counter()
import warpline
seconds = time.perf_counter() - start
os.environ = real
assert not opened, opened
loaded = [name for name in ("torch", "numpy", "cuda", "rich", "typer", "tokenizers") if name in sys.modules]
assert not loaded, loaded
print(seconds)
"""
)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.alone
def test_import_is_silent_and_fast(slowness: float) -> None:
    seconds = min(float(run_python(SILENT_IMPORT)) for _ in range(3))
    assert seconds < 0.3 * slowness


def test_silence_check_notices_noise() -> None:
    """The check above must be able to fail."""
    noisy = SILENT_IMPORT.replace("import warpline\n", "open('/etc/hostname'); import warpline\n")
    with pytest.raises(AssertionError, match="hostname"):
        run_python(noisy)
    reads = SILENT_IMPORT.replace("import warpline\n", "os.environ['HOME']; import warpline\n")
    with pytest.raises(AssertionError, match="read environment variable HOME"):
        run_python(reads)


def test_help_needs_no_torch() -> None:
    code = "import sys; import warpline.cli.main; print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


def room(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "base"


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "warpline" and len(parts) > 1:
                rooms.add(parts[1] if (SOURCE / parts[1]).is_dir() else "base")
    return rooms


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    if path.name in ("__init__.py", "__main__.py") and path.parent == SOURCE:
        return  # the package itself names everything, lazily
    assert imported_rooms(path) <= ALLOWED[room(path)]


def test_only_instruments_know_the_ladders() -> None:
    """Code that generates text must not depend on kernels that are slow on purpose."""
    inside = [SOURCE / "kernels" / "ladder", SOURCE / "bench", SOURCE / "cli"]
    outside = [path for path in SOURCE.rglob("*.py") if not any(path.is_relative_to(room) for room in inside)]
    assert not [path for path in outside if "kernels.ladder" in path.read_text()]


def test_all_is_complete_and_works() -> None:
    for name in warpline.__all__:
        assert getattr(warpline, name) is not None
    assert set(warpline.__all__) == {*warpline._HOMES, "__version__"}
    assert dir(warpline) == sorted(warpline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = warpline.Nonsense


def modules() -> list[str]:
    found = [info.name for info in pkgutil.walk_packages([str(SOURCE)], "warpline.")]
    return [name for name in found if not name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_public_names_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    for attribute, value in vars(module).items():
        if attribute.startswith("_") or getattr(value, "__module__", None) != name:
            continue
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{attribute}"


@pytest.mark.parametrize("name", modules())
def test_listed_names_exist(name: str) -> None:
    module = importlib.import_module(name)
    assert [listed for listed in getattr(module, "__all__", ()) if not hasattr(module, listed)] == []


def test_functions_stay_short() -> None:
    """Without their docstrings. Kernels are closures that are compiled whole, and a command has its options."""
    long: dict[str, int] = {}
    for path in SOURCE.rglob("*.py"):
        if room(path) in ("kernels", "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                documented = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
                count = (node.end_lineno or 0) - (documented or 0)
                long |= {f"{path}:{node.name}": count} if count > 60 else {}
    assert not long


def test_files_stay_small() -> None:
    files = [path for folder in ("src", "tests", "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
    long = {str(path): count for path in files if (count := len(path.read_text().splitlines())) > 400}
    assert not long


def test_two_environment_variables_at_most() -> None:
    used = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
                used.add(ast.literal_eval(node.args[0]))
            elif isinstance(node, ast.Subscript):
                assert ast.unparse(node.value) != "os.environ", f"{path}: use os.environ.get"
    assert used == {"WARPLINE_CACHE_DIR", "WARPLINE_DEBUG"}
