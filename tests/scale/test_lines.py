"""How a line is parsed, and what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from warpline import SamplingParams
from warpline.scale.lines import BadLine, OpenAI, Plain, dumped, read

DEFAULTS = SamplingParams(max_tokens=8, seed=100)


def line(given: Any, number: int = 3) -> Plain | OpenAI:
    return read(number, given if isinstance(given, bytes) else json.dumps(given).encode(), DEFAULTS, "prompt")


def test_a_line_has_settings_of_its_own_and_a_seed_by_its_place() -> None:
    found = line({"prompt": "A frog", "temperature": 0, "colour": "green", "stop": ["."], "top_k": None})
    assert isinstance(found, Plain)
    assert (found.params.max_tokens, found.params.temperature, found.params.stops) == (8, 0, (".",))
    assert found.params.seed == 102
    assert line({"prompt": [1, 2], "seed": 7}).params.seed == 7  # type: ignore[union-attr]
    assert line("just a text").prompt == "just a text"  # type: ignore[union-attr]
    answer = json.loads(found.answer("!", "stop", 2, 1))
    assert answer["colour"] == "green"
    assert (answer["line"], answer["completion"], answer["seed"]) == (3, "!", 102)


def test_biases_have_texts_for_keys() -> None:
    found = line({"prompt": "A frog", "logit_bias": {"9": 1, "3": -2.5}})
    assert isinstance(found, Plain)
    assert found.params.biases == ((3, -2.5), (9, 1.0))


def test_openai_requests() -> None:
    body = {"model": "stories", "prompt": "A frog"}
    found = line({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    assert isinstance(found, OpenAI)
    assert found.body == {**body, "seed": 102}
    answer = json.loads(found.answer(200, {"x": 1}))
    assert answer["custom_id"] == "a"
    assert answer["response"]["status_code"] == 200
    assert answer["error"] is None
    assert found.answer(200, {}) == found.answer(200, {})  # nothing in it is random


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (b"{not json\n", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe", "not JSON"),
        ([1, 2], "an object with 'prompt'"),
        ({"text": "x"}, "'prompt' is missing"),
        ({"prompt": 5}, "neither a text nor token ids"),
        ({"prompt": [1, True]}, "neither a text nor token ids"),
        ({"prompt": ""}, "is empty"),
        ({"prompt": "x", "completion": "y"}, "name of a result"),
        ({"prompt": "x", "temperature": -1}, "temperature must be"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens must be"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "token ids, not 'a'"),
        ({"custom_id": 5, "body": {}}, "custom_id must be a text"),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, "url one of"),
        ({"custom_id": "a", "url": "/v1/completions", "body": []}, "body must be an object"),
        ({"custom_id": "a", "url": "/v1/completions", "body": {"stream": True}}, "no streams"),
    ],
)
def test_bad_lines_say_what_is_wrong(given: Any, why: str) -> None:
    with pytest.raises(BadLine, match=why) as caught:
        line(given)
    said = json.loads(caught.value.line)
    assert said["line"] == 3
    assert why.split("'")[0] in said["error"]
    if isinstance(given, dict) and "custom_id" in given:
        assert said["custom_id"] == given["custom_id"]


def test_half_of_a_surrogate_pair_is_kept() -> None:
    assert json.loads(dumped({"text": "\ud83d"})) == {"text": "\ud83d"}
    assert "ü".encode() in dumped("ü")
