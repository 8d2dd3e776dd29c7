"""Attention of one head: rows of one sequence at consecutive positions, over what the cache holds.

Several rows share what is read and converted. A row's scores come from `vectors.products`, its softmax from one copy of
compiled code, and its values are added position by position, so it has the same bits among other rows and alone.
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

from warpline.kernels.cpu.arithmetic import exp
from warpline.kernels.cpu.intrinsics import INNER, Number, array
from warpline.kernels.cpu.sizes import GROUP, LANES
from warpline.kernels.cpu.vectors import VECTOR, fused, loaded, number, products

_FLOAT, _INT32 = ir.FloatType(), ir.IntType(32)
#: Vectors of a row's values that are summed at a time.
_ABREAST = 4


@functools.cache
def _mixed(rows: int) -> Callable[..., int]:
    """To so many rows of results add values, each times its weight, position by position. Compiled code calls it with
    addresses and numbers: values and the type of their elements, elements of a row of them, positions; weights, and
    from row to row of them; results, and from row to row of them."""

    @intrinsic
    def made(
        _context: Any, values: Any, kind: Any, depth: Any, count: Any, weights: Any, between: Any, y: Any, apart: Any
    ) -> Any:
        stored = kind.instance_type

        def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            values, _, depth, count, weights, between, y, apart = arguments

            def columns(first: Any, vectors: int, like: Any) -> None:
                """Of so many vectors, or of one element."""

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
                        weight = loaded(builder, weights, index, types.float32, _FLOAT)
                        if like is not _FLOAT:
                            one_lane = builder.insert_element(ir.Constant(like, ir.Undefined), weight, _INT32(0))
                            zeros = ir.Constant(ir.VectorType(_INT32, LANES), None)
                            weight = builder.shuffle_vector(one_lane, one_lane, zeros)
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


@njit(**INNER, fastmath=True)
def soften(scores: np.ndarray, scale: Number) -> None:
    """The softmax of scores times a scale, in their place."""
    count, top = len(scores), np.float32(-3e38)
    for t in range(count):
        scores[t] *= scale
        top = max(top, scores[t])
    total = np.float32(0)
    for t in range(count):
        scores[t] = exp(scores[t] - top)
        total += scores[t]
    share = np.float32(1) / total
    for t in range(count):
        scores[t] *= share


@functools.cache
def attend_of(cached: Any) -> Callable[..., None]:
    """Attention over a cache whose elements are of numpy's type `cached`: of `rows` rows the first looks at positions
    below `last`, each other at one more; the last `window` of these, if it is not 0. `q` and `y` are the addresses of
    this head's numbers, `q_apart` and `apart` the distances of rows, and at `room` there is memory for `GROUP` rows of
    q and as many rows of `capacity` scores."""
    cell = np.dtype(cached).itemsize
    block, in_turn, single = products(GROUP, 2), products(1, 4, in_turn=True), products(1, 1)
    mixed_group, mixed = _mixed(GROUP), _mixed(1)

    @njit(**INNER)
    def score(q: int, keys: int, depth: int, first: int, last: int, scores: int) -> None:
        """One row, positions from `first` on."""
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
        scale: Number, y: int, apart: int, capacity: int, room: int,
    ) -> None:  # fmt: skip
        scores, r = room + 4 * GROUP * depth, 0
        while r < rows:
            together = GROUP if rows - r >= GROUP and window == 0 else 1
            begin = max(0, last + r - window) if window > 0 else 0
            end = last + r  # of the first of them; what all of them look at
            whole = begin
            if together == GROUP:
                whole = end - (end - begin) % 2
                copies = array(room, np.float32, GROUP * depth)
                for i in range(GROUP):
                    given = array(q + 4 * (r + i) * q_apart, np.float32, depth)
                    for d in range(depth):
                        copies[i * depth + d] = given[d]
                for t in range(begin, whole, 2):
                    block(keys + t * depth * cell, cached, room, depth, scores + 4 * t, capacity)
            for i in range(together):
                its = scores + 4 * i * capacity
                score(q + 4 * (r + i) * q_apart, keys, depth, whole, end + i, its)
                soften(array(its + 4 * begin, np.float32, end + i - begin), scale)
                target = array(y + 4 * (r + i) * apart, np.float32, depth)
                for d in range(depth):
                    target[d] = np.float32(0)
            here, weights, target_at = values + begin * depth * cell, scores + 4 * begin, y + 4 * r * apart
            if together == GROUP:
                mixed_group(here, cached, depth, end - begin, weights, capacity, target_at, apart)
            else:
                mixed(here, cached, depth, end - begin, weights, capacity, target_at, apart)
            for i in range(1, together):
                its, later = scores + 4 * (i * capacity + end), values + end * depth * cell
                mixed(later, cached, depth, i, its, capacity, target_at + 4 * i * apart, apart)
            r += together

    return attend
