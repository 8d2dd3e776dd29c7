"""The persistent executor: one cooperative launch decodes many tokens."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from warpline.config import DTYPE_BYTES
from warpline.engine.executor import Executor
from warpline.engine.prompts import Prompts
from warpline.engine.sampling import advance
from warpline.engine.schedule import ENDED_BY, SAMPLED_BY
from warpline.engine.state import Needs, State
from warpline.engine.tape import record
from warpline.errors import ConfigError, DeviceError
from warpline.kernels import persistent
from warpline.kernels.compile import Binary, compile_one
from warpline.kernels.launch import arch_of
from warpline.kernels.spec import THREADS_PER_WARP
from warpline.model.weights import Weights

#: One warp brings the newest key, sixteen bytes to a lane.
MOST_HEAD_BYTES = 16 * THREADS_PER_WARP
#: Where decoders are compiled while prompts are computed.
_COMPILING = ThreadPoolExecutor(1)


class PersistentExecutor(Executor):
    """Weights on a tape."""

    name = "persistent"
    chunk = 32

    def __init__(self, weights: Weights, device: torch.device, dtype: str, *, arch: str | None = None):
        super().__init__(weights, device, dtype)
        if device.type != "cuda":
            raise DeviceError("the persistent executor runs on a CUDA GPU: use --executor torch here")
        config = weights.config
        if config.head_size % 16 or config.inner % 16:
            raise ConfigError(
                "the persistent executor needs heads and an MLP whose widths are multiples of 16, "
                f"not {config.head_size} and {config.inner}: use --executor graph"
            )
        if config.head_size * DTYPE_BYTES[dtype] > MOST_HEAD_BYTES:
            raise ConfigError(
                f"the persistent executor has heads of up to {MOST_HEAD_BYTES // DTYPE_BYTES[dtype]} in {dtype}, "
                f"not {config.head_size}: use --executor graph"
            )
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._prompts = Prompts(weights)
        self._wte, self._wpe = weights.tensors["wte.weight"], weights.tensors["wpe.weight"]
        multiprocessors = torch.cuda.get_device_properties(self._index).multi_processor_count
        extents = persistent.Extents(
            dtype=dtype,
            width=config.n_embd,
            inner=config.inner,
            heads=config.n_head,
            layers=config.n_layer,
            vocab=config.vocab_size,
            rows=1,
            blocks=multiprocessors,
            arch=arch or arch_of(self._index),
        )
        units = sum(extents.units(stage) for stage in persistent.STAGES[:-1])
        self.extents = replace(extents, blocks=min(multiprocessors, units))  # every block has something to do
        self.most_rows = self.extents.most_rows
        self._tapes = record(weights, persistent.plan(self.extents))
        self._fault = torch.zeros(1, dtype=torch.int32, device=device)
        self._logits: Tensor | None = None
        self._decoders: dict[tuple[int, Needs, persistent.Extents], persistent.DecodeProgram] = {}
        self._ahead: dict[persistent.DecodeProgram, Future[Binary[persistent.DecodeProgram]]] = {}
        self.patience = 10.0  # seconds after which a launch that makes no progress ends itself
        self.stamps: Tensor | None = None

    def prepare(self, state: State) -> None:
        """Compile and load what decodes this batch; an error says why this GPU cannot."""
        self._loaded(self._decoder(state))

    def compile_ahead(self, state: State) -> None:
        """Begin to compile what decodes this batch; whoever needs it waits for it."""
        if (program := self._decoder(state)) not in self._ahead and state.batch <= self.extents.most_rows:
            self._ahead[program] = _COMPILING.submit(compile_one, program, self.extents.arch)

    def _loaded(self, program: persistent.DecodeProgram) -> persistent.DecodeKernel:
        if (ahead := self._ahead.get(program)) is not None:
            ahead.result()
        return persistent.load(program, self._index)

    def stops_by_itself(self, state: State) -> bool:
        """A launch looks before every token."""
        return state.needs.logprobs is None

    def check(self) -> None:
        """Whether a launch had to end itself."""
        if self._fault.item():
            self._fault.zero_()
            raise DeviceError(
                f"a launch of the persistent executor made no progress for {self.patience:g} s and ended itself: "
                "the GPU may be busy with something else; try again, or use --executor graph"
            )

    def _prefill(self, state: State) -> None:
        self.compile_ahead(state)
        self._prompts.run(state)

    def _decode(self, state: State, n: int) -> None:
        """In one launch, unless the logarithms of probabilities are asked for."""
        if self.most_rows is not None and state.batch > self.most_rows:
            raise ConfigError(
                f"the persistent executor decodes up to {self.most_rows} sequences of this model, not {state.batch}"
            )
        program = self._decoder(state)
        if state.needs.logprobs is None:
            self._launch(state, n, program)
            return
        for _ in range(n):
            advance(state, self._launch(state, 1, program))

    def observe(self, state: State) -> dict[str, Tensor]:
        """From a launch that keeps what its blocks exchange."""
        program = self._program(state.batch, logits=True, observed=True, splits=1)
        logits = self._launch(state, 1, program)
        torch.cuda.synchronize(self.device)
        self.check()
        exchanged = self._loaded(program).exchanged()
        seen = {name: values[: state.batch].clone() for name, values in exchanged.items()}
        seen["logits"] = logits.clone()
        with torch.inference_mode():
            advance(state, logits)
        state.longest = min(state.longest + 1, state.capacity)
        return seen

    def _decoder(self, state: State) -> persistent.DecodeProgram:
        """The program that decodes this batch; asked for while the GPU waits."""
        needs, key = state.needs, (state.batch, state.needs, self.extents)
        if (found := self._decoders.get(key)) is None:
            filters = needs.penalty or needs.candidates > 0 or needs.min_p
            options = {"filters": filters} if needs.logprobs is None else {"logits": True}
            found = self._decoders[key] = self._program(state.batch, **options)
        return found

    def _program(self, batch: int, **options: Any) -> persistent.DecodeProgram:
        return persistent.DecodeProgram(replace(self.extents, rows=1 << (batch - 1).bit_length(), **options))

    @torch.inference_mode()
    def _launch(self, state: State, n: int, program: persistent.DecodeProgram) -> Tensor:
        """What does not change from launch to launch is put together once: the GPU may be waiting."""
        if self._logits is None or len(self._logits) < state.batch:
            self._logits = torch.empty(program.extents.rows, self.config.vocab_size, device=self.device)
        with torch.cuda.device(self._index):
            if (bound := state.kept.get((self, program, state.batch))) is None:
                kernel = self._loaded(program)
                bound = kernel, kernel.arguments(self._tensors(state), self._numbers(state))
                state.kept[self, program, state.batch] = bound
            kernel, arguments = bound
            arguments.logits, arguments.patience = self._logits.data_ptr(), int(self.patience * 1e9)
            if self.stamps is not None:
                arguments.stamps = self.stamps.data_ptr()
            kernel.launch(n, arguments)
        return self._logits[: state.batch]

    def _tensors(self, state: State) -> dict[str, Tensor]:
        """Memory that a launch reads and writes, and that stays where it is."""
        tapes, cache = self._tapes, state.cache
        shared = {"wte": self._wte, "wpe": self._wpe, "fault": self._fault, "k": cache.k, "v": cache.v}
        shared |= {name: getattr(tapes, name) for name in ("tape", "plans", "vectors", "lines")}
        return shared | {name: getattr(state, name) for name in {*SAMPLED_BY, *ENDED_BY}}

    def _numbers(self, state: State) -> dict[str, float | int]:
        config = self.config
        return {
            "batch": state.batch,
            "cache_rows": state.rows,
            "capacity": state.capacity,
            "window": config.window or 0,
            "eos": config.eos_number,
            "epsilon": config.layer_norm_epsilon,
            "scale": config.attention_scale(0),
            "scale_by_layer": int(config.scale_attn_by_inverse_layer_idx),
        }
