"""The tool that runs transformers' tests, on a folder with tests that pass, fail, and detect a patch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.hf_suite import __main__ as suite
from tools.hf_suite import hooks, loading

ROOT = Path(__file__).parents[2]

COMMON = """
import torch
from .exporters.test_export import ExportTesterMixin
from .generation.test_utils import GenerationTesterMixin

class ModelTesterMixin(ExportTesterMixin):
    def _prepare_for_class(self, inputs, kind, return_labels=False):
        return dict(inputs)

    def make(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        return self.all_model_classes[1](config).eval(), self._prepare_for_class(inputs, self.all_model_classes[1])

    def test_forward(self):
        model, inputs = self.make()
        with torch.no_grad():
            self.assertEqual(model(**inputs).logits.shape[:2], inputs["input_ids"].shape)

    def test_reloaded(self):
        import tempfile
        model, inputs = self.make()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model.save_pretrained(folder)
            again = type(model).from_pretrained(folder).eval()
            self.assertLess((again(**inputs).logits - model(**inputs).logits).abs().max(), 1e-5)

    def test_skipped(self):
        self.skipTest("not for us")

    def test_broken(self):
        with self.subTest("inner"):
            self.fail("so it is")

    def test_telling(self):
        self.assertNotIn("generate", self.make()[0].__dict__)
"""
GENERATION = """
import torch

class GenerationTesterMixin:
    def test_generate(self):
        model, inputs = self.make()
        ids = inputs["input_ids"]
        found = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        self.assertEqual(found.shape[1], ids.shape[1] + 3)
"""


def run(folder: Path, **files: str) -> tuple[int, str]:
    """Run the tool on a folder with these files."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "tools.hf_suite", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    return done.returncode, done.stdout + done.stderr


def test_plain_and_patched(tmp_path: Path) -> None:
    status, out = run(tmp_path, test_modeling_common=COMMON, generation__test_utils=GENERATION)
    assert status == 1, out
    assert "as it is  4 passed, 1 skipped, 1 failed" in out
    assert "patched   3 passed, 1 skipped, 2 failed" in out
    assert "differs: test_telling: passed as it is, failed patched" in out
    assert "failed both ways: test_broken: AssertionError: so it is" in out
    assert "5 models patched" in out
    assert "1 generate by the engine" in out
    assert "the tests of ExportTesterMixin\n" in out


def test_a_run_that_breaks_is_an_error(tmp_path: Path) -> None:
    """Here it breaks because of GPT-2's own tests, which are preferred if a folder has them."""
    status, out = run(
        tmp_path, test_modeling_common=COMMON, models__gpt2__test_modeling_gpt2="import nothing_of_that_name"
    )
    assert status == 1
    assert "nothing_of_that_name" in out


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no tests folder of transformers"):
        loading.load(tmp_path)


def result(outcome: str, patched: int = 1) -> dict[str, Any]:
    return {"outcomes": {"a": (outcome, "")}, "counts": {hooks.PATCHED: patched}, "absent": []}


@pytest.mark.parametrize(
    ("was", "now", "status"),
    [("passed", "passed", 0), ("passed", "skipped", 1), ("skipped", "passed", 0), ("failed", "passed", 0)],
)
def test_what_is_worse(was: str, now: str, status: int) -> None:
    assert suite.compare(result(was), result(now)) == status


def test_nothing_patched_is_an_error() -> None:
    assert suite.compare(result("passed"), result("passed", patched=0)) == 1
