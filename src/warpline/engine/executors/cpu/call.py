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
from warpline.engine.clock import Drafted
from warpline.engine.request import Request
from warpline.engine.slots import Slots
from warpline.kernels.cpu.sizes import (
    COUNTS,
    FIRST_CHANCES,
    GROUP,
    GUESS,
    KINDS,
    LINE,
    PANEL,
    ROOM,
    SUMS,
    TOGETHER,
    apart,
    attending,
    row_bytes,
)
from warpline.kernels.cpu.words import RECORD, SHARED, Begin, Form, Stage, Word
from warpline.model.quantise import SCALE
from warpline.model.screen import Screen

#: Pieces into which each thread's share of a product is cut: more are fairer, fewer are cheaper.
PIECES = 6
#: Stages from the end: behind the last layer's keys and values, and behind its attention.
BEHIND_KEYS, BEHIND_ATTENTION = -5, -4
#: Rows up to which each thread prepares x for itself, rather than wait for others.
ALONE = 4
#: Tokens of prompts that go through the stages at once: a multiple of the rows of a block (panels.py).
PROMPT_ROWS = 132


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
        threads: int,
        drafts: int = 0,
        table: np.ndarray | None = None,
    ):
        width, vocab, layers, lanes = config.n_embd, config.vocab_size, range(config.n_layer), slots.count
        self._tensors, self._threads, self._heads = tensors, threads, config.n_head
        # Memory that is not written to costs nothing, so there is room for every slot with all of its drafts.
        chosen = lanes * (1 + drafts)
        rows = max(chosen, PROMPT_ROWS)
        inner = config.inner
        # What a product reads as it lies has rows that do not compete for the same places of a cache.
        self.x, attended, hidden = (torch.empty(rows, size) for size in (width, apart(width), apart(inner)))
        self.attended = attended[:, :width]
        self.logits, noisy, raw = (torch.empty(chosen, vocab) for _ in range(3))
        qkv = torch.empty(rows, 3 * width)
        marks = torch.from_numpy(np.zeros((chosen, vocab), np.uint8))
        # Rows as a product wants them; of each thread a few, and what it needs besides, or what attention needs.
        inputs = max(width, inner)
        of_row = max(row_bytes(inputs), 4 * apart(inputs))
        prepared = torch.empty(rows * of_row, dtype=torch.uint8)
        products = (ALONE + 1) * of_row + 4 * (ROOM * inputs + SUMS) + LINE
        each = max(products, 4 * attending(width // config.n_head, slots.capacity))
        private = torch.empty(threads, -(-each // LINE) * LINE // 4)
        scales = [config.attention_scale(layer) for layer in layers]
        stages = []
        for i in layers:
            cache = {
                "keys": slots.cache.k[i],
                "values": slots.cache.v[i],
                "source": qkv,
                "target": attended,
                "target_apart": attended.shape[1],
            }
            stages += [
                self._product(f"h.{i}.attn.c_attn", Form.STORED, self.x, qkv, 3 * width, norm=f"h.{i}.ln_1"),
                _stage(form=Form.CACHED, **cache),
                _stage(form=Form.ATTENTION, **cache, scale=1 + i),
                self._product(f"h.{i}.attn.c_proj", Form.ADDED, attended, self.x, width),
                self._product(f"h.{i}.mlp.c_fc", Form.ACTIVATED, self.x, hidden, inner, norm=f"h.{i}.ln_2"),
                self._product(f"h.{i}.mlp.c_proj", Form.ADDED, hidden, self.x, width, inputs=inner),
            ]
        stages.append(self._product(head, Form.STORED, self.x, self.logits, vocab, norm="ln_f", more=_told_of(screen)))
        self._stages = len(stages)
        self._sequences, self._positions, self._lanes = (np.zeros(rows, np.int64) for _ in range(3))
        self._firsts = np.arange(rows + 1)
        self._drafts = drafts
        self._known_to: list[Request | None] = [None] * (lanes + 1)  # whose drafts a slot's chances are of
        self._price = np.ones(1, np.float32)
        self._chances = np.zeros((lanes + 1, KINDS), np.float32)
        self._counted, guesses = np.zeros((lanes + 1, COUNTS), np.int64), np.zeros((lanes + 1, GUESS), np.int64)
        self._wants = np.zeros(lanes + 1, np.uint8)
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
            Word.THREADS: threads,
            Word.EMBEDDING: tensors["wte.weight"],
            Word.EMBEDDING_SCALES: tensors.get("wte.weight" + SCALE, 0),
            Word.POSITION_EMBEDDING: tensors["wpe.weight"],
            Word.SETTINGS: np.array([config.layer_norm_epsilon, *scales], np.float32),
            Word.LANE_SLOTS: self._lanes,
            Word.FIRSTS: self._firsts,
            Word.PRICE: self._price,
            Word.CHANCES: self._chances,
            Word.GUESSES: guesses,
            Word.COUNTED: self._counted,
            Word.TABLE: 0 if table is None else table,
            Word.TABLE_SIZE: 0 if table is None else len(table),
            Word.WANTS: self._wants,
            Word.SEQUENCES: self._sequences,
            Word.POSITIONS: self._positions,
            Word.X: self.x,
            Word.LOGITS: self.logits,
            Word.NOISY: noisy,
            Word.MARKS: marks,
            Word.RAW: raw,
            Word.PREPARED: prepared,
            Word.PRIVATE: private,
            **{word: getattr(slots, word.name.lower()) for word in RECORD},
            **dict(zip(SHARED, self._shared, strict=True)),
        }
        self._kept = [*told.values(), qkv, hidden, slots.cache, screen]  # whose addresses are told
        self._words = np.array([_word(told.get(word, 0)) for word in Word] + [word for s in stages for word in s])
        self._rows: tuple[int, ...] = ()
        self._lane_count = 0

    def newest(self, slots: Slots, lanes: Sequence[int], steps: int, *, chooses: bool, screens: bool = False) -> int:
        """Have it told so many steps of these lanes; gives the address. `screens`: no row asks for more than its
        largest logit, with or without noise."""
        going = [lane for lane in lanes if not self._done[lane]]
        drafts = self._drafts if chooses else 0
        for lane in going if drafts else ():
            if (request := slots.request(lane)) is not self._known_to[lane]:
                self._known_to[lane], self._chances[lane] = request, FIRST_CHANCES
        self._tell_logprobs(slots, lanes if chooses else ())
        return self._told(lanes, Begin.NEWEST, 0, self._stages, steps, len(going), chooses, screens, drafts)

    def given(self, slots: Sequence[int], positions: np.ndarray, *, end: int = 0, screens: bool = False) -> int:
        """The tokens at these positions of these slots, through all stages before `end`, counted from behind."""
        self._positions[: len(positions)] = positions
        # The larger, the more share what is read; but every thread should have some.
        most = -(-len(slots) * self._heads // (PIECES * self._threads * GROUP)) * GROUP
        firsts = _groups(np.array(slots), positions, min(most, TOGETHER))
        return self._told(slots, Begin.GIVEN, 0, self._stages + end, 1, len(slots), False, screens, firsts=firsts)

    def ready(self, slots: Slots, lanes: Sequence[int], *, first: int, screens: bool = False) -> int:
        """What stands in the first rows of the memory between stages, from stage `first` on, counted from behind, to
        the choice of a token."""
        self._tell_logprobs(slots, lanes)
        return self._told(lanes, Begin.READY, self._stages + first, self._stages, 1, len(lanes), True, screens)

    def stamp(self, moments: int) -> np.ndarray | None:
        """Have the threads write their clocks at so many moments of every call from now on; 0 ends that. A row for each
        thread: how many it has written, the clocks, and room of its own."""
        clocks = np.zeros((self._threads, moments + 3), np.int64) if moments else None
        self._clocks = clocks
        self._words[Word.CLOCKS], self._words[Word.MOMENTS] = _word(0 if clocks is None else clocks), moments
        return clocks

    def counted(self) -> Drafted:
        """What came of drafts since the last time, and steps of the last call."""
        found = self._counted.sum(axis=0).tolist()
        self._counted[:] = 0
        return Drafted(int(self._words[Word.PASSES]), *found)

    @property
    def price(self) -> float:
        """Of a further row, as a share of a pass with one."""
        return float(self._price[0])

    @price.setter
    def price(self, price: float) -> None:
        self._price[0] = price

    @property
    def halts(self) -> bool:
        """Whether it is to end behind the step that it is at."""
        return bool(self._shared[SHARED.index(Word.HALT), 0])

    @halts.setter
    def halts(self, wanted: bool) -> None:
        self._shared[SHARED.index(Word.HALT), 0] = wanted

    def _told(
        self,
        slots: Sequence[int],
        begin: Begin,
        first: int,
        last: int,
        steps: int,
        going: int,
        chooses: bool,
        screens: bool = False,
        drafts: int = 0,
        firsts: np.ndarray | None = None,
    ) -> int:
        words, slots, count = self._words, tuple(slots), len(slots)
        if slots != self._rows or firsts is not None:
            firsts = np.arange(count + 1) if firsts is None else firsts
            self._lanes[:count] = self._sequences[:count] = slots
            self._firsts[: len(firsts)], self._lane_count = firsts, len(firsts) - 1
            # With drafts every pass writes its own; tokens that are given are others every time.
            self._rows = () if drafts or begin == Begin.GIVEN else slots
        words[Word.ROWS], words[Word.LANES] = count, self._lane_count
        words[Word.BEGIN], words[Word.FIRST], words[Word.LAST], words[Word.DRAFTS] = begin, first, last, drafts
        words[Word.STEPS], words[Word.CHOOSES], words[Word.SCREENS] = steps, chooses, screens
        most = count * (1 + drafts)
        words[Word.PREPARING] = min(most, PIECES * self._threads) if most > ALONE else 0
        self._shared[: SHARED.index(Word.HALT)] = 0
        self._shared[SHARED.index(Word.GOING), 0] = going
        self._shared[SHARED.index(Word.STOP), 0] = steps if going else 0
        return int(words.ctypes.data)

    def _tell_logprobs(self, slots: Slots, lanes: Sequence[int]) -> None:
        """Where they go, which may be elsewhere than the last time."""
        words = self._words
        words[Word.LOGPROB] = 0
        if slots.needs(lanes).logprobs is None:
            return
        assert slots.logprob is not None
        assert slots.top_logprob is not None
        assert slots.top_token is not None
        for lane in lanes:
            self._wants[lane] = slots.needs([lane]).logprobs is not None
        words[Word.LOGPROB], words[Word.TOPS] = _word(slots.logprob), slots.top_token.shape[-1]
        words[Word.TOP_LOGPROB], words[Word.TOP_TOKEN] = _word(slots.top_logprob), _word(slots.top_token)

    def _product(
        self,
        name: str,
        form: Form,
        source: Tensor,
        target: Tensor,
        outputs: int,
        *,
        inputs: int | None = None,
        norm: str | None = None,
        more: Mapping[str, Tensor] | None = None,
    ) -> list[int]:
        """`inputs`: as many as a row of x has, unless it is said."""
        t, inputs = self._tensors, inputs or self.x.shape[1]
        matrix = t[f"{name}.weight"]
        units = -(-outputs // PANEL)
        return _stage(
            form=form,
            pieces=min(units, PIECES * self._threads if self._threads > 1 else 1),
            source=source,
            source_apart=source.shape[1],
            target=target,
            target_apart=target.shape[1],
            matrix=matrix,
            in_rows=matrix.dim() == 2,
            scales=t.get(f"{name}.weight{SCALE}", 0),
            bias=t.get(f"{name}.bias", 0),
            inputs=inputs,
            outputs=outputs,
            norm=t[f"{norm}.weight"] if norm else 0,
            norm_bias=t[f"{norm}.bias"] if norm else 0,
            **(more or {}),
        )


def _groups(slots: np.ndarray, positions: np.ndarray, most: int) -> np.ndarray:
    """Rows at which groups begin that attend together, and the number of rows: tokens of one sequence, one behind the
    other, at most so many."""
    rows = np.arange(len(slots))
    begins = np.ones(len(rows), bool)
    begins[1:] = (slots[1:] != slots[:-1]) | (positions[1:] != positions[:-1] + 1)
    in_run = rows - np.maximum.accumulate(np.where(begins, rows, 0))
    return np.append(rows[in_run % most == 0], len(rows))


def _told_of(screen: Screen | None) -> dict[str, Tensor]:
    """Its codes and scales are in panels here."""
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
