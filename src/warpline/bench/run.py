"""Cases × methods → rows. Every method's tokens are judged before it is timed; a row without times says why."""

from __future__ import annotations

import gc
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from warpline import hardware
from warpline.bench import budget, throughput
from warpline.bench import methods as known
from warpline.bench.budget import NO_TIME, Deadline
from warpline.bench.figures import Times, figures
from warpline.bench.methods.base import Method
from warpline.bench.methods.names import METHODS
from warpline.bench.oracle import Oracle
from warpline.bench.process import measure_process
from warpline.bench.protocol import Sample, collect, interleave, timed, timed_result
from warpline.bench.rows import FAILURES, failed, provenance
from warpline.bench.timing import copy_bandwidth, product_rate, read_bandwidth
from warpline.bench.workloads import Case, Settings
from warpline.config import KV_DTYPES, ModelConfig
from warpline.model import cost
from warpline.model.weights import TORCH_DTYPES, Weights, load, read_config

logger = logging.getLogger(__name__)

#: Tokens from which a method's speed is estimated before it gets a long case.
TRIAL_TOKENS = 4
#: Reading more than this is not faster: it exceeds every cache.
MOST_MEGABYTES = 1024

Row = dict[str, Any]
Tick = Callable[[float], None]


@dataclass(slots=True)
class Built:
    """A method that is warm and was judged right."""

    method: Method
    ids: Any  # the prompts, as a user of the method holds them
    row: Row
    seconds: float  # of the generation that was judged


@dataclass(slots=True)
class Bench:
    """A run: its provenance, measured once, and the rows as they come."""

    settings: Settings
    origin: Row = field(default_factory=dict)
    says: Callable[[str], object] = lambda _: None  # reports what is being done
    begun: float = field(default_factory=time.monotonic)
    _weights: tuple[tuple[str, str], Weights] | None = None
    _limits: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)

    def prepare(self) -> None:
        """Record the provenance of this run, and on a GPU its copy bandwidth."""
        described = hardware.describe(self.settings.device)
        self.origin = provenance() | {"device": described.name, "cores": described.units}
        if (cache := hardware.cache_bytes(self.settings.device)) is not None:
            self.origin["cache_mb"] = round(cache / 1e6, 1)
        if described.kind == "cuda":
            self.origin["copy_gb_s"] = round(copy_bandwidth(), 1)
        else:
            self.origin["threads"] = torch.get_num_threads()

    def run(self, cases: Sequence[Case], methods: Sequence[str], tick: Tick) -> Iterator[list[Row]]:
        """Yield the rows of each case, one per method; `tick` counts methods. With a time limit, the cheap cases of a
        model come first, so that the last and expensive ones are left out."""
        if not math.isinf(self.settings.limit_seconds):
            order = list(dict.fromkeys((case.model, case.dtype) for case in cases))
            cases = sorted(cases, key=lambda c: (order.index((c.model, c.dtype)), self._need(c, methods)))
        for i, case in enumerate(cases):
            deadline = Deadline(time.monotonic() + self._share(cases[i:], methods))
            rows = self._case(case, methods, deadline, tick)
            shared = self.origin | asdict(case) | self.limits(case) | {"clocks": hardware.clocks(self.settings.device)}
            yield [shared | rows[name] for name in METHODS if name in rows]

    # --- limits -------------------------------------------------------------------------------------------------------

    def limits(self, case: Case) -> dict[str, float]:
        """Return what this machine can do now: GB/s of reading as many bytes as the model has, and TFLOP/s in its
        dtype. A GPU reads a model that fits its L2 cache faster than memory, and a short one slower than a long one;
        the limit is the faster of the model's bytes and of many."""
        key = (case.model, case.dtype)
        if key not in self._limits:
            self._limits[key] = self._measured(case)
        return self._limits[key]

    def _measure_again(self, case: Case) -> None:
        """Keep the better of the limits measured before and of those measured now."""
        before, now = self.limits(case), self._measured(case)
        self._limits[case.model, case.dtype] = {name: max(before[name], now[name]) for name in before}

    def _measured(self, case: Case) -> dict[str, float]:
        bytes_read = cost.weight_bytes(read_config(case.model), case.dtype)
        megabytes = min(max(16, bytes_read // 1_000_000), MOST_MEGABYTES)
        if self.settings.device == "cpu":
            from warpline.kernels.cpu import limits

            read, rate = limits.read_gb_s(megabytes), limits.product_tflop_s(case.dtype)
        else:
            read = max(read_bandwidth(size) for size in {megabytes, MOST_MEGABYTES})
            rate = product_rate(TORCH_DTYPES[KV_DTYPES[case.dtype]])  # int8 weights are multiplied as fp16
        return {"read_gb_s": round(read, 1), "product_tflop_s": round(rate, 4)}

    def _at_best(self, case: Case) -> float:
        """Return the seconds of one generation at the limits of this machine."""
        return budget.seconds_at_best(case, case.windowed(read_config(case.model)), *self.limits(case).values())

    # --- time ---------------------------------------------------------------------------------------------------------

    def _share(self, cases: Sequence[Case], methods: Sequence[str]) -> float:
        """Return the seconds that the first of these cases may take."""
        if math.isinf(self.settings.limit_seconds):
            return math.inf
        return budget.share(max(0.0, self._left), [self._need(case, methods) for case in cases])

    def _need(self, case: Case, methods: Sequence[str]) -> tuple[float, float]:
        """Return the seconds that a case takes at least and at most, with the methods that can run it."""
        device, possible = torch.device(self.settings.device), case.obstacle(read_config(case.model)) is None
        able = [kind for kind in map(known.find, methods) if possible and kind.obstacle(case, device) is None]
        return budget.need(case, self._at_best(case), [kind.startup_seconds for kind in able])

    @property
    def _left(self) -> float:
        return self.begun + self.settings.limit_seconds - time.monotonic()

    # --- one case -----------------------------------------------------------------------------------------------------

    def _case(self, case: Case, names: Sequence[str], deadline: Deadline, tick: Tick) -> dict[str, Row]:
        device, config = torch.device(self.settings.device), read_config(case.model)
        rows: dict[str, Row] = {name: {"method": name, "title": known.find(name).title} for name in names}
        reason = case.obstacle(config) or self._too_large(case, config)
        for name, row in rows.items():
            why = known.find(name).obstacle(case, device)
            if why is not None:
                row |= {"status": "missing", "why": why}
            elif reason is not None:
                row |= {"status": "impossible", "why": reason}
            elif self._left < self._at_best(case):
                row |= NO_TIME
        if self._at_best(case) > self.settings.patience_seconds:
            for row in rows.values():
                row.setdefault("status", "skipped")
                row.setdefault("why", self.settings.impatience)
        waiting = [name for name in names if "status" not in rows[name]]
        tick(len(names) - len(waiting))
        if case.kind in ("coldstart", "memory"):
            self._processes(case, device, {name: rows[name] for name in waiting}, deadline, tick)
        elif waiting and case.kind == "throughput":
            weights, limits, able = self.load(case), self.limits(case), {name: rows[name] for name in waiting}
            with _unadvised():
                throughput.measure(case, weights, device, able, self.settings, deadline, limits, tick)
            tidy()
        elif waiting:
            weights = self.load(case)
            generator = torch.Generator().manual_seed(case.prompt)
            prompts = torch.randint(config.vocab_size, (case.batch, case.prompt), generator=generator).to(device)
            self._generations(case, weights, prompts, {name: rows[name] for name in waiting}, deadline, tick)
        return rows

    def _processes(
        self, case: Case, device: torch.device, rows: dict[str, Row], deadline: Deadline, tick: Tick
    ) -> None:
        for i, (name, row) in enumerate(rows.items()):
            self.says(f"Starting {name}")
            out_of_time = self._left <= 0 or (i > 0 and not deadline.left)
            row |= NO_TIME if out_of_time else measure_process(name, case, device)
            tick(1)

    def _generations(
        self, case: Case, weights: Weights, prompts: Tensor, rows: dict[str, Row], deadline: Deadline, tick: Tick
    ) -> None:
        config = case.windowed(weights.config)
        oracle = Oracle(replace(weights, config=config))
        built: dict[str, Built] = {}
        for name, row in rows.items():
            with _unadvised():
                found = self._build(name, row, case, weights, prompts, oracle, deadline, first=not built)
            if found is not None:
                built[name] = found
            tick(0.5 if found is not None else 1)
        del oracle
        dtypes = {name: known.find(name).stored or case.dtype for name in built}
        its_own = {dtype: replace(case, dtype=dtype) for dtype in dtypes.values()}
        has_neighbours = self.settings.device == "cpu"  # their load varies: its limit is measured before and after
        if has_neighbours:
            for like in its_own.values():
                self._limits[like.model, like.dtype] = self._measured(like)
        times = self._time(case, built, prompts.device, deadline)

        def said() -> dict[str, Row]:
            limits = {name: self.limits(its_own[dtype]) for name, dtype in dtypes.items()}
            return {name: figures(case, config, times[name], name, its) | its for name, its in limits.items()}

        if has_neighbours or any(row.get("percent_of_limit", 0) > 100 for row in said().values()):
            for like in its_own.values():
                self._measure_again(like)
        rows_said = said()
        for name, one in built.items():
            one.row |= rows_said[name]
            one.method.close()
            tick(0.5)
        built.clear()
        tidy()

    def _build(
        self,
        name: str,
        row: Row,
        case: Case,
        weights: Weights,
        prompts: Tensor,
        oracle: Oracle,
        deadline: Deadline,
        *,
        first: bool,
    ) -> Built | None:
        """Build the method, warm it up and judge it; unless it is the first it must keep the deadline. On failure the
        row says why."""
        kind = known.find(name)
        self.says(f"Checking {name}")
        if kind.startup_seconds > deadline.left and not first:
            row |= NO_TIME
            return None
        method: Method | None = None
        try:
            begun = time.monotonic()
            method = kind(weights, case, prompts.device)
            deadline.at += time.monotonic() - begun  # a conversion made here serves other cases too
            ids = method.ids(prompts)
            expected = self._expected(method, case, ids)
            if expected > self.settings.patience_seconds:
                row |= {"status": "skipped", "why": self.settings.impatience}
            elif (method.warm_up + 1) * expected > deadline.left and not first:
                row |= NO_TIME
            else:
                for _ in range(method.warm_up):
                    _tokens(method, case, ids)
                seconds, tokens = timed_result(lambda: _tokens(method, case, ids), prompts.device)
                verdict = oracle.judge(prompts, tokens, case.dtype)
                row |= {"agreeing": round(verdict.agreeing, 4), "deficit": round(verdict.worst, 6)}
                if verdict.right or not kind.exact:
                    row["status"] = "ok"
                    return Built(method, ids, row, seconds)
                row |= {"status": "wrong", "why": f"its tokens are {verdict.worst:.2g} σ from the likeliest"}
        except FAILURES as error:
            logger.debug("%s failed", name, exc_info=True)
            row |= failed(error)
        if method is not None:
            method.close()
        return None

    def _expected(self, method: Method, case: Case, ids: Any) -> float:
        """Estimate the seconds of one generation from its first few tokens, once the method is warm."""
        if case.kind == "prefill":  # there is nothing shorter to estimate it from
            for _ in range(method.warm_up):
                method.answer(ids, 1)
            return self._at_best(case)
        few = min(TRIAL_TOKENS, case.new)
        method.answer(ids, few)
        first, some = (
            timed(lambda n=n: method.answer(ids, n), method.device)  # type: ignore[misc]
            for n in (1, few)
        )
        return first + max(0.0, some - first) / max(1, few - 1) * (case.new - 1)

    def _time(self, case: Case, built: dict[str, Built], device: torch.device, deadline: Deadline) -> dict[str, Times]:
        """Time the methods in turn: a first token, then a whole generation. With little time left whole generations are
        not repeated: the time of the judged one is used."""
        self.says(f"Timing {', '.join(built)} in turns" if len(built) < 4 else f"Timing {len(built)} methods in turns")
        left = deadline.left
        hurried = left < 3 * sum(one.seconds for one in built.values())
        paired = not hurried and case.kind != "prefill"
        calls: dict[str, list[Callable[[], object]]] = {}
        for name, one in built.items():
            calls[name] = [lambda b=one: b.method.answer(b.ids, 1)]  # type: ignore[misc]
            if paired:
                calls[name].append(lambda b=one: b.method.answer(b.ids, case.new))  # type: ignore[misc]
        found = collect(
            interleave(
                calls,
                device,
                repetitions=self.settings.repetitions,
                budget_seconds=min(self.settings.budget_seconds, left),
                least=1 if hurried else 3,
            )
        )
        if paired:
            return {name: Times(Sample(s.seconds[::2]), Sample(s.seconds[1::2])) for name, s in found.items()}
        if case.kind == "prefill":
            return {name: Times(sample, sample) for name, sample in found.items()}
        return {name: Times(sample, Sample((built[name].seconds,))) for name, sample in found.items()}

    # --- memory -------------------------------------------------------------------------------------------------------

    def load(self, case: Case) -> Weights:
        """Load the weights once for consecutive cases that share them."""
        key = (case.model, case.dtype)
        if self._weights is None or self._weights[0] != key:
            self._weights = None
            tidy()
            self._weights = key, load(case.model, dtype=case.dtype, device=self.settings.device)
        return self._weights[1]

    def _too_large(self, case: Case, config: ModelConfig) -> str | None:
        """Return why a case (weights, the oracle's float32, KV cache) does not fit in memory; None if it does."""
        free = hardware.free_bytes(self.settings.device)
        if free is None:
            return None
        need = cost.weight_bytes(config, "fp32")
        rows = case.batch
        if case.kind == "throughput":
            rows = min(rows, *throughput.SIZES[torch.device(self.settings.device).type])
        need += rows * (case.prompt + case.new) * cost.kv_bytes_per_position(config, case.dtype)
        if self._weights is None or self._weights[0] != (case.model, case.dtype):
            need += cost.weight_bytes(config, case.dtype)
        if need <= free:
            return None
        return f"needs {need:,} bytes, {need - free:,} more than are free: use a smaller batch or model"


@contextmanager
def _unadvised() -> Iterator[None]:
    """Hide warnings of torch's compiler about the code of the model: they advise to write it differently."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
        yield


def _tokens(method: Method, case: Case, ids: Any) -> Tensor:
    """Return a method's answer to a case as tokens [B, new]."""
    return method.tokens(method.answer(ids, max(1, case.new))).clone()


def tidy() -> None:
    """Free the memory and the compiled code of a case; torch limits the number of compiled forms."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
