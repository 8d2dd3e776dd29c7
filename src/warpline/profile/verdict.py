"""Names the first bottleneck in plain English: every known remedy is priced with the cost model and the measured times,
and the one that saves most is named. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from warpline.model import cost
from warpline.profile.classify import classify
from warpline.profile.launches import overhead
from warpline.profile.names import WHOLE
from warpline.profile.roofline import Point, Roofs, points, roofs, whole
from warpline.profile.session import KernelRow, Phase, Session

#: From this share of the limit on, only less work makes a step faster.
AT_THE_LIMIT = 0.8
#: Bottlenecks that are unnecessary work: they are named even at the limit.
LESS_WORK = ("no KV cache", "another executor", "logits of all positions")
#: µs below which a kernel is short, and how many short ones in a step are many.
SHORT, MANY = 10.0, 16
#: Steps that fused attention replaces, and steps that a neighbouring kernel can do as well.
_PARTS = ("scores", "mask", "softmax", "values")
_SMALL = ("ln_1", "ln_2", "ln_f", "residual 1", "residual 2", "activation", "QKV reshape", "output reshape", "add")


@dataclass(frozen=True, slots=True)
class Finding:
    """A bottleneck, what it costs, and what to do."""

    kind: str
    cause: str
    remedy: str
    saved_us: float
    step_us: float

    @property
    def after_us(self) -> float:
        """µs of a step with the remedy."""
        return self.step_us - self.saved_us

    @property
    def gain(self) -> float:
        """How many times as fast the step becomes."""
        return self.step_us / max(self.after_us, 1e-9)

    @property
    def text(self) -> str:
        """The finding as a paragraph."""
        return (
            f"{self.cause} {self.remedy} At best this shortens a step from {self.step_us:,.0f} to "
            f"{self.after_us:,.0f} µs ({self.gain:.2f}× as fast)."
        )


def findings(session: Session, phase: Phase) -> list[Finding]:
    """Return every remedy that would save something, the best first."""
    limits = roofs(session)
    priced = points(session, phase)
    found = [
        *_no_cache(session, phase, limits),
        *_other_executor(phase),
        *_all_logits(phase, priced),
        *_gaps(session, phase),
        *_parts_of_attention(session, phase, priced, limits),
        *_exchanges(session, phase),
        *_short_kernels(session, phase, limits),
        *_attention(session, phase, priced),
        *_small_steps(session, phase, priced),
        *_slow_products(session, phase, priced),
        *_precision(session, phase, priced),
    ]
    return sorted((one for one in found if one.saved_us > 0.01 * phase.free_us), key=lambda one: -one.saved_us)


def verdict(session: Session, phase: Phase) -> str:
    """Return a short paragraph: how near the step is to its limit, and the first remedy."""
    step = whole(session, phase)
    share = min(1.0, step.roof_us / phase.free_us)
    what = "memory" if step.by_bytes else "arithmetic"
    stands = (
        f"A {phase.name} step takes {phase.free_us:,.0f} µs; {what} alone would need {step.roof_us:,.0f} µs, "
        f"so it runs at {100 * share:.0f} % of the limit."
    )
    if phase.step_us < phase.plain_us:
        stands = stands.replace(" µs;", " µs (recorded; noise made it shorter than without recording);", 1)
    best = findings(session, phase)
    if share >= AT_THE_LIMIT:
        best = [one for one in best if one.kind in LESS_WORK]
    if share >= AT_THE_LIMIT and not best:
        return (
            f"{stands} The {what} is the only limit: only less work helps, such as fewer bytes per weight, "
            "or more sequences per pass."
        )
    if not best:
        seen = bool(points(session, phase))
        why = (
            "No single cause accounts for the rest."
            if seen
            else "Its modules were not recorded, so no remedy can be priced."
        )
        return f"{stands} {why}"
    following = f" Next: {best[1].kind}, {best[1].saved_us:,.0f} µs." if len(best) > 1 else ""
    return f"{stands} {best[0].text}{following}"


def _no_cache(session: Session, phase: Phase, limits: Roofs) -> Iterator[Finding]:
    """Find that every token computes the whole text again."""
    work = session.workload(phase)
    if phase.name != "decode" or work.new == 1:
        return
    cached = cost.decode(session.config, session.dtype, batch=session.batch, context=work.new - 1)
    now, then = (limits.us(cost.total_bytes(w), cost.total_flops(w)) for w in (work, cached))
    # The gaps stay: only computing shrinks, in the ratio of the two roofs.
    saved = phase.free_busy_us * (1 - then / now)
    yield Finding(
        "no KV cache",
        f"Every token computes all {work.new} positions again, {cost.total_flops(work) / cost.total_flops(cached):.0f} "
        "times the arithmetic that the new one needs.",
        "Keep keys and values in a cache.",
        saved,
        phase.free_us,
    )


def _other_executor(phase: Phase) -> Iterator[Finding]:
    """Find that the cpu executor, timed in the same run, is faster."""
    if phase.cpu_us is not None and phase.cpu_us < phase.free_us:
        yield Finding(
            "another executor",
            f"The cpu executor takes {phase.cpu_us:,.0f} µs for the same step, measured in this run.",
            "Use it: LLM does on a CPU, and so does --executor cpu.",
            phase.free_us - phase.cpu_us,
            phase.free_us,
        )


def _all_logits(phase: Phase, priced: list[Point]) -> Iterator[Finding]:
    """Find that the LM head, the largest matrix, computes more than the last position of each sequence."""
    count = phase.work.logits
    for head in (point for point in priced if "LM head" in point.name and count > 1):
        spent = _computing(phase, head)
        yield Finding(
            "logits of all positions",
            f"The LM head computes logits of all {count:,} positions, of which one is needed: {spent:,.0f} µs "
            f"({100 * spent / phase.free_us:.0f} %).",
            "Compute those of the last position alone.",
            spent * (1 - 1 / count),
            phase.free_us,
        )


def _gaps(session: Session, phase: Phase) -> Iterator[Finding]:
    """Find gaps. Recording makes them longer, so they are taken from an unrecorded step."""
    spent = overhead(phase)
    gaps = phase.free_us - phase.free_busy_us
    share = 100 * gaps / phase.free_us
    if session.kind == "cpu":
        yield Finding(
            "host",
            f"Python and the dispatch of {spent.kernels:,.0f} operators take {gaps:,.0f} µs of each step "
            f"({share:.0f} %).",
            "Fewer and larger operators reduce this."
            if "compile" in session.method or session.method.startswith("cpu")
            else "Fewer and larger operators, or torch.compile, reduce this.",
            gaps,
            phase.free_us,
        )
        return
    each = "" if spent.host_us_per_launch is None else f", {spent.host_us_per_launch:.1f} µs of the host each"
    between = f"gaps between {spent.kernels:,.0f} kernels ({spent.launches:,.1f} launches{each})."
    if not spent.kernels:
        between = "gaps between modules; those inside them were not seen."
    counted = phase.launches  # besides one or a few graphs, only copies of inputs
    what, captured = "The GPU waits for the host", counted.graphs and counted.kernels > 8 * counted.count
    if captured:
        what = "The step is a graph, but the GPU still waits for its launch and between its kernels"
    if phase.name == "prefill":
        remedy = (
            "Prepare less before the launch, or take several prompts at once."
            if captured
            else "Capture the pass in a CUDA graph, as the executors graph and persistent do."
        )
    elif captured:
        remedy = "Let kernels overlap, as the graph executor does, or decode many tokens in one launch (persistent)."
    else:
        remedy = (
            "Capture the step in a CUDA graph, or decode many tokens in one launch (executors graph and persistent)."
        )
    yield Finding(
        "gaps",
        f"{what}: it computes {100 - share:.0f} % of the time, and {gaps:,.0f} µs of each step are {between}",
        remedy,
        gaps,
        phase.free_us,
    )


def _exchanges(session: Session, phase: Phase) -> Iterator[Finding]:
    """Find stages of one launch in which blocks or threads wait for the results of others. Weights keep arriving
    meanwhile, so a step without exchanges still takes what the memory needs."""
    count = sum(row.calls for row in _exchange_rows(phase))
    spent = sum(row.us for row in _exchange_rows(phase)) * _unrecorded(phase)
    what = "threads of the cpu executor" if session.kind == "cpu" else "blocks of the persistent kernel"
    if count:
        yield Finding(
            "exchanges",
            f"{count:,.0f} times a step the {what} exchange results, and wait "
            f"{spent:,.0f} µs for them ({100 * spent / phase.free_us:.0f} %).",
            "Fewer exchanges help, and so do more sequences per step.",
            min(spent, phase.free_us - whole(session, phase).roof_us),
            phase.free_us,
        )


def _exchange_rows(phase: Phase) -> list[KernelRow]:
    return [row for row in phase.kernels if classify(row.name) == "exchange"]


def _short_kernels(session: Session, phase: Phase, limits: Roofs) -> Iterator[Finding]:
    """Find many short kernels: filling and draining the GPU takes longer than their work."""
    if session.kind != "cuda" or phase.source != "kineto":
        return
    short = [row for row in phase.kernels if row.us < SHORT * row.calls]
    count, spent = sum(row.calls for row in short), sum(row.us for row in short) * _unrecorded(phase)
    if count < MANY:
        return
    step = whole(session, phase)
    best = step.roof_us * spent / phase.free_busy_us  # their part of what the step must move
    yield Finding(
        "short kernels",
        f"{count:,.0f} kernels of each step last less than {SHORT:g} µs, {spent / count:.1f} on average: starting and "
        f"ending them costs more than their work, which needs {best:,.0f} of the {spent:,.0f} µs.",
        "Fuse neighbours (torch.compile, the graph executor), or do the step in one launch (persistent)."
        if session.method not in ("graph", "kernels")
        else "One launch for many tokens (persistent) reads weights without a pause.",
        spent - best,
        phase.free_us,
    )


def _attention(session: Session, phase: Phase, priced: list[Point]) -> Iterator[Finding]:
    """Find slow fused attention over a cache that it must read."""
    found = [point for point in priced if "fused attention" in point.name]
    if not found:
        return
    spent, best = sum(_computing(phase, point) for point in found), sum(point.roof_us for point in found)
    cached = session.workload(phase).kv_read
    over = f"the {cached:,} positions of its cache" if cached else "the prompt"
    yield Finding(
        "attention",
        f"Attention over {over} takes {spent:,.0f} µs, where bytes and FLOPs need {best:,.0f} µs.",
        "Divide each head's positions among more blocks, so that all of the GPU reads."
        if session.kind == "cuda"
        else "Use a kernel that reads keys and values once, by all threads.",
        spent - best,
        phase.free_us,
    )


def _parts_of_attention(session: Session, phase: Phase, priced: list[Point], limits: Roofs) -> Iterator[Finding]:
    parts = [point for point in priced if point.name in _PARTS]
    if not parts:
        return
    work = session.workload(phase)
    fused = next(c for c in cost.costs(_fused(work)) if c.step.name == "fused attention")
    spent, best = sum(_computing(phase, point) for point in parts), limits.us(fused.bytes, fused.flops)
    yield Finding(
        "attention in parts",
        f"Attention runs as {len(parts)} steps that hand their scores over through memory: {spent:,.0f} µs, where one "
        f"fused kernel would need {best:,.0f} µs at the roof.",
        "Fuse it (scaled_dot_product_attention, or FlashAttention of our kernels).",
        spent - best,
        phase.free_us,
    )


def _fused(work: cost.Workload) -> cost.Workload:
    return cost.Workload(
        config=work.config, dtype=work.dtype, batch=work.batch, new=work.new, past=work.past, logits=work.logits
    )


def _small_steps(session: Session, phase: Phase, priced: list[Point]) -> Iterator[Finding]:
    """Find small steps that a neighbour's kernel could do without another pass through memory."""
    small = [point for point in priced if point.name in _SMALL]
    spent = sum(_computing(phase, point) for point in small)
    if small:
        yield Finding(
            "small steps",
            f"LayerNorms, residuals, activation and reshapes compute for {spent:,.0f} µs of each step, though they do "
            "almost no arithmetic.",
            "Fuse them into the products beside them, as the kernels of the graph executor do."
            if session.kind == "cuda"
            else "Fuse them into the products beside them"
            + ("." if "compile" in session.method else ", as torch.compile does."),
            spent,
            phase.free_us,
        )


def _computing(phase: Phase, point: Point) -> float:
    """Return the computing µs of a module when unrecorded, without exchanges, which have a remedy of their own."""
    exchanged = sum(row.us for row in _exchange_rows(phase) if point.name in row.path)
    return (point.us - exchanged) * _unrecorded(phase)


def _unrecorded(phase: Phase) -> float:
    return phase.free_busy_us / phase.busy_us


def _slow_products(session: Session, phase: Phase, priced: list[Point]) -> Iterator[Finding]:
    words = ("rojection", "xpansion", WHOLE, *(("LM head",) if phase.work.logits == 1 else ()))  # else see _all_logits
    products = [p for p in priced if any(word in p.name for word in words)]
    if not products:
        return
    spent = sum(_computing(phase, point) for point in products)
    best = sum(min(_computing(phase, point), point.roof_us) for point in products)
    worst = min(products, key=lambda point: point.share)
    by_bytes = sum(point.roof_us for point in products if point.by_bytes) > best / 2
    if session.kind == "cpu":
        remedy = "Use a faster library or more threads" + (", or fewer bytes to a weight." if by_bytes else ".")
    elif by_bytes:
        remedy = (
            "Use kernels that stream weights at the speed of memory ('warpline ladder matmul' shows how, "
            "'warpline tune' finds their best form)."
        )
    else:
        remedy = "Use larger tiles on tensor cores, or a larger batch."
    yield Finding(
        "weight streaming" if by_bytes else "slow products",
        f"Matrix products take {spent:,.0f} µs; their {'weights' if by_bytes else 'FLOPs'} alone need {best:,.0f} µs; "
        f"the slowest, {worst.name}, reaches {100 * worst.share:.0f} % of its roof ({worst.gb_s:,.1f} GB/s).",
        remedy,
        spent - best,
        phase.free_us,
    )


def _precision(session: Session, phase: Phase, priced: list[Point]) -> Iterator[Finding]:
    """Find fp32 weights on a GPU: half precision halves the bytes and computes as fast as it is read."""
    bound = [point for point in priced if point.bound == "memory"]
    if session.kind != "cuda" or session.dtype != "fp32" or not bound:
        return
    spent = sum(_computing(phase, point) for point in bound)
    yield Finding(
        "fp32",
        f"{spent:,.0f} µs of each step are bound by memory, which holds four bytes for every weight.",
        "Store weights in fp16 (--dtype fp16): half the bytes, half that time.",
        spent / 2,
        phase.free_us,
    )
