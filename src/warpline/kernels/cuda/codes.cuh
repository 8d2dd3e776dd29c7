// int8 weights in registers: codes become numbers where they are multiplied, and the scale of a row, which is the same
// for all of them, multiplies the sum.
//
// The idea: the integers from 0 to 255 are the last bits of a half from 1024 on, so a byte beside 0x64 is 1024 and that
// byte. Two codes become a pair with one permutation and one subtraction, both exact; a conversion instruction for each
// would take longer than reading them.
#pragma once
#include "ptx.cuh"

namespace warpline {

// Bytes FIRST and the next one of codes + 128, as halves of 1024 and more,
template <int FIRST>
__device__ __forceinline__ unsigned raised(unsigned positive) {
    return __byte_perm(positive, 0x64646464u, FIRST == 0 ? 0x4140 : 0x4342);
}
// and without what they are more than the codes: 1024 + 128.
__device__ __forceinline__ unsigned lowered(unsigned both) {
    asm("sub.f16x2 %0, %0, %1;" : "+r"(both) : "r"(0x64806480u));
    return both;
}
template <int FIRST>
__device__ __forceinline__ unsigned halves_of(unsigned positive) {
    return lowered(raised<FIRST>(positive));
}

// Four codes as two pairs of neighbours.
template <typename T>
__device__ __forceinline__ void pairs_of_codes(unsigned codes, unsigned& low, unsigned& high);

template <>
__device__ __forceinline__ void pairs_of_codes<__half>(unsigned codes, unsigned& low, unsigned& high) {
    const unsigned positive = codes ^ 0x80808080u;  // 128 more
    low = raised<0>(positive), high = raised<2>(positive);
    low = lowered(low), high = lowered(high);
}

// A bfloat16 is the upper half of a float, and has room for every code; a float has 2^23 and a byte as a half has 1024.
template <>
__device__ __forceinline__ void pairs_of_codes<__nv_bfloat16>(unsigned codes, unsigned& low, unsigned& high) {
    const unsigned positive = codes ^ 0x80808080u;
    constexpr float OFFSET = 8388608.f + 128.f;
    unsigned value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[i] = __float_as_uint(__uint_as_float(__byte_perm(positive, 0x4b000000u, 0x7650 + i)) - OFFSET);
    }
    low = __byte_perm(value[0], value[1], 0x7632);
    high = __byte_perm(value[2], value[3], 0x7632);
}

// The pairs of neighbours in 16 bytes of weights: eight numbers of the arithmetic's type, or sixteen codes.
template <typename T, typename W>
struct WeightPairs;

template <typename T>
struct WeightPairs<T, T> {
    static constexpr int COUNT = 4;
    unsigned at[COUNT];
    __device__ __forceinline__ explicit WeightPairs(const Vec<unsigned, 4>& held) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) at[i] = held.at[i];
    }
};

template <typename T>
struct WeightPairs<T, signed char> {
    static constexpr int COUNT = 8;
    unsigned at[COUNT];
    __device__ __forceinline__ explicit WeightPairs(const Vec<unsigned, 4>& held) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs_of_codes<T>(held.at[i], at[2 * i], at[2 * i + 1]);
    }
};

}  // namespace warpline
