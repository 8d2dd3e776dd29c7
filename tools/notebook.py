"""Runs the notebook's cells and stores what they print: `python -m tools.notebook`. It needs no Jupyter."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "colab.ipynb"


def filled(notebook: dict[str, Any], home: Path) -> dict[str, Any]:
    """Return the notebook with the output of each cell; the path `home` is replaced by ~."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        number += 1
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), scope)
        text = out.getvalue().replace(str(home), "~")
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return notebook


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    source = str(NOTEBOOK.parents[1] / "src")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HOME": folder, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
        os.chdir(folder)
        made = filled(notebook, Path(folder))
    NOTEBOOK.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{NOTEBOOK.name}: outputs stored")


if __name__ == "__main__":
    main()
