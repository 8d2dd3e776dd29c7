"""Where a call's host time goes, on the GPU."""

import time, statistics, functools, collections, sys
import numpy as np, torch
from warpline import LLM, SamplingParams
from warpline.engine import engine as E, slots as S, crossing as X, llm as L
import warpline.engine.executors.graph.prompts as P

spent = collections.defaultdict(list)


def wrap(cls, name, label):
    f = getattr(cls, name)

    @functools.wraps(f)
    def g(*a, **k):
        t = time.perf_counter()
        try:
            return f(*a, **k)
        finally:
            spent[label].append((time.perf_counter() - t) * 1e6)

    setattr(cls, name, g)


def med(x):
    return statistics.median(x)


llm = LLM("random:gpt2", dtype="fp16", device="cuda")
print(llm.executor, flush=True)
rng = np.random.default_rng(0)


def prompts(b, n):
    return [rng.integers(0, 50257, n).tolist() for _ in range(b)]


cases = [
    (1, 128, 1),
    (1, 1000, 1),
    (1, 1024, 1),
    (16, 1000, 1),
    (16, 1024, 1),
    (1, 16, 100),
    (8, 16, 100),
    (64, 16, 100),
    (256, 16, 100),
]
from warpline.bench import methods


def api(b, n, new):
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    ps = prompts(b, n)
    t = time.perf_counter()
    out = llm.generate(ps, params)
    t1 = time.perf_counter()
    texts = [c.text for c in out]
    t2 = time.perf_counter()
    return (t1 - t) * 1e3, (t2 - t) * 1e3


def raw(b, n, new):
    from warpline.engine.request import Request, Span

    slots, ex = llm.engine._allocated(), llm.executor
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    rs = [Request(p, params, 0, 0, n + new) for p in prompts(b, n)]
    with torch.cuda.stream(llm.engine._stream):
        t = time.perf_counter()
        taken = slots.admit(rs)
        ex.prefill(slots, [Span(s, 0, n, (s,)) for s in taken])
        if new > 1:
            ex.decode(slots, taken, new - 1)
        slots.report(taken, new).wait()
        t1 = time.perf_counter()
        for s in taken:
            slots.release(s)
    return (t1 - t) * 1e3


for c in cases:
    for _ in range(4):
        api(*c)
        raw(*c)


def table(title):
    print(title, flush=True)
    for c in cases:
        a = [api(*c) for _ in range(15)]
        r = [raw(*c) for _ in range(15)]
        print(
            c,
            "api %.3f with text %.3f raw %.3f ratio %.3f"
            % (med([x for x, _ in a]), med([y for _, y in a]), med(r), med([y for _, y in a]) / med(r)),
            flush=True,
        )


table("plain")
for cls, names in (
    (L.LLM, ["generate", "_requests", "_run", "_complete"]),
    (E.Engine, ["submit", "run", "step", "_launch", "_land", "_publish", "_sweep", "cancel", "_measure"]),
    (S.Slots, ["admit", "report"]),
    (X.KernelCrossing, ["admit", "report", "select"]),
    (X.Report, ["wait"]),
    (X.Staging, ["send", "ready"]),
    (P.Prompts, ["run"]),
    (P.Pass, ["fill", "run"]),
    (E.Clock, ["mark", "landed", "__init__", "seconds"]),
):
    for n in names:
        wrap(cls, n, f"{cls.__name__}.{n}")
wrap(type(llm.executor), "prefill", "ex.prefill")
wrap(type(llm.executor), "decode", "ex.decode")
wrap(type(llm.engine.scheduler), "plan", "plan")
wrap(type(llm.engine.scheduler), "sweep", "sweep")
wrap(L, "share_prefixes", "share_prefixes")
wrap(S, "admission", "admission")
for c in [(1, 128, 1), (16, 1000, 1), (64, 16, 100), (256, 16, 100)]:
    spent.clear()
    k = 15
    for _ in range(k):
        api(*c)
    print(c)
    for label, xs in spent.items():
        print(
            "   %-28s n/call %5.1f  us/call %8.1f  median %7.1f" % (label, len(xs) / k, sum(xs) / k, med(xs)),
            flush=True,
        )
