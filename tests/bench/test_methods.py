"""What is measured and who: workloads, and methods that answer with the oracle's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bench.conftest import CPU, case
from tests.conftest import SMALL
from warpline.bench import methods
from warpline.bench.methods import ct2
from warpline.bench.methods.names import METHODS
from warpline.bench.methods.ours import Naive
from warpline.bench.workloads import WORKLOADS, cases
from warpline.errors import ConfigError
from warpline.model.weights import load


def test_workloads_are_the_named_ones() -> None:
    reference, long = WORKLOADS["reference"].shapes, WORKLOADS["long"].shapes
    assert (reference, long) == (((1, 16, 100),), ((1, 124, 900),))
    assert set(WORKLOADS) == {"reference", "decode", "long", "prefill", "batch", "coldstart", "memory"}


def test_sweep_is_the_product() -> None:
    found = cases(["reference", "batch"], models=["a", "b"], dtypes=["fp32", "fp16"], new=[5, 6], windows=[None, 4])
    assert len(found) == (1 + 3) * 2 * 2 * 2 * 2
    assert len(set(found)) == len(found)
    assert {c.batch for c in found} == {1, 8, 64, 256}
    one = cases(["decode"], models=["a"], dtypes=["fp32"], prompts=[7])
    assert [c.prompt for c in one] == [7]  # the five depths became one
    assert cases(["prefill"], models=["a"], dtypes=["fp32"], new=[9])[0].new == 0


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


@pytest.mark.parametrize("name", ["naive", "torch", "hf-eager", "hf-sdpa", "static-kv"])
@pytest.mark.parametrize("batch", [1, 3])
def test_methods_agree_with_the_oracle_to_the_token(name: str, batch: int) -> None:
    weights, one = load(SMALL), case(batch=batch, prompt=9, new=12)
    prompts = torch.randint(weights.config.vocab_size, (batch, 9), generator=torch.Generator().manual_seed(batch))
    expected = Naive(weights, one, CPU).generate(prompts, 12)
    method = methods.find(name)(weights, one, CPU)
    assert torch.equal(method.generate(prompts, 12), expected)
    assert torch.equal(method.generate(prompts, 3), expected[:, :3])  # nothing of the last run is left


@pytest.mark.parametrize("name", ["torch", "static-kv"])
def test_windows_agree(name: str) -> None:
    weights, one = load(SMALL), case(prompt=9, new=12, window=5)
    prompts = torch.randint(weights.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(7))
    expected = Naive(weights, one, CPU).generate(prompts, 12)
    assert torch.equal(methods.find(name)(weights, one, CPU).generate(prompts, 12), expected)
    assert not torch.equal(Naive(weights, case(prompt=9, new=12), CPU).generate(prompts, 12), expected)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu", "silu", "tanh"])
def test_onnxruntime_knows_every_activation(activation: str) -> None:
    weights, one = load(f"{SMALL},activation_function={activation}"), case(new=12)
    prompts = torch.randint(weights.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))
    method = methods.find("onnxruntime")(weights, one, CPU)
    assert torch.equal(method.generate(prompts, 12), Naive(weights, one, CPU).generate(prompts, 12))
    method.close()


@pytest.mark.parametrize("name", ["ctranslate2", "onnxruntime"])
def test_other_engines_agree(name: str) -> None:
    model = "random:n_layer=2,n_head=2,n_embd=64,n_positions=64"
    weights, one = load(model), case(model=model, prompt=9, new=6)
    prompts = torch.randint(weights.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))
    method = methods.find(name)(weights, one, CPU)
    assert torch.equal(method.generate(prompts, 6), Naive(weights, one, CPU).generate(prompts, 6))
    method.close()


@pytest.mark.parametrize("name", ["torch", "hf-sdpa", "ctranslate2", "onnxruntime"])
def test_the_end_of_a_text_is_a_token_like_any_other(name: str) -> None:
    """A model that says it again and again goes on to the full length."""
    weights = load("random:n_layer=1,n_head=2,n_embd=64,n_positions=64")
    end = weights.config.eos_token_id
    weights.tensors["wte.weight"][end] += 10 * weights.tensors["ln_f.bias"]
    weights.tensors["ln_f.bias"].mul_(50)
    prompts = torch.arange(1, 10)[None]
    expected = Naive(weights, case(), CPU).generate(prompts, 12)
    assert end in expected[0, :-1].tolist()
    method = methods.find(name)(weights, case(prompt=9, new=12), CPU)
    assert torch.equal(method.generate(prompts, 12), expected)
    method.close()


def test_a_conversion_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing-here"):
        ct2._convert(tmp_path / "nothing-here", tmp_path / "out", "float32")
