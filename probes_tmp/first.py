import time, statistics, functools, sys
import numpy as np, torch
from warpline import LLM, SamplingParams
from warpline.engine import engine as E, slots as S, crossing as X, llm as L
import warpline.engine.executors.graph.prompts as P
from warpline.engine.executors.graph.bind import captured
stamps = []
def wrap(cls, name, label):
    f = getattr(cls, name)
    @functools.wraps(f)
    def g(*a, **k):
        stamps.append((label + " in", time.perf_counter()))
        try: return f(*a, **k)
        finally: stamps.append((label + " out", time.perf_counter()))
    setattr(cls, name, g)
llm = LLM("random:gpt2", dtype="fp16", device="cuda")
rng = np.random.default_rng(0)
params = {}
def call(b, n, new):
    p = params.setdefault(new, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
    ps = list(rng.integers(0, 50257, (b, n)))
    a = time.perf_counter(); out = llm.generate(ps, p); [c.text for c in out]
    return (time.perf_counter() - a) * 1e6
cases = [(1,128,1),(1,1024,1),(16,1024,1),(1,16,100)]
def table(title):
    for c in cases:
        for _ in range(4): call(*c)
        xs = [call(*c) for _ in range(25)]
        print(title, c, "median %.0f min %.0f us" % (statistics.median(xs), min(xs)), flush=True)
table("launches")
# variant: admit and report as graphs
cr = llm.engine._slots.crossing
saved = dict(cr._launches), [l.launch for l in cr._landings]
with torch.cuda.stream(llm.engine._stream):
    cr._launches["admit"] = captured([cr._launches["admit"]], llm.engine.executor.device).replay
    for l in cr._landings: l.launch = captured([l.launch], llm.engine.executor.device).replay
table("graphs")
cr._launches.update(saved[0])
for l, f in zip(cr._landings, saved[1]): l.launch = f
for cls, names in ((L.LLM, ["generate","_requests","_run","_complete"]), (E.Engine, ["step","_launch","_land","_publish"]),
    (S.Slots, ["admit","report"]), (X.KernelCrossing, ["_admit","stage","select"]), (X.Report, ["wait"]), (P.Prompts, ["run","_pass"]), (P.Pass, ["fill","run"])):
    for n in names: wrap(cls, n, f"{cls.__name__}.{n}")
wrap(type(llm.engine.scheduler), "plan", "plan")
for c in [(1,128,1),(1,1024,1)]:
    runs = []
    for _ in range(25):
        stamps.clear(); call(*c)
        t0 = stamps[0][1]; runs.append([(l, (t - t0) * 1e6) for l, t in stamps])
    print(c)
    for i, (l, _) in enumerate(runs[-1]): print("   %-24s %7.1f" % (l, statistics.median(r[i][1] for r in runs if len(r) > i)), flush=True)
# the pass alone, by events, host out of the way
slots, ex = llm.engine._slots, llm.executor
from warpline.engine.request import Span, Request
for b, n in ((1,128),(1,1024),(16,1024)):
    rs = [Request(rng.integers(0,50257,n), params[1], 0, 0, n + 1) for _ in range(b)]
    with torch.cuda.stream(llm.engine._stream):
        taken = slots.admit(rs); sp = [Span(s, 0, n, (s,)) for s in taken]
        ex.prefill(slots, sp); torch.cuda.synchronize()
        p = next(p for k, p in ex._graph.prompts._passes[slots].items() if k[0] == P.rounded_rows(b*n) and k[1] == P.rounded_sequences(b))
        xs = []
        for _ in range(10):
            torch.cuda._sleep(2_000_000)
            e = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            e[0].record(); p.run(); e[1].record(); torch.cuda.synchronize(); xs.append(e[0].elapsed_time(e[1]) * 1e3)
        print((b, n), "pass on the GPU %.0f us, parts %d, launches %d" % (statistics.median(xs), len(p._replays), len(p._launches)), flush=True)
        for s in taken: slots.release(s)
