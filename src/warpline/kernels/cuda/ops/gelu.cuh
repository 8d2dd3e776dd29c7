// GELU in its tanh form, with or without a bias: y = g(x), y = g(x + bias).
//
// The idea: 0.5 x (1 + tanh u) equals x / (1 + exp(-2u)), which stays accurate for negative x, where 1 + tanh u cancels. It takes
// two special-function instructions, each good to about 2^-22. The fast form is one tanh.approx with a relative error of about
// 2^-11: near fp16's own rounding, visible in fp32.
// Memory traffic: one element in, one out. Small blocks of threads with one vector each come closest to a copy; for few elements,
// narrower vectors use more threads.
// Tried and lost: expf and IEEE division, some 25 instructions per element; in half precision the kernel was then bound by
// arithmetic, at 70 % of a copy's bandwidth.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

namespace warpline {

template <bool FAST>
__device__ __forceinline__ float gelu_of(float x) {
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    if constexpr (FAST) return 0.5f * x * (1.f + tanh_approx(u));
    return x * rcp_approx(1.f + exp2_approx(-2.f * LOG2_E * u));
}

// `bias` may be null. BYTES is the widest load or store, where the row length allows it.
template <typename T, int COLUMNS, bool FAST, int BLOCK, int UNROLL, int BYTES>
__device__ __forceinline__ void gelu(const T* x, const T* bias, T* y, int rows) {
    constexpr int WIDTH = vector_width<T>(COLUMNS, BYTES), PER_ROW = COLUMNS / WIDTH;
    using Pack = Vec<T, WIDTH>;
    const long long vectors = static_cast<long long>(rows) * PER_ROW;
    const long long first = static_cast<long long>(blockIdx.x) * (BLOCK * UNROLL) + threadIdx.x;
    const int column = bias != nullptr ? static_cast<int>(first % PER_ROW) : 0;
    Pack pack[UNROLL], shift[UNROLL] = {};
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
        if (first + i * BLOCK >= vectors) continue;
        pack[i] = reinterpret_cast<const Pack*>(x)[first + i * BLOCK];
        if (bias != nullptr) shift[i] = reinterpret_cast<const Pack*>(bias)[(column + i * BLOCK) % PER_ROW];
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
        if (first + i * BLOCK >= vectors) continue;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            pack[i].at[j] = from_float<T>(gelu_of<FAST>(to_float(pack[i].at[j]) + to_float(shift[i].at[j])));
        }
        reinterpret_cast<Pack*>(y)[first + i * BLOCK] = pack[i];
    }
}

}  // namespace warpline
