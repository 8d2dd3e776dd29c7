"""transformers' tests folder as a package, under a name that does not meet our own `tests`."""

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

#: What the folder is called here.
PACKAGE = "transformers_tests"
#: What `test_modeling_common` imports and the source distribution lacks, module → classes. Each is stood in for by an
#: empty class, so its tests are missing, and nothing else is.
ABSENT = {
    "exporters": (),
    "exporters.test_export": ("ExportTesterMixin",),
    "generation": (),
    "generation.test_utils": ("GenerationTesterMixin",),
}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `ABSENT`, after every other finder has looked for them, and remembers which."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As importlib asks for it."""
        short = name.removeprefix(f"{PACKAGE}.")
        if not name.startswith(f"{PACKAGE}.") or short not in ABSENT:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=not ABSENT[short])

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """An ordinary one."""

    def exec_module(self, module: ModuleType) -> None:
        """Empty classes."""
        for name in ABSENT[module.__name__.removeprefix(f"{PACKAGE}.")]:
            setattr(module, name, type(name, (), {}))
            self.used.append(name)


def load(folder: Path) -> StandIns:
    """Make `folder` importable as `PACKAGE`; says what had to be stood in for, as it is imported."""
    if not (folder / "test_modeling_common.py").is_file():
        raise FileNotFoundError(f"{folder} has no test_modeling_common.py: it is no tests folder of transformers")
    package = ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[PACKAGE] = package
    stand_ins = StandIns()
    sys.meta_path.append(stand_ins)
    return stand_ins


def module(name: str) -> Any:
    """One module of the folder; None if it has no such module."""
    if importlib.util.find_spec(f"{PACKAGE}.{name}") is None:
        return None
    return importlib.import_module(f"{PACKAGE}.{name}")
