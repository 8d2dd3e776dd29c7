// The lower rungs of GELU after a bias: y = g(x + bias), in float, with tanhf as in the formula.
//
// The idea: every element is read and written once in any case, so only the number of bytes in flight can change. The rung above,
// ops/gelu.cuh, also replaces tanhf by two cheap instructions.
// Memory traffic: one element in, one out; the bias comes from the caches.
#pragma once
#include "common.cuh"

namespace warpline {

__device__ __forceinline__ float gelu_tanh(float x) {
    return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// One thread per RUN neighbouring elements, one after another: the lanes of a warp are RUN elements apart.
template <typename T, int COLUMNS, int RUN, int BLOCK>
__device__ __forceinline__ void gelu_naive(const T* x, const T* bias, T* y, int rows) {
    const long long first = (static_cast<long long>(blockIdx.x) * BLOCK + threadIdx.x) * RUN;
    const long long elements = static_cast<long long>(rows) * COLUMNS;
#pragma unroll 1
    for (long long i = first; i < min(first + RUN, elements); ++i) y[i] = gelu_tanh(x[i] + bias[i % COLUMNS]);
}

// Neighbouring threads take neighbouring vectors of up to BYTES. With UNROLL a thread has several, a block apart, and all its
// loads come before its stores.
template <typename T, int COLUMNS, int UNROLL, int BYTES, int BLOCK>
__device__ __forceinline__ void gelu_coalesced(const T* x, const T* bias, T* y, int rows) {
    constexpr int WIDTH = vector_width<T>(COLUMNS, BYTES), PER_ROW = COLUMNS / WIDTH;
    using Pack = Vec<T, WIDTH>;
    const long long vectors = static_cast<long long>(rows) * PER_ROW;
    const long long first = static_cast<long long>(blockIdx.x) * (BLOCK * UNROLL) + threadIdx.x;
    Pack pack[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
        if (first + i * BLOCK < vectors) pack[i] = reinterpret_cast<const Pack*>(x)[first + i * BLOCK];
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
        const long long at = first + i * BLOCK;
        if (at >= vectors) continue;
        const Pack shift = reinterpret_cast<const Pack*>(bias)[at % PER_ROW];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) pack[i].at[j] = gelu_tanh(pack[i].at[j] + shift.at[j]);
        reinterpret_cast<Pack*>(y)[at] = pack[i];
    }
}

}  // namespace warpline
