"""Made-up events become rows with known sums."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from warpline.errors import ConfigError
from warpline.profile.events import MOST_MOMENTS, TRACE_STEPS, Event, aggregate
from warpline.profile.session import ModulePath


def span(start: float, us: float, *path: str) -> Event:
    return Event("span", "/".join(path), start, us, path=path)


def end(at: float) -> Event:
    return Event("end", "", at)


def times(rows: object) -> dict[ModulePath, tuple[float, float]]:
    return {row.path: (row.busy_us, row.gap_us) for row in rows}  # type: ignore[attr-defined]


def host_step(at: float) -> list[Event]:
    """30 µs: 2 nothing, 8 a leaf, 2 between siblings, 6 a leaf, 4 between blocks, 5 a leaf, 3 nothing."""
    return [
        Event("mark", "", at),
        span(at + 2, 8, "h.0", "attention", "scores"),
        Event("op", "aten::matmul", at + 3, 6),
        Event("op", "aten::bmm", at + 4, 4),
        span(at + 12, 6, "h.0", "attention", "mask"),
        span(at + 22, 5, "h.1", "ln_1"),
        Event("op", "aten::native_layer_norm", at + 23, 3),
    ]


def test_every_moment_on_a_cpu_has_a_module() -> None:
    events = [*host_step(0), *host_step(30), *host_step(60), end(90)]
    found = aggregate(events, expected=3, skip=1, on_gpu=False)
    assert found.steps == (30, 30)
    rows = times(found.spans)
    assert rows["h.0", "attention", "scores"] == (6, 2)
    assert rows["h.0", "attention"] == (0, 2)  # between two of its steps
    assert rows["h.0", "attention", "mask"] == (0, 6)
    assert rows["h.1", "ln_1"] == (3, 2)
    assert rows[()] == (0, 9)  # before, after, and between two blocks
    assert sum(a + b for a, b in rows.values()) == 30
    kernels = {row.name: row for row in found.kernels}
    assert (kernels["aten::matmul"].us, kernels["aten::matmul"].duration_us) == (2, 6)
    assert sum(row.us for row in found.kernels) == sum(busy for busy, _ in rows.values())
    assert kernels["aten::bmm"].path == ("h.0", "attention", "scores")


def test_spans_inside_spans_keep_their_own_time() -> None:
    events = [Event("mark", "", 0), span(1, 20, "h.0"), span(2, 5, "h.0", "ln_1"), span(8, 10, "h.0", "attention")]
    events += [Event("op", "aten::scaled_dot_product_attention", 9, 4), end(25)]
    rows = times(aggregate(events, expected=1, on_gpu=False).spans)
    assert rows["h.0",] == (0, 5)
    assert rows["h.0", "ln_1"] == (0, 5)
    assert rows["h.0", "attention"] == (0, 6)
    assert rows["h.0", "attention", "fused attention"] == (4, 0)
    assert rows[()] == (0, 5)


def test_operators_are_placed_by_a_sequencer_where_nobody_names_modules() -> None:
    """The region around all operators belongs to the step, an operator's inner ones to its module; sums still hold."""
    events: list[Event] = []
    for at in (0.0, 100.0):
        events += [Event("mark", "", at), Event("op", "compiled region", at + 1, 90)]
        events += [Event("op", "cpp_fused_layer_norm_0", at + 5, 10), Event("op", "aten::addmm", at + 20, 30)]
        events += [Event("op", "aten::expand", at + 22, 4), Event("op", "aten::mm", at + 60, 20)]
    seen: list[list[str]] = []

    def sequencer(names: Sequence[str]) -> list[ModulePath | None]:
        seen.append(list(names))
        return [("h.0", "ln_1"), ("h.0", "attention", "QKV projection"), None]

    found = aggregate([*events, end(200)], expected=2, on_gpu=False, sequencer=sequencer)
    assert seen == [["cpp_fused_layer_norm_0", "aten::addmm", "aten::mm"]] * 2
    rows = times(found.spans)
    assert rows["h.0", "ln_1"] == (10, 0)
    assert rows["h.0", "attention", "QKV projection"] == (30, 0)
    assert rows[()] == (50, 10)  # the unplaced product, and the region's own time
    assert found.unplaced == 2
    assert sum(row.us for row in found.kernels) == 90


def gpu_step(at: float, number: int) -> list[Event]:
    """Two launches in 40 µs; the kernels run 10 µs later, and the second begins before the first one's end."""
    return [
        Event("mark", "", at),
        span(at + 1, 10, "h.0", "attention", "scores"),
        Event("launch", "cudaLaunchKernel", at + 5, 3, correlation=2 * number),
        Event("kernel", "gemm", at + 15, 10, correlation=2 * number),
        span(at + 12, 8, "h.0", "ln_1"),
        Event("launch", "cudaLaunchKernel", at + 14, 3, correlation=2 * number + 1),
        Event("kernel", "norm", at + 20, 15, correlation=2 * number + 1),
    ]


def test_gaps_and_overlaps_on_a_gpu() -> None:
    events = [*(event for i in range(3) for event in gpu_step(40.0 * i, i + 1)), end(120)]
    found = aggregate(events, expected=3, skip=1, on_gpu=True)
    assert found.steps == (40, 40)
    rows = times(found.spans)
    assert rows["h.0", "attention", "scores"] == (10, 20)  # from 35 of the step before to 15
    assert rows["h.0", "ln_1"] == (10, 0)  # what remains of it after the first one's end
    assert sum(a + b for a, b in rows.values()) == 40
    assert {row.name: (row.us, row.duration_us) for row in found.kernels} == {"gemm": (10, 10), "norm": (10, 15)}
    assert (found.launches.count, found.launches.host_us, found.launches.kernels) == (2, 6, 2)
    assert found.unplaced == 0


def test_kernels_run_late_but_belong_to_the_step_that_launched_them() -> None:
    events = [event for i in range(4) for event in gpu_step(40.0 * i, i + 1)]
    late = [replace(e, start=e.start + 100) if e.kind == "kernel" else e for e in events]
    found = aggregate([*late, end(300)], expected=4, skip=1, on_gpu=True)
    assert found.steps == (40, 40, 40)
    assert found.launches.kernels == 2


def test_the_timeline_follows_the_kernels_of_its_steps() -> None:
    """The GPU runs 100 µs behind the host: both show the same whole steps."""
    events = [event for i in range(4) for event in gpu_step(40.0 * i, i + 1)]
    late = [replace(e, start=e.start + 100) if e.kind == "kernel" else e for e in events]
    shown = aggregate([*late, end(300)], expected=4, skip=1, on_gpu=True).timeline
    starts = {track: [m.start for m in shown if m.track == track] for track in ("module", "host", "gpu", "step")}
    assert starts["module"] == [1, 12, 41, 52]  # from the mark of the second step on
    assert starts["host"] == [5, 14, 45, 54]
    assert starts["gpu"] == [115, 120, 155, 160]
    assert starts["step"] == [95, 135]
    for step in (m for m in shown if m.track == "step"):
        own = [m for m in shown if m.track == "gpu" and step.start <= m.start < step.start + step.us]
        assert max(m.start + m.us for m in own) == step.start + step.us


def test_what_lies_between_two_generations_belongs_to_no_step() -> None:
    """Prompts 1,000 µs apart: a step begins with its mark, and a copy after a generation's end belongs to none."""
    events: list[Event] = []
    for i in range(3):
        events += [*gpu_step(1000.0 * i, i + 1), end(1000.0 * i + 50)]
        events += [Event("launch", "cudaMemcpyAsync", 1000.0 * i + 60, 3, correlation=100 + i)]
        events += [Event("kernel", "Memcpy DtoH", 1000.0 * i + 70, 5, correlation=100 + i)]
    found = aggregate(events, expected=3, skip=1, on_gpu=True)
    assert found.steps == (35, 35)
    assert times(found.spans)["h.0", "attention", "scores"] == (10, 15)
    assert (found.launches.count, found.launches.kernels) == (2, 2)
    host = [e for i in range(3) for e in [*host_step(1000.0 * i), end(1000.0 * i + 30)]]
    assert aggregate(host, expected=3, skip=1, on_gpu=False).steps == (30, 30)


def test_a_prompt_that_begins_before_the_gpu_is_done_begins_when_it_is() -> None:
    late = [replace(e, start=e.start + 30) if e.kind == "kernel" else e for e in gpu_step(0.0, 1)]
    found = aggregate([*late, end(45), *gpu_step(50.0, 2), end(100)], expected=2, skip=1, on_gpu=True)
    assert found.steps == (20,)  # from 65, when the kernels before end, to 85


def test_a_kernel_whose_launch_was_not_seen_goes_with_the_one_before() -> None:
    events = [*gpu_step(0.0, 1), *gpu_step(40.0, 2), Event("kernel", "tail", 76.0, 2, correlation=99), end(80)]
    found = aggregate(events, expected=2, skip=1, on_gpu=True)
    assert found.steps == (43,)
    assert found.launches.kernels == 3


@pytest.mark.parametrize("expected", [2, 4])
def test_other_steps_than_were_taken_are_refused(expected: int) -> None:
    events = [*(event for i in range(3) for event in gpu_step(40.0 * i, i + 1)), end(120)]
    with pytest.raises(ConfigError, match=f"3 steps were seen where {expected} were taken"):
        aggregate(events, expected=expected, skip=1, on_gpu=True)
    with pytest.raises(ConfigError, match="did not end"):
        aggregate(events[:-1], expected=3, skip=1, on_gpu=True)


def test_kernels_of_a_graph() -> None:
    events: list[Event] = []
    for i in range(3):
        events += [Event("mark", "", 50.0 * i), Event("launch", "cudaGraphLaunch", 50.0 * i + 1, 8, correlation=i + 1)]
        events += [Event("kernel", f"k{j}", 50.0 * i + 10 + 5 * j, 4, correlation=i + 1) for j in range(3)]
    events.append(end(150))
    alone = aggregate(events, expected=3, skip=1, on_gpu=True)
    assert alone.unplaced == 6
    assert set(times(alone.spans)) == {()}
    paths: list[ModulePath | None] = [("h.0", "ln_1"), ("h.0", "MLP", "expansion"), None]
    placed = aggregate(events, expected=3, skip=1, on_gpu=True, sequencer=lambda names: paths[: len(names)])
    assert placed.unplaced == 2
    assert times(placed.spans)["h.0", "MLP", "expansion"] == (4, 1)
    assert (placed.launches.graphs, placed.launches.count, placed.launches.kernels) == (1, 1, 3)


def test_sums_hold_for_anything() -> None:
    """Random kernels, overlapping or not: modules sum to the step, kernels to the busy time."""
    dice = random.Random(3)
    events: list[Event] = []
    at, free = 0.0, 0.0
    for step in range(12):
        events.append(Event("mark", "", at))
        for k in range(dice.randint(1, 30)):
            name, number = f"m{dice.randint(0, 5)}", 1000 * step + k + 1
            events.append(span(at + 0.1, 2, f"h.{dice.randint(0, 3)}", name))
            events.append(Event("launch", "cuLaunchKernelEx", at + 0.5, 1, correlation=number))
            start = max(at + 4, free - dice.random() * 3)
            events.append(Event("kernel", name, start, us := dice.random() * 9, correlation=number))
            free = max(free, start + us)
            at += 2.5
        at += 1
    found = aggregate([*events, end(at + 50)], expected=12, skip=2, on_gpu=True)
    rows = times(found.spans)
    mean = sum(found.steps) / len(found.steps)
    assert sum(a + b for a, b in rows.values()) == pytest.approx(mean)
    assert sum(row.us for row in found.kernels) == pytest.approx(sum(busy for busy, _ in rows.values()))


def test_nothing_recorded() -> None:
    with pytest.raises(ConfigError, match="no step was recorded"):
        aggregate([], expected=0, on_gpu=False)
    with pytest.raises(ConfigError, match="no step was recorded"):
        aggregate([*host_step(0), end(30)], expected=1, skip=1, on_gpu=False)
    with pytest.raises(ConfigError, match="the GPU did nothing"):
        aggregate([*host_step(0), end(30)], expected=1, on_gpu=True)


def test_the_timeline_is_bounded() -> None:
    events = [Event("mark", "", 1000.0 * i) for i in range(20)]
    events += [Event("op", "aten::add", 10.0 * i, 9) for i in range(2000)]
    events += [Event("op", "aten::view", 10.0 * i + 1, 1) for i in range(2000)]  # too short to be shown
    found = aggregate([*events, end(20_000)], expected=20, on_gpu=False)
    shown = [moment.start for moment in found.timeline if moment.track == "host"]
    assert shown == [10.0 * i for i in range(100 * TRACE_STEPS)]
    many = [Event("op", "aten::add", 10.0 * i, 9) for i in range(2 * MOST_MOMENTS)]
    long = aggregate([Event("mark", "", 0.0), *many, end(20.0 * MOST_MOMENTS)], expected=1, on_gpu=False)
    assert len(long.timeline) == MOST_MOMENTS
    half = [Event("mark", "", 0.0), Event("mark", "", 6.0 * MOST_MOMENTS), end(20.0 * MOST_MOMENTS)]
    assert len(aggregate([*half, *many], expected=2, on_gpu=False).timeline) == 1 + 6 * MOST_MOMENTS // 10


def test_launches_are_shown_however_short() -> None:
    events = [*(event for i in range(3) for event in gpu_step(40.0 * i, i + 1)), end(120)]
    found = aggregate(events, expected=3, skip=1, on_gpu=True)
    assert [m.name for m in found.timeline if m.track == "host"] == ["cudaLaunchKernel"] * 4


def test_nobody_waits_a_negative_time() -> None:
    """Operators slightly longer than their span, because clocks are read one after the other."""
    events = [Event("mark", "", 0), span(1, 4, "h.0", "ln_1"), Event("op", "aten::native_layer_norm", 1.5, 4.5), end(9)]
    rows = times(aggregate(events, expected=1, on_gpu=False).spans)
    assert all(gap >= 0 for _, gap in rows.values())
    assert rows["h.0", "ln_1"] == (4.0, 0.0)
    assert sum(busy + gap for busy, gap in rows.values()) == pytest.approx(9)


def test_an_operator_that_ends_with_the_one_around_it_is_inside() -> None:
    events = [Event("mark", "", 0), Event("op", "aten::addmm", 1, 10), Event("op", "aten::mm", 2, 9), end(20)]
    seen: list[list[str]] = []

    def sequencer(names: Sequence[str]) -> list[ModulePath | None]:
        seen.append(list(names))
        return [("h.0", "MLP", "expansion")] * len(names)

    aggregate(events, expected=1, on_gpu=False, sequencer=sequencer)
    assert seen == [["aten::addmm"]]
