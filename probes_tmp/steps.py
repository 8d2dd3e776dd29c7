import torch, time, statistics
from warpline import LLM, SamplingParams
from warpline.engine.request import Request, Span
import numpy as np

llm = LLM("random:gpt2", dtype="fp16", device="cuda")
slots, ex = llm.engine._allocated(), llm.executor
rng = np.random.default_rng(0)
for b in (1, 2, 4, 8, 16, 64, 256):
    xs, ps = [], []
    for _ in range(6):
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        rs = [Request(rng.integers(0, 50257, 16), params, 0, 0, 116) for _ in range(b)]
        with torch.cuda.stream(llm.engine._stream):
            taken = slots.admit(rs)
            ev = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            ev[0].record()
            ex.prefill(slots, [Span(s, 0, 16, (s,)) for s in taken])
            ev[1].record()
            ex.decode(slots, taken, 99)
            ev[2].record()
            slots.report(taken, 100).wait()
            torch.cuda.synchronize()
            for s in taken:
                slots.release(s)
        xs.append(ev[1].elapsed_time(ev[2]) * 1e3 / 99)
        ps.append(ev[0].elapsed_time(ev[1]) * 1e3)
    print(
        b,
        "us a step median %.2f min %.2f   prompts us %.0f" % (statistics.median(xs), min(xs), statistics.median(ps)),
        flush=True,
    )
