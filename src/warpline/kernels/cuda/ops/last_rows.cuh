// Copies the rows `last` of two tensors, one per lane: all that the end of a pass over prompts needs of the last layer.
//
// Memory traffic: two rows of COLUMNS elements in and out per lane.
#pragma once
#include "row.cuh"

namespace warpline {

template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void last_rows(const T* x, const T* residual, const long long* last, T* last_x, T* last_residual,
                                          int lanes) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int lane = Slice::template row<BLOCK>();
    if (lane >= lanes) return;
    const long long from = last[lane] * COLUMNS, to = static_cast<long long>(lane) * COLUMNS;
    Slice first, second;
    first.load(x + from);
    second.load(residual + from);
    first.store(last_x + to);
    second.store(last_residual + to);
}

}  // namespace warpline
