// Keys and values of a prompt into the KV cache: slot t of each sequence and head gets row t.
//
// A thread moves one vector of each. Traffic: both once in, once out.
#pragma once
#include "common.cuh"

namespace warpline {

template <typename T, int DEPTH, int BLOCK>
__device__ __forceinline__ void fill_cache(View<T> new_k, View<T> new_v, View<T> k, View<T> v, int batch, int heads, int rows) {
    constexpr int WIDTH = vector_width<T>(DEPTH), VECTORS = DEPTH / WIDTH;
    using Pack = Vec<T, WIDTH>;
    const int i = static_cast<int>(blockIdx.x) * BLOCK + threadIdx.x;
    const int at = i % VECTORS, head = i / VECTORS % heads, row = i / (VECTORS * heads) % rows, sequence = i / (VECTORS * heads) / rows;
    if (sequence >= batch) return;
    const auto move = [&](const View<T>& from, const View<T>& to) {
        auto* target = const_cast<T*>(to.rows(sequence, head) + row * to.row);
        reinterpret_cast<Pack*>(target)[at] = reinterpret_cast<const Pack*>(from.rows(sequence, head) + row * from.row)[at];
    };
    move(new_k, k);
    move(new_v, v);
}

}  // namespace warpline
