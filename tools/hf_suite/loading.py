"""Makes transformers' tests folder importable as a package, under a name that differs from our own `tests`."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

#: The package name of the folder.
PACKAGE = "transformers_tests"
#: Modules that `test_modeling_common` imports and the source distribution lacks, with their classes. Empty classes
#: replace them, so that only their tests are missing.
ABSENT = {
    "exporters": (),
    "exporters.test_export": ("ExportTesterMixin",),
    "generation": (),
    "generation.test_utils": ("GenerationTesterMixin",),
}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `ABSENT` if no other finder does, and records which were needed."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of an absent module; called by importlib."""
        short = name.removeprefix(f"{PACKAGE}.")
        if not name.startswith(f"{PACKAGE}.") or short not in ABSENT:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=not ABSENT[short])

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Return None, so that importlib makes an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module with empty classes."""
        for name in ABSENT[module.__name__.removeprefix(f"{PACKAGE}.")]:
            setattr(module, name, type(name, (), {}))
            self.used.append(name)


def load(folder: Path) -> StandIns:
    """Make `folder` importable as `PACKAGE`; the result records the replaced classes as they are imported."""
    if not (folder / "test_modeling_common.py").is_file():
        raise FileNotFoundError(f"{folder} has no test_modeling_common.py: it is no tests folder of transformers")
    package = ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[PACKAGE] = package
    stand_ins = StandIns()
    sys.meta_path.append(stand_ins)
    return stand_ins


def module(name: str) -> Any:
    """Return a module of the folder; None if it has no such module."""
    if importlib.util.find_spec(f"{PACKAGE}.{name}") is None:
        return None
    return importlib.import_module(f"{PACKAGE}.{name}")
