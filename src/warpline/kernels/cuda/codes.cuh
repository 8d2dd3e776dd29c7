// int8 weights in registers: codes are converted where they are multiplied; the scale of a row multiplies the sum.
//
// The idea: in fp16 the integers 1024 to 1279 have the byte 0x64 above the low byte, so a code byte below 0x64 is 1024 plus that
// byte. Two codes become a pair with one permutation and one subtraction, both exact; a conversion instruction per code would
// take longer than reading them.
#pragma once
#include "ptx.cuh"

namespace warpline {

// Bytes FIRST and FIRST + 1 of codes + 128, as fp16 values plus 1024.
template <int FIRST>
__device__ __forceinline__ unsigned raised(unsigned positive) {
    return __byte_perm(positive, 0x64646464u, FIRST == 0 ? 0x4140 : 0x4342);
}
// Subtracts 1024 + 128.
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
    const unsigned positive = codes ^ 0x80808080u;  // codes + 128
    low = raised<0>(positive), high = raised<2>(positive);
    low = lowered(low), high = lowered(high);
}

// bfloat16 is the upper half of a float and holds every code exactly; a float of 2^23 plus the byte replaces the 1024 of fp16.
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

// The pairs of neighbours in 16 bytes of weights: eight values of the arithmetic type, or sixteen codes.
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
