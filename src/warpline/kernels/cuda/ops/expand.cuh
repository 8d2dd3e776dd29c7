// Expands int8 codes: y = codes * scale, row by row, for products of many rows, which need weights in T.
//
// Memory traffic: one byte in and sizeof(T) out per weight. The result is read next; small matrices are still in L2 then.
#pragma once
#include "common.cuh"

namespace warpline {

// BYTES is the widest store, where the row length allows it.
template <typename T, int COLUMNS, int BLOCK, int UNROLL, int BYTES>
__device__ __forceinline__ void expand(const signed char* codes, const float* scale, T* y, int rows) {
    constexpr int WIDTH = vector_width<T>(COLUMNS, BYTES), PER_ROW = COLUMNS / WIDTH;
    using Codes = Vec<signed char, WIDTH>;
    const long long vectors = static_cast<long long>(rows) * PER_ROW;
    const long long first = static_cast<long long>(blockIdx.x) * (BLOCK * UNROLL) + threadIdx.x;
    Codes held[UNROLL];
    float its_scale[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
        const long long at = first + i * BLOCK;
        if (at >= vectors) continue;
        held[i] = reinterpret_cast<const Codes*>(codes)[at];
        its_scale[i] = scale[at / PER_ROW];
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
        const long long at = first + i * BLOCK;
        if (at >= vectors) continue;
        Vec<T, WIDTH> pack;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) pack.at[j] = from_float<T>(static_cast<float>(held[i].at[j]) * its_scale[i]);
        reinterpret_cast<Vec<T, WIDTH>*>(y)[at] = pack;
    }
}

}  // namespace warpline
