"""The names that people meet first say what they are, with an example that runs."""

from __future__ import annotations

import doctest
import inspect

import pytest

import warpline.hf
from warpline import LLM, Completion, EngineConfig, ModelConfig, SamplingParams

FIRST = {
    "LLM": LLM,
    "LLM.generate": LLM.generate,
    "LLM.stream": LLM.stream,
    "LLM.submit": LLM.submit,
    "LLM.score": LLM.score,
    "SamplingParams": SamplingParams,
    "EngineConfig": EngineConfig,
    "ModelConfig": ModelConfig,
    "Completion": Completion,
    "hf.patch": warpline.hf.patch,
}


@pytest.mark.parametrize("name", FIRST)
def test_examples_of_docstrings_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "hf.patch":
        pytest.importorskip("transformers")
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(FIRST[name]) or "", {}, name, None, None)
    assert example.examples
    outcome = doctest.DocTestRunner(verbose=False).run(example)
    assert outcome.failed == 0, capsys.readouterr().out
