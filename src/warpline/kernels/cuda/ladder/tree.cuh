// A tree reduction in shared memory, as before lanes could exchange registers.
#pragma once
#include "common.cuh"

namespace warpline {

// Over all THREADS of a block, a power of two: half of them combine two values each, then a quarter, until one is left, with a
// barrier after every level. Requires: every thread calls it; `tree` holds a float per thread.
template <int THREADS, typename F>
__device__ __forceinline__ float tree_reduce(float value, float* tree, F combine) {
    tree[threadIdx.x] = value;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) tree[threadIdx.x] = combine(tree[threadIdx.x], tree[threadIdx.x + half]);
        __syncthreads();
    }
    const float result = tree[0];
    __syncthreads();  // all threads have read it: the tree can be reused
    return result;
}

}  // namespace warpline
