"""The benchmark on a GPU: every method that runs there answers with the oracle's tokens, and rows are complete."""

from __future__ import annotations

import json

import pytest
import torch

from tests.conftest import SMALL
from warpline.bench import methods
from warpline.bench.methods.names import METHODS
from warpline.bench.methods.ours import Naive
from warpline.bench.oracle import Oracle
from warpline.bench.timing import copy_bandwidth, read_bandwidth
from warpline.bench.workloads import Case
from warpline.cli.main import main
from warpline.model.weights import load

pytestmark = [  # warnings of torch: advice on precision and softmax, and a graph that it captures empty on purpose
    pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

GPU = torch.device("cuda")
#: Left out: methods that do not run here, and two that compile slowly and are otherwise the eager ones.
NAMES = [
    name
    for name in METHODS
    if "cuda" in methods.find(name).devices
    and methods.find(name).missing() is None
    and name not in ("naive-compile", "torch-compile")
]


def case(dtype: str) -> Case:
    return Case(workload="reference", kind="generate", model=SMALL, dtype=dtype, batch=2, prompt=9, new=24)


@pytest.mark.parametrize("name", NAMES)
def test_methods_agree_with_the_oracle(name: str) -> None:
    torch._dynamo.reset()
    weights, one = load(SMALL, device="cuda"), case("fp32")
    prompts = torch.randint(weights.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(5)).to(GPU)
    expected = Naive(weights, one, GPU).generate(prompts, 24)
    method = methods.find(name)(weights, one, GPU)
    given = method.given(prompts)
    held = [torch.full((n,), -1, device=GPU) for n in range(1, 200)]  # freed memory is reused and overwritten
    for _ in range(3):  # captured graphs are used from the second time on
        assert torch.equal(method.tokens(method.generate(given, 24)).cpu(), expected.cpu())
    assert torch.equal(method.tokens(method.generate(given, 3)).cpu(), expected[:, :3].cpu())
    method.close()
    del held


@pytest.mark.parametrize("name", ["torch", "warpline", "hf-sdpa", "static-kv-graph"])
def test_half_precision_is_judged_right(name: str) -> None:
    weights = load(SMALL, dtype="fp16", device="cuda")
    prompts = torch.randint(weights.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(6)).to(GPU)
    method = methods.find(name)(weights, case("fp16"), GPU)
    tokens = method.tokens(method.generate(method.given(prompts), 24)).to(GPU)
    oracle = Oracle(weights)
    assert oracle.judge(prompts, tokens, "fp16").right
    assert not oracle.judge(prompts, (tokens + 1) % weights.config.vocab_size, "fp16").right


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "reference", "prefill", "-m", SMALL, "--method", "torch,static-kv-graph", "--new", "8"]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--prompt", "16", "--batch", "2", "--repetitions", "3", "--json"])
    assert not caught.value.code
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert all(row["copy_gb_s"] > 0 < row["read_gb_s"] and row["clocks"]["sm"] > 0 for row in rows)


def test_many_requests(capsys: pytest.CaptureFixture[str]) -> None:
    """Our method answers them together, the others padded, all judged; static shapes are compiled before the timing."""
    words = ["bench", "throughput", "-m", SMALL, "--method", "warpline,static-kv-compile,hf-sdpa,graph", "--json"]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--batch", "100", "--prompt", "20", "--new", "12", "--repetitions", "2"])
    assert not caught.value.code
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert [row["status"] for row in rows.values()] == ["ok", "missing", "ok", "ok"], rows
    assert rows["warpline"]["mean_lanes"] > 8
    assert rows["static-kv-compile"]["padded_batch"] in (32, 64, 100)
    assert all(row["requests_per_second"] > 0 for row in rows.values() if row["status"] == "ok")


@pytest.mark.alone
def test_bandwidths_are_of_the_same_memory() -> None:
    read, copy = read_bandwidth(), copy_bandwidth()
    assert 0.8 < read / copy < 1.25
