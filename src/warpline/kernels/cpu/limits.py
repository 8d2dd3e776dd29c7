"""The limits of a CPU: memory bandwidth and multiplication rate, measured by code that does nothing else, on all
threads."""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llvmlite import ir

from warpline import hardware
from warpline.kernels.cpu import machine
from warpline.kernels.cpu.sizes import LANES, LINE
from warpline.kernels.cpu.team import Team

_INT16, _INT32, _INT64, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTEGERS, _FLOATS = ir.VectorType(_INT32, LANES), ir.VectorType(_FLOAT, LANES)
_PAIRS = ir.VectorType(_INT16, 2 * LANES)
#: Bytes that a loop reads at a time, and prefetch distances to try (0: none): the best differs between CPUs.
_BLOCK, _AHEADS = 8 * LINE, (0, 4096, 8192)
#: Independent sums, as many as the registers hold, by width of the registers.
_SUMS = {True: 12, False: 6}
_TURNS = 1_000_000
#: Cache lines at which turns of a multiplication begin, and those that are read; sums are stored behind them.
_PLACES, _READ = 8, 16
_HUGE = 1 << 21


def read_gb_s(megabytes: int = 512, repeats: int = 5) -> float:
    """Return the best bandwidth of several passes over so much memory, with each prefetch distance and page size."""
    size, best = megabytes * 1_000_000 // _BLOCK * _BLOCK, 0.0
    each = -(-size // hardware.threads() // _BLOCK) * _BLOCK
    parts = [(begin, min(each, size - begin)) for begin in range(0, size, each)]
    passes = max(1, 256_000_000 // size)  # a short pass would end before all threads run
    team = Team(len(parts))
    for first in _rooms(size):
        for _ in range(repeats):
            for ahead in _AHEADS:
                rooms = [_room(first + begin, count, passes) for begin, count in parts]
                best = max(best, passes * size / _seconds(team, _reader(ahead), rooms) / 1e9)
    team.close()
    return best


def product_tflop_s(dtype: str, repeats: int = 20) -> float:
    """Return the rate of float32 products, or for "int8" of the 16-bit products of codes, without reading memory."""
    function, count = _multiplier(dtype == "int8"), hardware.threads()
    pairs = 2 if dtype == "int8" else 1
    work = 2 * LANES * pairs * _SUMS[machine.is_wide()] * _TURNS
    rooms = [_room() for _ in range(count)]
    team = Team(count)
    best = max(count * work / _seconds(team, function, rooms) / 1e12 for _ in range(repeats))
    team.close()
    return best


def _rooms(size: int) -> Iterator[int]:
    """Yield addresses of so much memory that has been written to: with normal pages, and with huge ones if there are
    any."""
    advice = [None, mmap.MADV_HUGEPAGE] if hasattr(mmap, "MADV_HUGEPAGE") else [None]
    for wish in advice:
        room = mmap.mmap(-1, size + _HUGE)
        if wish is not None:
            try:
                room.madvise(wish)
            except OSError:  # a system without huge pages
                continue
        memory = np.frombuffer(room, np.uint8)
        memory[:] = 1
        yield -(-memory.ctypes.data // _HUGE) * _HUGE
        del memory, room  # before the next allocation


def _room(*told: int) -> np.ndarray:
    """Return the memory of a call, in whole cache lines, beginning with its arguments."""
    count = LINE // 8 * (_READ + max(_SUMS.values()))
    words = np.ones(count + LINE // 8, np.int64)
    words = words[-words.ctypes.data % LINE // 8 :][:count]
    words[: len(told)] = told
    return words


def _seconds(team: Team, function: Callable[[int, int], None], rooms: list[np.ndarray]) -> float:
    begun = time.perf_counter()
    team.run(lambda me: function(me, int(rooms[me].ctypes.data)))
    return time.perf_counter() - begun


@functools.cache
def _reader(ahead: int) -> Callable[[int, int], None]:
    """Return a function that reads memory; its arguments are address, bytes and passes."""

    def make(builder: Any, words: Any) -> None:
        begin, size, passes = (_word(builder, words, i) for i in range(3))
        total = builder.alloca(_INTEGERS)
        builder.store(ir.Constant(_INTEGERS, None), total)
        kind = ir.FunctionType(ir.VoidType(), [_INT64.as_pointer(), _INT32, _INT32, _INT32])
        prefetch = ir.Function(builder.module, kind, "llvm.prefetch.p0")

        def block(at: Any) -> None:
            for line in range(0, _BLOCK, LINE):
                here = builder.add(begin, builder.add(at, _INT64(line)))
                if ahead:
                    soon = builder.inttoptr(builder.add(here, _INT64(ahead)), _INT64.as_pointer())
                    builder.call(prefetch, [soon, _INT32(0), _INT32(3), _INT32(1)])
                found = builder.load(builder.inttoptr(here, _INTEGERS.as_pointer()), align=4)
                builder.store(builder.xor(builder.load(total), found), total)

        _repeat(builder, passes, 1, lambda _: _repeat(builder, size, _BLOCK, block))
        _keep(builder, words, builder.load(total))

    return _made(make)


@functools.cache
def _multiplier(integers: bool) -> Callable[[int, int], None]:
    """Return a function that multiplies values in its memory repeatedly."""

    def make(builder: Any, words: Any) -> None:
        kind = _PAIRS if integers else _FLOATS
        sums = [builder.alloca(_INTEGERS if integers else _FLOATS) for _ in range(_SUMS[machine.is_wide()])]
        for total in sums:
            builder.store(ir.Constant(total.type.pointee, None), total)
        fused = ir.Function(builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fmuladd.v{LANES}f32")

        def turn(number: Any) -> None:
            # Each turn reads elsewhere: the compiler would multiply constant values only once.
            start = builder.add(words, builder.mul(builder.and_(number, _INT64(_PLACES - 1)), _INT64(LINE)))

            def read(line: int) -> Any:
                pointer = builder.inttoptr(builder.add(start, _INT64(LINE * line)), kind.as_pointer())
                return builder.load(pointer, align=4)

            few, others = [read(line) for line in range(2)], [read(2 + i) for i in range(len(sums) // 2)]
            for i, total in enumerate(sums):
                a, b, before = few[i % 2], others[i // 2], builder.load(total)
                builder.store(_pairs(builder, before, a, b) if integers else builder.call(fused, [a, b, before]), total)

        _repeat(builder, _INT64(_TURNS), 1, turn)
        for i, total in enumerate(sums):
            _keep(builder, words, builder.load(total), i)

    return _made(make)


def _pairs(builder: Any, before: Any, a: Any, b: Any) -> Any:
    """Add pairs of products of 16-bit values; LLVM compiles this to one instruction."""
    wide = ir.VectorType(_INT32, 2 * LANES)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    halves = [
        builder.shuffle_vector(products, products, ir.Constant(_INTEGERS, [*range(first, 2 * LANES, 2)]))
        for first in (0, 1)
    ]
    return builder.add(before, builder.add(*halves))


def _made(make: Callable[[Any, Any], None]) -> Callable[[int, int], None]:
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_INT64, _INT64]), machine.ENTRY)
    builder = ir.IRBuilder(function.append_basic_block())
    make(builder, function.args[1])
    builder.ret_void()
    return machine.loaded(machine.compiled(str(module)))


def _word(builder: Any, words: Any, i: int) -> Any:
    return builder.load(builder.inttoptr(builder.add(words, _INT64(8 * i)), _INT64.as_pointer()))


def _repeat(builder: Any, end: Any, step: int, do: Callable[[Any], None]) -> None:
    """Emit a loop over 0, step, ... below `end`. Requires: end > 0."""
    before, body = builder.block, builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    at = builder.phi(_INT64)
    at.add_incoming(_INT64(0), before)
    do(at)
    following = builder.add(at, _INT64(step))
    at.add_incoming(following, builder.block)
    after = builder.append_basic_block()
    builder.cbranch(builder.icmp_unsigned("<", following, end), body, after)
    builder.position_at_end(after)


def _keep(builder: Any, words: Any, found: Any, i: int = 0) -> None:
    """Store a result, so that the compiler cannot remove its computation."""
    target = builder.inttoptr(builder.add(words, _INT64(LINE * (_READ + i))), found.type.as_pointer())
    builder.store(found, target, align=4)
