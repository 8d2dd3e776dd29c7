"""The cpu executor: tokens decoded by a team of threads in one call, prompts through the BLAS that torch brings."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpline.config import ACTIVATIONS, WEIGHT_BYTES
from warpline.engine.cpu_prompts import CpuPrompts
from warpline.engine.executor import Executor
from warpline.engine.sampling import advance
from warpline.engine.state import State
from warpline.errors import DeviceError
from warpline.kernels.cpu import arithmetic
from warpline.kernels.cpu.decode import MATRICES, SIZES, VECTORS, decode
from warpline.model.quantise import SCALE
from warpline.model.weights import Weights

#: How elements are seen by compiled code: half precision goes by its bits.
_SEEN = {torch.float32: torch.float32, torch.float16: torch.int16, torch.bfloat16: torch.uint16, torch.int8: torch.int8}
_FORMS = {
    "gelu_tanh": arithmetic.GELU_TANH,
    "gelu": arithmetic.GELU,
    "relu": arithmetic.RELU,
    "silu": arithmetic.SILU,
    "tanh": arithmetic.TANH,
}


class Team:
    """Threads that run the same function at the same time, each with its number; the caller is number 0."""

    def __init__(self, size: int):
        self.size = size
        self._work: list[SimpleQueue[Callable[[int], Any] | None]] = [SimpleQueue() for _ in range(size - 1)]
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        for number, work in enumerate(self._work, 1):
            threading.Thread(target=self._serve, args=(number, work), daemon=True).start()

    def _serve(self, number: int, work: SimpleQueue[Callable[[int], Any] | None]) -> None:
        while (task := work.get()) is not None:
            try:
                task(number)
                self._ended.put(None)
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                self._ended.put(error)

    def run(self, task: Callable[[int], Any]) -> Any:
        """What number 0 returns, when all have ended."""
        for work in self._work:
            work.put(task)
        result = task(0)
        for error in [self._ended.get() for _ in self._work]:
            if error is not None:
                raise error
        return result

    def close(self) -> None:
        """Let the threads go."""
        for work in self._work:
            work.put(None)


class CpuExecutor(Executor):
    """One call for many tokens."""

    name = "cpu"
    dtypes = tuple(WEIGHT_BYTES)

    def __init__(self, weights: Weights, device: torch.device, dtype: str, *, threads: int | None = None):
        if device.type != "cpu":
            raise DeviceError("the cpu executor runs on a CPU: use --device cpu, or another executor here")
        super().__init__(weights, device, dtype)
        self.chunk = 8
        config, t = weights.config, weights.tensors
        self._team = Team(threads or torch.get_num_threads())
        weakref.finalize(self, self._team.close).atexit = False  # a thread must not wake while Python ends
        self._alone, self._gate, self._turn = threading.Lock(), np.zeros(1, np.int64), 1
        names = [f"h.{i}.{name}.weight" for i in range(config.n_layer) for name in MATRICES]
        names += ["wte.weight", "lm_head.weight" if "lm_head.weight" in t else "wte.weight"]
        self._held = [_seen(t[name]) for name in names]
        scales = [t[name + SCALE].data_ptr() if name + SCALE in t else 0 for name in names]
        self._prompts = CpuPrompts(weights)
        self._weights = weights  # whose memory the addresses are of
        self._kind = self._held[0].ravel()[:0]
        vectors = [torch.cat([t[f"h.{i}.{name}"].float() for name in VECTORS]) for i in range(config.n_layer)]
        end = torch.zeros_like(vectors[0])
        end[: 2 * config.n_embd] = torch.cat([t["ln_f.weight"], t["ln_f.bias"]]).float()
        self._model = (
            np.array([a.ctypes.data for a in self._held], np.int64),
            np.array(scales, np.int64),
            self._kind,
            torch.stack([*vectors, end]).numpy(),
            t["wpe.weight"].float().contiguous().numpy(),
        )
        self._scales = np.array([config.attention_scale(i) for i in range(config.n_layer)], np.float32)

    def _prefill(self, state: State) -> None:
        """All but the last token of each prompt together, the last as a step."""
        self._prompts.run(state)
        self._decode(state, 1)

    def _decode(self, state: State, n: int) -> None:
        """In one call, unless the logarithms of probabilities are asked for."""
        if state.needs.logprobs is None:
            self._call(state, n, chooses=True)
            return
        for _ in range(n):
            logits = self._call(state, 1, chooses=False)
            with torch.inference_mode():
                advance(state, logits)

    def observe(self, state: State) -> dict[str, Tensor]:
        """The logits; nothing else of a step is left afterwards."""
        logits = self._call(state, 1, chooses=False).clone()
        with torch.inference_mode():
            advance(state, logits)
        state.longest = min(state.longest + 1, state.capacity)
        return {"logits": logits}

    def _call(self, state: State, n: int, *, chooses: bool) -> Tensor:
        config, batch = self.config, state.batch
        if (key := (self, "rooms", batch)) not in state.kept:
            state.kept[key] = _Rooms(config.n_embd, config.inner, config.vocab_size, batch)
        rooms: _Rooms = state.kept[key]
        numbers = {
            "width": config.n_embd,
            "inner": config.inner,
            "layers": config.n_layer,
            "heads": config.n_head,
            "vocab": config.vocab_size,
            "batch": batch,
            "window": config.window or 0,
            "eos": config.eos_number,
            "activation": _FORMS[ACTIVATIONS[config.activation_function]],
            "chooses": int(chooses),
        }
        sizes = np.array([numbers[name] for name in SIZES], np.int64)
        fields = [
            getattr(state, name).numpy()
            for name in (
                "tokens", "length", "known", "limit", "min_length", "temperature", "top_k", "top_p", "min_p", "penalty",
                "noise", "stops_at_eos", "done", "broken",
            )
        ]  # fmt: skip
        cache = _seen(state.cache.k), _seen(state.cache.v)
        epsilon = np.float32(config.layer_norm_epsilon)
        given = (sizes, epsilon, self._scales, *self._model, *cache, *fields, *rooms.all)
        with self._alone:  # a team meets for one thing at a time
            turn = self._turn
            self._turn = self._team.run(lambda me: decode(me, self._team.size, self._gate, turn, n, *given))
        return torch.from_numpy(rooms.logits)


class _Rooms:
    """What a step needs between its stages."""

    def __init__(self, width: int, inner: int, vocab: int, batch: int):
        self.logits = np.empty((batch, vocab), np.float32)
        self.all = (
            *(np.empty((batch, columns), np.float32) for columns in (width, 3 * width, width, inner)),
            self.logits,
            np.empty((batch, vocab), np.float32),
            np.zeros((batch, vocab), np.uint8),
        )


def _seen(tensor: Tensor) -> np.ndarray:
    """As compiled code reads it: elements one behind the other."""
    assert tensor.is_contiguous()
    return tensor.view(_SEEN[tensor.dtype]).numpy()
