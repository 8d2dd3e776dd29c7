// Mean and variance of rows: stored by the op that writes the rows, for the op that standardises them.
//
// The idea: for every SLICE of columns two floats, the mean and the sum of squared distances from it; slices of all rows are
// stored side by side. Those of the whole row follow without cancellation, whatever its mean.
#pragma once
#include "common.cuh"

namespace warpline {

constexpr int SLICE = 16;

// Statistics of a slice of which four neighbouring lanes have four values each. Requires: the whole warp calls it.
__device__ __forceinline__ float2 slice_statistics(float a, float b, float c, float d) {
    const auto of_all = [](float sum) {
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
    };
    const float mean = of_all((a + b) + (c + d)) * (1.f / SLICE);
    a -= mean, b -= mean, c -= mean, d -= mean;
    return make_float2(mean, of_all((a * a + b * b) + (c * c + d * d)));
}

// Mean and 1 / deviation of ROWS rows of COLUMNS, by THREADS threads, each with a part of a row's slices. Slices are added up in
// quarters of a row, then the quarters, so that the number of threads per row changes no bit.
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
    // Requires: a barrier of the block since `store`.
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
