// What has come of each lane since the last report, for the host to read: a block to a lane; a lane of -1 has nothing to say.
//
// A row of `news` is how many tokens are new, flags (1: done, 2: not_finite, 4: a launch found a fault), then the tokens; what is
// behind them stays. It may lie in the host's pinned memory, so that nothing has to be copied. What there is no room for is
// left for the next report.
// Traffic: the new tokens in, and out again.
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
    __syncthreads();  // every thread has read how far the last report went
    if (threadIdx.x > 0) return;
    news[0] = count;
    news[1] = (done[slot] ? 1 : 0) | (not_finite[slot] ? 2 : 0) | (*fault != 0 ? 4 : 0);
    reported[slot] = from + count;
}

}  // namespace warpline
