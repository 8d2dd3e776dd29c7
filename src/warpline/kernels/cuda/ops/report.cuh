// Reports to the host what is new in each lane since the last report: one block per lane; a lane of -1 is skipped.
//
// A row of `news` is the number of new tokens, flags (1: done, 2: not_finite, 4: a launch found a fault), then the tokens; the
// rest of the row is not written. `news` may lie in the host's pinned memory, so that no copy is needed. Tokens that do not fit
// are left for the next report.
// Memory traffic: the new tokens in, and out again.
#pragma once
#include "common.cuh"

namespace warpline {

template <typename T, int BLOCK>
__device__ __forceinline__ void report(const long long* tokens, const long long* length, const bool* done, const bool* not_finite,
                                       const long long* lanes, const int* fault, long long* reported, int* news, int width,
                                       int capacity) {
    const long long slot = lanes[blockIdx.x];
    if (slot < 0) return;
    const long long from = reported[slot];
    const int count = static_cast<int>(max(0ll, min(length[slot] - from, width - 2ll)));
    tokens += slot * capacity + from;
    news += static_cast<long long>(blockIdx.x) * width;
    for (int i = threadIdx.x; i < count; i += BLOCK) news[2 + i] = static_cast<int>(tokens[i]);
    __syncthreads();  // every thread has read `reported`
    if (threadIdx.x > 0) return;
    news[0] = count;
    news[1] = (done[slot] ? 1 : 0) | (not_finite[slot] ? 2 : 0) | (*fault != 0 ? 4 : 0);
    reported[slot] = from + count;
}

}  // namespace warpline
