// What a step ends with: each sequence's new token is appended, and the sequence ends where it should.
//
// A thread per sequence. `token` is what was chosen, `logit` its score, which is no number if the model's are none. While a
// sequence is shorter than `known`, the token that stands there already is taken. A sequence that is done stays as it is.
#pragma once
#include "common.cuh"

namespace warpline {

template <typename T, int BLOCK>
__device__ __forceinline__ void append_token(const long long* token, const T* logit, const long long* known,
                                             const long long* limit, const bool* stops_at_eos, long long* tokens,
                                             long long* length, bool* done, bool* broken, int rows, int capacity, int eos) {
    const int row = static_cast<int>(blockIdx.x) * BLOCK + threadIdx.x;
    if (row >= rows || done[row]) return;
    const long long at = length[row];
    long long* slot = tokens + static_cast<long long>(row) * capacity + at;
    if (at >= known[row]) *slot = token[row];
    length[row] = at + 1;
    if (!isfinite(to_float(logit[row]))) broken[row] = true;
    if ((*slot == eos && stops_at_eos[row]) || at + 1 >= limit[row]) done[row] = true;
}

}  // namespace warpline
