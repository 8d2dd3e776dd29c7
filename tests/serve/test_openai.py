"""OpenAI's own client with a live server, compared with the library."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.live import Live
from warpline import LLM, SamplingParams

PROMPTS = ["A frog and a crow", "One day", "Ünïcödé ☃ 🐸", "The end."]


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def model(live: Live) -> str:
    return live.state.name


def test_completions_are_the_librarys(live: Live, client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=1, top_p=0.9, seed=5, n=2)
    expected = llm.generate(PROMPTS, params)
    answer = client.completions.create(
        model=model(live), prompt=PROMPTS, max_tokens=24, temperature=1, top_p=0.9, seed=5, n=2
    )
    assert [choice.text for choice in answer.choices] == [completion.text for completion in expected]
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert {choice.finish_reason for choice in answer.choices} <= {"length", "stop"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in expected)
    assert answer.usage.prompt_tokens == sum(len(llm.tokenizer.encode(p)) for p in PROMPTS)


def test_a_stream_says_the_same(live: Live, client: openai.OpenAI, llm: LLM) -> None:
    named: dict[str, Any] = {"model": model(live), "prompt": PROMPTS, "max_tokens": 40, "seed": 9, "n": 2}
    whole = client.completions.create(**named)
    texts = [""] * 8
    reasons: list[str | None] = [None] * 8
    usage = None
    for event in client.completions.create(**named, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usage = event.usage or usage
        assert bool(event.choices) == (event.usage is None)
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


@pytest.mark.parametrize("prompt", [[15, 16, 17], [[15, 16], [999]]])
def test_ids_for_prompts(live: Live, client: openai.OpenAI, llm: LLM, prompt: Any) -> None:
    answer = client.completions.create(model=model(live), prompt=prompt, max_tokens=8, seed=1, temperature=0)
    expected = llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0))
    assert [choice.text for choice in answer.choices] == [completion.text for completion in expected]


def test_logprobs_are_the_librarys(live: Live, client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate("A frog", SamplingParams(max_tokens=12, temperature=1, top_p=1, seed=3, logprobs=3))
    answer = client.completions.create(
        model=model(live), prompt="A frog", max_tokens=12, temperature=1, seed=3, logprobs=3
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert expected.logprobs is not None
    assert found.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4)
    assert len(found.top_logprobs or []) == 12
    offset = 0
    for token, at in zip(found.tokens, found.text_offset, strict=True):
        assert at == offset
        if not token.startswith("bytes:"):
            offset += len(token)
        else:
            break  # characters of several tokens are counted where they end


def test_echo_scores_the_prompt(live: Live, client: openai.OpenAI, llm: LLM) -> None:
    """As lm-eval requests it: log-probabilities of the prompt's own tokens."""
    text = "A frog and a crow went out."
    ids = llm.tokenizer.encode(text)
    answer = client.completions.create(model=model(live), prompt=ids, max_tokens=0, echo=True, logprobs=2)
    found = answer.choices[0].logprobs
    assert answer.choices[0].text == text
    assert found is not None
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    expected = prompt_logprobs(llm, ids)
    assert found.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    more = client.completions.create(model=model(live), prompt=text, max_tokens=3, echo=True, logprobs=2, seed=1)
    plain = client.completions.create(model=model(live), prompt=text, max_tokens=3, seed=1)
    assert more.choices[0].text == text + plain.choices[0].text
    assert more.choices[0].logprobs is not None
    assert more.choices[0].logprobs.text_offset is not None
    assert more.choices[0].logprobs.text_offset[len(ids)] == len(text)
    streamed = list(
        client.completions.create(
            model=model(live), prompt=text, max_tokens=3, echo=True, logprobs=2, seed=1, stream=True
        )
    )
    assert "".join(event.choices[0].text for event in streamed) == more.choices[0].text
    pieces = [event.choices[0].logprobs for event in streamed if event.choices[0].logprobs is not None]
    assert [at for piece in pieces for at in piece.text_offset or []] == more.choices[0].logprobs.text_offset


def prompt_logprobs(llm: LLM, ids: list[int]) -> list[float]:
    """Return those of every token after the first, computed by the library with one token more at a time."""
    import torch

    from tests.conftest import make_model
    from warpline.model import weights

    model = make_model(weights.load(llm.model))
    logits = model(torch.tensor([ids])).double().log_softmax(-1)[0]
    return [float(logits[i, token]) for i, token in enumerate(ids[1:])]


def test_chat(live: Live, client: openai.OpenAI, llm: LLM) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]},
    ]
    answer = client.chat.completions.create(model=model(live), messages=messages, max_tokens=10, seed=4)
    prompt = "Be brief.\nUser: Who are you?\nAssistant:"
    params = SamplingParams(max_tokens=10, temperature=1, top_p=1, seed=4, stop="\nUser:")
    assert answer.choices[0].message.content == llm.generate(prompt, params)[0].text
    assert answer.choices[0].message.role == "assistant"
    events = list(
        client.chat.completions.create(
            model=model(live), messages=messages, max_completion_tokens=10, seed=4, stream=True,
            logprobs=True, top_logprobs=2,
        )
    )  # fmt: skip
    assert "".join(event.choices[0].delta.content or "" for event in events) == answer.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].choices[0].finish_reason == "length"
    scored = [t for event in events if event.choices[0].logprobs for t in event.choices[0].logprobs.content or []]
    assert len(scored) == 10
    assert all(len(token.top_logprobs) == 2 and math.isfinite(token.logprob) for token in scored)
    assert bytes(b for token in scored for b in token.bytes or []).decode(errors="replace") == "".join(
        event.choices[0].delta.content or "" for event in events
    )


def test_models(live: Live, client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == [model(live)]
    assert client.models.retrieve(model(live)).id == model(live)
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-5'"):
        client.models.retrieve("gpt-5")


def test_penalties_and_biases(live: Live, client: openai.OpenAI, llm: LLM) -> None:
    asked: dict[str, Any] = {"model": model(live), "prompt": "A frog", "max_tokens": 30, "temperature": 0}
    plain = client.completions.create(**asked)
    settings: dict[str, Any] = {"presence_penalty": 1.0, "frequency_penalty": 0.7}
    found = client.completions.create(**asked, **settings, logit_bias={"262": -100, "11": 3})
    (expected,) = llm.generate(
        "A frog",
        SamplingParams(temperature=0, top_p=1.0, max_tokens=30, logit_bias={262: -100.0, 11: 3.0}, **settings),
    )
    assert found.choices[0].text == expected.text != plain.choices[0].text
    assert 262 not in expected.token_ids
    favoured = client.completions.create(**asked, logit_bias={"464": 100})
    assert favoured.choices[0].text == "The" * 30


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [50257]}, "token id"),
        ({"prompt": [1] * 257}, "context is 256"),
        ({"prompt": "a " * 100_000}, "context is 256"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "n": 129}, "n:"),
        ({"prompt": "x", "extra_body": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream: true"),
        ({"prompt": "x", "extra_body": {"min_tokens": 30}}, "min_tokens"),
        ({"prompt": "x", "presence_penalty": 3}, "presence_penalty"),
        ({"prompt": "x", "logit_bias": {"99999": 1}}, "token ids below"),
        ({"prompt": "x", "logit_bias": {"5": 500}}, "logit_bias"),
    ],
)
def test_what_cannot_be_honoured(live: Live, client: openai.OpenAI, named: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.completions.create(**({"model": model(live)} | named))
    assert caught.value.body["type"] == "invalid_request_error"  # type: ignore[index]
    assert "\n" not in caught.value.message


def test_unsupported_chats(live: Live, client: openai.OpenAI) -> None:
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model=model(live), messages=image)
    hello: Any = [{"role": "user", "content": "Hello"}]
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model=model(live), messages=hello, tools=tools)
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-5'"):
        client.chat.completions.create(model="gpt-5", messages=hello)


def test_a_timeout_leaves_nothing(live: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.02).completions.create(
            model=model(live), prompt="x", max_tokens=250, n=8, extra_body={"ignore_eos": True}, logprobs=5
        )
    live.wait_until_empty()


def test_async_streams_and_cancels(live: Live, llm: LLM) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:

            async def text(seed: int) -> str:
                stream = await client.completions.create(
                    model=model(live), prompt="One day", max_tokens=20, seed=seed, stream=True
                )
                return "".join([event.choices[0].text async for event in stream])

            found = await asyncio.gather(*(text(seed) for seed in range(20)))
            for seed, one in enumerate(found):
                params = SamplingParams(max_tokens=20, temperature=1, top_p=1, seed=seed)
                assert one == llm.generate("One day", params)[0].text
            stream = await client.completions.create(
                model=model(live), prompt="x", max_tokens=250, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                await stream.close()
                break
            task = asyncio.create_task(text(1))
            await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    live.wait_until_empty()
