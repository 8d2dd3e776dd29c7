// Statistics of rows (statistics.cuh) where the op that wrote them left none. Four elements per thread.
// Memory traffic: x once, and an eighth as many floats.
#pragma once
#include "statistics.cuh"

namespace warpline {

template <typename T, int COLUMNS, int BLOCK>
__device__ __forceinline__ void row_statistics(const T* x, float* statistics, int rows) {
    static_assert(COLUMNS % SLICE == 0);
    const long long at = (static_cast<long long>(blockIdx.x) * BLOCK + threadIdx.x) * 4;
    const bool inside = at < static_cast<long long>(rows) * COLUMNS;
    const Vec<T, 4> v = inside ? *reinterpret_cast<const Vec<T, 4>*>(x + at) : Vec<T, 4>{};
    const float2 found = slice_statistics(to_float(v.at[0]), to_float(v.at[1]), to_float(v.at[2]), to_float(v.at[3]));
    if (inside && threadIdx.x % 4 == 0) {
        reinterpret_cast<float2*>(statistics)[at % COLUMNS / SLICE * rows + at / COLUMNS] = found;
    }
}

}  // namespace warpline
