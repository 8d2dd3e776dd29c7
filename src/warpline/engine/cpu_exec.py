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

from warpline import hardware
from warpline.config import ACTIVATIONS, KV_DTYPES, WEIGHT_BYTES, ModelConfig
from warpline.engine.cpu_prompts import CpuPrompts
from warpline.engine.executor import Executor
from warpline.engine.sampling import advance
from warpline.engine.state import State
from warpline.errors import DeviceError
from warpline.kernels.cpu import library
from warpline.kernels.cpu.words import SHARED, Form, Stage, Word
from warpline.model.quantise import SCALE
from warpline.model.weights import Weights

#: Pieces into which each thread's share of a product is cut: more are fairer, fewer are cheaper.
PIECES = 6
#: Tokens of prompts up to which a matrix that would have to be converted is rather multiplied as it is.
FEW = 32


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
        self.threads = threads or hardware.threads()
        self._program = _program(config, dtype)
        self._team = Team(self.threads)
        weakref.finalize(self, self._team.close).atexit = False  # a thread must not wake while Python ends
        self._alone = threading.Lock()
        self._prompts = CpuPrompts(weights)
        self._head = weights.head
        #: Whose memory the addresses are of.
        self._tensors = {
            name: value.float().contiguous() if value.dim() == 1 or name == "wpe.weight" else value
            for name, value in t.items()
        }
        scales = [config.attention_scale(i) for i in range(config.n_layer)]
        self._settings = np.array([config.layer_norm_epsilon, *scales], np.float32)

    @classmethod
    def begin(cls, config: ModelConfig, dtype: str) -> None:
        """Compile, on another core."""
        _program(config, dtype)

    def _prefill(self, state: State) -> None:
        """All but the last token of each prompt together, and the last as a step; or all together, where the head alone
        is less than a step because nothing is converted, or where the step is still being compiled."""
        state.restart()
        if not self._program.is_ready or (self.dtype == "fp32" and state.longest > 1):
            advance(state, self._prompts.logits(state))
            return
        before = int(state.length[: state.batch].sum()) - state.batch
        if 0 < before <= FEW:
            self._call(state, 1, rows=before, chooses=False)
        else:
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

    def _call(self, state: State, n: int, *, chooses: bool, rows: int = 0) -> Tensor:
        """`n` steps, or the first `rows` tokens of the prompts, which want nothing but keys and values."""
        key, shape = (self, rows > 0), (state.batch, rows)
        if key not in state.kept or state.kept[key][0] != shape:  # the last shape alone: logits of many are large
            state.kept[key] = shape, self._bound(state, rows)
        call: _Call = state.kept[key][1]
        if rows:
            given = [(b, p) for b, length in enumerate(state.length[: state.batch].tolist()) for p in range(length - 1)]
            call.rows.copy_(torch.tensor(given).T)
        with self._alone:  # a team meets for one thing at a time
            address = call.begin(n, int((~state.done[: state.batch]).sum()), chooses)
            function = self._program.function()
            self._team.run(lambda me: function(me, address))
        return call.logits

    def _bound(self, state: State, given: int) -> _Call:
        """The words of a call for the batch as it is."""
        config, batch, rows = self.config, state.batch, given or state.batch
        width, inner, vocab, ends = config.n_embd, config.inner, config.vocab_size, 0 if given else batch
        x, qkv, heads, hidden = (torch.zeros(rows, columns) for columns in (width, 3 * width, width, inner))
        logits, noisy = torch.zeros(ends, vocab), torch.zeros(ends, vocab)
        private = torch.zeros(self.threads, rows * width + max(width, inner, state.capacity))
        marks, settings = torch.zeros(ends, vocab, dtype=torch.uint8), torch.from_numpy(self._settings)
        places = torch.stack([torch.arange(rows), torch.zeros(rows, dtype=torch.int64)])
        stages = []
        for i in range(config.n_layer):
            cache = {"matrix": state.cache.k[i], "scales": state.cache.v[i], "pieces": rows * config.n_head}
            cache |= {"bias": 1 + i, "source": qkv, "target": heads}
            stages += [
                self._product(f"h.{i}.attn.c_attn", Form.STORED, x, qkv, norm=f"h.{i}.ln_1"),
                *([_stage(form=Form.KEYS, **cache)] if given else []),
                _stage(form=Form.ATTENTION, **cache),
                self._product(f"h.{i}.attn.c_proj", Form.ADDED, heads, x),
                self._product(f"h.{i}.mlp.c_fc", Form.ACTIVATED, x, hidden, norm=f"h.{i}.ln_2"),
                self._product(f"h.{i}.mlp.c_proj", Form.ADDED, hidden, x),
            ]
        if given:
            del stages[-4:]  # of the last layer nothing but keys and values
        else:
            stages.append(self._product(self._head, Form.STORED, x, logits, norm="ln_f"))
        told: dict[Word, Any] = {
            Word.BATCH: batch,
            Word.ROWS: rows,
            Word.GIVEN: given > 0,
            Word.WIDTH: width,
            Word.HEADS: config.n_head,
            Word.VOCAB: vocab,
            Word.CAPACITY: state.capacity,
            Word.WINDOW: config.window or 0,
            Word.EOS: config.eos_number,
            Word.STAGES: len(stages),
            Word.PRIVATE_SIZE: private.shape[1],
            Word.EMBEDDING: self._tensors["wte.weight"],
            Word.EMBEDDING_SCALES: self._tensors.get("wte.weight" + SCALE, 0),
            Word.PLACES: self._tensors["wpe.weight"],
            Word.SETTINGS: settings,
            Word.SEQUENCES: places[0],
            Word.POSITIONS: places[1],
            Word.X: x,
            Word.LOGITS: logits,
            Word.NOISY: noisy,
            Word.MARKS: marks,
            Word.PRIVATE: private,
            **{name: getattr(state, name.name.lower()) for name in Word if Word.TOKENS <= name <= Word.BROKEN},
        }
        return _Call(told, stages, logits, places, [*told.values(), qkv, heads, hidden])

    def _product(self, name: str, form: Form, source: Tensor, target: Tensor, norm: str | None = None) -> list[int]:
        t = self._tensors
        matrix = t[f"{name}.weight"]
        outputs, inputs = matrix.shape
        return _stage(
            form=form,
            pieces=min(outputs, PIECES * self.threads if self.threads > 1 else 1),
            matrix=matrix,
            scales=t.get(f"{name}.weight{SCALE}", 0),
            bias=t.get(f"{name}.bias", 0),
            source=source,
            target=target,
            inputs=inputs,
            outputs=outputs,
            norm=t[f"{norm}.weight"] if norm else 0,
            norm_bias=t[f"{norm}.bias"] if norm else 0,
        )


def _program(config: ModelConfig, dtype: str) -> library.Build:
    return library.build(dtype, KV_DTYPES[dtype], ACTIVATIONS[config.activation_function])


class _Call:
    """What a team is told, in memory that stays where it is."""

    def __init__(self, told: dict[Word, Any], stages: list[list[int]], logits: Tensor, rows: Tensor, kept: list[Any]):
        self.logits, self.rows, self._kept = logits, rows, kept  # rows: sequence and position of each
        self._shared = torch.zeros(len(SHARED), 16, dtype=torch.int64)  # a word in every other line of the cache
        told |= dict(zip(SHARED, self._shared, strict=True))
        self._words = np.array([_word(told.get(name, 0)) for name in Word] + [word for s in stages for word in s])

    def begin(self, steps: int, going: int, chooses: bool) -> int:
        """Ready for so many steps of so many rows; gives the address."""
        self._words[Word.STEPS], self._words[Word.CHOOSES] = steps, chooses
        self._shared.zero_()
        self._shared[SHARED.index(Word.GOING), 0] = going
        self._shared[SHARED.index(Word.STOP), 0] = steps if going else 0
        return int(self._words.ctypes.data)


def _stage(**named: Any) -> list[int]:
    return [_word(named.get(name.name.lower(), 0)) for name in Stage]


def _word(value: Any) -> int:
    if not isinstance(value, Tensor):
        return int(value)
    assert value.is_contiguous()
    return value.data_ptr()
