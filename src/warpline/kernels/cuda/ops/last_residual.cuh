// Residual addition at the last position of each sequence: all that is needed of a prompt's last layer.
//
// Traffic: two rows of COLUMNS elements in and one out, for each sequence.
#pragma once
#include "row.cuh"

namespace warpline {

template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void last_residual(const T* x, const T* residual, const long long* count, T* y, int rows, int length) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    if (row >= rows) return;
    const long long at = (static_cast<long long>(row) * length + count[row] - 1) * COLUMNS;
    Slice sum, other;
    sum.load(x + at);
    other.load(residual + at);
#pragma unroll
    for (int i = 0; i < Slice::STEPS * Slice::WIDTH; ++i) sum.value[i] += other.value[i];
    sum.store(y + static_cast<long long>(row) * COLUMNS);
}

}  // namespace warpline
