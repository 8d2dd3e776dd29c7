import gc, time, threading, statistics, sys
import torch
from warpline.bench import methods
from warpline.bench.protocol import interleave, collect, timed
from warpline.bench.workloads import Case
from warpline.model.weights import load
dev = torch.device("cuda:0")
gctime = [0.0, 0, 0]; t0 = [0.0]
def cb(phase, info):
    if phase == "start": t0[0] = time.perf_counter()
    else: gctime[0] += time.perf_counter() - t0[0]; gctime[1] += 1; gctime[2] = max(gctime[2], info["generation"])
gc.callbacks.append(cb)
case = Case(workload="batch", kind="generate", model="random:gpt2", dtype="fp16", batch=64, prompt=16, new=100, window=None)
w = load("random:gpt2", dtype="fp16", device="cuda")
prompts = torch.randint(50257, (64, 16), generator=torch.Generator().manual_seed(0)).to(dev)
made = {}
def build(name):
    m = methods.find(name)(w, case, dev); ids = m.ids(prompts)
    for _ in range(4): m.answer(ids, 100)
    for _ in range(4): m.answer(ids, 1)
    made[name] = (m, ids)
def go(title, names):
    calls = {}
    for n in names:
        m, ids = made[n]
        calls[n + " whole"] = lambda m=m, ids=ids: m.answer(ids, 100)
        calls[n + " first"] = lambda m=m, ids=ids: m.answer(ids, 1)
    g0 = list(gctime)
    found = collect(interleave(calls, dev, repetitions=12, budget_seconds=60))
    print(title, {k: round(v.median * 1e3, 3) for k, v in found.items()}, "gc ms %.1f n %d maxgen %d" % ((gctime[0] - g0[0]) * 1e3, gctime[1] - g0[1], gctime[2]), flush=True)
    gctime[2] = 0
build("warpline"); build("graph")
go("A alone", ["warpline"]); go("A both", ["warpline", "graph"])
gc.collect(); gc.freeze(); go("B frozen", ["warpline", "graph"]); gc.unfreeze()
t = time.time(); build("static-kv-compile"); print("compiled in", time.time() - t, threading.enumerate(), len(gc.get_objects()), flush=True)
go("C all", ["warpline", "graph", "static-kv-compile"]); go("D two", ["warpline", "graph"]); go("D alone", ["warpline"])
gc.collect(); gc.freeze(); go("E frozen", ["warpline", "graph", "static-kv-compile"]); go("E alone", ["warpline"])
gc.disable(); go("F no gc", ["warpline", "graph", "static-kv-compile"])
