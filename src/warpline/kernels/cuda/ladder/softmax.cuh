// The lower rungs of softmax over rows, in float.
//
// The idea: as in LayerNorm, which threads own a row and how they combine their results; then how often the row is read: three
// times (maximum, sum, result), twice with the online softmax, once in ops/softmax.cuh, the rung above.
// Memory traffic at best: rows x COLUMNS elements in, as many out. Repeated reads of a row mostly come from L1.
#pragma once
#include "ladder/tree.cuh"

namespace warpline {

// One thread per row.
template <typename T, int COLUMNS, int BLOCK>
__device__ __forceinline__ void softmax_naive(const T* x, T* y, int rows) {
    const int row = blockIdx.x * BLOCK + threadIdx.x;
    if (row >= rows) return;
    const T* in = x + static_cast<long long>(row) * COLUMNS;
    T* out = y + static_cast<long long>(row) * COLUMNS;
    float largest = LOWEST, sum = 0.f;
#pragma unroll 1
    for (int i = 0; i < COLUMNS; ++i) largest = fmaxf(largest, in[i]);
#pragma unroll 1
    for (int i = 0; i < COLUMNS; ++i) sum += expf(in[i] - largest);
    const float scale = 1.f / sum;
#pragma unroll 1
    for (int i = 0; i < COLUMNS; ++i) out[i] = expf(in[i] - largest) * scale;
}

// One block per row, with a tree reduction in shared memory.
template <typename T, int COLUMNS, int BLOCK>
__device__ __forceinline__ void softmax_tree(const T* x, T* y, int rows) {
    __shared__ float tree[BLOCK];
    const T* in = x + static_cast<long long>(blockIdx.x) * COLUMNS;
    T* out = y + static_cast<long long>(blockIdx.x) * COLUMNS;
    float largest = LOWEST, sum = 0.f;
#pragma unroll 1
    for (int i = threadIdx.x; i < COLUMNS; i += BLOCK) largest = fmaxf(largest, in[i]);
    largest = tree_reduce<BLOCK>(largest, tree, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll 1
    for (int i = threadIdx.x; i < COLUMNS; i += BLOCK) sum += expf(in[i] - largest);
    const float scale = 1.f / tree_reduce<BLOCK>(sum, tree, [](float a, float b) { return a + b; });
#pragma unroll 1
    for (int i = threadIdx.x; i < COLUMNS; i += BLOCK) out[i] = expf(in[i] - largest) * scale;
}

// ROW_WARPS warps per row, vectors of up to BYTES. ONLINE computes maximum and sum in one pass: when a lane finds a larger value,
// it rescales its sum.
template <typename T, int COLUMNS, int ROW_WARPS, int BYTES, bool ONLINE, int BLOCK>
__device__ __forceinline__ void softmax_warps(const T* x, T* y, int rows) {
    constexpr int LANES = ROW_WARPS * WARP, WIDTH = vector_width<T>(COLUMNS, BYTES), VECTORS = COLUMNS / WIDTH;
    using Pack = Vec<T, WIDTH>;
    __shared__ float scratch[BLOCK / WARP];
    const int row = blockIdx.x * (BLOCK / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    // Threads beyond the last row repeat it without storing, so that every thread reaches the block's barriers.
    const long long at = static_cast<long long>(min(row, rows - 1)) * COLUMNS;
    const Pack* in = reinterpret_cast<const Pack*>(x + at);
    float largest = LOWEST, sum = 0.f;
    // Unrolled by a fixed number: a complete unroll would let the compiler keep the row in registers, which is the last rung's
    // idea.
#pragma unroll 2
    for (int i = lane; i < VECTORS; i += LANES) {
        const Pack pack = in[i];
        const float before = largest;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) largest = fmaxf(largest, pack.at[j]);
        if constexpr (ONLINE) {
            sum *= expf(before - largest);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) sum += expf(pack.at[j] - largest);
        }
    }
    const float own = largest;
    largest = group_max<ROW_WARPS>(largest, scratch);
    if constexpr (ONLINE) {
        sum *= expf(own - largest);
    } else {
#pragma unroll 2
        for (int i = lane; i < VECTORS; i += LANES) {
            const Pack pack = in[i];
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) sum += expf(pack.at[j] - largest);
        }
    }
    const float scale = 1.f / group_sum<ROW_WARPS>(sum, scratch);
    if (row >= rows) return;
#pragma unroll 2
    for (int i = lane; i < VECTORS; i += LANES) {
        Pack pack = in[i];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) pack.at[j] = expf(pack.at[j] - largest) * scale;
        reinterpret_cast<Pack*>(y + at)[i] = pack;
    }
}

}  // namespace warpline
