"""The persistent executor: one cooperative launch decodes many tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from warpline.config import KV_DTYPES, WEIGHT_BYTES, EngineConfig
from warpline.engine.executors.base import Executor
from warpline.engine.executors.graph.bind import PREPARING
from warpline.engine.executors.graph.prompts import Prompts
from warpline.engine.executors.graph.schedule import STATE, OpCall, PassRules
from warpline.engine.executors.persistent.tape import record
from warpline.engine.executors.sampling import advance, note_logprobs
from warpline.engine.request import Needs, Span
from warpline.engine.slots import Slots
from warpline.errors import ConfigError, DeviceError
from warpline.kernels import decode_plan, persistent
from warpline.kernels.compile import Binary, compile_many, compile_one
from warpline.kernels.launch import arch_of
from warpline.kernels.spec import THREADS_PER_WARP
from warpline.model.weights import Weights

#: Largest head: one warp loads the newest key, 16 bytes per lane.
MOST_HEAD_BYTES = 16 * THREADS_PER_WARP


@dataclass(eq=False, slots=True)
class _Decoder:
    """A program with its compilation, its kernel, and its arguments by slots."""

    program: persistent.DecodeProgram
    compiled: Future[Binary[persistent.DecodeProgram]] | None = None  # started ahead of the first use
    kernel: persistent.DecodeKernel | None = None
    bound: WeakKeyDictionary[Slots, persistent.Arguments] = field(default_factory=WeakKeyDictionary)


class PersistentExecutor(Executor):
    """Decodes with weights on a tape. Each instance has its own exchange words, so several may run."""

    name = "persistent"
    dtypes = tuple(WEIGHT_BYTES)
    chunk, most_steps = 32, 128
    prompt_tokens = 16384
    native = has_tape = True
    can_be_invariant = True

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        dtype: str,
        *,
        arch: str | None = None,
        prompts: Prompts | None = None,
    ):
        """Make the executor; `arch` overrides the target that is compiled for."""
        super().__init__(weights, device, dtype)
        if device.type != "cuda":
            raise DeviceError("the persistent executor runs on a CUDA GPU: use --executor cpu here")
        config = weights.config
        if config.head_size % 16 or config.inner % 16:
            raise ConfigError(
                "the persistent executor needs heads and an MLP whose widths are multiples of 16, "
                f"not {config.head_size} and {config.inner}: use --executor graph"
            )
        size = weights.activations.itemsize
        if config.head_size * size > MOST_HEAD_BYTES:
            raise ConfigError(
                f"the persistent executor has heads of up to {MOST_HEAD_BYTES // size} in {dtype}, "
                f"not {config.head_size}: use --executor graph"
            )
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self.prompts = prompts or Prompts(PassRules(weights))
        names = {"wte": "wte.weight", "wpe": "wpe.weight", "head": f"{weights.head}.weight"}
        plain = {name: weights.matrix(name).plain(weights.activations) for name in {*names.values()}}
        self._matrices = {name: plain[stored] for name, stored in names.items()}
        multiprocessors = torch.cuda.get_device_properties(self._index).multi_processor_count
        extents = decode_plan.Extents(
            dtype=KV_DTYPES[dtype],
            coded=weights.is_quantised,
            width=config.n_embd,
            inner=config.inner,
            heads=config.n_head,
            layers=config.n_layer,
            vocab=config.vocab_size,
            rows=1,
            blocks=multiprocessors,
            arch=arch or arch_of(self._index),
            positions=min(config.n_positions, config.window or config.n_positions),
        )
        units = sum(extents.units(stage) for stage in decode_plan.STAGES[:-1])
        extents = replace(extents, blocks=min(multiprocessors, units))  # every block has work
        self.extents, self.most_lanes, self._weights = extents, extents.most_rows, weights
        self._tapes = record(weights, decode_plan.plan(extents))
        self._logits: Tensor | None = None
        self._compiler, self._compiling = ThreadPoolExecutor(1, "warpline-compile"), threading.Lock()
        self._decoders: dict[tuple[object, ...], _Decoder] = {}
        self.patience = 10.0  # seconds after which a launch without progress ends itself
        self._stamps: Tensor | None = None

    def set_up(self, asked: EngineConfig, model: str) -> None:
        """Apply options. Invariant: prompts and contexts are always split in the same way."""
        super().set_up(asked, model)
        if self.invariant:
            self.extents = replace(self.extents, invariant=True)
            if not self.prompts.rules.invariant:
                self.prompts = Prompts(PassRules(self._weights, invariant=True))

    def prepare(self, slots: Slots, lanes: Sequence[int]) -> None:
        """Compile and load what decodes these lanes; raises if this GPU cannot."""
        self._loaded(self._decoder(len(lanes), slots.needs(lanes)))

    def compile_ahead(self, slots: Slots, lanes: Sequence[int]) -> None:
        """Start compiling what decodes these lanes, with filters and without, in case a sequence that joins needs the
        other."""
        if len(lanes) > self.extents.most_rows:
            return
        needed = self._decoder(len(lanes), slots.needs(lanes))
        if needed.kernel is not None:
            return
        for decoder in (needed, *(self._with(len(lanes), filters=filters) for filters in (False, True))):
            with self._compiling:
                if decoder.compiled is None:
                    decoder.compiled = self._compiler.submit(compile_one, decoder.program, self.extents.arch)

    def prepare_all(self, slots: Slots) -> None:
        """Compile and load the programs with and without filters, for every power of two of rows."""
        most = min(slots.count, self.extents.most_rows)
        rows = [1 << i for i in range((most - 1).bit_length() + 1) if 1 << i <= self.extents.most_rows]
        decoders = [self._with(count, filters=filters) for count in rows for filters in (False, True)]
        compile_many([(decoder.program, self.extents.arch) for decoder in decoders])
        for decoder in decoders:
            self._loaded(decoder)

    def _loaded(self, decoder: _Decoder) -> persistent.DecodeKernel:
        if decoder.kernel is None:
            if decoder.compiled is not None:
                decoder.compiled.result()
            with PREPARING:
                decoder.kernel = persistent.DecodeKernel(decoder.program, self._index)
        return decoder.kernel

    def stops_by_itself(self, lanes: int, needs: Needs) -> bool:
        """Whether the kernel decodes all steps in one launch, which checks before every token."""
        return needs.logprobs is None

    def screens(self, slots: Slots, lanes: Sequence[int]) -> bool:
        """Whether only the largest logit is needed, with or without noise."""
        return self._decoder(len(lanes), slots.needs(lanes)).program.extents.screened

    def fault(self) -> DeviceError:
        """Return the error for a launch whose wait timed out."""
        return DeviceError(
            f"a launch of the persistent executor made no progress for {self.patience:g} s and ended itself: "
            "the GPU may be busy with something else; try again, or use --executor graph"
        )

    def _prefill(self, slots: Slots, spans: Sequence[Span]) -> None:
        self.prompts.run(slots, spans)

    def table(self, phase: str) -> list[OpCall] | None:
        """Return the ops of a pass over prompts; a decode launch is one kernel."""
        return self.prompts.table if phase == "prefill" else None

    def _decode(self, slots: Slots, lanes: Sequence[int], n: int) -> None:
        """Decode in one launch, or in one per token if log-probabilities are asked for, which torch computes."""
        needs = slots.needs(lanes)
        decoder = self._decoder(len(lanes), needs)
        if needs.logprobs is None:
            self._reached("decode")
            self._launch(slots, lanes, n, decoder)
            return
        index = slots.crossing.select(lanes, len(lanes))
        for _ in range(n):
            self._reached("decode")
            with torch.inference_mode():
                was_done = slots.done[index]
                note_logprobs(slots, lanes, self._launch(slots, lanes, 1, decoder), was_done, index)

    def observe(self, slots: Slots, lanes: Sequence[int]) -> dict[str, Tensor]:
        """Decode a step with a program that keeps its exchange words, and return their values."""
        decoder = self._with(len(lanes), logits=True, observed=True, invariant=False, whole=True)
        logits = self._launch(slots, lanes, 1, decoder)[:, : self.config.vocab_size]
        torch.cuda.synchronize(self.device)
        if slots.fault.item():
            slots.fault.zero_()
            raise self.fault()
        exchanged = self._loaded(decoder).exchanged()
        seen = {name: values[: len(lanes)].clone() for name, values in exchanged.items()}
        seen["logits"] = logits.clone()
        with torch.inference_mode():
            advance(slots, lanes, logits)
        return seen

    @contextmanager
    def stamped(self, tokens: int) -> Iterator[Tensor]:
        """While this is open, launches store each block's clock at the end of every stage of `tokens` tokens. Yields
        int64 [block, stamp]."""
        before, stages = self.extents, len(persistent.LAYER_STAMPS) * self.config.n_layer + len(persistent.TOKEN_STAMPS)
        self.extents = replace(before, stamped_tokens=tokens)
        self._stamps = torch.zeros(before.blocks, tokens * stages, dtype=torch.int64, device=self.device)
        try:
            yield self._stamps
        finally:
            self.extents, self._stamps = before, None

    def _decoder(self, lanes: int, needs: Needs) -> _Decoder:
        """Return the program for so many lanes with such needs."""
        if needs.logprobs is not None:
            return self._with(lanes, logits=True, filters=True)
        return self._with(lanes, filters=needs.filters)

    def _with(self, lanes: int, **options: Any) -> _Decoder:
        rows = 1 << (lanes - 1).bit_length()
        key = (rows, self.extents.stamped_tokens, *options.items())
        if (found := self._decoders.get(key)) is None:
            program = persistent.DecodeProgram(replace(self.extents, rows=rows, **options))
            found = self._decoders.setdefault(key, _Decoder(program))
        return found

    @torch.inference_mode()
    def _launch(self, slots: Slots, lanes: Sequence[int], n: int, decoder: _Decoder) -> Tensor:
        """Launch `n` tokens and return the logits. The arguments are built once per `Slots`: the GPU may be waiting."""
        rows = decoder.program.extents.rows
        if self._logits is None or len(self._logits) < rows:
            # Columns beyond the vocabulary stay -inf.
            self._logits = torch.full((rows, self.extents.logits_pitch), -torch.inf, device=self.device)
        kernel = self._loaded(decoder)
        table = slots.crossing.select(lanes, len(lanes))
        if (arguments := decoder.bound.get(slots)) is None:
            tensors = self._tensors(slots) | {"lanes": table}
            arguments = decoder.bound[slots] = kernel.arguments(tensors, self._numbers(slots))
        arguments.batch, arguments.logits, arguments.patience = (
            len(lanes),
            self._logits.data_ptr(),
            int(self.patience * 1e9),
        )
        if self._stamps is not None:
            arguments.stamps = self._stamps.data_ptr()
        kernel.launch(n, arguments)
        return self._logits[: len(lanes)]

    def _tensors(self, slots: Slots) -> dict[str, Tensor]:
        """Return the tensors that a launch reads and writes; their addresses do not change."""
        tapes, cache = self._tapes, slots.cache
        shared = self._matrices | {"fault": slots.fault, "k": cache.k, "v": cache.v}
        shared |= {name: getattr(tapes, name) for name in ("tape", "plans", "vectors", "norm_terms", "scales")}
        return shared | {name: getattr(slots, name) for name in STATE}

    def _numbers(self, slots: Slots) -> dict[str, float | int]:
        config = self.config
        return {
            "batch": 1,
            "layer_stride": slots.cache.k.stride(0),
            "capacity": slots.capacity,
            "window": config.window or 0,
            "eos": config.eos_number,
            "epsilon": config.layer_norm_epsilon,
            "scale": config.attention_scale(0),
            "scale_by_layer": int(config.scale_attn_by_inverse_layer_idx),
        }
