// Rows as int8 codes with one scale each: row = codes * scale. The same bits as codes.py computes.
#pragma once
#include "common.cuh"

namespace warpline {

using Code = signed char;
constexpr float LARGEST_CODE = 127.f, LEAST_SCALE = 1e-30f;

// Whether a storage type is codes.
template <typename S>
constexpr bool IS_CODE = false;
template <>
constexpr bool IS_CODE<Code> = true;

// The scales of a position's key and value, stored side by side.
using ScalePair = Vec<float, 2>;

// Quantises a row of which each of LANES neighbouring lanes has N values; returns its scale. Requires: all lanes of the warp call
// it. Magnitudes are compared as unsigned integers: the order is the same, and NaN, which fmaxf would drop, is the largest, so
// that the scale becomes NaN and with it the row. A row too small for the inverse of its scale becomes zeros.
template <int LANES, int N>
__device__ __forceinline__ float encode_row(const float (&x)[N], Code (&codes)[N]) {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) largest = max(largest, __float_as_uint(fabsf(x[i])));
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, other));
    const float scale = __fmul_rn(__uint_as_float(largest), 1.f / LARGEST_CODE);
    const float inverse = scale >= LEAST_SCALE ? __frcp_rn(scale) : 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) codes[i] = static_cast<Code>(__float2int_rn(__fmul_rn(x[i], inverse)));
    return scale;
}

// Element i of a vector as a float; codes without their scale. A code byte becomes the low byte of a float of 2^23, from which
// the offset is subtracted, because conversion instructions run at a quarter of the rate. The xor is shared by four neighbours.
template <typename T, int N>
__device__ __forceinline__ float number(const Vec<T, N>& v, int i) {
    return to_float(v.at[i]);
}
template <int N>
__device__ __forceinline__ float number(const Vec<Code, N>& v, int i) {
    if constexpr (N % 4 == 0) {
        const unsigned shifted = reinterpret_cast<const unsigned*>(&v)[i / 4] ^ 0x80808080u;  // codes + 128
        return __uint_as_float(__byte_perm(shifted, 0x4b000000u, 0x7540 + i % 4)) - (0x1p23f + 128.f);
    } else {
        return static_cast<float>(v.at[i]);
    }
}

template <typename A, typename B>
constexpr bool IS_SAME = false;
template <typename A>
constexpr bool IS_SAME<A, A> = true;

// Vector `at` of a row; it may be longer than the 16 bytes to which rows are aligned.
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> read_vector(const T* row, int at) {
    constexpr int MOST = 16 / sizeof(T), WIDTH = N < MOST ? N : MOST;
    Vec<T, N> held;
#pragma unroll
    for (int i = 0; i < N / WIDTH; ++i) {
        reinterpret_cast<Vec<T, WIDTH>*>(&held)[i] = reinterpret_cast<const Vec<T, WIDTH>*>(row)[at * (N / WIDTH) + i];
    }
    return held;
}

}  // namespace warpline
