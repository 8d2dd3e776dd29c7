// The end of a step: appends each lane's new token to its slot, and marks the sequence as done where it ends.
//
// One thread per lane. `token` is the chosen one, `logit` its score, NaN or infinite if the model's logits are. While a sequence
// is shorter than `known`, the token already stored there is kept. Sequences that are done do not change. If `biased`, appending
// a token lowers its bias by `frequency`, the first time by `presence` as well.
// Contract: `lanes` and the slot's record are read before the preceding launches end, so none of them may write these.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

namespace warpline {

// Lowers the bias of a token that has been appended to the text.
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
