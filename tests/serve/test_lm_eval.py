"""lm-eval's own client for OpenAI's completions must get the library's log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.live import Live
from tests.serve.test_openai import prompt_logprobs
from warpline import LLM
from warpline.model.weights import load

PAIRS = [
    ("A frog and a crow", " went to the river."),
    ("One day", " it rained, and the owl was wet."),
    ("", " Hello there"),
]


@pytest.fixture(scope="module")
def judge(live: Live, llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from warpline.model.export import export

    folder = tmp_path_factory.mktemp("tokenizer")
    export(load(llm.model), folder)
    return LocalCompletionsAPI(
        base_url=f"{live.url}/v1/completions", model=live.state.name, tokenizer=str(folder), max_length=256,
        tokenizer_backend="huggingface", num_concurrent=1, batch_size=4, seed=1,
    )  # fmt: skip


def test_loglikelihoods_are_the_librarys(judge: Any, llm: LLM) -> None:
    from lm_eval.api.instance import Instance

    asked = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(PAIRS)]
    found = judge.loglikelihood(asked, disable_tqdm=True)
    for (context, text), (value, greedy) in zip(PAIRS, found, strict=True):
        before = llm.tokenizer.encode(context or "<|endoftext|>", special=True)
        ids = [*before, *llm.tokenizer.encode(text)]
        expected = prompt_logprobs(llm, ids)[len(before) - 1 :]
        assert value == pytest.approx(sum(expected), abs=1e-4 * len(expected))
        assert isinstance(greedy, bool)


def test_generation_stops_where_it_is_told(judge: Any, llm: LLM) -> None:
    from lm_eval.api.instance import Instance

    from warpline import SamplingParams

    (whole,) = llm.generate("One day", SamplingParams(max_tokens=30, temperature=0))
    stop = whole.text[9:12]
    arguments = ("One day", {"until": [stop], "max_gen_toks": 30, "temperature": 0})
    (said,) = judge.generate_until(
        [Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0)], disable_tqdm=True
    )
    assert said == whole.text[: whole.text.index(stop)]
