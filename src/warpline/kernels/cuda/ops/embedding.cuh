// Token and position embedding: y = wte[id] + wpe[position], row by row.
//
// Memory traffic: two rows of COLUMNS elements in, one out. Rows are gathered, each in whole vectors. Rows of wte may be int8
// codes (W) with a scale per row.
#pragma once
#include "row.cuh"

namespace warpline {

// Sum of two rows; the first is stored as W and multiplied by `scale`.
template <typename Slice, typename T, typename W>
__device__ __forceinline__ void add_embeddings(const W* token_row, float scale, const T* place_row, T* y) {
    using Pack = Vec<W, Slice::WIDTH>;
    Slice place;
    place.load(place_row);  // its address is known first
    Pack token[Slice::STEPS];
#pragma unroll
    for (int step = 0; step < Slice::STEPS; ++step) {
        token[step] = {};
        if (place.holds(step)) token[step] = reinterpret_cast<const Pack*>(token_row)[place.index(step)];
    }
#pragma unroll
    for (int i = 0; i < Slice::STEPS * Slice::WIDTH; ++i) {  // to_float also converts codes
        place.value[i] = fmaf(to_float(token[i / Slice::WIDTH].at[i % Slice::WIDTH]), scale, place.value[i]);
    }
    place.store(y);
}

template <typename T, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void embedding(const long long* ids, const long long* positions, const T* wte, const T* wpe,
                                          T* y, int rows) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    if (row >= rows) return;
    add_embeddings<Slice>(wte + ids[row] * COLUMNS, 1.f, wpe + positions[row] * COLUMNS, y + static_cast<long long>(row) * COLUMNS);
}

// Embedding of the token at `position` of a slot. `scale` is null if wte has no scales.
template <typename Slice, int COLUMNS, typename T, typename W>
__device__ __forceinline__ void embed_token(const long long* tokens, const W* wte, const float* scale, const T* wpe, T* y,
                                            int row, long long slot, long long position, int capacity) {
    const long long token = tokens[slot * capacity + position];
    add_embeddings<Slice>(wte + token * COLUMNS, scale != nullptr ? scale[token] : 1.f, wpe + position * COLUMNS,
                          y + static_cast<long long>(row) * COLUMNS);
}

// Packed prompts: row r is the token at row_positions[r] of slot row_slots[r].
template <typename T, typename W, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void prompt_embedding(const long long* tokens, const long long* row_slots,
                                                 const long long* row_positions, const W* wte, const float* scale,
                                                 const T* wpe, T* y, int rows, int capacity) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    if (row >= rows) return;
    embed_token<Slice, COLUMNS>(tokens, wte, scale, wpe, y, row, row_slots[row], row_positions[row], capacity);
}

// The newest token of each lane's slot: the one at length - 1.
template <typename T, typename W, int COLUMNS, int BLOCK, int ROW_WARPS>
__device__ __forceinline__ void newest_embedding(const long long* tokens, const long long* length, const long long* lanes,
                                                 const W* wte, const float* scale, const T* wpe, T* y, int rows,
                                                 int capacity) {
    using Slice = RowSlice<T, COLUMNS, ROW_WARPS>;
    const int row = Slice::template row<BLOCK>();
    if (row >= rows) return;
    const long long slot = lanes[row];
    embed_token<Slice, COLUMNS>(tokens, wte, scale, wpe, y, row, slot, length[slot] - 1, capacity);
}

}  // namespace warpline
