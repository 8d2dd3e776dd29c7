// Softmax of rows, in float for every storage type.
//
// The idea: as in LayerNorm the row stays in registers, so maximum, sum and division need no traffic beyond one read and one
// write. The maximum is subtracted so that exp cannot overflow.
// Memory traffic: rows x COLUMNS elements in, as many out.
#pragma once
#include "row.cuh"

namespace warpline {

template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void softmax(const T* x, T* y, int rows) {
    __shared__ float scratch[BLOCK / WARP];
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    const long long at = static_cast<long long>(min(row, rows - 1)) * COLUMNS;
    Slice slice;
    slice.load(x + at);
    float largest = LOWEST;
    slice.each([&](float v) { largest = fmaxf(largest, v); });
    largest = group_max<ROW_WARPS>(largest, scratch);
    float sum = 0.f;
    slice.each([&](float& v) {
        v = expf(v - largest);
        sum += v;
    });
    const float scale = 1.f / group_sum<ROW_WARPS>(sum, scratch);
    slice.each([&](float& v) { v *= scale; });
    if (row < rows) slice.store(y + at);
}

}  // namespace warpline
