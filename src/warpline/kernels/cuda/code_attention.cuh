// Attention of one fp16 query to keys and values that are codes, for heads of 64, by one warp on tensor cores.
//
// The idea: a product uses one of its sixteen rows, but it saves more instructions than it wastes, because codes are expanded two
// at a time and never multiplied one by one.
// Layout: of eight neighbouring keys, lane 4g + t has 16 codes of key g from column 16t on, and 8 codes each of values 2t and
// 2t + 1 from column 8g on. Products may add columns in any order, so these bytes are operands as loaded, and a key's score leaves
// the first product in the lane where the second one takes its weight.
// Range: weights are fp16. A value's scale multiplies its weight, in units of the largest scale so far, so that weights stay
// within the range of fp16.
#pragma once
#include "codes.cuh"
#include "kv_codes.cuh"
#include "online.cuh"
#include "ptx.cuh"

namespace warpline {

struct CodeAttention {
    using Codes = Vec<Code, 16>;
    unsigned query[8];
    OnlineSoftmax softmax;  // its sum covers this lane's keys
    float unit = 0.f;
    float out[8][4] = {};  // the first two of each four: columns 16t + i and 16t + 8 + i

    __device__ __forceinline__ void ask(const Vec<__half, 16>& numbers) {
#pragma unroll
        for (int i = 0; i < 8; ++i) query[i] = reinterpret_cast<const unsigned*>(&numbers)[i];
    }

    // A lane's codes of value 2t + e.
    static __device__ __forceinline__ Vec<Code, 8>& value_of(Codes& two, int e) { return reinterpret_cast<Vec<Code, 8>*>(&two)[e]; }

    // Spreads one value and its position's scales, held by the warp's first four lanes with 16 columns each, as value 0 of eight.
    static __device__ __forceinline__ void spread(Codes& value, ScalePair& scaled) {
        const int group = threadIdx.x % WARP / 4;
        unsigned found[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) found[i] = __shfl_sync(0xffffffffu, reinterpret_cast<const unsigned*>(&value)[i], group / 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) reinterpret_cast<unsigned*>(&value)[i] = i > 1 ? 0 : group % 2 ? found[i + 2] : found[i];
#pragma unroll
        for (int i = 0; i < 2; ++i) scaled.at[i] = __shfl_sync(0xffffffffu, scaled.at[i], 0);
    }

    // Adds COUNT times eight keys and values; key 2t + e of the u-th eight counts if is_there(u, e).
    template <int COUNT, typename There>
    __device__ __forceinline__ void take(const Codes (&key)[COUNT][1], const Codes (&value)[COUNT][1],
                                         const ScalePair (&scaled)[COUNT][2], float factor, There is_there) {
        float score[COUNT][2], largest = LOWEST, most = unit;
#pragma unroll
        for (int u = 0; u < COUNT; ++u) {
            float sum[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned codes = word(key[u][0], i);
                multiply(sum, query[2 * i], query[2 * i + 1], halves_of<0>(codes), halves_of<2>(codes));
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                score[u][e] = is_there(u, e) ? sum[e] * scaled[u][e].at[0] : LOWEST;
                largest = fmaxf(largest, score[u][e]);
                most = fmaxf(most, scaled[u][e].at[1]);
            }
        }
#pragma unroll
        for (int other = 2; other > 0; other /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, other));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, other));
        }
        const float inverse = most >= LEAST_SCALE ? rcp_approx(most) : 0.f;
        const float rescale = softmax.raise(largest, factor) * (most == unit ? 1.f : unit * inverse);
        unit = most;
#pragma unroll
        for (int i = 0; i < 16; ++i) out[i / 2][i % 2] *= rescale;
        unsigned weight[COUNT + 1];
#pragma unroll
        for (int u = 0; u < COUNT; ++u) {
            float its[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) its[e] = softmax.weigh(score[u][e], factor) * (scaled[u][e].at[1] * inverse);
            weight[u] = pack_pair<__half>(its[0], its[1]);
        }
        weight[COUNT] = 0;
#pragma unroll
        for (int u = 0; u < COUNT; u += 2) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned first = pairs<0>(value[u][0], i), second = pairs<2>(value[u][0], i);
                const Codes& after = value[u + 1 < COUNT ? u + 1 : u][0];  // a repeated one has weight 0
                const unsigned third = pairs<0>(after, i), fourth = pairs<2>(after, i);
                multiply(out[4 * i], weight[u], weight[u + 1], halves_of<0>(first), halves_of<0>(third));
                multiply(out[4 * i + 1], weight[u], weight[u + 1], halves_of<2>(first), halves_of<2>(third));
                multiply(out[4 * i + 2], weight[u], weight[u + 1], halves_of<0>(second), halves_of<0>(fourth));
                multiply(out[4 * i + 3], weight[u], weight[u + 1], halves_of<2>(second), halves_of<2>(fourth));
            }
        }
    }

    // The softmax of all keys, and this lane's columns 16t to 16t + 15. All groups have the same.
    __device__ __forceinline__ void finish(OnlineSoftmax& whole, float (&columns)[16]) const {
        whole = softmax;
#pragma unroll
        for (int other = 2; other > 0; other /= 2) whole.sum += __shfl_xor_sync(0xffffffffu, whole.sum, other);
#pragma unroll
        for (int i = 0; i < 16; ++i) columns[i] = out[i % 8][i / 8] * unit;
    }

   private:
    // Four codes, plus 128 each.
    static __device__ __forceinline__ unsigned word(const Codes& codes, int i) {
        return reinterpret_cast<const unsigned*>(&codes)[i] ^ 0x80808080u;
    }
    // Codes 4i + FIRST and the next one of two values: of the first, of the second, and again.
    template <int FIRST>
    static __device__ __forceinline__ unsigned pairs(const Codes& two, int i) {
        return __byte_perm(word(two, i), word(two, 2 + i), FIRST == 0 ? 0x5140 : 0x7362);
    }
    // All sixteen rows of the left operand are equal.
    static __device__ __forceinline__ void multiply(float (&sum)[4], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
        const unsigned a[4] = {a0, a0, a1, a1};
        multiply_add<__half>(sum, a, b0, b1);
    }
};

}  // namespace warpline
