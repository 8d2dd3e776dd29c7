// Writes new requests into their slots: one block per request; a lane of -1 is skipped.
//
// The idea: the inputs may lie in the host's pinned memory. They are read once, and a copy before the launch would cost the host
// more than reading them over the bus costs the GPU. Every field of the slot is set, so nothing is left of the sequence before;
// only tokens behind the known ones stay, and they are written before they are read. The noise of a slot follows from the 64-bit
// `stream` alone: entry t is splitmix64 of stream + (t + 1) * 0x9e3779b97f4a7c15, as in `noise_keys` of kernels/noise.py.
// Memory traffic: the known tokens in; a row of tokens and a row of noise out.
#pragma once
#include "common.cuh"

namespace warpline {

__device__ __forceinline__ int noise_key(unsigned long long stream, int at) {
    unsigned long long z = stream + (at + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return static_cast<int>(z ^ z >> 31);
}

// Layout per request: `integers` length, known, limit, min_length, top_k, start of its tokens in `given`, start and number of its
// biases; `floats` temperature, top_p, min_p, penalty, presence, frequency; `flags` stops_at_eos, biased. The slot's rows of
// `bias` and `counts` are written only if `biased`.
template <typename T, int BLOCK>
__device__ __forceinline__ void admit(const long long* lanes, const long long* integers, const float* floats, const bool* flags,
                                      const long long* stream, const int* given, const int* biased_tokens,
                                      const float* biases, long long* length, long long* known, long long* limit,
                                      long long* min_length, long long* top_k, float* temperature, float* top_p, float* min_p,
                                      float* penalty, float* presence, float* frequency, bool* stops_at_eos, bool* biased,
                                      bool* done, bool* not_finite, long long* reported, float* bias, int* counts,
                                      long long* tokens, int* noise, int capacity, int vocab) {
    const int row = blockIdx.x;
    const long long slot = lanes[row];
    if (slot < 0) return;
    integers += static_cast<long long>(row) * 8;
    floats += static_cast<long long>(row) * 6;
    flags += static_cast<long long>(row) * 2;
    if (threadIdx.x == 0) {
        length[slot] = reported[slot] = integers[0];
        known[slot] = integers[1];
        limit[slot] = integers[2];
        min_length[slot] = integers[3];
        top_k[slot] = integers[4];
        temperature[slot] = floats[0];
        top_p[slot] = floats[1];
        min_p[slot] = floats[2];
        penalty[slot] = floats[3];
        presence[slot] = floats[4];
        frequency[slot] = floats[5];
        stops_at_eos[slot] = flags[0];
        biased[slot] = flags[1];
        done[slot] = not_finite[slot] = false;
    }
    given += integers[5];
    tokens += slot * capacity;
    noise += slot * capacity;
    const unsigned long long key = static_cast<unsigned long long>(stream[row]);
    const int brought = static_cast<int>(integers[1]);
    for (int t = threadIdx.x; t < capacity; t += BLOCK) {
        if (t < brought) tokens[t] = given[t];
        noise[t] = noise_key(key, t);
    }
    if (!flags[1]) return;
    bias += slot * vocab;
    counts += slot * vocab;
    for (int t = threadIdx.x; t < vocab; t += BLOCK) {
        bias[t] = 0.f;
        counts[t] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < integers[7]; i += BLOCK) bias[biased_tokens[integers[6] + i]] = biases[integers[6] + i];
}

}  // namespace warpline
