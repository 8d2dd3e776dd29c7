// Quantises the new keys and values of packed prompts into a KV cache of codes, before attention, and writes the rounded values
// back to k and v.
//
// The idea: attention then sees the same values whether a key was in the cache or is new, so a prompt gives the same result in
// whatever chunks it runs; and new keys need not be expanded again in every block of queries.
// Row r is the token at row_positions[r] of slot row_slots[r]. LANES lanes handle the key and the value of a row in one head.
// Memory traffic: keys and values in and out, codes and scales out.
#pragma once
#include "kv_codes.cuh"

namespace warpline {

template <typename T, int DEPTH, int LANES, int BLOCK>
__device__ __forceinline__ void quantise_kv(View<T> k, View<T> v, const long long* row_slots, const long long* row_positions,
                                            View<Code> cache_k, View<Code> cache_v, View<float> scales, int rows, int heads) {
    constexpr int WIDTH = vector_width<T>(DEPTH), VECTORS = DEPTH / WIDTH;
    constexpr int STEPS = ceil_div(VECTORS, LANES), SIZE = STEPS * WIDTH;
    const int item = blockIdx.x * (BLOCK / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const bool exists = item < rows * heads;  // the others only take part in shuffles
    const int row = exists ? item / heads : 0, head = exists ? item % heads : 0;
    const int slot = static_cast<int>(row_slots[row]), position = static_cast<int>(row_positions[row]);
    T* own[] = {const_cast<T*>(k.rows(0, head)) + row * k.row, const_cast<T*>(v.rows(0, head)) + row * v.row};
    Code* kept[] = {const_cast<Code*>(cache_k.rows(slot, head)) + position * cache_k.row,
                    const_cast<Code*>(cache_v.rows(slot, head)) + position * cache_v.row};
    float numbers[2][SIZE];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int at = (s * LANES + lane) * WIDTH;
            Vec<T, WIDTH> held = {};
            if (exists && at < DEPTH) held = read_vector<WIDTH>(own[which], at / WIDTH);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) numbers[which][s * WIDTH + i] = to_float(held.at[i]);
        }
    }
    ScalePair scale;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        Code codes[SIZE];
        scale.at[which] = encode_row<LANES>(numbers[which], codes);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int at = (s * LANES + lane) * WIDTH;
            if (!exists || at >= DEPTH) continue;
            Vec<Code, WIDTH> code;
            Vec<T, WIDTH> rounded;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                code.at[i] = codes[s * WIDTH + i];
                rounded.at[i] = from_float<T>(static_cast<float>(code.at[i]) * scale.at[which]);
            }
            *reinterpret_cast<Vec<Code, WIDTH>*>(kept[which] + at) = code;
            *reinterpret_cast<Vec<T, WIDTH>*>(own[which] + at) = rounded;
        }
    }
    if (exists && lane == 0) {
        *reinterpret_cast<ScalePair*>(const_cast<float*>(scales.rows(slot, head)) + position * scales.row) = scale;
    }
}

}  // namespace warpline
