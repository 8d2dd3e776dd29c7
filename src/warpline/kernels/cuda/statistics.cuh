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

// Mean and 1 / deviation of ROWS rows of COLUMNS for THREADS threads, each of which has a part of a row's slices. They are
// added up in quarters of a row, then the quarters, so that the number of threads to a row changes no bit.
template <int COLUMNS, int ROWS, int THREADS>
struct RowStandards {
    static constexpr int PARTS = THREADS / ROWS, QUARTERS = 4, OWN = QUARTERS / PARTS, EACH = COLUMNS / SLICE / QUARTERS;
    static_assert(EACH * QUARTERS * SLICE == COLUMNS && PARTS * ROWS == THREADS && OWN * PARTS == QUARTERS);
    using Shared = float2[QUARTERS][ROWS];
    float2 slice[OWN][EACH];
    const int row = static_cast<int>(threadIdx.x) % ROWS, part = static_cast<int>(threadIdx.x) / ROWS;

    __device__ __forceinline__ void load(const float* statistics, int rows, int first_row) {
        const float2* from = reinterpret_cast<const float2*>(statistics) + first_row + row;
#pragma unroll
        for (int i = 0; i < OWN * EACH; ++i) {
            slice[i / EACH][i % EACH] =
                first_row + row < rows ? from[static_cast<long long>(part * OWN * EACH + i) * rows] : make_float2(0.f, 0.f);
        }
    }
    __device__ __forceinline__ void store(Shared& shared) const {
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
            const float2(&its)[EACH] = slice[own];
            float mean = 0.f, squares = 0.f;
#pragma unroll
            for (int i = 0; i < EACH; ++i) mean += its[i].x;
            mean *= 1.f / EACH;
#pragma unroll
            for (int i = 0; i < EACH; ++i) squares += its[i].y + SLICE * (its[i].x - mean) * (its[i].x - mean);
            shared[part * OWN + own][row] = make_float2(mean, squares);
        }
    }
    // Once everybody has met.
    static __device__ __forceinline__ float2 of(const Shared& shared, int row, float epsilon) {
        float mean = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < QUARTERS; ++i) mean += shared[i][row].x * (1.f / QUARTERS);
#pragma unroll
        for (int i = 0; i < QUARTERS; ++i) {
            const float2 quarter = shared[i][row];
            squares += quarter.y + COLUMNS / QUARTERS * (quarter.x - mean) * (quarter.x - mean);
        }
        return make_float2(mean, rsqrtf(squares * (1.f / COLUMNS) + epsilon));
    }
};

}  // namespace warpline
