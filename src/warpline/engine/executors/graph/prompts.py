"""Passes over prompts: a library's products where rows are many, our kernels for the rest, captured as graphs by size.

A pass runs packed rows: the tokens of any number of prompts, or of parts of them, concatenated. Tables map each row to
its slot and position, and name the rows that go on after the last attention to a first token. It consists of the layers
of `schedule` with FlashAttention, which reads cached keys and values and stores the new ones.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from warpline.config import ACTIVATIONS
from warpline.engine.crossing import Progress, Table
from warpline.engine.executors.graph.bind import PREPARING, bind, captured
from warpline.engine.executors.graph.schedule import (
    CACHE,
    CODED_CACHE,
    End,
    OpCall,
    PassRules,
    block_parameters,
    blocks,
    companions,
    ending,
    head_parameters,
    of_cache,
    of_slots,
    on_memory,
    room_for_logits,
)
from warpline.engine.executors.sampling import note_logprobs
from warpline.engine.request import Span
from warpline.engine.slots import Slots
from warpline.errors import ConfigError
from warpline.kernels import launch
from warpline.kernels.catalog import find
from warpline.kernels.catalog.prompts import ENTRY, prompt_tiles
from warpline.model.weights import Weights

Launch = Callable[[], object]

#: Numbers of rows that passes are made for; beyond them, four steps per doubling.
ROWS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
#: Numbers of sequences that passes are made for; beyond them, multiples of the last. They are few, because the surplus
#: costs only rows of the last layer and the head, and each pair of both numbers is bound and captured separately.
SEQUENCES = (1, 8, 64)
#: Most rows of the passes that are prepared ahead, by the number of sequences.
PREPARED_ROWS = {1: 1024, 8: 2048, 64: 8192}
#: Passes share memory with others of up to twice their rows, and all with fewer rows than this: some 20 KB per row for
#: gpt2.
LEAST_SHARED = 1024
#: Launches in a pass's first graph, and the growth factor of the next ones. A graph whose kernels overlap begins when
#: the host has enqueued all of them, 1 µs each (H200); meanwhile the graph before runs, 4 µs each.
FIRST_PART, GROWTH = 8, 4
#: Positions, to be sliced.
_POSITIONS = np.arange(1 << 17)


def rounded_rows(rows: int) -> int:
    """Return the rows of the pass that runs `rows` rows."""
    if rows <= ROWS[-1]:
        return ROWS[bisect_left(ROWS, rows)]
    step = 1 << ((rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def rounded_sequences(count: int) -> int:
    """Return the sequences of the pass that runs `count` sequences."""
    return next((n for n in SEQUENCES if n >= count), -(-count // SEQUENCES[-1]) * SEQUENCES[-1])


class Prompts:
    """The passes over prompts, for all executors that use our kernels."""

    def __init__(self, rules: PassRules):
        activation = rules.weights.config.activation_function
        if ACTIVATIONS[activation] != "gelu_tanh":
            raise ConfigError(f"our kernels know only GELU's tanh form, not {activation}: use --executor torch")
        self.rules = rules
        self._passes: WeakKeyDictionary[Slots, dict[tuple[int, int, End], Pass]] = WeakKeyDictionary()
        self._memory: WeakKeyDictionary[Slots, _Memory] = WeakKeyDictionary()
        #: The ops of the last pass.
        self.table: list[OpCall] | None = None

    def run(self, slots: Slots, spans: Sequence[Span]) -> None:
        """Run spans as `Executor._prefill` describes it. Prompts that continue later have no end and run in a pass of
        their own."""
        ending = [span for span in spans if span.lanes]
        if len(ending) < len(spans):
            self._run(slots, [span for span in spans if not span.lanes])
        if ending:
            self._run(slots, ending)

    def _run(self, slots: Slots, spans: Sequence[Span]) -> None:
        lanes = [lane for span in spans for lane in span.lanes]
        rows = rounded_rows(sum(span.end - span.start for span in spans))
        count, needs = rounded_sequences(max(len(spans), len(lanes))), slots.needs(lanes)
        end = self.rules.end(count, likeliest=needs.likeliest) if lanes else End.NOTHING
        found = self._pass(slots, (rows, count, end))
        found.fill(spans, lanes, slots.parking)
        self.table = found.steps
        if needs.logprobs is None:
            found.run()
            return
        with torch.inference_mode():
            done = slots.done[slots.crossing.select(lanes, len(lanes))]
            found.run()
            note_logprobs(slots, lanes, found.logits[: len(lanes)], done)

    def prepare_all(self, slots: Slots) -> None:
        """Capture passes over one prompt, and over several."""
        for count, most in PREPARED_ROWS.items():
            if count > rounded_sequences(slots.count):
                break
            ends = {self.rules.end(count, likeliest=likeliest) for likeliest in (False, True)}
            most = min(most, rounded_rows(slots.count * slots.capacity))
            for rows in sorted({rounded_rows(n) for n in range(count, most + 1)}):
                for end in ends:
                    self._pass(slots, (rows, count, end)).capture()

    def _pass(self, slots: Slots, key: tuple[int, int, End]) -> Pass:
        passes = self._passes.setdefault(slots, {})
        if (found := passes.get(key)) is None:
            with PREPARING:
                memory = self._memory.setdefault(slots, _Memory())
                found = passes[key] = Pass(self.rules, slots, memory, *key)
        return found


def growing(launches: Sequence[Launch]) -> list[Sequence[Launch]]:
    """Split the launches into parts, each GROWTH times as long as the one before."""
    parts, size = [], FIRST_PART
    while len(launches) > 2 * size:
        parts.append(launches[:size])
        launches, size = launches[size:], size * GROWTH
    return [*parts, launches]


class Pass:
    """A pass over `rows` packed rows of up to `count` sequences, bound to memory."""

    @torch.inference_mode()
    def __init__(self, rules: PassRules, slots: Slots, memory: _Memory, rows: int, count: int, end: End):
        config = rules.weights.config
        self._device = rules.weights.device
        self._queries = _tile_queries(rules, slots, rows)
        self._tables(rows, count, slots.crossing.progress)
        named = memory.of_rows(rules, slots, rows) | memory.of_ends(rules, slots, count)
        self.logits = named["logits"]
        named |= {"row_slots": self.row_slots, "row_positions": self.row_positions}
        named |= {"last": self.last, "lanes": self.lanes, "tiles": self.tiles}

        def attention(layer: int) -> list[OpCall]:
            h = f"h.{layer}"
            q, k, v, *cache = (f"{h}.{name}" for name in (*"qkv", *(CODED_CACHE if rules.kv_codes else CACHE)))
            numbers = {"window": config.window or 0, "scale": config.attention_scale(layer)}
            attend = OpCall(_attention(rules), (q, k, v, "tiles", *cache), (f"{h}.heads",), numbers, layer)
            stored = OpCall("quantise_kv", (k, v, "row_slots", "row_positions", *cache), layer=layer)
            return [stored, attend] if rules.kv_codes else [attend]

        embedded = ("tokens", "row_slots", "row_positions", *rules.matrix("wte"), "wpe.weight")
        #: The ops of the pass.
        self.steps = [
            OpCall(f"prompt_embedding{rules.coded}", embedded, ("all.in",)),
            *blocks(rules, rows, attention, last_rows=0 if end is End.NOTHING else count),
            *ending(rules, count, end, "last.out"),
        ]
        bound = bind(on_memory(self.steps, named), overlapping=True, invariant=rules.invariant)
        self._launches: list[Launch] = [self._table.send, *bound]
        self._runs = 0
        self._replays: list[Launch] = []

    def _tables(self, rows: int, count: int, progress: Progress) -> None:
        """Allocate what differs from run to run in one block of memory, so that one copy brings all of it."""
        tiles = rows // self._queries + count
        ends = np.cumsum([2 * rows, 2 * rows, 2 * count, 2 * count, 8 * tiles]).tolist()  # in int32
        block = torch.zeros(ends[-1], dtype=torch.int32, device=self._device)
        parts = [slice(*both) for both in itertools.pairwise([0, *ends])]
        *long, tiles_there = (block[part] for part in parts)
        self.row_slots, self.row_positions, self.last, self.lanes = (part.view(torch.int64) for part in long)
        self.tiles = tiles_there.view(tiles, ENTRY)
        self._table = Table(block, progress)
        array = self._table.array
        self._here = [array[part].view(np.int64) for part in parts[:4]], array[parts[4]].reshape(tiles, ENTRY)

    def fill(self, spans: Sequence[Span], ending: Sequence[int], parking: int) -> None:
        """Set what the next run computes, and the slots that get a token. The GPU waits for this: keep it short."""
        self._table.wait()
        (row_slots, _, _, lanes), tiles = self._here
        rows, found = self._fill_one(spans[0]) if len(spans) == 1 else self._fill_many(spans)
        row_slots[rows:] = parking
        lanes[: len(ending)], lanes[len(ending) :] = ending, parking
        tiles[found:] = 0

    def _fill_one(self, span: Span) -> tuple[int, int]:
        """Fill the tables for one span; return rows and tiles. Most passes have one, and arrays of one element are
        slow."""
        (row_slots, row_positions, last, _), tiles = self._here
        slot, start, end, lanes = span
        rows = end - start
        row_slots[:rows], row_positions[:rows], last[: len(lanes)] = slot, _POSITIONS[start:end], rows - 1
        found = _tiles_of(rows, self._queries)
        tiles[: len(found)] = found
        tiles[: len(found), :2] = slot, start
        return rows, len(found)

    def _fill_many(self, spans: Sequence[Span]) -> tuple[int, int]:
        (row_slots, row_positions, last, _), tiles = self._here
        slots, starts, ends, lanes = zip(*spans, strict=True)
        slot, start, end = (np.array(values) for values in (slots, starts, ends))
        count = end - start
        behind = count.cumsum()
        first, rows = behind - count, int(behind[-1])
        row_slots[:rows], row_positions[:rows] = slot.repeat(count), _POSITIONS[:rows] - (first - start).repeat(count)
        taken = [len(its) for its in lanes]
        last[: sum(taken)] = (behind - 1).repeat(taken)
        found = prompt_tiles(slot, start, first, count, self._queries)
        tiles[: len(found)] = found
        return rows, len(found)

    def run(self) -> None:
        """Launch kernel by kernel the first time, capture the second, then replay. A size that does not come again
        should not wait for a capture."""
        if not self._replays:
            self._begin()
        for replay in self._replays:
            replay()
        self._table.used()

    @torch.inference_mode()
    def _begin(self) -> None:
        self._runs += 1
        if self._runs == 2 and self._device.type == "cuda":
            self.capture()
            return
        for call in self._launches:
            call()

    def capture(self) -> None:
        """Capture the pass, unless it has been."""
        if not self._replays:
            self._replays = [captured(part, self._device).replay for part in growing(self._launches)]


@functools.lru_cache(maxsize=2048)
def _tiles_of(rows: int, queries: int) -> np.ndarray:
    """Return the tiles of one sequence; slot and start are filled in later."""
    none = np.zeros(1, np.int64)
    return prompt_tiles(none, none, none, none + rows, queries)


def _attention(rules: PassRules) -> str:
    """Return the name of the attention op."""
    return "prompt_attention_int8" if rules.kv_codes else "prompt_attention"


def _tile_queries(rules: PassRules, slots: Slots, rows: int) -> int:
    """Return the queries per block of attention, which the table of tiles depends on."""
    weights, config, spec = rules.weights, rules.weights.config, find(_attention(rules))
    if weights.device.type != "cuda":
        return 64
    dims = {"rows": rows, "heads": config.n_head, "depth": config.head_size}
    dims |= {"slots": slots.count + 1, "positions": slots.capacity}
    dtype, device = launch.DTYPES[weights.activations], weights.device.index
    return launch.tunables_of(spec, dtype, dims, device, invariant=rules.invariant)["tile_queries"]


class _Memory:
    """Memory of the passes over prompts of some slots, shared because the passes run one after another."""

    def __init__(self) -> None:
        self._rooms: dict[int, dict[str, Tensor]] = {}  # by rows
        self._ends: dict[int, dict[str, Tensor]] = {}  # by sequences

    def of_rows(self, rules: PassRules, slots: Slots, rows: int) -> dict[str, Tensor]:
        """Return memory for every name in a pass; all layers share the intermediate buffers."""
        config = rules.weights.config
        room = {name: tensor[:rows] for name, tensor in self._room(rules.weights, rows).items()}
        x, middle, qkv, hidden, attention = (room[name] for name in ("in", "middle", "qkv", "hidden", "attention"))
        by_head = qkv.view(1, rows, 3, config.n_head, config.head_size)
        q, k, v = (part.transpose(1, 2) for part in by_head.unbind(2))  # [1, H, rows, D]
        heads = attention.view(1, rows, config.n_head, config.head_size)
        found = {**block_parameters(rules, rows), "all.in": x, "all.attention": attention, "tokens": slots.tokens}
        beside = companions(rules, {"in": x, "middle": middle}, (room["normal"], room["product"]))
        for layer in range(config.n_layer):
            own = {"in": x, "middle": middle, "qkv": qkv, "q": q, "k": k, "v": v, "heads": heads}
            own |= {"attention": attention, "hidden": hidden, **beside}
            own |= of_cache(slots, layer)
            found |= {f"h.{layer}.{name}": tensor for name, tensor in own.items()}
        return found

    def _room(self, weights: Weights, rows: int) -> dict[str, Tensor]:
        size, width = max(LEAST_SHARED, 1 << (rows - 1).bit_length()), weights.config.n_embd
        if size not in self._rooms:
            columns = {"in": width, "middle": width, "qkv": 3 * width, "hidden": weights.config.inner}
            columns |= dict.fromkeys(("attention", "normal", "product"), width)
            # Products also read the rows without a token.
            self._rooms[size] = {name: weights.room(size, count).zero_() for name, count in columns.items()}
        return self._rooms[size]

    def of_ends(self, rules: PassRules, slots: Slots, count: int) -> dict[str, Tensor]:
        """Return memory for every name after the last attention, where one row of each sequence is left."""
        if count not in self._ends:
            config, room = rules.weights.config, rules.weights.room
            names = ("attention", "in", "middle", "out", "out.normal")
            rows = {f"last.{name}": room(count, config.n_embd).zero_() for name in names}
            found = {**block_parameters(rules, count), **head_parameters(rules, count), **of_slots(slots, count)}
            found |= rows | companions(rules, {name: rows[name] for name in ("last.middle", "last.out")})
            found |= {"last.hidden": room(count, config.inner), "logits": room_for_logits(rules, count)}
            self._ends[count] = found
        return self._ends[count]
