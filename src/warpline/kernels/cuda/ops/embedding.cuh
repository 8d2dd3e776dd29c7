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

// The embedding of the token at `position` of a slot, at that place.
template <typename Slice, typename T, int COLUMNS>
__device__ __forceinline__ void embed_token(const long long* tokens, const T* wte, const T* wpe, T* y, int row, long long slot,
                                            long long position, int capacity) {
    add_embeddings<Slice>(wte + tokens[slot * capacity + position] * COLUMNS, wpe + position * COLUMNS,
                          y + static_cast<long long>(row) * COLUMNS);
}

// Of prompts, packed: row r is the token at row_positions[r] of slot row_slots[r].
template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void prompt_embedding(const long long* tokens, const long long* row_slots,
                                                 const long long* row_positions, const T* wte, const T* wpe, T* y, int rows,
                                                 int capacity) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    if (row >= rows) return;
    embed_token<Slice, T, COLUMNS>(tokens, wte, wpe, y, row, row_slots[row], row_positions[row], capacity);
}

// Of each lane the newest token of its slot: the one at length - 1.
template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void newest_embedding(const long long* tokens, const long long* length, const long long* lanes,
                                                 const T* wte, const T* wpe, T* y, int rows, int capacity) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    if (row >= rows) return;
    const long long slot = lanes[row];
    embed_token<Slice, T, COLUMNS>(tokens, wte, wpe, y, row, slot, length[slot] - 1, capacity);
}

}  // namespace warpline
