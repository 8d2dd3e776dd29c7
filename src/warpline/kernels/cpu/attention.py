"""Attention of one head: rows of one sequence at consecutive positions, over what the cache holds.

A single row reads keys as they are stored. Several rows share keys that are transposed first, so that a lane is a
position and a dot product needs no sum across a vector; it adds in the order of `vectors.products` all the same. Values
are added position by position. So a row has the same bits alone and among other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from warpline.kernels.cpu.intrinsics import INNER, Number, array
from warpline.kernels.cpu.sizes import GROUP, LANES, LINE, TOGETHER, apart
from warpline.kernels.cpu.vectors import (
    LOG2_E,
    STRIDE,
    VECTOR,
    alike,
    exponential,
    fused,
    larger,
    loaded,
    number,
    picked,
    products,
    spread,
    summed,
    transposed,
)

_FLOAT, _INT32 = ir.FloatType(), ir.IntType(32)
_INTEGERS = ir.VectorType(_INT32, LANES)
#: Head size of all GPT-2 models. Loops over a number that the compiler does not know take twice as long.
_USUAL = 64
#: Below all scores.
_LEAST = -3e38
#: Vectors of a row's values that are summed at a time.
_ABREAST = 4


@functools.cache
def _mixed(rows: int) -> Callable[..., int]:
    """Return a function that adds values, each times its weight, to `rows` rows of results, position by position.

    Its arguments: address of the values and type of their elements, elements per row of values, positions; address of
    the weights and their row stride; address of the results and their row stride."""

    @intrinsic
    def made(
        _context: Any, values: Any, kind: Any, depth: Any, count: Any, weights: Any, between: Any, y: Any, apart: Any
    ) -> Any:
        stored = kind.instance_type

        def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            values, _, depth, count, weights, between, y, apart = arguments

            def columns(first: Any, vectors: int, like: Any) -> None:
                """Add `vectors` vectors of columns, or one element."""

                def place(row: int, vector: int) -> Any:
                    at = builder.add(builder.mul(apart, number(row)), builder.add(first, number(LANES * vector)))
                    address = builder.add(y, builder.mul(at, number(4)))
                    return builder.inttoptr(address, like.as_pointer())

                each = [(row, vector) for row in range(rows) for vector in range(vectors)]
                totals = {one: cgutils.alloca_once(builder, like) for one in each}
                for one, total in totals.items():
                    builder.store(builder.load(place(*one), align=4), total)
                with cgutils.for_range(builder, count) as loop:
                    at = builder.add(builder.mul(loop.index, depth), first)
                    some = [
                        loaded(builder, values, builder.add(at, number(LANES * v)), stored, like)
                        for v in range(vectors)
                    ]
                    for row in range(rows):
                        index = builder.add(builder.mul(between, number(row)), loop.index)
                        weight = spread(builder, loaded(builder, weights, index, types.float32, _FLOAT), like)
                        for vector, value in enumerate(some):
                            total = totals[row, vector]
                            builder.store(fused(builder, builder.load(total), value, weight), total)
                for one, total in totals.items():
                    builder.store(builder.load(total), place(*one), align=4)

            done = number(0)
            for vectors in (_ABREAST, 1):
                size = number(LANES * vectors)
                steps = builder.udiv(builder.sub(depth, done), size)
                with cgutils.for_range(builder, steps) as loop:
                    columns(builder.add(done, builder.mul(loop.index, size)), vectors, VECTOR)
                done = builder.add(done, builder.mul(steps, size))
            with cgutils.for_range(builder, builder.sub(depth, done)) as loop:
                columns(builder.add(done, loop.index), 1, _FLOAT)
            return count

        return types.int64(types.int64, kind, *[types.int64] * 6), make

    return made


@intrinsic
def _softened(_context: Any, scores: Any, count: Any, scale: Any) -> Any:
    """Replace scores by exp(scaled score minus the largest) and return 1 / their sum. `scores` is an address; up to a
    whole vector behind the last score may be overwritten."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, count, scale = arguments
        vectors = builder.udiv(count, number(LANES))
        rest = builder.trunc(builder.urem(count, number(LANES)), _INT32)
        lanes = ir.Constant(_INTEGERS, [*range(LANES)])
        is_there = builder.icmp_unsigned("<", lanes, spread(builder, rest, _INTEGERS))

        def each(do: Callable[[Any, Any], None]) -> None:
            """Call `do` with every vector's address, and the mask of its valid lanes, None for all."""
            with cgutils.for_range(builder, vectors) as loop:
                do(place(loop.index), None)
            with builder.if_then(builder.icmp_unsigned(">", rest, _INT32(0))):
                do(place(vectors), is_there)

        def place(vector: Any) -> Any:
            return builder.inttoptr(builder.add(scores, builder.mul(vector, number(4 * LANES))), VECTOR.as_pointer())

        def among(there: Any, found: Any, other: float) -> Any:
            return found if there is None else builder.select(there, found, alike(VECTOR, other))

        largest = cgutils.alloca_once_value(builder, alike(VECTOR, _LEAST))
        total = cgutils.alloca_once_value(builder, alike(VECTOR, 0.0))

        def compare(at: Any, there: Any) -> None:
            found = among(there, builder.load(at, align=4), _LEAST)
            builder.store(larger(builder, builder.load(largest), found), largest)

        each(compare)
        top = builder.load(largest)
        for step in (8, 4, 2, 1):
            top = larger(builder, top, picked(builder, top, top, [lane ^ step for lane in range(LANES)]))
        factor = spread(builder, builder.fmul(scale, ir.Constant(_FLOAT, LOG2_E)), VECTOR)

        def weigh(at: Any, there: Any) -> None:
            off = builder.fmul(builder.fsub(builder.load(at, align=4), top), factor)
            found = among(there, exponential(builder, off), 0.0)
            builder.store(found, at, align=4)
            builder.store(builder.fadd(builder.load(total), found), total)

        each(weigh)
        return builder.fdiv(ir.Constant(_FLOAT, 1.0), summed(builder, builder.load(total)))

    return types.float32(types.int64, types.int64, types.float32), make


@intrinsic
def _turned(_context: Any, keys: Any, kind: Any, depth: Any, count: Any, panel: Any) -> Any:
    """Store keys of at most `LANES` positions as float32, transposed: vectors in which a lane is a position."""
    stored = kind.instance_type

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        keys, _, depth, count, panel = arguments
        last = builder.sub(count, number(1))
        firsts = []  # elements at which rows begin; missing rows repeat the last one
        for i in range(LANES):
            row = builder.select(builder.icmp_unsigned("<", number(i), last), number(i), last)
            firsts.append(builder.mul(row, depth))

        def put(found: Any, element: Any, lane: int) -> None:
            at = builder.add(panel, builder.mul(element, number(4 * LANES)))
            at = builder.add(at, number(4 * lane))
            builder.store(found, builder.inttoptr(at, found.type.as_pointer()), align=4)

        vectors = builder.udiv(depth, number(LANES))
        with cgutils.for_range(builder, vectors) as loop:
            begin = builder.mul(loop.index, number(LANES))
            rows = [loaded(builder, keys, builder.add(first, begin), stored, VECTOR) for first in firsts]
            for i, found in enumerate(transposed(builder, rows)):
                put(found, builder.add(begin, number(i)), 0)
        done = builder.mul(vectors, number(LANES))
        with cgutils.for_range(builder, builder.sub(depth, done)) as loop:
            element = builder.add(done, loop.index)
            for lane, first in enumerate(firsts):
                put(loaded(builder, keys, builder.add(first, element), stored, _FLOAT), element, lane)
        return count

    return types.int64(types.int64, kind, *[types.int64] * 3), make


@functools.cache
def _scored(rows: int, known: int | None = None) -> Callable[..., int]:
    """Return a function that computes scores of `rows` rows of q for transposed keys, with the bits of
    `vectors.products`.

    Its arguments: addresses of the keys and of the first row, elements of a row (`known` if given at compile time);
    address of the scores and their row stride."""

    @intrinsic
    def made(_context: Any, panel: Any, q: Any, depth: Any, scores: Any, apart: Any) -> Any:
        def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            panel, q, depth, scores, apart = arguments
            if known is not None:
                depth = number(known)
            starts = [builder.add(q, builder.mul(depth, number(4 * row))) for row in range(rows)]
            steps = builder.udiv(depth, number(STRIDE))
            whole = builder.mul(steps, number(STRIDE))
            has_half = builder.icmp_unsigned(">=", builder.sub(depth, whole), number(LANES))

            def add(totals: list[Any], element: Any) -> None:
                key = loaded(builder, panel, builder.mul(element, number(LANES)), types.float32, VECTOR)
                for start, total in zip(starts, totals, strict=True):
                    one = spread(builder, loaded(builder, start, element, types.float32, _FLOAT), VECTOR)
                    builder.store(fused(builder, builder.load(total), key, one), total)

            def zeros() -> list[Any]:
                made = [cgutils.alloca_once(builder, VECTOR) for _ in range(rows)]
                for total in made:
                    builder.store(alike(VECTOR, 0.0), total)
                return made

            def summed_up(first: int, step: int) -> list[Any]:
                """Sum the elements from `first` on, every `step`-th."""
                if step < STRIDE:
                    halves = summed_up(first, 2 * step), summed_up(first + step, 2 * step)
                    return [builder.fadd(a, b) for a, b in zip(*halves, strict=True)]
                totals = zeros()
                with cgutils.for_range(builder, steps) as loop:
                    add(totals, builder.add(builder.mul(loop.index, number(STRIDE)), number(first)))
                if first < LANES:
                    with builder.if_then(has_half):
                        add(totals, builder.add(whole, number(first)))
                return [builder.load(total) for total in totals]

            found, rest = summed_up(0, 1), zeros()
            done = builder.select(has_half, builder.add(whole, number(LANES)), whole)
            with cgutils.for_range(builder, builder.sub(depth, done)) as loop:
                add(rest, builder.add(done, loop.index))
            for row, (one, more) in enumerate(zip(found, rest, strict=True)):
                at = builder.add(scores, builder.mul(apart, number(4 * row)))
                target = builder.inttoptr(at, VECTOR.as_pointer())
                builder.store(builder.fadd(one, builder.load(more)), target, align=4)
            return depth

        return types.int64(*[types.int64] * 5), make

    return made


_apart = njit(**INNER)(apart)


@functools.cache
def attend_of(cached: Any, wide: bool) -> Callable[..., None]:
    """Return attention over a cache of numpy's type `cached`. The first of `rows` rows sees the positions below `last`,
    each next row one more; the last `window` of these, if it is not 0. `q` and `y` are addresses of this head's values,
    `q_apart` and `y_apart` the row strides, and `room` is the address of `sizes.attending` floats. `wide`: see
    `decode.program`."""
    cell = np.dtype(cached).itemsize
    in_turn, single = products(1, 4, in_turn=True), products(1, 1)
    most = 4 if wide else 1  # rows whose sums fit into the registers
    scored, scored_one, scored_unusual = _scored(most, _USUAL), _scored(1, _USUAL), _scored(1)
    mixed_group, mixed = _mixed(GROUP), _mixed(1)

    @njit(**INNER)
    def score_all(
        q: int, q_apart: int, rows: int, keys: int, depth: int, last: int, scores: int, apart: int, panel: int
    ) -> None:
        """Compute the scores of all rows for all positions, from copies of q and keys behind the scores."""
        copies = panel + 4 * LANES * depth
        for i in range(rows):
            given, copy = (
                array(q + 4 * i * q_apart, np.float32, depth),
                array(copies + 4 * i * depth, np.float32, depth),
            )
            for d in range(depth):
                copy[d] = given[d]
        end = last + rows - 1
        for t in range(0, end, LANES):
            _turned(keys + t * depth * cell, cached, depth, min(LANES, end - t), panel)
            r = max(0, t - last + 1)  # the first row that sees t
            while r < rows:
                here, target = copies + 4 * r * depth, scores + 4 * (r * apart + t)
                if depth != _USUAL:
                    scored_unusual(panel, here, depth, target, apart)
                    r += 1
                elif rows - r < most:
                    scored_one(panel, here, depth, target, apart)
                    r += 1
                else:
                    scored(panel, here, depth, target, apart)
                    r += most

    @njit(**INNER)
    def score(q: int, keys: int, depth: int, first: int, last: int, scores: int) -> None:
        """Compute the scores of one row."""
        t = first
        while t < last:
            if last - t >= 4:
                in_turn(keys + t * depth * cell, cached, q, depth, scores + 4 * t, 1)
                t += 4
            else:
                single(keys + t * depth * cell, cached, q, depth, scores + 4 * t, 1)
                t += 1

    @njit(**INNER)
    def attend(
        q: int, q_apart: int, rows: int, keys: int, values: int, depth: int, last: int, window: int,
        scale: Number, y: int, y_apart: int, capacity: int, room: int,
    ) -> None:  # fmt: skip
        apart = _apart(capacity)
        shares, scores, panel = array(room, np.float32, GROUP), room + LINE, room + LINE + 4 * TOGETHER * apart
        together = rows >= GROUP and window == 0
        if together:
            score_all(q, q_apart, rows, keys, depth, last, scores, apart, panel)
        r = 0
        while r < rows:
            some = GROUP if together and rows - r >= GROUP else 1
            end, weights, target = last + r, scores + 4 * r * apart, y + 4 * r * y_apart
            begin = max(0, end - window) if window > 0 else 0
            if not together:
                score(q + 4 * r * q_apart, keys, depth, begin, end, weights)
            for i in range(some):
                shares[i] = _softened(weights + 4 * (i * apart + begin), end + i - begin, scale)
                its = array(target + 4 * i * y_apart, np.float32, depth)
                for d in range(depth):
                    its[d] = np.float32(0)
            here, count = values + begin * depth * cell, end - begin
            if some == GROUP:
                mixed_group(here, cached, depth, count, weights + 4 * begin, apart, target, y_apart)
            else:
                mixed(here, cached, depth, count, weights + 4 * begin, apart, target, y_apart)
            for i in range(1, some):  # the positions that the first row does not see
                later, more = values + end * depth * cell, weights + 4 * (i * apart + end)
                mixed(later, cached, depth, i, more, apart, target + 4 * i * y_apart, y_apart)
            for i in range(some):
                its = array(target + 4 * i * y_apart, np.float32, depth)
                for d in range(depth):
                    its[d] *= shares[i]
            r += some

    return attend
