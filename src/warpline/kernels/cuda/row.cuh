// A row in the registers of the warps that own it: read once, written once.
#pragma once
#include "common.cuh"

namespace warpline {

// The part of a row that one lane holds, as floats.
template <typename T, int COLUMNS, int ROW_WARPS>
struct RowSlice {
    static constexpr int WIDTH = vector_width<T>(COLUMNS);
    static constexpr int VECTORS = COLUMNS / WIDTH;
    static constexpr int LANES = ROW_WARPS * WARP;
    static constexpr int STEPS = ceil_div(VECTORS, LANES);
    using Pack = Vec<T, WIDTH>;

    float value[STEPS * WIDTH];
    int lane;

    __device__ __forceinline__ RowSlice() : lane(threadIdx.x % LANES) {}

    // The row of this thread's group of warps; BLOCK threads per block.
    template <int BLOCK>
    static __device__ __forceinline__ int row() {
        return blockIdx.x * (BLOCK / LANES) + threadIdx.x / LANES;
    }

    __device__ __forceinline__ bool holds(int step) const { return step * LANES + lane < VECTORS; }
    __device__ __forceinline__ int index(int step) const { return step * LANES + lane; }

    __device__ __forceinline__ void load(const T* row) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            Pack pack = {};
            if (holds(step)) pack = reinterpret_cast<const Pack*>(row)[index(step)];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) value[step * WIDTH + i] = to_float(pack.at[i]);
        }
    }

    __device__ __forceinline__ void store(T* row) const {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (!holds(step)) continue;
            Pack pack;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) pack.at[i] = from_float<T>(value[step * WIDTH + i]);
            reinterpret_cast<Pack*>(row)[index(step)] = pack;
        }
    }

    // Applies `f` to every element held and its counterparts in two vectors, which are loaded as needed.
    template <typename F>
    __device__ __forceinline__ void each(const T* first, const T* second, F f) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (!holds(step)) continue;
            const Pack a = reinterpret_cast<const Pack*>(first)[index(step)];
            const Pack b = reinterpret_cast<const Pack*>(second)[index(step)];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) f(value[step * WIDTH + i], to_float(a.at[i]), to_float(b.at[i]));
        }
    }

    // Applies `f` to every element held, in a fixed order.
    template <typename F>
    __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (!holds(step)) continue;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) f(value[step * WIDTH + i]);
        }
    }
};

}  // namespace warpline
