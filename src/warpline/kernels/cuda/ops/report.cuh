// What has come of each lane since the last report, for the host to read in one copy: a block to a lane.
//
// A row of `news` is how many tokens are new, flags (1: done, 2: broken, 4: a launch found a fault), then the tokens, and -1
// behind them. What there is no room for is left for the next report.
// Traffic: the new tokens in, the rows of `news` out.
#pragma once
#include "common.cuh"

namespace warpline {

template <typename T, int BLOCK>
__device__ __forceinline__ void report(const long long* tokens, const long long* length, const bool* done, const bool* broken,
                                       const long long* lanes, const int* fault, long long* reported, int* news, int width,
                                       int capacity) {
    const long long slot = lanes[blockIdx.x], from = reported[slot];
    const int count = static_cast<int>(max(0ll, min(length[slot] - from, width - 2ll)));
    tokens += slot * capacity + from;
    news += static_cast<long long>(blockIdx.x) * width;
    for (int i = threadIdx.x; i < width - 2; i += BLOCK) news[2 + i] = i < count ? static_cast<int>(tokens[i]) : -1;
    __syncthreads();  // every thread has read how far the last report went
    if (threadIdx.x > 0) return;
    news[0] = count;
    news[1] = (done[slot] ? 1 : 0) | (broken[slot] ? 2 : 0) | (*fault != 0 ? 4 : 0);
    reported[slot] = from + count;
}

}  // namespace warpline
