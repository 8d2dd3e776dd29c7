// What a step ends with: the new token of each lane is appended to its slot, whose sequence ends where it should.
//
// A thread per lane. `token` is what was chosen, `logit` its score, which is no number if the model's are none. While a
// sequence is shorter than `known`, the token that stands there already is taken. A sequence that is done stays as it is.
// Where `biased`, a token is lowered by `frequency` each time that it is appended, by `presence` as well the first time.
#pragma once
#include "common.cuh"

namespace warpline {

// A text has got a token: what is added to its logit from now on.
__device__ __forceinline__ void lower(float* bias, int* counts, long long token, float presence, float frequency) {
    bias[token] -= frequency + (counts[token]++ == 0 ? presence : 0.f);
}

template <typename T, int BLOCK>
__device__ __forceinline__ void append_token(const long long* token, const T* logit, const long long* lanes,
                                             const long long* known, const long long* limit, const bool* stops_at_eos,
                                             const bool* biased, const float* presence, const float* frequency,
                                             long long* tokens, long long* length, bool* done, bool* broken, float* bias,
                                             int* counts, int rows, int capacity, int vocab, int eos) {
    const int row = static_cast<int>(blockIdx.x) * BLOCK + threadIdx.x;
    if (row >= rows) return;
    const long long slot = lanes[row];
    if (done[slot]) return;
    const long long at = length[slot];
    long long* place = tokens + slot * capacity + at;
    if (at >= known[slot]) *place = token[row];
    length[slot] = at + 1;
    if (biased[slot]) lower(bias, counts, slot * vocab + *place, presence[slot], frequency[slot]);
    if (!isfinite(to_float(logit[row]))) broken[slot] = true;
    if ((*place == eos && stops_at_eos[slot]) || at + 1 >= limit[slot]) done[slot] = true;
}

}  // namespace warpline
