// Bounds on the logits of an LM head, from int8 codes of its rows: outputs that cannot be the largest need not be computed.
//
// The idea: a row w of the head is stored a second time as int8 codes and a scale; c = codes * scale. The hidden state h is
// rounded to q, 16 bits relative to its length. Then
//   w h - c q = (w - c) h + c (h - q),  so  |w h - c q| <= |w - c| |h| + |c| |h - q|                 (Cauchy-Schwarz)
// and c q is an exact sum of integers. `error` is |w - c| and `norm` the larger of |w| and |c|, both rounded up by the host
// (model/screen.py). The rounding of the product itself, in any order of addition, is bounded by a multiple of |w| |h|.
// A score that does not fall when its logit rises has its bounds at the bounds of the logit, rounding included. So the largest
// score is among those whose upper bound is not below another's lower bound; no other output is computed.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

namespace warpline {

// Outputs and inputs of a tile of codes; a lane has 16 bytes of it: outputs g and g + 8, eight inputs each.
constexpr int CODE_OUTPUTS = 16, CODE_INPUTS = 32;

// A row of hidden states: its quantum, and the factors of a code's error (length) and norm (rest).
struct ScreenedRow {
    float quantum, length, rest;
};

// The least integer not below the root of n.
__device__ constexpr int root_from(int n) {
    int root = 0;
    while (root * root < n) ++root;
    return root;
}

// For a row of WIDTH values with the sum of squares `square`. Where something could overflow or underflow, bounds are infinite.
template <int WIDTH>
__device__ __forceinline__ ScreenedRow screened_row(float square) {
    constexpr float ROOT = root_from(WIDTH);
    constexpr float LARGEST = 32600.f;  // quanta; the rounded upper byte must fit a byte
    // Half a quantum per value and a little for arithmetic; and twice the rounding of WIDTH sums.
    const float length = square * rsqrt_approx(square) * (1.f + 0x1p-10f), quantum = length * (1.f / LARGEST);
    const bool sound = length > 1e-15f && length < 1e18f;
    return sound ? ScreenedRow{quantum, length, 0.51f * ROOT * quantum + WIDTH * 0x1p-21f * length}
                 : ScreenedRow{0.f, infinity(), infinity()};
}

// A value in quanta (`per_one` quanta are 1) as upper and lower byte: 256 upper + lower.
struct TwoBytes {
    signed char upper, lower;
};
__device__ __forceinline__ TwoBytes in_bytes(float x, float per_one) {
    const int quanta = __float2int_rn(x * per_one), upper = (quanta + 128) >> 8;
    return {static_cast<signed char>(upper), static_cast<signed char>(quanta - 256 * upper)};
}

// What the host knows of one output.
struct CodeBounds {
    float scale, error, norm;
};

struct Interval {
    float low, high;
};

// The interval of the logit from the sums of its codes with the row's upper and lower bytes.
__device__ __forceinline__ Interval logit_between(const ScreenedRow& row, const CodeBounds& code, int upper, int lower) {
    const float about = fmaf(256.f, static_cast<float>(upper), static_cast<float>(lower)) * row.quantum * code.scale;
    const float off = (row.length * code.error + row.rest * code.norm) * 1.001f + fabsf(about) * 0x1p-20f + 1e-30f;
    const float low = about - off, high = about + off;
    return {low == low ? low : -infinity(), high == high ? high : infinity()};
}

// Multiplies a tile of codes (16 bytes per lane) with eight columns of bytes, of which a lane has eight inputs of column lane /
// 4. The sums are those of outputs g and g + 8, columns 2t and 2t + 1.
__device__ __forceinline__ void multiply_add_codes(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // Turing multiplies 8 x 16 by 16 x 8: the same fragments in four parts
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(c[i % 2 * 2]), "+r"(c[i % 2 * 2 + 1])
            : "r"(a[i]), "r"(i < 2 ? b0 : b1));
    }
#endif
}

}  // namespace warpline
