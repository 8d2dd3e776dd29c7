import time, ctypes, statistics, contextlib, gc
import numpy as np, torch
from cuda.bindings import driver

torch.cuda.init()
dev = torch.device("cuda:0")


def t(label, f, n=300, sync=True):
    for _ in range(10):
        f()
    torch.cuda.synchronize()
    xs = []
    for _ in range(n):
        a = time.perf_counter()
        f()
        xs.append((time.perf_counter() - a) * 1e6)
        if sync:
            torch.cuda.synchronize()
    xs.sort()
    print(
        "%-46s median %7.2f  p10 %7.2f p90 %7.2f us" % (label, xs[len(xs) // 2], xs[len(xs) // 10], xs[-len(xs) // 10]),
        flush=True,
    )


a = time.perf_counter()
s = 0
for i in range(1000000):
    s += i
print("python loop of 1e6: %.1f ms" % ((time.perf_counter() - a) * 1e3))
pinned = torch.zeros(65536, dtype=torch.uint8, pin_memory=True)
there = torch.zeros(65536, dtype=torch.uint8, device=dev)
p4, t4 = pinned[:4096], there[:4096]
st = torch.cuda.Stream()
cuda = ctypes.CDLL("libcuda.so.1")
with torch.cuda.stream(st):
    t("torch copy_ 4 kB pinned->dev", lambda: t4.copy_(p4, non_blocking=True))
    t("torch copy_ 4 kB dev->pinned", lambda: p4.copy_(t4, non_blocking=True))
    raw = torch.cuda.current_stream().cuda_stream
    t("cuda-python memcpy htod", lambda: driver.cuMemcpyHtoDAsync(t4.data_ptr(), p4.data_ptr(), 4096, raw))
    f = cuda.cuMemcpyHtoDAsync_v2
    f.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    d, h = t4.data_ptr(), p4.data_ptr()
    t("ctypes memcpy htod", lambda: f(d, h, 4096, raw))
    g = cuda.cuMemcpyHtoDAsync_v2.__class__ and cuda["cuMemcpyAsync"]
    g.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    t("ctypes memcpy async dtoh", lambda: g(h, d, 4096, raw))
    t("current_stream().cuda_stream", lambda: torch.cuda.current_stream(0).cuda_stream)
    t("_cuda_getCurrentRawStream", lambda: torch._C._cuda_getCurrentRawStream(0))
    e = torch.cuda.Event()
    t("event.record", lambda: e.record())
    t("event.record+synchronize", lambda: (e.record(), e.synchronize()), sync=False)
    t("event.synchronize done", lambda: e.synchronize())
    t("Event(timing)+record", lambda: torch.cuda.Event(enable_timing=True).record())
    t("stream.synchronize idle", lambda: st.synchronize())


def enter():
    with torch.cuda.stream(st):
        pass


t("with torch.cuda.stream", enter)


def enter2():
    with torch.cuda.device(0):
        pass


t("with torch.cuda.device", enter2)


def enter3():
    with torch.inference_mode():
        pass


t("with inference_mode", enter3)
t("slice", lambda: there[:100])
t("view", lambda: t4.view(64, 64))
arr = np.zeros(4096, np.int64)
t("numpy fill 4096", lambda: arr.__setitem__(slice(None), 3))
t("np.arange 128", lambda: np.arange(128))
# kernels
from warpline.kernels import launch
from warpline.engine.slots import Slots
from warpline.config import ModelConfig
from warpline.engine.request import Request
from warpline import SamplingParams

cfg = ModelConfig()
slots = Slots(cfg, 64, 1025, device=dev, dtype=torch.float16, native=True)
x = slots.crossing
req = [Request(np.arange(128), SamplingParams(temperature=0, max_tokens=1), 0, 0, 129)]
with torch.cuda.stream(st):
    (s,) = slots.admit(req)
    slots.report([s], 1).wait()
    la, _ = x._admissions[1, 128]
    lr, _ = x._reports[1, 34]
    t("launch admit (bound)", la)
    t("launch report (bound)", lr)
    k = [c.cell_contents for c in la.__closure__]
    plan = next(c for c in k if isinstance(c, launch.Plan))
    arguments = next(c for c in k if isinstance(c, launch.Arguments))
    shape = next(c for c in k if isinstance(c, launch.Launch))
    m = plan.kernel._module
    fn = m._function
    at = ctypes.addressof(arguments.pointers)
    sizes = (shape.grid, 1, 1, shape.block // shape.teams, shape.teams, 1, shape.shared_bytes, raw)
    t("cuda-python cuLaunchKernel", lambda: driver.cuLaunchKernel(fn, *sizes, at, 0))
    L = cuda.cuLaunchKernel
    L.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p] * 3
    fi = int(fn)
    t("ctypes cuLaunchKernel", lambda: L(fi, *sizes, at, None))
    L2 = cuda["cuLaunchKernel"]
    cargs = [
        ctypes.c_void_p(fi),
        *(ctypes.c_uint(v) for v in sizes[:7]),
        ctypes.c_void_p(raw),
        ctypes.c_void_p(at),
        None,
    ]
    t("ctypes cuLaunchKernel prebuilt", lambda: L2(*cargs))
    t("torch add_ launch", lambda: t4.add_(1))
    gr = torch.cuda.CUDAGraph()
    from warpline.engine.executors.graph.bind import captured

    gr = captured([la, lr], dev)
    t("graph replay of 2", lambda: gr.replay())
    gr8 = captured([la, lr] * 4, dev)
    gr32 = captured([la, lr] * 16, dev)
    gr128 = captured([la, lr] * 64, dev)
    t("graph replay of 8", lambda: gr8.replay())
    t("graph replay of 32", lambda: gr32.replay())
    t("graph replay of 128", lambda: gr128.replay())
    slots.release(s)

    def full():
        (s,) = slots.admit(req)
        slots.release(s)

    t("slots.admit of one", full)
    t("slots.report+wait", lambda: slots.report([0], 1).wait())
print("gc objects", len(gc.get_objects()), "threshold", gc.get_threshold())
a = time.perf_counter()
gc.collect()
print("gc.collect %.1f ms" % ((time.perf_counter() - a) * 1e3))
