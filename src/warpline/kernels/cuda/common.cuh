// Conversions, vectors and reductions that every op uses. Requires CUDA's half-precision headers only, nothing of the host.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace warpline {

constexpr int WARP = 32;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LOWEST = -3.402823466e38f;
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Storage types are converted at loads and stores; all arithmetic is float.
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// N neighbours that one load or store moves.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
    T at[N];
};

// The widest access, up to `bytes`, for which every row of `columns` elements starts aligned.
template <typename T>
__device__ constexpr int vector_width(int columns, int bytes = 16) {
    int width = bytes / static_cast<int>(sizeof(T));
    while (columns % width != 0) width /= 2;
    return width;
}

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A tensor [batch, head, row, column] with contiguous columns; the other strides are in elements.
template <typename T>
struct View {
    const T* data;
    long long batch, head, row;

    // Address of row 0 of a head of a sequence.
    __device__ __forceinline__ const T* rows(int b, int h) const { return data + b * batch + h * head; }
};

// The block's dynamic shared memory.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
    extern __shared__ __align__(16) unsigned char bytes[];
    return reinterpret_cast<T*>(bytes);
}

// A barrier of the first THREADS threads of a block only.
template <int THREADS>
__device__ __forceinline__ void sync_threads() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// Returns whether this block is the last of `blocks` to get here; it then sees the others' earlier writes through L2 (__ldcg).
// Requires: all threads call it. `arrived` counts from 0 and is reset to 0 for the next launch.
__device__ __forceinline__ bool finishes_last(int* arrived, int blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived, 1) == blocks - 1;
        if (last) *arrived = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// Butterfly reduction: every lane ends with the same bits, in a fixed order.
template <typename F>
__device__ __forceinline__ float warp_reduce(float x, F combine) {
#pragma unroll
    for (int lane = WARP / 2; lane > 0; lane /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

// Reduction over WARPS neighbouring warps. Requires: all threads of the block call it; `scratch` holds a float per warp.
template <int WARPS, typename F>
__device__ __forceinline__ float group_reduce(float x, float* scratch, F combine) {
    x = warp_reduce(x, combine);
    if constexpr (WARPS > 1) {
        const int warp = threadIdx.x / WARP;
        const float* group = scratch + warp / WARPS * WARPS;
        __syncthreads();  // the last result has been read
        if (threadIdx.x % WARP == 0) scratch[warp] = x;
        __syncthreads();
        x = group[0];
#pragma unroll
        for (int i = 1; i < WARPS; ++i) x = combine(x, group[i]);
    }
    return x;
}

template <int WARPS>
__device__ __forceinline__ float group_sum(float x, float* scratch) {
    return group_reduce<WARPS>(x, scratch, [](float a, float b) { return a + b; });
}

template <int WARPS>
__device__ __forceinline__ float group_max(float x, float* scratch) {
    return group_reduce<WARPS>(x, scratch, [](float a, float b) { return fmaxf(a, b); });
}

}  // namespace warpline
