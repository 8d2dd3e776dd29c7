"""The torch executor on CUDA: the CPU's tokens in fp32, close logits in half precision, no surprises."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from tests.conftest import SMALL
from tests.model.test_stories import NATS_PER_TOKEN, TOLERANCE, golden, held_out
from warpline import LLM, SamplingParams
from warpline.cli import survey
from warpline.cli.main import main
from warpline.model.weights import load

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def full_fp32() -> None:
    assert torch.cuda.is_available(), "make test-gpu needs a CUDA GPU"
    torch.backends.cuda.matmul.allow_tf32 = False


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(50257) for _ in range(rng.randint(1, 60))] for _ in range(count)]


@pytest.mark.parametrize("model", [SMALL, "random:gpt2"])
def test_fp32_tokens_equal_the_cpus(model: str) -> None:
    cpu, gpu = LLM(model, device="cpu"), LLM(model, device="cuda", executor="torch", dtype="fp32")
    ours = [c.token_ids for c in gpu.generate(prompts(9), GREEDY)]
    assert ours == [c.token_ids for c in cpu.generate(prompts(9), GREEDY)]
    assert ours == [gpu.generate(prompt, GREEDY)[0].token_ids for prompt in prompts(9)]


@pytest.mark.parametrize(("dtype", "epsilon"), [("fp16", 2**-11), ("bf16", 2**-8)])
@torch.no_grad()
def test_half_precision_logits_are_close(dtype: str, epsilon: float) -> None:
    """Rounding errors of about 4 per layer add up like a random walk; logits of this model are of order 1."""
    gpu = LLM("random:gpt2", device="cuda", executor="torch", dtype=dtype)
    ids = torch.tensor(prompts(1), device="cuda")
    exact = LLM("random:gpt2", device="cuda", executor="torch", dtype="fp32").executor.model(ids)  # type: ignore[attr-defined]
    half = gpu.executor.model(ids).float()  # type: ignore[attr-defined]
    assert (half - exact).std() < 8 * epsilon * (4 * 12) ** 0.5 * exact.std()


@pytest.mark.parametrize("prompt", golden())
def test_golden_stories(prompt: str) -> None:
    (completion,) = LLM(device="cuda", executor="torch", dtype="fp32").generate(
        prompt, SamplingParams(temperature=0, max_tokens=300)
    )
    assert list(completion.token_ids) == golden()[prompt]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_perplexity_of_stories(dtype: str) -> None:
    scored = LLM(device="cuda", executor="torch", dtype=dtype).score(held_out())
    assert scored.nats_per_token == pytest.approx(NATS_PER_TOKEN, rel=TOLERANCE[dtype])


def test_sampling_and_streaming() -> None:
    gpu = LLM(SMALL, device="cuda", executor="torch")
    assert gpu.dtype == "fp16"
    params = SamplingParams(max_tokens=40, seed=3, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=2)
    (whole,) = gpu.generate("Hello", params)
    assert "".join(gpu.stream("Hello", params)) == whole.text
    assert whole.logprobs is not None
    assert len(whole.logprobs) == len(whole.token_ids)
    (stopped,) = gpu.generate("Hello", replace(params, stop=whole.text[8:10]))
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(whole.text[8:10])]


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "Hello", "--model", SMALL, "--max-new-tokens", "9", "--device", "cuda:0", "--json"])
    assert caught.value.code == 0
    assert json.loads(capsys.readouterr().out)["device"] == torch.cuda.get_device_name(0)


def test_survey_sees_the_gpu() -> None:
    found = survey.take()
    gpu = found.devices[1]
    assert gpu.kind == "cuda"
    assert gpu.arch == "sm_{}{}".format(*torch.cuda.get_device_capability(0))
    assert gpu.measured_bandwidth is not None
    assert gpu.measured_bandwidth > 50
    assert found.software["NVIDIA driver"]


def test_out_of_memory_is_one_line() -> None:
    from warpline.errors import DeviceError

    small = "random:n_layer=1,n_head=1,n_embd=64,n_positions=100"
    llm = LLM(small, device="cuda", executor="torch", max_batch=100_000_000)
    with pytest.raises(DeviceError, match="not enough free memory"):
        llm.generate([1], GREEDY)


def test_weights_load_onto_the_gpu() -> None:
    weights = load(SMALL, dtype="fp16", device="cuda")
    assert all(tensor.is_cuda and tensor.dtype == torch.float16 for tensor in weights.tensors.values())
