"""What a team is told: the words of a call, and the memory between its stages.

From call to call little changes: which slots the rows are of, between which stages they go, and a few numbers. So the
words are made once for given slots, with room for as many rows as these can ever have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpline.config import ModelConfig
from warpline.engine.slots import Slots
from warpline.kernels.cpu.words import RECORD, SHARED, Begin, Form, Stage, Word
from warpline.model.quantise import SCALE
from warpline.model.screen import Screen

#: Pieces into which each thread's share of a product is cut: more are fairer, fewer are cheaper.
PIECES = 6
#: Stages from the end: behind the last layer's keys and values, behind its attention, and the head.
BEHIND_KEYS, BEHIND_ATTENTION, HEAD = -5, -4, -1


class Call:
    """One for each `Slots`, of which it knows the tensors alone: it ends when they do."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        head: str,
        slots: Slots,
        *,
        screen: Screen | None,
        rows: int,
        threads: int,
    ):
        width, vocab, layers, lanes = config.n_embd, config.vocab_size, range(config.n_layer), slots.count
        self._heads, self._tensors, self._threads = config.n_head, tensors, threads
        # Memory that is not written to costs nothing, so there is room for every slot.
        self.x, self.attended = torch.empty(rows, width), torch.empty(rows, width)
        self.logits, noisy = torch.empty(lanes, vocab), torch.empty(lanes, vocab)
        qkv, hidden = torch.empty(rows, 3 * width), torch.empty(rows, config.inner)
        marks = torch.from_numpy(np.zeros((lanes, vocab), np.uint8))
        private = torch.empty(threads, rows * width + max(width, config.inner, slots.capacity))
        scales = [config.attention_scale(layer) for layer in layers]
        stages = []
        for i in layers:
            cache = {"keys": slots.cache.k[i], "values": slots.cache.v[i], "source": qkv, "target": self.attended}
            stages += [
                self._product(f"h.{i}.attn.c_attn", Form.STORED, self.x, qkv, norm=f"h.{i}.ln_1"),
                _stage(form=Form.CACHED, **cache),
                _stage(form=Form.ATTENTION, **cache, scale=1 + i),
                self._product(f"h.{i}.attn.c_proj", Form.ADDED, self.attended, self.x),
                self._product(f"h.{i}.mlp.c_fc", Form.ACTIVATED, self.x, hidden, norm=f"h.{i}.ln_2"),
                self._product(f"h.{i}.mlp.c_proj", Form.ADDED, hidden, self.x),
            ]
        stages.append(self._product(head, Form.STORED, self.x, self.logits, norm="ln_f", **_told_of(screen)))
        self._stages = len(stages)
        self._sequences, self._positions = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._shared = np.zeros((len(SHARED), 16), np.int64)  # a word in every other line of the cache
        self._done = slots.done.numpy()
        told: dict[Word, Any] = {
            Word.SLOTS: slots.count + 1,
            Word.WIDTH: width,
            Word.HEADS: config.n_head,
            Word.VOCAB: vocab,
            Word.CAPACITY: slots.capacity,
            Word.WINDOW: config.window or 0,
            Word.EOS: config.eos_number,
            Word.STAGES: len(stages),
            Word.PRIVATE_SIZE: private.shape[1],
            Word.EMBEDDING: tensors["wte.weight"],
            Word.EMBEDDING_SCALES: tensors.get("wte.weight" + SCALE, 0),
            Word.PLACES: tensors["wpe.weight"],
            Word.SETTINGS: np.array([config.layer_norm_epsilon, *scales], np.float32),
            Word.SEQUENCES: self._sequences,
            Word.POSITIONS: self._positions,
            Word.X: self.x,
            Word.LOGITS: self.logits,
            Word.NOISY: noisy,
            Word.MARKS: marks,
            Word.PRIVATE: private,
            **{word: getattr(slots, word.name.lower()) for word in RECORD},
            **dict(zip(SHARED, self._shared, strict=True)),
        }
        self._kept = [*told.values(), qkv, hidden, slots.cache, screen]  # whose addresses are told
        self._words = np.array([_word(told.get(word, 0)) for word in Word] + [word for s in stages for word in s])
        table = self._words[len(Word) :].reshape(len(stages), len(Stage))
        self._by_rows = len(Word) + Stage.PIECES + len(Stage) * np.flatnonzero(table[:, Stage.FORM] >= Form.CACHED)
        self._slots: tuple[int, ...] = ()

    def newest(self, lanes: Sequence[int], steps: int, *, chooses: bool, screens: bool = False) -> int:
        """Have it told so many steps of these slots; gives the address. `screens`: no row asks for more than its
        largest logit, with or without noise."""
        self._set_rows(lanes)
        going = len(lanes) - np.count_nonzero(self._done[self._sequences[: len(lanes)]])
        return self._told(Begin.NEWEST, 0, self._stages, steps, int(going), chooses, screens)

    def given(self, slots: Sequence[int], positions: Sequence[int], *, end: int) -> int:
        """The tokens at these positions of these slots, through all stages before `end`, counted from behind."""
        self._set_rows(slots)
        self._positions[: len(positions)] = positions
        return self._told(Begin.GIVEN, 0, self._stages + end, 1, len(slots), False)

    def ready(self, lanes: Sequence[int], *, first: int, chooses: bool, screens: bool = False) -> int:
        """What stands in the first rows of the memory between stages, from stage `first` on, counted from behind."""
        self._set_rows(lanes)
        return self._told(Begin.READY, self._stages + first, self._stages, 1, len(lanes), chooses, screens)

    @property
    def halts(self) -> bool:
        """Whether it is to end behind the step that it is at."""
        return bool(self._shared[SHARED.index(Word.HALT), 0])

    @halts.setter
    def halts(self, wanted: bool) -> None:
        self._shared[SHARED.index(Word.HALT), 0] = wanted

    def _set_rows(self, slots: Sequence[int]) -> None:
        slots = tuple(slots)
        if slots != self._slots:
            if len(slots) != len(self._slots):
                self._words[Word.ROWS] = len(slots)
                self._words[self._by_rows] = len(slots) * self._heads
            self._sequences[: len(slots)] = slots
            self._slots = slots

    def _told(
        self, begin: Begin, first: int, last: int, steps: int, going: int, chooses: bool, screens: bool = False
    ) -> int:
        words = self._words
        words[Word.BEGIN], words[Word.FIRST], words[Word.LAST] = begin, first, last
        words[Word.STEPS], words[Word.CHOOSES], words[Word.SCREENS] = steps, chooses, screens
        self._shared[: SHARED.index(Word.HALT)] = 0
        self._shared[SHARED.index(Word.GOING), 0] = going
        self._shared[SHARED.index(Word.STOP), 0] = steps if going else 0
        return int(words.ctypes.data)

    def _product(
        self, name: str, form: Form, source: Tensor, target: Tensor, norm: str | None = None, **more: Tensor
    ) -> list[int]:
        t = self._tensors
        matrix = t[f"{name}.weight"]
        outputs, inputs = matrix.shape
        return _stage(
            form=form,
            pieces=min(outputs, PIECES * self._threads if self._threads > 1 else 1),
            source=source,
            target=target,
            matrix=matrix,
            scales=t.get(f"{name}.weight{SCALE}", 0),
            bias=t.get(f"{name}.bias", 0),
            inputs=inputs,
            outputs=outputs,
            norm=t[f"{norm}.weight"] if norm else 0,
            norm_bias=t[f"{norm}.bias"] if norm else 0,
            **more,
        )


def _told_of(screen: Screen | None) -> dict[str, Tensor]:
    if screen is None:
        return {}
    return {"codes": screen.codes, "code_scales": screen.scale, "errors": screen.error, "norms": screen.norm}


def _stage(**named: Any) -> list[int]:
    return [_word(named.get(name.name.lower(), 0)) for name in Stage]


def _word(value: Any) -> int:
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return int(value.ctypes.data)
    if not isinstance(value, Tensor):
        return int(value)
    assert value.is_contiguous()
    return value.data_ptr()
