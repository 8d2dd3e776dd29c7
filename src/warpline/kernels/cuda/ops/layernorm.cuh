// LayerNorm of rows: y = (x - mean) / sqrt(variance + epsilon) * weight + bias.
//
// The idea: a row is held in registers by the warps that own it, so it is read once and written once, and mean and
// variance are taken one after the other (the numerically safe way) at no extra traffic.
// Traffic: rows x COLUMNS elements in, as many out; weight and bias stay in the caches.
#pragma once
#include "row.cuh"

namespace warpline {

// Mean 0 and variance 1, in place. Every thread of the block must call it; `scratch` holds a float per warp.
template <typename T, int COLUMNS, int ROW_WARPS>
__device__ __forceinline__ void standardise(RowSlice<T, COLUMNS, ROW_WARPS>& slice, float epsilon, float* scratch) {
    float sum = 0.f;
    slice.each([&](float v) { sum += v; });
    const float mean = group_sum<ROW_WARPS>(sum, scratch) * (1.f / COLUMNS);
    float squares = 0.f;
    slice.each([&](float& v) {
        v -= mean;
        squares += v * v;
    });
    const float scale = rsqrtf(group_sum<ROW_WARPS>(squares, scratch) * (1.f / COLUMNS) + epsilon);
    slice.each([&](float& v) { v *= scale; });
}

template <typename T, int COLUMNS, int ROW_WARPS>
__device__ __forceinline__ void normalise(RowSlice<T, COLUMNS, ROW_WARPS>& slice, const T* weight, const T* bias,
                                          float epsilon, float* scratch) {
    standardise(slice, epsilon, scratch);
    slice.each(weight, bias, [&](float& v, float w, float b) { v = v * w + b; });
}

template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void layernorm(const T* x, const T* weight, const T* bias, T* y, int rows, float epsilon) {
    __shared__ float scratch[BLOCK / WARP];
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    // A group beyond the last row repeats it, so that the block's barriers are met by all; only its store is left out.
    const long long at = static_cast<long long>(min(row, rows - 1)) * COLUMNS;
    Slice slice;
    slice.load(x + at);
    normalise(slice, weight, bias, epsilon, scratch);
    if (row < rows) slice.store(y + at);
}

// The residual added first: sum = x + residual, y = LayerNorm(sum). The sum is rounded before it is normalised, as it
// would be if two kernels did this.
template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void residual_layernorm(const T* x, const T* residual, const T* weight, const T* bias, T* sum,
                                                   T* y, int rows, float epsilon) {
    __shared__ float scratch[BLOCK / WARP];
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    const long long at = static_cast<long long>(min(row, rows - 1)) * COLUMNS;
    Slice slice, other;
    slice.load(x + at);
    other.load(residual + at);
#pragma unroll
    for (int i = 0; i < Slice::STEPS * Slice::WIDTH; ++i) {
        slice.value[i] = to_float(from_float<T>(slice.value[i] + other.value[i]));
    }
    if (row < rows) slice.store(sum + at);
    normalise(slice, weight, bias, epsilon, scratch);
    if (row < rows) slice.store(y + at);
}

}  // namespace warpline
