// Mean and variance of rows, left by whoever writes them for whoever standardises them later.
//
// They are a pair of floats for every SLICE of its columns, of all rows side by side: their mean, and the sum of their
// squared distances from it. From these those of the row follow without cancellation, whatever its mean.
#pragma once
#include "common.cuh"

namespace warpline {

constexpr int SLICE = 16;

struct Eight {
    float at[8];
};
template <typename T>
__device__ __forceinline__ Eight load_eight(const T* from) {
    constexpr int WIDTH = 16 / sizeof(T);
    Eight eight;
#pragma unroll
    for (int i = 0; i < 8; i += WIDTH) {
        const Vec<T, WIDTH> vector = *reinterpret_cast<const Vec<T, WIDTH>*>(from + i);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) eight.at[i + j] = to_float(vector.at[j]);
    }
    return eight;
}

__device__ __forceinline__ float sum_of(const float (&v)[8]) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// The statistics of a slice of which this lane has half and its neighbour the rest; each stores one of the two numbers.
template <typename T>
__device__ __forceinline__ void leave_statistics(const Vec<T, 8>& half, float* statistics, int rows, int row, int column) {
    const unsigned pair = 3u << (threadIdx.x % WARP & ~1u);
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = to_float(half.at[i]);
    float sum = sum_of(v);
    const float mean = (sum + __shfl_xor_sync(pair, sum, 1)) * (1.f / SLICE);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = (v[i] - mean) * (v[i] - mean);
    sum = sum_of(v);
    sum += __shfl_xor_sync(pair, sum, 1);
    statistics[(static_cast<long long>(column / SLICE) * rows + row) * 2 + threadIdx.x % 2] = threadIdx.x % 2 == 0 ? mean : sum;
}

// Mean and 1 / deviation of 64 rows of COLUMNS for 256 threads, each of which has a quarter of a row's slices.
template <int COLUMNS>
struct RowStandards {
    static constexpr int SLICES = COLUMNS / SLICE, EACH = SLICES / 4;
    static_assert(EACH * 4 * SLICE == COLUMNS);
    using Shared = float2[4][64];
    float2 slice[EACH];
    const int row = static_cast<int>(threadIdx.x) % 64, quarter = static_cast<int>(threadIdx.x) / 64;

    __device__ __forceinline__ void load(const float* statistics, int rows, int first_row) {
        const float2* from = reinterpret_cast<const float2*>(statistics) + first_row + row;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            slice[i] = first_row + row < rows ? from[static_cast<long long>(quarter * EACH + i) * rows] : make_float2(0.f, 0.f);
        }
    }
    __device__ __forceinline__ void store(Shared& shared) const {
        float mean = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) mean += slice[i].x;
        mean *= 1.f / EACH;
#pragma unroll
        for (int i = 0; i < EACH; ++i) squares += slice[i].y + SLICE * (slice[i].x - mean) * (slice[i].x - mean);
        shared[quarter][row] = make_float2(mean, squares);
    }
    // Once everybody has met.
    static __device__ __forceinline__ float2 of(const Shared& shared, int row, float epsilon) {
        float mean = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) mean += shared[i][row].x * 0.25f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 part = shared[i][row];
            squares += part.y + COLUMNS / 4 * (part.x - mean) * (part.x - mean);
        }
        return make_float2(mean, rsqrtf(squares * (1.f / COLUMNS) + epsilon));
    }
};

}  // namespace warpline
