// Rows of numbers as codes of a byte with a scale each: row = codes * scale. As codes.py computes them, to the bit.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

namespace warpline {

using Code = signed char;
constexpr float LARGEST_CODE = 127.f, LEAST_SCALE = 1e-30f;

// Whether a storage type is codes.
template <typename S>
constexpr bool IS_CODE = false;
template <>
constexpr bool IS_CODE<Code> = true;

// The scales of a position's key and value, which lie side by side.
using ScalePair = Vec<float, 2>;

// The codes of a row of which each of LANES neighbouring lanes has N numbers, and its scale. All lanes of the warp must call
// it. Magnitudes are compared as unsigned numbers: these are in the same order, and a NaN, which fmaxf would drop, is the
// largest of all, so that the scale is one and every number of the row. A row too small for one over its scale is zeros.
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

// Number i of a vector as a float; of codes without their scale. Of four codes that are neighbours a byte becomes the last one
// of a float of 2^23 and more, where a unit is 1, and what it begins with is subtracted: conversions go through a unit that is
// four times as slow. What all four share is computed once.
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

// The products of one row and eight rows of 64 codes, on tensor cores. Four neighbouring lanes share a row of codes, 16 each,
// and have the same 16 numbers of the one row; all eight groups of a warp do. In which order the columns are taken is free,
// so a lane's bytes are operands as they are loaded, once each stands below the byte that makes it a half of 1,024 and more.
// What that adds to the sum depends on the one row alone: `prepare` computes it, in the same way.
struct CodeProduct {
    static constexpr unsigned UPPER_BYTES = 0x64646464u;  // of halves of 1,024 and more, where a unit is 1
    static constexpr unsigned TWICE_1152 = 0x64806480u;   // two halves of 1,024 + 128
    unsigned row[8];
    float excess;

    __device__ __forceinline__ void prepare(const Vec<__half, 16>& numbers) {
#pragma unroll
        for (int i = 0; i < 8; ++i) row[i] = reinterpret_cast<const unsigned*>(&numbers)[i];
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) multiply(sum, i, TWICE_1152, TWICE_1152);
        excess = sum[0];
    }

    // Of the row of codes that this lane has a part of.
    __device__ __forceinline__ float operator()(const Vec<Code, 16>& codes) const {
        float sum[4] = {};  // of the row with those of groups 2t and 2t + 1, where this is lane t of its group; and again
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned shifted = reinterpret_cast<const unsigned*>(&codes)[i] ^ 0x80808080u;  // codes + 128
            multiply(sum, i, __byte_perm(shifted, UPPER_BYTES, 0x4140), __byte_perm(shifted, UPPER_BYTES, 0x4342));
        }
        const int lane = threadIdx.x % WARP, group = lane / 4;
        return __shfl_sync(0xffffffffu, group % 2 ? sum[1] : sum[0], group * 4 + group / 2) - excess;
    }

   private:
    __device__ __forceinline__ void multiply(float (&sum)[4], int i, unsigned b0, unsigned b1) const {
        const unsigned a[4] = {row[2 * i], row[2 * i], row[2 * i + 1], row[2 * i + 1]};  // all sixteen rows are this one
        multiply_add<__half>(sum, a, b0, b1);
    }
};

template <typename A, typename B>
constexpr bool IS_SAME = false;
template <typename A>
constexpr bool IS_SAME<A, A> = true;

// Vector `at` of a row, which may be longer than the 16 bytes to which rows are aligned.
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
