// What a step ends with: the new token of each lane is appended to its slot, whose sequence ends where it should.
//
// A thread per lane. `token` is what was chosen, `logit` its score, which is no number if the model's are none. While a
// sequence is shorter than `known`, the token that stands there already is taken. A sequence that is done stays as it is.
// Where `biased`, `counts` says how often each token has been appended.
#pragma once
#include "common.cuh"

namespace warpline {

template <typename T, int BLOCK>
__device__ __forceinline__ void append_token(const long long* token, const T* logit, const long long* lanes,
                                             const long long* known, const long long* limit, const bool* stops_at_eos,
                                             const bool* biased, long long* tokens, long long* length, bool* done,
                                             bool* broken, int* counts, int rows, int capacity, int vocab, int eos) {
    const int row = static_cast<int>(blockIdx.x) * BLOCK + threadIdx.x;
    if (row >= rows) return;
    const long long slot = lanes[row];
    if (done[slot]) return;
    const long long at = length[slot];
    long long* place = tokens + slot * capacity + at;
    if (at >= known[slot]) *place = token[row];
    length[slot] = at + 1;
    if (biased[slot]) counts[slot * vocab + *place] += 1;
    if (!isfinite(to_float(logit[row]))) broken[slot] = true;
    if ((*place == eos && stops_at_eos[slot]) || at + 1 >= limit[slot]) done[slot] = true;
}

}  // namespace warpline
