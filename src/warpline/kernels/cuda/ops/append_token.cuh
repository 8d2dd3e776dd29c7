// What a step ends with: the new token of each lane is appended to its slot, whose sequence ends where it should.
//
// A thread per lane. `token` is what was chosen, `logit` its score, which is no number if the model's are none. While a
// sequence is shorter than `known`, the token that stands there already is taken. A sequence that is done stays as it is.
// Where `biased`, a token is lowered by `frequency` each time that it is appended, by `presence` as well the first time.
// What is known of a slot is read before the launches ahead have ended: where launches overlap, none of those may write it.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

namespace warpline {

// A text has got a token: what is added to its logit from now on.
__device__ __forceinline__ void lower(float* bias, int* counts, long long token, float presence, float frequency) {
    bias[token] -= frequency + (counts[token]++ == 0 ? presence : 0.f);
}

template <typename T, int BLOCK>
__device__ __forceinline__ void append_token(const long long* token, const T* logit, const long long* lanes,
                                             const long long* known, const long long* limit, const bool* stops_at_eos,
                                             const bool* biased, const float* presence, const float* frequency,
                                             long long* tokens, long long* length, bool* done, bool* not_finite, float* bias,
                                             int* counts, int rows, int capacity, int vocab, int eos) {
    const int row = static_cast<int>(blockIdx.x) * BLOCK + threadIdx.x;
    const long long slot = row < rows ? lanes[row] : 0;
    const bool ended = row >= rows || done[slot], stops = stops_at_eos[slot], adjusts = biased[slot];
    const long long at = length[slot], given = known[slot], most = limit[slot];
    await_previous_launch();
    if (ended) return;
    long long* place = tokens + slot * capacity + at;
    const long long added = at < given ? *place : token[row];
    *place = added;
    length[slot] = at + 1;
    if (adjusts) lower(bias, counts, slot * vocab + added, presence[slot], frequency[slot]);
    if (!isfinite(to_float(logit[row]))) not_finite[slot] = true;
    if ((added == eos && stops) || at + 1 >= most) done[slot] = true;
}

}  // namespace warpline
