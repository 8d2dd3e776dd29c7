"""Cases × methods → rows. Every method's tokens are judged before its time counts; what cannot run says why."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from warpline import hardware
from warpline.bench import methods as known
from warpline.bench.methods.base import Method
from warpline.bench.oracle import Oracle
from warpline.bench.process import measure_process
from warpline.bench.protocol import Sample, collect, interleave, timed
from warpline.bench.rows import provenance
from warpline.bench.workloads import Case, Settings
from warpline.config import ModelConfig
from warpline.errors import DeviceError, WarplineError
from warpline.model import cost
from warpline.model.weights import Weights, load

logger = logging.getLogger(__name__)

#: Tokens by which a method's speed is judged before it is given a long case.
TRIAL_TOKENS = 4
LATE = {"status": "skipped", "why": "the time given for the run was up"}


@dataclass(slots=True)
class Bench:
    """A run: its origin, measured once, and the rows as they come."""

    settings: Settings
    origin: dict[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    _weights: tuple[tuple[str, str], Weights] | None = None

    def prepare(self) -> None:
        """Measure what this machine can do, now."""
        device = hardware.describe(self.settings.device)
        read = hardware.measure_bandwidth(self.settings.device)
        self.origin = provenance() | {"device": device.name, "read_gb_s": round(read, 1), "clocks": clocks()}
        if device.kind == "cuda":
            from warpline.bench.timing import copy_bandwidth

            self.origin["copy_gb_s"] = round(copy_bandwidth(), 1)
        else:
            self.origin["threads"] = torch.get_num_threads()

    def run(
        self, cases: Sequence[Case], methods: Sequence[str], tick: Callable[[float], None]
    ) -> Iterator[dict[str, Any]]:
        """A row per case and method, in that order; `tick` counts them."""
        for case in cases:
            for row in self._case(case, methods):
                tick(1)
                yield self.origin | asdict(case) | row

    def _case(self, case: Case, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        device = torch.device(self.settings.device)
        weights = self.load(case)
        reason = case.obstacle(weights.config)
        if reason is not None:
            yield from ({"method": name, "status": "impossible", "why": reason} for name in names)
            return
        self._require_memory(case, weights)
        if case.kind in ("coldstart", "memory"):
            for name in names:
                why = known.find(name).obstacle(case, device)
                if why is not None:
                    yield {"method": name, "status": "missing", "why": why}
                else:
                    yield {"method": name} | (LATE if self._is_late else measure_process(name, case, device))
            return
        generator = torch.Generator().manual_seed(case.prompt)
        prompts = torch.randint(weights.config.vocab_size, (case.batch, case.prompt), generator=generator).to(device)
        config = weights.config if case.window is None else replace(weights.config, window=case.window)
        oracle = Oracle(replace(weights, config=config))
        if case.kind == "prefill":
            expected = case.batch * timed(lambda: oracle.model(prompts[:1]), device)
            if expected > self.settings.patience_seconds:
                why = f"more than {self.settings.patience_seconds:g} s for one prompt: --patience allows it"
                yield from ({"method": name, "status": "skipped", "why": why} for name in names)
                return
        built: dict[str, Method] = {}
        rows = {
            name: {"method": name} | self._build(name, case, weights, prompts, oracle, device, built) for name in names
        }
        samples = self._time(case, built, prompts, device)
        for name in built:
            rows[name] |= figures(case, config, samples, name, self.origin)
        for method in built.values():
            method.close()
        built.clear()
        _tidy()
        yield from rows.values()

    def _build(
        self,
        name: str,
        case: Case,
        weights: Weights,
        prompts: Tensor,
        oracle: Oracle,
        device: torch.device,
        built: dict[str, Method],
    ) -> dict[str, Any]:
        """Make the method, warm it up and judge it; what goes wrong is the row's to tell."""
        kind = known.find(name)
        why = kind.obstacle(case, device)
        if why is not None:
            return {"status": "missing", "why": why}
        if self._is_late:
            return LATE
        try:
            method = kind(weights, case, device)
            slow = self._too_slow(method, case, prompts, device)
            if slow is not None:
                method.close()
                return {"status": "skipped", "why": slow}
            for _ in range(method.warm_up):
                tokens = _tokens(method, case, prompts)
        except (RuntimeError, ImportError, ValueError, TypeError, WarplineError) as error:
            logger.debug("%s failed", name, exc_info=True)
            return {"status": "failed", "why": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        verdict = oracle.judge(prompts, tokens, case.dtype)
        judged = {"agreeing": round(verdict.agreeing, 4), "deficit": round(verdict.worst, 6)}
        if kind.exact and not verdict.right:
            method.close()
            return judged | {"status": "wrong", "why": f"its tokens are {verdict.worst:.2g} σ from the likeliest"}
        built[name] = method
        return judged | {"status": "ok", "title": kind.title}

    @property
    def _is_late(self) -> bool:
        return time.monotonic() - self.begun > self.settings.limit_seconds

    def _too_slow(self, method: Method, case: Case, prompts: Tensor, device: torch.device) -> str | None:
        """Whether one generation would try the user's patience, judged by its first few tokens, once they are warm."""
        if case.kind == "prefill" or case.new <= TRIAL_TOKENS:
            return None
        for _ in range(2):
            seconds = timed(lambda: method.generate(prompts, TRIAL_TOKENS), device)
        expected = seconds / TRIAL_TOKENS * case.new
        if expected <= self.settings.patience_seconds:
            return None
        return f"more than {self.settings.patience_seconds:g} s for one generation: --patience allows it"

    def _time(self, case: Case, built: dict[str, Method], prompts: Tensor, device: torch.device) -> dict[str, Sample]:
        calls: dict[str, Callable[[], object]] = {}
        for name, method in built.items():
            if case.kind == "prefill":
                calls[f"{name} whole"] = lambda m=method: m.logits(prompts)  # type: ignore[misc]
            else:
                calls[f"{name} whole"] = lambda m=method: m.generate(prompts, case.new)  # type: ignore[misc]
                calls[f"{name} first"] = lambda m=method: m.generate(prompts, 1)  # type: ignore[misc]
        options = {"repetitions": self.settings.repetitions, "budget_seconds": self.settings.budget_seconds}
        return collect(interleave(calls, device, **options))  # type: ignore[arg-type]

    def load(self, case: Case) -> Weights:
        """Once for the cases in a row that share them."""
        key = (case.model, case.dtype)
        if self._weights is None or self._weights[0] != key:
            self._weights = None
            _tidy()
            self._weights = key, load(case.model, dtype=case.dtype, device=self.settings.device)
        return self._weights[1]

    def _require_memory(self, case: Case, weights: Weights) -> None:
        """Refuse before allocating what cannot fit: a KV cache, and the float32 weights of the oracle."""
        if not self.settings.device.startswith("cuda"):
            return
        free, _ = torch.cuda.mem_get_info(self.settings.device)
        positions = case.batch * (case.prompt + case.new)
        cache = positions * cost.kv_bytes_per_position(weights.config, case.dtype)
        need = cache + cost.weight_bytes(weights.config, "fp32")
        if need > free:
            raise DeviceError(
                f"{case.label} needs {need:,} bytes, {need - free:,} more than are free: use a smaller batch or model"
            )


def figures(
    case: Case, config: ModelConfig, samples: dict[str, Sample], name: str, origin: dict[str, Any]
) -> dict[str, Any]:
    """What a row says of a method's times."""
    whole = samples[f"{name} whole"]
    row: dict[str, Any] = {
        "seconds": round(whole.median, 7),
        "seconds_p20": round(whole.percentile(0.2), 7),
        "seconds_p80": round(whole.percentile(0.8), 7),
        "seconds_mean": round(whole.mean, 7),
        "seconds_sigma": round(whole.sigma, 7),
        "repetitions": len(whole.seconds),
    }
    if case.kind == "prefill":
        work = cost.prefill(config, case.dtype, batch=case.batch, tokens=case.prompt)
        row["tokens_per_second"] = round(case.batch * case.prompt / whole.median, 2)
        row["tflop_s"] = round(cost.total_flops(work) / whole.median / 1e12, 3)
        return row
    first = samples[f"{name} first"].median
    steps = case.new - 1
    decode = whole.median - first
    row["first_token_seconds"] = round(first, 7)
    row["tokens_per_second"] = round(case.batch * case.new / whole.median, 2)
    if steps > 0 and decode > 0:
        moved = cost.decode_bytes(config, case.dtype, lengths=[case.prompt] * case.batch, steps=steps)
        if case.kind == "decode":
            row["tokens_per_second"] = round(case.batch * steps / decode, 2)
        row["us_per_token"] = round(1e6 * decode / steps, 3)
        if known.find(name).exact:  # others move fewer bytes than the dtype says
            row["gb_s"] = round(moved / decode / 1e9, 2)
            row["percent_of_limit"] = round(100 * moved / decode / 1e9 / origin["read_gb_s"], 2)
    return row


def clocks() -> dict[str, int] | None:
    """Clocks of the GPU in MHz, as the driver tells them; None where there is none to ask."""
    if not torch.cuda.is_available():
        return None
    try:
        return {"sm": torch.cuda.clock_rate()}
    except (RuntimeError, ModuleNotFoundError) as error:  # torch asks through a package of its own
        logger.warning("the GPU's clocks are not recorded: %s", error)
        return None


def _tokens(method: Method, case: Case, prompts: Tensor) -> Tensor:
    """What a case's method answers, as tokens [B, new]."""
    if case.kind == "prefill":
        return method.logits(prompts).argmax(dim=-1, keepdim=True)
    return method.generate(prompts, case.new).clone()


def _tidy() -> None:
    """Leave nothing of a case to the next: neither memory nor compiled code, whose forms are limited in number."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
