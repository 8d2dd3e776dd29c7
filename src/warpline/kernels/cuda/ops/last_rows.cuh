// The last position of each sequence in two tensors: all that a prompt's last block needs behind its attention.
//
// Traffic: two rows of COLUMNS elements in and out, for each sequence.
#pragma once
#include "row.cuh"

namespace warpline {

template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void last_rows(const T* x, const T* residual, const long long* count, T* last_x, T* last_residual,
                                          int rows, int length) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    if (row >= rows) return;
    const long long from = (static_cast<long long>(row) * length + count[row] - 1) * COLUMNS, to = static_cast<long long>(row) * COLUMNS;
    Slice first, second;
    first.load(x + from);
    second.load(residual + from);
    first.store(last_x + to);
    second.store(last_residual + to);
}

}  // namespace warpline
