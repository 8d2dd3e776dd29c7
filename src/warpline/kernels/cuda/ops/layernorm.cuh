// LayerNorm of rows: y = (x - mean) / sqrt(variance + epsilon) * weight + bias.
//
// The idea: the warps that own a row hold it in registers, so it is read once and written once. Mean and variance are computed
// one after the other, which is numerically safe, without extra traffic.
// Memory traffic: rows x COLUMNS elements in, as many out; weight and bias stay in the caches.
#pragma once
#include "row.cuh"

namespace warpline {

// Makes mean 0 and variance 1, in place. Requires: every thread of the block calls it; `scratch` holds a float per warp.
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
    // Threads beyond the last row repeat it without storing, so that every thread reaches the block's barriers.
    const long long at = static_cast<long long>(min(row, rows - 1)) * COLUMNS;
    Slice slice;
    slice.load(x + at);
    normalise(slice, weight, bias, epsilon, scratch);
    if (row < rows) slice.store(y + at);
}

// With the residual: sum = x + residual, y = LayerNorm(sum). The sum is rounded before it is normalised, as two kernels would do.
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
