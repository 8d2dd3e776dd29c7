"""Workloads, and methods that answer with the oracle's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bench.conftest import CPU, case
from tests.conftest import SMALL
from warpline.bench import methods
from warpline.bench.methods import ct2
from warpline.bench.methods.names import METHODS
from warpline.bench.methods.ours import Naive
from warpline.bench.workloads import WORKLOADS, cases
from warpline.engine.executors.pytorch import TorchExecutor
from warpline.engine.request import Span
from warpline.engine.slots import Slots
from warpline.errors import ConfigError
from warpline.model.weights import load, read_config


def test_workloads_are_the_named_ones() -> None:
    reference, long = WORKLOADS["reference"].shapes, WORKLOADS["long"].shapes
    assert (reference, long) == (((1, 16, 100),), ((1, 124, 900),))
    assert set(WORKLOADS) == {"reference", "decode", "long", "prefill", "batch", "throughput", "coldstart", "memory"}
    assert WORKLOADS["throughput"].shapes == ((1024, 225, 202),)


def test_sweep_is_the_product() -> None:
    found = cases(["reference", "batch"], models=["a", "b"], dtypes=["fp32", "fp16"], new=[5, 6], windows=[None, 4])
    assert len(found) == (1 + 3) * 2 * 2 * 2 * 2
    assert len(set(found)) == len(found)
    assert {c.batch for c in found} == {1, 8, 64, 256}
    one = cases(["decode"], models=["a"], dtypes=["fp32"], prompts=[7])
    assert [c.prompt for c in one] == [7]  # the five depths became one
    assert cases(["prefill"], models=["a"], dtypes=["fp32"], new=[9])[0].new == 0
    many, fewer = (cases(["throughput"], models=["a"], dtypes=["fp32"], on_cpu=on_cpu)[0] for on_cpu in (False, True))
    assert (many.batch, fewer.batch) == (1024, 64)
    assert "1,024 requests of about 225 + 202 tokens" in many.label


def test_bad_sweeps_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'reference'"):
        cases(["refrence"], models=["a"], dtypes=["fp32"])
    with pytest.raises(ConfigError, match="batch must be at least 1"):
        cases(["reference"], models=["a"], dtypes=["fp32"], batches=[0])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_name_and_says_what_it_lacks(name: str) -> None:
    method = methods.find(name)
    assert method.title
    reason = method.obstacle(case(), CPU)
    assert (reason is None) == ("cpu" in method.devices)
    assert "no bf8" in str(method.obstacle(case(dtype="bf8"), torch.device(method.devices[0])))
    if not method.windows:
        assert "window" in str(method.obstacle(case(window=4), torch.device(method.devices[0])))


@pytest.mark.parametrize("name", ["naive", "torch", "cpu", "kernels", "warpline", "hf-eager", "hf-sdpa", "static-kv"])
@pytest.mark.parametrize("batch", [1, 3])
def test_methods_agree_with_the_oracle_to_the_token(name: str, batch: int) -> None:
    weights, one = load(SMALL), case(batch=batch, prompt=9, new=12)
    prompts = torch.randint(weights.config.vocab_size, (batch, 9), generator=torch.Generator().manual_seed(batch))
    expected = Naive(weights, one, CPU).generate(prompts, 12)
    method = methods.find(name)(weights, one, CPU)
    given = method.given(prompts)
    assert torch.equal(method.tokens(method.generate(given, 12)), expected)
    assert torch.equal(method.tokens(method.generate(given, 3)), expected[:, :3])  # nothing of the last run is left
    method.close()


def test_what_begins_on_the_host_gets_ids_there() -> None:
    """Our methods are timed from ids on the host to tokens on the host; the others keep prompts on their device."""
    weights, prompts = load(SMALL), torch.arange(18).view(2, 9)
    made = {name: methods.find(name)(weights, case(batch=2, prompt=9), CPU) for name in ("warpline", "torch", "naive")}
    given = {name: method.given(prompts) for name, method in made.items()}
    assert given["naive"] is prompts
    assert [row.tolist() for row in given["warpline"]] == prompts.tolist()
    assert [type(row) for row in given["torch"]] == [np.ndarray] * 2
    assert [row.tolist() for row in given["torch"]] == prompts.tolist()


def test_long_prompts_are_run_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass has more tokens than the executor takes, and the result is the same."""
    weights, one = load(SMALL), case(batch=3, prompt=9, new=5)
    prompts = torch.randint(weights.config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(4))
    expected = Naive(weights, one, CPU).generate(prompts, 5)
    seen: list[list[tuple[int, int, bool]]] = []
    run = TorchExecutor.prefill

    def prefill(self: TorchExecutor, slots: Slots, spans: Sequence[Span]) -> None:
        seen.append([(span.start, span.end, bool(span.lanes)) for span in spans])
        run(self, slots, spans)

    monkeypatch.setattr(TorchExecutor, "prefill", prefill)
    monkeypatch.setattr(TorchExecutor, "prompt_tokens", 12)
    method = methods.find("torch")(weights, one, CPU)
    assert torch.equal(method.tokens(method.generate(method.given(prompts), 5)), expected)
    assert seen == [[(0, 9, True), (0, 3, False)], [(3, 9, True), (0, 6, False)], [(6, 9, True)]]


def test_logits_that_are_no_numbers_are_an_error() -> None:
    weights = load(SMALL)
    broken = replace(weights, tensors=weights.tensors | {"ln_f.bias": weights.tensors["ln_f.bias"] * torch.nan})
    method = methods.find("torch")(broken, case(prompt=9), CPU)
    for _ in range(2):  # the slot is free again
        with pytest.raises(RuntimeError, match="no numbers"):
            method.generate(method.given(torch.arange(9)[None]), 4)


@pytest.mark.parametrize("name", ["cpu-int8", "warpline-int8"])
def test_int8_is_near(name: str) -> None:
    weights, one = load("stories"), case(model="stories", prompt=9, new=8)
    prompts = torch.randint(weights.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(1))
    method = methods.find(name)(weights, one, CPU)
    tokens = method.tokens(method.generate(method.given(prompts), 8))
    assert (tokens == Naive(weights, one, CPU).generate(prompts, 8)).float().mean() >= 0.5
    method.close()


@pytest.mark.parametrize("name", ["torch", "warpline", "static-kv"])
def test_windows_agree(name: str) -> None:
    weights, one = load(SMALL), case(prompt=9, new=12, window=5)
    prompts = torch.randint(weights.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(7))
    expected = Naive(weights, one, CPU).generate(prompts, 12)
    method = methods.find(name)(weights, one, CPU)
    assert torch.equal(method.tokens(method.generate(method.given(prompts), 12)), expected)
    assert not torch.equal(Naive(weights, case(prompt=9, new=12), CPU).generate(prompts, 12), expected)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu", "silu", "tanh"])
def test_onnxruntime_knows_every_activation(activation: str) -> None:
    weights, one = load(f"{SMALL},activation_function={activation}"), case(new=12)
    prompts = torch.randint(weights.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))
    method = methods.find("onnxruntime")(weights, one, CPU)
    assert torch.equal(method.tokens(method.generate(prompts, 12)), Naive(weights, one, CPU).generate(prompts, 12))
    method.close()


@pytest.mark.parametrize("name", ["ctranslate2", "onnxruntime"])
def test_other_engines_agree(name: str) -> None:
    model = "random:n_layer=2,n_head=2,n_embd=64,n_positions=64"
    weights, one = load(model), case(model=model, prompt=9, new=6)
    prompts = torch.randint(weights.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))
    method = methods.find(name)(weights, one, CPU)
    assert torch.equal(method.tokens(method.generate(prompts, 6)), Naive(weights, one, CPU).generate(prompts, 6))
    method.close()


@pytest.mark.parametrize("name", ["torch", "warpline", "hf-sdpa", "ctranslate2", "onnxruntime"])
def test_the_end_of_a_text_is_a_token_like_any_other(name: str) -> None:
    """A model that repeats the end of text generates to the full length."""
    weights = load("random:n_layer=1,n_head=2,n_embd=64,n_positions=64")
    end = weights.config.eos_token_id
    weights.tensors["wte.weight"][end] += 10 * weights.tensors["ln_f.bias"]
    weights.tensors["ln_f.bias"].mul_(50)
    prompts = torch.arange(1, 10)[None]
    expected = Naive(weights, case(), CPU).generate(prompts, 12)
    assert end in expected[0, :-1].tolist()
    method = methods.find(name)(weights, case(prompt=9, new=12), CPU)
    assert torch.equal(method.tokens(method.generate(method.given(prompts), 12)), expected)
    method.close()


def test_a_conversion_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing-here"):
        ct2._convert(tmp_path / "nothing-here", tmp_path / "out", "float32")


@pytest.mark.parametrize(("prompt", "new", "fits"), [(90, 6, True), (90, 7, False), (96, 0, True), (97, 0, False)])
def test_a_case_needs_positions_for_its_prompt_and_its_new_tokens(prompt: int, new: int, fits: bool) -> None:
    one = case(prompt=prompt, new=new, kind="generate" if new else "prefill")
    assert read_config(one.model).n_positions == 96
    assert (one.obstacle(read_config(one.model)) is None) is fits
