"""The same seed, the same text: alone, among others, streamed or not, with or without log-probabilities."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.live import Live

ASK: dict[str, Any] = {"prompt": "A frog and a crow", "max_tokens": 60, "seed": 11, "ignore_eos": True}


def text(live: Live, **more: Any) -> str:
    return str(live.request("/v1/completions", ASK | more)[1]["choices"][0]["text"])


def streamed(live: Live, **more: Any) -> str:
    events = live.events("/v1/completions", ASK | more)
    assert events.pop() is None
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_alone_and_among_64_others(live: Live) -> None:
    alone = text(live)
    with ThreadPoolExecutor(65) as pool:
        others = [
            pool.submit(live.request, "/v1/completions", {"prompt": f"Number {i}", "max_tokens": 5 + i, "seed": i})
            for i in range(64)
        ]
        crowded = [pool.submit(text, live), pool.submit(streamed, live), pool.submit(streamed, live, stream_interval=1)]
        assert [one.result() for one in crowded] == [alone] * 3
        assert {one.result()[0] for one in others} == {200}
    assert text(live, logprobs=2) == alone
    assert text(live, seed=12) != alone


@pytest.mark.parametrize("interval", [None, 1, 7])
def test_stop_texts_never_show(live: Live, interval: int | None) -> None:
    whole = text(live)
    at = len(whole) // 2
    stop = whole[at : at + 3]
    more: dict[str, Any] = {"stop": [stop, "never there"], "stream_interval": interval}
    events = live.events("/v1/completions", ASK | more)
    said = "".join(event["choices"][0]["text"] for event in events if event is not None)
    assert said == whole[: whole.index(stop)] == text(live, stop=stop)
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_an_event_for_each_token(live: Live) -> None:
    events = live.events("/v1/completions", ASK | {"stream_interval": 1, "return_token_ids": True})[:-1]
    ids = [event["choices"][0]["token_ids"] for event in events]
    assert [len(one) for one in ids] == [1] * 60
    assert events[0]["choices"][0]["prompt_token_ids"] == live.state.backend.tokenizer.encode(ASK["prompt"])
    whole = live.request("/v1/completions", ASK | {"return_token_ids": True})[1]["choices"][0]
    assert sum(ids, []) == whole["token_ids"]  # noqa: RUF017 - short


def test_timings_and_usage(live: Live) -> None:
    said = live.request("/v1/completions", ASK | {"return_timings": True})[1]
    assert said["timings"]["tokens_per_second"] > 0
    assert said["timings"]["first_token_seconds"] > 0
    *_, last, done = live.events(
        "/v1/completions", ASK | {"return_timings": True, "stream_options": {"include_usage": True}}
    )
    assert done is None
    assert last["choices"] == []
    assert last["usage"] == said["usage"] == {"prompt_tokens": 5, "completion_tokens": 60, "total_tokens": 65}
    assert last["timings"].keys() == said["timings"].keys()


def test_a_prompt_that_fills_the_context(live: Live) -> None:
    status, said, _ = live.request("/v1/completions", {"prompt": [7] * 256, "max_tokens": 9, "seed": 1})
    assert status == 200
    assert said["usage"]["completion_tokens"] == 1
    assert said["choices"][0]["finish_reason"] == "length"


def test_tokenize(live: Live) -> None:
    words = "A frog 🐸<|endoftext|>"
    status, said, _ = live.request("/tokenize", {"prompt": words, "return_token_strs": True})
    assert status == 200
    assert said["tokens"] == live.state.backend.tokenizer.encode(words, special=True)
    assert said["count"] == len(said["tokens"]) == len(said["token_strs"])
    assert live.request("/detokenize", {"tokens": said["tokens"]})[1] == {"prompt": words}
    assert live.request("/detokenize", {"tokens": [50257]})[0] == 400


def test_metrics_add_up(live: Live) -> None:
    def read() -> dict[str, float]:
        lines = [line for line in live.request("/metrics")[1].splitlines() if line and line[0] != "#"]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    before = read()
    text(live)
    streamed(live)
    after = read()

    def grown(name: str) -> float:
        keys = [key for key in after if key.split("{")[0] == name and "le=" not in key]
        return sum(after[key] - before.get(key, 0) for key in keys)

    assert grown("warpline:prompt_tokens_total") == 10
    assert grown("warpline:generation_tokens_total") == 120
    assert grown("warpline:request_success_total") == 2
    assert grown("warpline:time_to_first_token_seconds_count") == 2
    assert grown("warpline:inter_token_latency_seconds_count") > 60
    assert grown("warpline:e2e_request_latency_seconds_sum") > grown("warpline:time_to_first_token_seconds_sum") > 0
    buckets = [key for key in after if key.startswith("warpline:inter_token_latency_seconds_bucket")]
    assert 'le="1e-05"' in buckets[0]
    assert [after[key] for key in buckets] == sorted(after[key] for key in buckets)
    assert all(value == value and value >= 0 for value in after.values())
