// Mean and variance of rows, left by whoever writes them for whoever standardises them later.
//
// They are a pair of floats for every SLICE of its columns, of all rows side by side: their mean, and the sum of their
// squared distances from it. From these those of the row follow without cancellation, whatever its mean.
#pragma once
#include "common.cuh"

namespace warpline {

constexpr int SLICE = 16;

// The statistics of a slice of which each of four neighbouring lanes has four numbers; all of a warp take part.
__device__ __forceinline__ float2 slice_statistics(float a, float b, float c, float d) {
    const auto of_all = [](float sum) {
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
    };
    const float mean = of_all((a + b) + (c + d)) * (1.f / SLICE);
    a -= mean, b -= mean, c -= mean, d -= mean;
    return make_float2(mean, of_all((a * a + b * b) + (c * c + d * d)));
}

// Mean and 1 / deviation of ROWS rows of COLUMNS for THREADS threads, each of which has a part of a row's slices.
template <int COLUMNS, int ROWS, int THREADS>
struct RowStandards {
    static constexpr int PARTS = THREADS / ROWS, EACH = COLUMNS / SLICE / PARTS;
    static_assert(EACH * PARTS * SLICE == COLUMNS && PARTS * ROWS == THREADS);
    using Shared = float2[PARTS][ROWS];
    float2 slice[EACH];
    const int row = static_cast<int>(threadIdx.x) % ROWS, part = static_cast<int>(threadIdx.x) / ROWS;

    __device__ __forceinline__ void load(const float* statistics, int rows, int first_row) {
        const float2* from = reinterpret_cast<const float2*>(statistics) + first_row + row;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            slice[i] = first_row + row < rows ? from[static_cast<long long>(part * EACH + i) * rows] : make_float2(0.f, 0.f);
        }
    }
    __device__ __forceinline__ void store(Shared& shared) const {
        float mean = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) mean += slice[i].x;
        mean *= 1.f / EACH;
#pragma unroll
        for (int i = 0; i < EACH; ++i) squares += slice[i].y + SLICE * (slice[i].x - mean) * (slice[i].x - mean);
        shared[part][row] = make_float2(mean, squares);
    }
    // Once everybody has met.
    static __device__ __forceinline__ float2 of(const Shared& shared, int row, float epsilon) {
        float mean = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) mean += shared[i][row].x * (1.f / PARTS);
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const float2 part = shared[i][row];
            squares += part.y + COLUMNS / PARTS * (part.x - mean) * (part.x - mean);
        }
        return make_float2(mean, rsqrtf(squares * (1.f / COLUMNS) + epsilon));
    }
};

}  // namespace warpline
