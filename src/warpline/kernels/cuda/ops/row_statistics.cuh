// Statistics of rows that nobody has left any of: see statistics.cuh. A thread has eight elements.
// Traffic: x once, and an eighth as many floats.
#pragma once
#include "statistics.cuh"

namespace warpline {

template <typename T, int COLUMNS, int BLOCK>
__device__ __forceinline__ void row_statistics(const T* x, float* statistics, int rows) {
    static_assert(COLUMNS % SLICE == 0);
    const long long at = (static_cast<long long>(blockIdx.x) * BLOCK + threadIdx.x) * 8;
    if (at < static_cast<long long>(rows) * COLUMNS) {
        const int row = static_cast<int>(at / COLUMNS), column = static_cast<int>(at % COLUMNS);
        leave_statistics(*reinterpret_cast<const Vec<T, 8>*>(x + at), statistics, rows, row, column);
    }
}

}  // namespace warpline
