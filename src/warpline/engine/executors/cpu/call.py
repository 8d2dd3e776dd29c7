"""The arguments of a call of the team: 64-bit words, and the memory between the stages.

Little changes from call to call: the slots of the rows, the first and last stage, and a few numbers. So the words are
made once per `Slots`, with room for as many rows as these can ever have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from warpline.config import ModelConfig
from warpline.engine.clock import Drafted
from warpline.engine.executors.cpu.memory import ALONE, Memory
from warpline.engine.request import Request
from warpline.engine.slots import Slots
from warpline.kernels.cpu.sizes import (
    COUNTS,
    FIRST_CHANCES,
    GROUP,
    GUESS,
    KINDS,
    PANEL,
    TOGETHER,
)
from warpline.kernels.cpu.words import (
    AWAITED,
    EMBEDDING_STAGE,
    HEAD_STAGE,
    LAYER_STAGES,
    RECORD,
    SHARED,
    TOKEN_STAGE,
    Begin,
    Form,
    Stage,
    Word,
)
from warpline.model.quantise import SCALE
from warpline.model.screen import Screen

#: Pieces into which each thread's share of a product is divided: more balance better, fewer cost less.
PIECES = 6
#: Stages counted from the end: after the last layer's keys and values, and after its attention.
BEHIND_KEYS, BEHIND_ATTENTION = -5, -4
#: Tokens of prompts that go through the stages together: a multiple of the rows of a block (panels.py).
PROMPT_ROWS = 132


class Stamps(NamedTuple):
    """Clocks of threads in one call: [thread, moment], in nanoseconds, the first one at its begin; and what is done
    before each of the others, in which layer, of one step."""

    clocks: np.ndarray
    moments: list[tuple[str, int | None]]


class Call:
    """The words for one `Slots`. It refers to its tensors only, and ends with them."""

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
        self._tensors, self._threads, self._heads, self._drafts = tensors, threads, config.n_head, drafts
        chosen = slots.count * (1 + drafts)
        rows = max(chosen, PROMPT_ROWS)
        memory = Memory.of(config, slots, rows=rows, chosen=chosen, threads=threads)
        self.x, self.logits, self.attended = memory.x, memory.logits, memory.attended[:, : config.n_embd]
        stages = [stage for layer in range(config.n_layer) for stage in self._layer(layer, config, slots, memory)]
        last = _told_of(screen)
        stages.append(
            self._product(head, Form.STORED, memory.x, memory.logits, config.vocab_size, norm="ln_f", more=last)
        )
        self._stages = len(stages)
        self._sequences, self._positions, self._lanes = (np.zeros(rows, np.int64) for _ in range(3))
        self._firsts = np.arange(rows + 1)
        self._known_to: list[Request | None] = [None] * (slots.count + 1)  # the request that a slot's chances belong to
        self._price = np.ones(1, np.float32)
        self._chances = np.zeros((slots.count + 1, KINDS), np.float32)
        self._counted = np.zeros((slots.count + 1, COUNTS), np.int64)
        self._wants = np.zeros(slots.count + 1, np.uint8)
        self._shared = np.zeros((len(SHARED), 16), np.int64)  # one word in every other cache line
        self._done = slots.done.numpy()
        told: dict[Word, Any] = {
            **_of_model(config, tensors),
            Word.SLOTS: slots.count + 1,
            Word.CAPACITY: slots.capacity,
            Word.STAGES: len(stages),
            Word.THREADS: threads,
            Word.LANE_SLOTS: self._lanes,
            Word.FIRSTS: self._firsts,
            Word.PRICE: self._price,
            Word.CHANCES: self._chances,
            Word.GUESSES: np.zeros((slots.count + 1, GUESS), np.int64),
            Word.COUNTED: self._counted,
            Word.TABLE: 0 if table is None else table,
            Word.TABLE_SIZE: 0 if table is None else len(table),
            Word.WANTS: self._wants,
            Word.SEQUENCES: self._sequences,
            Word.POSITIONS: self._positions,
            **memory.words(),
            **{word: getattr(slots, word.name.lower()) for word in RECORD},
            **dict(zip(SHARED, self._shared, strict=True)),
        }
        self._kept = [*told.values(), memory, slots.cache, screen]  # keeps the memory at these addresses alive
        self._words = np.array([_word(told.get(word, 0)) for word in Word] + [word for s in stages for word in s])
        self._rows: tuple[int, ...] = ()
        self._lane_count = 0
        self._clocks: np.ndarray | None = None

    def newest(self, slots: Slots, lanes: Sequence[int], steps: int, *, chooses: bool, screens: bool = False) -> int:
        """Set the words for `steps` steps of these lanes; return their address. `screens`: codes of the LM head say
        which logits are computed."""
        going = [lane for lane in lanes if not self._done[lane]]
        drafts = self._drafts if chooses else 0
        for lane in going if drafts else ():
            if (request := slots.request(lane)) is not self._known_to[lane]:
                self._known_to[lane], self._chances[lane] = request, FIRST_CHANCES
        self._tell_logprobs(slots, lanes if chooses else ())
        return self._told(lanes, Begin.NEWEST, 0, self._stages, steps, len(going), chooses, screens, drafts)

    def given(self, slots: Sequence[int], positions: np.ndarray, *, end: int = 0, screens: bool = False) -> int:
        """Set the words to run the tokens at these positions through all stages before `end`, counted from the end."""
        self._positions[: len(positions)] = positions
        # More tokens per group share more reads, but every thread should have some.
        most = -(-len(slots) * self._heads // (PIECES * self._threads * GROUP)) * GROUP
        firsts = _groups(np.array(slots), positions, min(most, TOGETHER))
        return self._told(slots, Begin.GIVEN, 0, self._stages + end, 1, len(slots), False, screens, firsts=firsts)

    def ready(self, slots: Slots, lanes: Sequence[int], *, first: int, screens: bool = False) -> int:
        """Set the words to run the first rows, from stage `first` (counted from the end) to the choice of a token."""
        self._tell_logprobs(slots, lanes)
        return self._told(lanes, Begin.READY, self._stages + first, self._stages, 1, len(lanes), True, screens)

    def stamp(self, steps: int) -> None:
        """Make the threads store their clocks during the next call, of at most `steps` steps; 0 turns that off."""
        moments = 1 + steps * 2 * (self._stages + 2)
        # A row for each thread: how many it has written, the clocks, and two words for the clock itself.
        self._clocks = np.zeros((self._threads, moments + 3), np.int64) if steps else None
        words, clocks = self._words, self._clocks
        words[Word.CLOCKS], words[Word.MOMENTS] = _word(0 if clocks is None else clocks), moments

    def stamped(self) -> Stamps:
        """Return the clocks of the last call."""
        assert self._clocks is not None
        moments = self._moments()
        count = int(self._clocks[0, 0])
        return Stamps(self._clocks[:, 1 : 1 + count].copy(), moments)

    def _moments(self) -> list[tuple[str, int | None]]:
        """Return what a thread does before each clock of a step after the first clock, and in which layer."""
        words = self._words
        newest = words[Word.BEGIN] == Begin.NEWEST
        stages: list[tuple[str, int | None]] = [] if words[Word.BEGIN] == Begin.READY else [(EMBEDDING_STAGE, None)]
        for number in range(words[Word.FIRST], words[Word.LAST]):
            layer, which = divmod(number, len(LAYER_STAGES))
            name = LAYER_STAGES[which]
            if number == self._stages - 1:
                stages.append((HEAD_STAGE, None))
            elif not (newest and name.startswith("cache")):  # attention stores those of newest tokens itself
                stages.append((name, layer))
        if words[Word.CHOOSES]:
            stages.append((TOKEN_STAGE, None))
        return [(m, layer) for stage, layer in stages for m in (stage, AWAITED.format(stage.partition(":")[0]))]

    def counted(self) -> Drafted:
        """Return the counts of drafts since the last call of this, and the steps of the last call of the team."""
        found = self._counted.sum(axis=0).tolist()
        self._counted[:] = 0
        return Drafted(int(self._words[Word.PASSES]), *found)

    @property
    def price(self) -> float:
        """Cost of one more row, as a share of a pass with one row."""
        return float(self._price[0])

    @price.setter
    def price(self, price: float) -> None:
        self._price[0] = price

    @property
    def halts(self) -> bool:
        """Whether the call should end after the current step."""
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
            # With drafts every pass writes its own slots; given tokens differ every time.
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
        """Set the addresses of the logprob buffers, which may have been allocated anew."""
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

    def _layer(self, i: int, config: ModelConfig, slots: Slots, memory: Memory) -> list[list[int]]:
        """Return the stages of layer `i`."""
        x, width, inner = memory.x, config.n_embd, config.inner
        cache = {
            "keys": slots.cache.k[i],
            "values": slots.cache.v[i],
            "source": memory.qkv,
            "target": memory.attended,
            "target_apart": memory.attended.shape[1],
        }
        return [
            self._product(f"h.{i}.attn.c_attn", Form.STORED, x, memory.qkv, 3 * width, norm=f"h.{i}.ln_1"),
            _stage(form=Form.CACHED, **cache),
            _stage(form=Form.ATTENTION, **cache, scale=1 + i),
            self._product(f"h.{i}.attn.c_proj", Form.ADDED, memory.attended, x, width),
            self._product(f"h.{i}.mlp.c_fc", Form.ACTIVATED, x, memory.hidden, inner, norm=f"h.{i}.ln_2"),
            self._product(f"h.{i}.mlp.c_proj", Form.ADDED, memory.hidden, x, width, inputs=inner),
        ]

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
        """Return the words of a product; `inputs` defaults to the width of x."""
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
    """Return the rows at which groups begin that attend together, and the number of rows. A group is at most `most`
    consecutive tokens of one sequence."""
    rows = np.arange(len(slots))
    begins = np.ones(len(rows), bool)
    begins[1:] = (slots[1:] != slots[:-1]) | (positions[1:] != positions[:-1] + 1)
    in_run = rows - np.maximum.accumulate(np.where(begins, rows, 0))
    return np.append(rows[in_run % most == 0], len(rows))


def _of_model(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[Word, Any]:
    """Return what a call is told of the model besides its stages."""
    scales = [config.attention_scale(layer) for layer in range(config.n_layer)]
    return {
        Word.WIDTH: config.n_embd,
        Word.HEADS: config.n_head,
        Word.VOCAB: config.vocab_size,
        Word.WINDOW: config.window or 0,
        Word.EOS: config.eos_number,
        Word.EMBEDDING: tensors["wte.weight"],
        Word.EMBEDDING_SCALES: tensors.get("wte.weight" + SCALE, 0),
        Word.POSITION_EMBEDDING: tensors["wpe.weight"],
        Word.SETTINGS: np.array([config.layer_norm_epsilon, *scales], np.float32),
    }


def _told_of(screen: Screen | None) -> dict[str, Tensor]:
    """Return the words of a screen. Requires: its codes and scales are in panels."""
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
