import time, statistics, sys, cProfile, pstats, collections, functools
import numpy as np, torch

torch.set_num_threads(1)
from warpline import LLM, SamplingParams
from warpline.engine.executors.base import Executor
from warpline.engine import executors as X


class Dry(Executor):
    name = "dry"
    chunk, most_steps, prompt_tokens = 32, 128, 16384

    def _prefill(self, slots, spans):
        lanes = [l for s in spans for l in s.lanes]
        L = slots.length.numpy()
        L[lanes] += 1
        self._d(slots, lanes)

    def _d(self, slots, lanes):
        slots.done.numpy()[lanes] = slots.length.numpy()[lanes] >= slots.limit.numpy()[lanes]

    def _decode(self, slots, lanes, n):
        L = slots.length.numpy()
        L[lanes] = np.minimum(L[lanes] + n, slots.limit.numpy()[lanes])
        self._d(slots, lanes)


import warpline.model.weights as W

w = (
    W.load("random:gpt2", dtype="fp32", device="cpu")
    if "--gpt2" in sys.argv
    else W.load("stories", dtype="fp32", device="cpu")
)
llm = LLM.of(w, torch.device("cpu"), "fp32", executor="torch", max_batch=256)
llm.executor = llm.engine.executor = Dry(w, torch.device("cpu"), "fp32")
llm.engine.scheduler.chunk, llm.engine.scheduler.most_steps, llm.engine.scheduler.prompt_tokens = 32, 128, 16384
import gc

if "--nogc" in sys.argv:
    gc.disable()
rng = np.random.default_rng(0)
V = w.config.vocab_size
P = w.config.n_positions


def go(b, n, new, reps=40):
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    xs, ys = [], []
    for _ in range(reps):
        ps = [rng.integers(0, V, n).tolist() for _ in range(b)]
        a = time.perf_counter()
        out = llm.generate(ps, params)
        t1 = time.perf_counter()
        [c.text for c in out]
        xs.append((t1 - a) * 1e6)
        ys.append((time.perf_counter() - a) * 1e6)
    print(
        (b, n, new),
        "generate %.0f us, with text %.0f us (min %.0f)" % (statistics.median(xs), statistics.median(ys), min(ys)),
    )


a = time.perf_counter()
s = 0
for i in range(1000000):
    s += i
print("python loop of 1e6: %.1f ms" % ((time.perf_counter() - a) * 1e3))
cases = [(1, 128, 1), (16, min(1000, P - 1), 1), (1, 16, 100), (8, 16, 100), (64, 16, 100), (256, 16, 100)]
for c in cases:
    go(*c)
if "--profile" in sys.argv:
    for c in ((1, 128, 1), (64, 16, 100), (256, 16, 100)):
        pr = cProfile.Profile()
        pr.enable()
        go(*c, reps=30)
        pr.disable()
        pstats.Stats(pr).sort_stats("tottime").print_stats(22)
