// The lower rungs of the matrix product: y = x weight^T + bias in float, x [rows, INPUTS], weight [OUTPUTS, INPUTS].
//
// The idea: each function adds one thing to the one before it, and each switch one more: UNROLL, BYTES, EACH. The rungs above are
// ops/matmul.cuh, first in float, then in half precision on tensor cores.
// Memory traffic at best: x, weight and y once. Without tiles every output reads a row of each, 8 * INPUTS bytes for 2 * INPUTS
// operations, and only the caches reduce this.
#pragma once
#include "common.cuh"

namespace warpline {

// One thread per output, neighbouring threads in neighbouring rows. Both matrices are stored row by row, so the 32 values of x
// that a warp reads at a time lie in 32 cache lines, and so do its 32 results (not coalesced).
template <typename T, int OUTPUTS, int INPUTS, int BLOCK>
__device__ __forceinline__ void matmul_naive(const T* x, const T* weight, const T* bias, T* y, int rows) {
    const long long i = static_cast<long long>(blockIdx.x) * BLOCK + threadIdx.x;
    const long long row = i % rows, output = i / rows;
    if (output >= OUTPUTS) return;
    float sum = 0.f;
#pragma unroll 1
    for (int k = 0; k < INPUTS; ++k) sum += x[row * INPUTS + k] * weight[output * INPUTS + k];
    y[row * OUTPUTS + output] = sum + bias[output];
}

// One warp per output: neighbouring lanes read neighbouring inputs, whole cache lines, and add up their parts at the end. Rows
// that do not allow vectors of BYTES get narrower ones.
template <typename T, int OUTPUTS, int INPUTS, int UNROLL, int BYTES, int BLOCK>
__device__ __forceinline__ void matmul_coalesced(const T* x, const T* weight, const T* bias, T* y, int rows) {
    constexpr int WIDTH = vector_width<T>(INPUTS, BYTES);
    using Pack = Vec<T, WIDTH>;
    const long long i = (static_cast<long long>(blockIdx.x) * BLOCK + threadIdx.x) / WARP;
    const long long row = i / OUTPUTS, output = i % OUTPUTS;
    if (row >= rows) return;  // the whole warp has the same output
    const Pack* a = reinterpret_cast<const Pack*>(x + row * INPUTS);
    const Pack* b = reinterpret_cast<const Pack*>(weight + output * INPUTS);
    float sum = 0.f;
#pragma unroll UNROLL
    for (int k = threadIdx.x % WARP; k < INPUTS / WIDTH; k += WARP) {
        const Pack p = a[k], q = b[k];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) sum += p.at[j] * q.at[j];
    }
    sum = warp_reduce(sum, [](float s, float t) { return s + t; });
    if (threadIdx.x % WARP == 0) y[row * OUTPUTS + output] = sum + bias[output];
}

// One block per square of outputs: all threads together load a tile of x and of weight once, and it serves the whole square from
// shared memory. A thread holds the sums of EACH x EACH outputs, sixteen apart, in registers; with more than one, each value
// loaded from shared memory serves several products.
template <typename T, int OUTPUTS, int INPUTS, int EACH>
__device__ __forceinline__ void matmul_tiles(const T* x, const T* weight, const T* bias, T* y, int rows) {
    constexpr int SIDE = 16, TILE = SIDE * EACH, K = 32, WIDTH = vector_width<T>(INPUTS);
    constexpr int LANE = K + 4;  // eight neighbouring rows begin on different banks
    using Pack = Vec<T, WIDTH>;
    using Four = Vec<T, 4>;
    __shared__ __align__(16) T tile_x[TILE * LANE];
    __shared__ __align__(16) T tile_w[TILE * LANE];
    constexpr int ACROSS = ceil_div(OUTPUTS, TILE);
    const int first_row = static_cast<int>(blockIdx.x) / ACROSS * TILE, first_output = static_cast<int>(blockIdx.x) % ACROSS * TILE;
    const int row0 = threadIdx.x / SIDE, column0 = threadIdx.x % SIDE;

    // Loads TILE rows of K inputs; elements outside the matrix are 0.
    const auto fetch = [](T* tile, const T* matrix, int first, int count, int k) {
#pragma unroll
        for (int i = threadIdx.x; i < TILE * K / WIDTH; i += SIDE * SIDE) {
            const int row = i / (K / WIDTH), column = i % (K / WIDTH) * WIDTH;
            Pack pack = {};
            if (first + row < count && k + column < INPUTS) {
                pack = *reinterpret_cast<const Pack*>(matrix + static_cast<long long>(first + row) * INPUTS + k + column);
            }
            *reinterpret_cast<Pack*>(tile + row * LANE + column) = pack;
        }
    };

    float sum[EACH][EACH] = {};
    for (int k0 = 0; k0 < INPUTS; k0 += K) {
        fetch(tile_x, x, first_row, rows, k0);
        fetch(tile_w, weight, first_output, OUTPUTS, k0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < K; k += 4) {
            Four a[EACH], b[EACH];
#pragma unroll
            for (int m = 0; m < EACH; ++m) a[m] = *reinterpret_cast<const Four*>(tile_x + (row0 + m * SIDE) * LANE + k);
#pragma unroll
            for (int n = 0; n < EACH; ++n) b[n] = *reinterpret_cast<const Four*>(tile_w + (column0 + n * SIDE) * LANE + k);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int m = 0; m < EACH; ++m) {
#pragma unroll
                    for (int n = 0; n < EACH; ++n) sum[m][n] += a[m].at[j] * b[n].at[j];
                }
            }
        }
        __syncthreads();  // these tiles have been read
    }
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        const int output = first_output + column0 + n * SIDE;
        if (output >= OUTPUTS) continue;
        const float shift = bias[output];
#pragma unroll
        for (int m = 0; m < EACH; ++m) {
            const int row = first_row + row0 + m * SIDE;
            if (row < rows) y[static_cast<long long>(row) * OUTPUTS + output] = sum[m][n] + shift;
        }
    }
}

}  // namespace warpline
