"""The cpu executor seen from inside: stages by the clocks of its threads."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import SMALL
from tests.profile.test_collect import CPU, wanted
from warpline.bench.methods.ours import OnCpu
from warpline.model import cost
from warpline.model.weights import load
from warpline.profile import tree
from warpline.profile.collect import collect
from warpline.profile.names import BLOCKS
from warpline.profile.roofline import points
from warpline.profile.verdict import verdict


@pytest.mark.parametrize(("name", "dtype"), [("cpu", "fp32"), ("cpu-int8", "int8")])
def test_the_cpu_executor_shows_its_stages(name: str, dtype: str) -> None:
    """By the clocks of its threads; a pass over a prompt is two calls. Weights in int8 have the bytes of int8."""
    session = collect(wanted(name, dtype=dtype))
    assert (session.method, session.dtype) == (name, dtype)
    for phase in session.phases:
        assert tree.build(phase).us == pytest.approx(phase.step_us, rel=0.02)
        assert sum(row.us for row in phase.kernels) == pytest.approx(phase.busy_us, rel=0.02)
    prefill, decode = session.phase("prefill"), session.phase("decode")
    assert (prefill.source, prefill.launches.count) == ("stamps", 2)
    tree_of_prompt = tree.build(prefill)
    for module in ("ln_1 + QKV projection", "KV cache", "fused attention", "output projection + residual 1"):
        assert tree_of_prompt.find(BLOCKS, "attention", module) is not None
    assert 0 <= prefill.gap_us < 0.9 * prefill.step_us
    assert (decode.source, decode.steps, decode.work.screened) == ("stamps", 4, dtype == "fp32")
    assert prefill.work.screened is decode.work.screened
    layers = session.config.n_layer
    assert len(decode.kernels) == 2 * (1 + 5 * layers + 2)
    awaited = [row for row in decode.kernels if row.name.endswith("others awaited")]
    assert len(awaited) == 1 + 5 * layers + 2
    assert 0 < sum(row.us for row in awaited) < 0.9 * decode.busy_us
    for module in ("ln_1 + QKV projection", "KV cache + fused attention", "output projection + residual 1"):
        assert tree.build(decode).find(BLOCKS, "attention", module) is not None
    assert sum(point.bytes for point in points(session, decode)) >= cost.total_bytes(session.workload(decode))
    assert verdict(session, decode)


def test_steps_that_are_not_stamped_cost_nothing_more() -> None:
    """After a profile the executor writes no clocks; during one, clocks of threads only increase."""
    method = OnCpu(load(SMALL), wanted("cpu").case, CPU)
    given = method.given(torch.zeros(1, 12, dtype=torch.int64))
    found = method.stamped(given, 5, 2)
    assert len(found.us) == 2
    assert bool((found.clocks > 0).all())
    assert bool((found.clocks.diff(dim=1) >= 0).all())
    before = found.clocks.clone()
    method.generate(given, 4)
    assert found.clocks.equal(before)
    method.close()
