// Token and position embedding: y = wte[id] + wpe[position], row by row.
//
// Traffic: two rows of COLUMNS elements in, one out. Rows are gathered, but each is read in whole vectors.
#pragma once
#include "row.cuh"

namespace warpline {

template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void embedding(const long long* ids, const long long* positions, const T* wte, const T* wpe,
                                          T* y, int rows) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    if (row >= rows) return;
    Slice token, place;
    token.load(wte + ids[row] * COLUMNS);
    place.load(wpe + positions[row] * COLUMNS);
#pragma unroll
    for (int i = 0; i < Slice::STEPS * Slice::WIDTH; ++i) token.value[i] += place.value[i];
    token.store(y + static_cast<long long>(row) * COLUMNS);
}

// Of each sequence its newest token, at its place: the one at length - 1 of the row of `tokens`.
template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void newest_embedding(const long long* tokens, const long long* length, const T* wte,
                                                 const T* wpe, T* y, int rows, int capacity) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    if (row >= rows) return;
    const long long position = length[row] - 1;
    Slice token, place;
    place.load(wpe + position * COLUMNS);
    token.load(wte + tokens[static_cast<long long>(row) * capacity + position] * COLUMNS);
#pragma unroll
    for (int i = 0; i < Slice::STEPS * Slice::WIDTH; ++i) token.value[i] += place.value[i];
    token.store(y + static_cast<long long>(row) * COLUMNS);
}

}  // namespace warpline
