// Online softmax: scores arrive a few at a time.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

namespace warpline {

// The largest score so far, and the sum of the weights relative to it. `factor` is scale * log2(e).
struct OnlineSoftmax {
    float largest = LOWEST, sum = 0.f;

    // Takes the maximum of new scores; returns the factor for all earlier sums: exactly 1 if the maximum does not change, so that
    // excluded scores (LOWEST) change no bit.
    __device__ __forceinline__ float raise(float candidate, float factor) {
        const float before = largest;
        largest = fmaxf(largest, candidate);
        const float rescale = exp2_approx((before - largest) * factor);
        sum *= rescale;
        return rescale;
    }

    __device__ __forceinline__ float weigh(float score, float factor) {
        const float weight = exp2_approx(fmaf(score, factor, -base(factor)));
        sum += weight;
        return weight;
    }

   private:
    // A query that has seen no key yet has no maximum to subtract; its weights are all 0.
    __device__ __forceinline__ float base(float factor) const { return largest == LOWEST ? 0.f : largest * factor; }
};

}  // namespace warpline
