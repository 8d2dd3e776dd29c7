// Token and position embedding: y = wte[id] + wpe[position], row by row.
//
// Traffic: two rows of COLUMNS elements in, one out. Rows are gathered, but each is read in whole vectors.
#pragma once
#include "row.cuh"

namespace warpline {

template <typename Slice, typename T>
__device__ __forceinline__ void add_embeddings(const T* token_row, const T* place_row, T* y) {
    Slice token, place;
    place.load(place_row);  // known first
    token.load(token_row);
#pragma unroll
    for (int i = 0; i < Slice::STEPS * Slice::WIDTH; ++i) token.value[i] += place.value[i];
    token.store(y);
}

template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void embedding(const long long* ids, const long long* positions, const T* wte, const T* wpe,
                                          T* y, int rows) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    if (row >= rows) return;
    add_embeddings<Slice>(wte + ids[row] * COLUMNS, wpe + positions[row] * COLUMNS, y + static_cast<long long>(row) * COLUMNS);
}

// Of prompts: row t of a sequence is its token t, at place t. `length` rows of each; `capacity` of them lie in memory.
template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void prompt_embedding(const long long* tokens, const T* wte, const T* wpe, T* y, int sequences,
                                                 int length, int capacity) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>(), sequence = row / length, place = row % length;
    if (sequence >= sequences) return;
    add_embeddings<Slice>(wte + tokens[static_cast<long long>(sequence) * capacity + place] * COLUMNS, wpe + place * COLUMNS,
                          y + static_cast<long long>(row) * COLUMNS);
}

// Of each sequence its newest token, at its place: the one at length - 1 of the row of `tokens`.
template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void newest_embedding(const long long* tokens, const long long* length, const T* wte,
                                                 const T* wpe, T* y, int rows, int capacity) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    if (row >= rows) return;
    const long long position = length[row] - 1;
    add_embeddings<Slice>(wte + tokens[static_cast<long long>(row) * capacity + position] * COLUMNS, wpe + position * COLUMNS,
                          y + static_cast<long long>(row) * COLUMNS);
}

}  // namespace warpline
