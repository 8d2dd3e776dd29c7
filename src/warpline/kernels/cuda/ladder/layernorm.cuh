// The lower rungs of LayerNorm: y = (x - mean) / sqrt(variance + epsilon) * weight + bias, in float.
//
// The idea: which threads own a row, and how they add up. All of these read the row three times, for mean, variance and result;
// the rung above, ops/layernorm.cuh, holds it in registers and reads it once.
// Memory traffic at best: rows x COLUMNS elements in, as many out. Repeated reads of a row mostly come from L1.
#pragma once
#include "ladder/tree.cuh"

namespace warpline {

// One thread per row: the loads of a warp are a row apart, so 32 cache lines are fetched for 32 values (not coalesced).
template <typename T, int COLUMNS, int BLOCK>
__device__ __forceinline__ void layernorm_naive(const T* x, const T* weight, const T* bias, T* y, int rows, float epsilon) {
    const int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= rows) return;
    const T* in = x + static_cast<long long>(row) * COLUMNS;
    T* out = y + static_cast<long long>(row) * COLUMNS;
    float sum = 0.f, squares = 0.f;
#pragma unroll 1
    for (int i = 0; i < COLUMNS; ++i) sum += in[i];
    const float mean = sum * (1.f / COLUMNS);
#pragma unroll 1
    for (int i = 0; i < COLUMNS; ++i) squares += (in[i] - mean) * (in[i] - mean);
    const float scale = rsqrtf(squares * (1.f / COLUMNS) + epsilon);
#pragma unroll 1
    for (int i = 0; i < COLUMNS; ++i) out[i] = (in[i] - mean) * scale * weight[i] + bias[i];
}

// One block per row: neighbouring threads read neighbouring columns, and sums are added by a tree in shared memory.
template <typename T, int COLUMNS, int BLOCK>
__device__ __forceinline__ void layernorm_tree(const T* x, const T* weight, const T* bias, T* y, int rows, float epsilon) {
    __shared__ float tree[BLOCK];
    const auto add = [](float a, float b) { return a + b; };
    const T* in = x + static_cast<long long>(blockIdx.x) * COLUMNS;
    T* out = y + static_cast<long long>(blockIdx.x) * COLUMNS;
    float sum = 0.f, squares = 0.f;
#pragma unroll 1
    for (int i = threadIdx.x; i < COLUMNS; i += BLOCK) sum += in[i];
    const float mean = tree_reduce<BLOCK>(sum, tree, add) * (1.f / COLUMNS);
#pragma unroll 1
    for (int i = threadIdx.x; i < COLUMNS; i += BLOCK) squares += (in[i] - mean) * (in[i] - mean);
    const float scale = rsqrtf(tree_reduce<BLOCK>(squares, tree, add) * (1.f / COLUMNS) + epsilon);
#pragma unroll 1
    for (int i = threadIdx.x; i < COLUMNS; i += BLOCK) out[i] = (in[i] - mean) * scale * weight[i] + bias[i];
}

// ROW_WARPS warps per row: lanes exchange registers, and the sums of several warps are added in shared memory once. With BYTES of
// 16 a lane reads and writes four neighbours at a time, where the row length allows it.
template <typename T, int COLUMNS, int ROW_WARPS, int BYTES, int BLOCK>
__device__ __forceinline__ void layernorm_warps(const T* x, const T* weight, const T* bias, T* y, int rows, float epsilon) {
    constexpr int LANES = ROW_WARPS * WARP, WIDTH = vector_width<T>(COLUMNS, BYTES), VECTORS = COLUMNS / WIDTH;
    using Pack = Vec<T, WIDTH>;
    __shared__ float scratch[BLOCK / WARP];
    const int row = blockIdx.x * (BLOCK / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    // Threads beyond the last row repeat it without storing, so that every thread reaches the block's barriers.
    const long long at = static_cast<long long>(min(row, rows - 1)) * COLUMNS;
    const Pack* in = reinterpret_cast<const Pack*>(x + at);
    float sum = 0.f, squares = 0.f;
    // Unrolled by a fixed number: a complete unroll would let the compiler keep the row in registers, which is the next rung's
    // idea.
#pragma unroll 2
    for (int i = lane; i < VECTORS; i += LANES) {
        const Pack pack = in[i];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) sum += pack.at[j];
    }
    const float mean = group_sum<ROW_WARPS>(sum, scratch) * (1.f / COLUMNS);
#pragma unroll 2
    for (int i = lane; i < VECTORS; i += LANES) {
        const Pack pack = in[i];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) squares += (pack.at[j] - mean) * (pack.at[j] - mean);
    }
    const float scale = rsqrtf(group_sum<ROW_WARPS>(squares, scratch) * (1.f / COLUMNS) + epsilon);
    if (row >= rows) return;
#pragma unroll 2
    for (int i = lane; i < VECTORS; i += LANES) {
        const Pack pack = in[i], w = reinterpret_cast<const Pack*>(weight)[i], b = reinterpret_cast<const Pack*>(bias)[i];
        Pack out;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) out.at[j] = (pack.at[j] - mean) * scale * w.at[j] + b.at[j];
        reinterpret_cast<Pack*>(y + at)[i] = out;
    }
}

}  // namespace warpline
