// LayerNorm of rows: y = (x - mean) / sqrt(variance + epsilon) * weight + bias.
//
// The idea: a row is held in registers by the warps that own it, so it is read once and written once, and mean and
// variance are taken one after the other (the numerically safe way) at no extra traffic.
// Traffic: rows x COLUMNS elements in, as many out; weight and bias stay in the caches.
#pragma once
#include "common.cuh"

namespace warpline {

// The part of a row that one lane holds, as floats.
template <typename T, int COLUMNS, int ROW_WARPS>
struct RowSlice {
    static constexpr int WIDTH = vector_width<T>(COLUMNS);
    static constexpr int VECTORS = COLUMNS / WIDTH;
    static constexpr int LANES = ROW_WARPS * WARP;
    static constexpr int STEPS = ceil_div(VECTORS, LANES);
    using Pack = Vec<T, WIDTH>;

    float value[STEPS * WIDTH];
    int lane;

    __device__ __forceinline__ RowSlice() : lane(threadIdx.x % LANES) {}

    __device__ __forceinline__ bool holds(int step) const { return step * LANES + lane < VECTORS; }
    __device__ __forceinline__ int index(int step) const { return step * LANES + lane; }

    __device__ __forceinline__ void load(const T* row) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (!holds(step)) continue;
            const Pack pack = reinterpret_cast<const Pack*>(row)[index(step)];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) value[step * WIDTH + i] = to_float(pack.at[i]);
        }
    }

    __device__ __forceinline__ void store(T* row) const {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (!holds(step)) continue;
            Pack pack;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) pack.at[i] = from_float<T>(value[step * WIDTH + i]);
            reinterpret_cast<Pack*>(row)[index(step)] = pack;
        }
    }

    // Normalise in place. Every thread of the block must call it.
    __device__ __forceinline__ void normalise(const T* weight, const T* bias, float epsilon, float* scratch) {
        float sum = 0.f;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (!holds(step)) continue;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) sum += value[step * WIDTH + i];
        }
        const float mean = group_sum<ROW_WARPS>(sum, scratch) * (1.f / COLUMNS);
        float squares = 0.f;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (!holds(step)) continue;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                const float d = value[step * WIDTH + i] - mean;
                squares += d * d;
            }
        }
        const float scale = rsqrtf(group_sum<ROW_WARPS>(squares, scratch) * (1.f / COLUMNS) + epsilon);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (!holds(step)) continue;
            const Pack w = reinterpret_cast<const Pack*>(weight)[index(step)];
            const Pack b = reinterpret_cast<const Pack*>(bias)[index(step)];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                float& v = value[step * WIDTH + i];
                v = (v - mean) * scale * to_float(w.at[i]) + to_float(b.at[i]);
            }
        }
    }
};

template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void layernorm(const T* x, const T* weight, const T* bias, T* y, int rows, float epsilon) {
    __shared__ float scratch[BLOCK / WARP];
    const int row = blockIdx.x * (BLOCK / (ROW_WARPS * WARP)) + threadIdx.x / (ROW_WARPS * WARP);
    // A group beyond the last row repeats it, so that the block's barriers are met by all; only its store is left out.
    const long long at = static_cast<long long>(min(row, rows - 1)) * COLUMNS;
    RowSlice<T, COLUMNS, ROW_WARPS> slice;
    slice.load(x + at);
    slice.normalise(weight, bias, epsilon, scratch);
    if (row < rows) slice.store(y + at);
}

// The residual added first: sum = x + residual, y = LayerNorm(sum). The sum is rounded before it is normalised, as it
// would be if two kernels did this.
template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void residual_layernorm(const T* x, const T* residual, const T* weight, const T* bias, T* sum,
                                                   T* y, int rows, float epsilon) {
    __shared__ float scratch[BLOCK / WARP];
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = blockIdx.x * (BLOCK / (ROW_WARPS * WARP)) + threadIdx.x / (ROW_WARPS * WARP);
    const long long at = static_cast<long long>(min(row, rows - 1)) * COLUMNS;
    Slice slice, other;
    slice.load(x + at);
    other.load(residual + at);
#pragma unroll
    for (int i = 0; i < Slice::STEPS * Slice::WIDTH; ++i) {
        slice.value[i] = to_float(from_float<T>(slice.value[i] + other.value[i]));
    }
    if (row < rows) slice.store(sum + at);
    slice.normalise(weight, bias, epsilon, scratch);
    if (row < rows) slice.store(y + at);
}

}  // namespace warpline
