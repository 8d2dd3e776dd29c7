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

}  // namespace warpline
