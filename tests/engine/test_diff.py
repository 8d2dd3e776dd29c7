"""`warpline diff`: no difference between equal executors, and the right op named otherwise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.conftest import SMALL
from warpline.cli.main import main
from warpline.engine.check.diff import _begin, compare, first_dependence
from warpline.engine.executors import Executor, create
from warpline.engine.executors.graph.kernels import KernelsExecutor
from warpline.engine.executors.graph.prompts import Prompts
from warpline.engine.executors.graph.schedule import PassRules, order
from warpline.engine.request import Span
from warpline.engine.slots import Slots
from warpline.errors import ConfigError
from warpline.model.weights import Weights, load

CPU = torch.device("cpu")


def texts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(50257) for _ in range(length)] for _ in range(count)]


def damaged(weights: Weights, name: str) -> Weights:
    tensors = dict(weights.tensors)
    tensors[name] = tensors[name] + 1e-3 * torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
    return replace(weights, tensors=tensors)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_executors_that_agree(dtype: str, count: int) -> None:
    weights = load(SMALL, dtype=dtype)
    kernels, torchs = (create(name, weights, CPU, dtype) for name in ("kernels", "torch"))
    assert compare(kernels, torchs, texts(count, 24), 6) is None
    slots, lanes = _begin(torchs, texts(2, 9), 3)
    found = torchs.observe(slots, lanes)
    assert set(found) == set(order(weights.config.n_layer))
    assert {len(value) for value in found.values()} == {2}


@pytest.mark.parametrize("seed", range(3))
def test_a_trained_model_whose_rows_have_outliers(seed: int) -> None:
    weights = load("stories")
    kernels, torchs = (create(name, weights, CPU, "fp32") for name in ("kernels", "torch"))
    rng = random.Random(seed)
    text = [[rng.randrange(50257) for _ in range(40)] for _ in range(2)]
    assert compare(kernels, torchs, text, 4) is None


@pytest.mark.parametrize(
    ("parameter", "op"),
    [
        ("wpe.weight", "h.0.in"),
        ("h.0.attn.c_attn.weight", "h.0.qkv"),
        ("h.1.attn.c_proj.bias", "h.1.middle"),
        ("h.1.ln_2.bias", "h.1.hidden"),
        ("h.2.mlp.c_fc.weight", "h.2.hidden"),
        ("h.2.mlp.c_proj.weight", "h.3.in"),
        ("ln_f.weight", "logits"),
    ],
)
def test_the_first_op_that_differs_is_named(parameter: str, op: str) -> None:
    weights = load(SMALL)
    wrong = create("kernels", damaged(weights, parameter), CPU, "fp32")
    assert isinstance(wrong, KernelsExecutor)
    wrong.prompts = Prompts(PassRules(weights))  # the prompt's K and V are right
    found = compare(wrong, create("torch", weights, CPU, "fp32"), texts(2, 20), 4)
    assert found is not None
    assert found.name == op
    assert found.position == 16
    assert found.error > found.allowed
    assert op in str(found)


def test_not_a_number_is_a_difference() -> None:
    weights = load(SMALL)
    tensors = {**weights.tensors, "h.1.mlp.c_fc.bias": weights.tensors["h.1.mlp.c_fc.bias"] * torch.nan}
    wrong = create("kernels", replace(weights, tensors=tensors), CPU, "fp32")
    assert isinstance(wrong, KernelsExecutor)
    wrong.prompts = Prompts(PassRules(weights))
    found = compare(wrong, create("torch", weights, CPU, "fp32"), texts(1, 20), 4)
    assert found is not None
    assert found.name == "h.1.hidden"


def test_bits_that_do_not_depend_on_the_batch() -> None:
    cpu = create("cpu", load(SMALL), CPU, "fp32")
    assert first_dependence(cpu, texts(5, 12), 3) is None


@pytest.mark.parametrize("op", ["h.0.qkv", "h.1.middle", "logits"])
def test_the_first_op_that_depends_on_the_batch_is_named(op: str) -> None:
    """One value in the last of three or more rows is off by the least possible amount."""

    class Company(KernelsExecutor):
        def observe(self, slots: Slots, lanes: Sequence[int]) -> dict[str, torch.Tensor]:
            rows = [super(Company, self).observe(slots, [lane]) for lane in lanes]
            found = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
            if len(lanes) > 2:
                found[op][-1] = torch.nextafter(found[op][-1], torch.tensor(torch.inf))
            return found

    weights = load(SMALL)
    executor = Company(weights, CPU, "fp32")
    assert first_dependence(executor, texts(2, 12), 3) is None
    found = first_dependence(executor, texts(3, 12), 3)
    assert found is not None
    assert (found.batch, found.row, found.position, found.name) == (3, 2, 9, op)
    assert 0 < found.error < 1e-5
    assert op in str(found)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["diff", "--model", SMALL, "--device", "cpu", *arguments])
        printed = capsys.readouterr()
        return caught.value.code, printed.out, printed.err

    code, out, _ = run("--executor", "kernels", "--tokens", "3", "--batch", "2")
    assert code == 0
    assert "no difference" in out
    assert run("--executor", "kernels", "--tokens", "0")[0] == 2
    code, _, err = run("--executor", "kernls")
    assert code == 2
    assert "kernels" in err
    assert "context" in run("--executor", "kernels", "--prompt", "95")[2]
    code, out, _ = run("-e", "cpu", "--alone", "--deterministic", "batch", "--tokens", "2", "--prompt", "5")
    assert code == 0
    assert "among 2, 3, 8, 9, 16, 64" in out
    assert "--against" in run("--executor", "cpu", "--alone", "--against", "torch")[2]
    assert "deterministic" in run("--executor", "torch", "--deterministic", "batch")[2]


def test_an_executor_that_shows_nothing_says_so() -> None:
    weights = load(SMALL)

    class Silent(Executor):
        name = "silent"

        def _prefill(self, slots: Slots, spans: Sequence[Span]) -> None:
            pass

        def _decode(self, slots: Slots, lanes: Sequence[int], n: int) -> None:
            pass

    with pytest.raises(ConfigError, match="silent"):
        compare(Silent(weights, CPU, "fp32"), create("torch", weights, CPU, "fp32"), texts(1, 9), 2)
