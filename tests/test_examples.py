"""The examples run from top to bottom on a machine without a GPU or a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import run_alone

EXAMPLES = Path(__file__).parents[1] / "examples"
#: Parts of what each script prints.
SHOWN = {
    "batch": ("A frog and a bee", "the same alone: True", "128 tokens in "),
    "hf_patch": ("replaced  generate", "1 × original method: num_beams"),
    "score": ("perplexity  Once upon a time", "' very'"),
    "stream": ("tokens)", "cancelled: cancelled", "1:", "2:", "The old whale"),
}


def test_notebook(tmp_path: Path) -> None:
    """Its code cells, one after another. They are plain Python, so this needs no Jupyter."""
    notebook = json.loads((EXAMPLES / "colab.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    stored = "".join("".join(out["text"]) for cell in cells for out in cell["outputs"])
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "python -m tools.notebook"
    assert not [word for word in ("/root", "/home", "/tmp", "Traceback") if word in stored]
    out = run_alone(["-c", "\n".join("".join(cell["source"]) for cell in cells)], tmp_path)
    shown = (
        "tok/s",
        "replaced  generate",
        "The dragon was hungry.",
        "True False",
        "Verdict",
        "our engine alone",
        "hf-sdpa",
        "cpu-int8",
    )
    for part in shown:
        assert part in out
        assert part in stored


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_scripts(path: Path, tmp_path: Path) -> None:
    out = run_alone([str(path)], tmp_path)
    for part in SHOWN[path.stem]:
        assert part in out
