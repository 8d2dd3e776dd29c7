// Assignment of context parts to blocks in the persistent decode kernel, and attention to the parts of one block.
#pragma once
#include "persistent/stages.cuh"

namespace warpline {

template <typename M>
class Parts : protected Stages<M> {
   protected:
    using Memory = Layout<M>;
    using Base = Stages<M>;
    using Memory::ROWS, Memory::THREADS, Memory::HEADS, Memory::DEPTH, Memory::WIDTH, Memory::WHOLE_CONTEXTS;
    using typename Memory::T, typename Memory::Attention, typename Memory::Row;
    using Base::a, Base::shared, Base::splits, Base::layer, Base::EACH, Base::column_of, Base::vector, Base::scale_rows, Base::rows_at, Base::words_before, Base::tag;
    using Base::Base;

    // Whether no block has more than one part.
    static constexpr bool ONE_PART = ROWS * HEADS * (M::INVARIANT ? M::PARTS : 1) <= M::BLOCKS;

    // Index of a row's token at `position`, and of its noise.
    __device__ __forceinline__ long long token_at(const Row& row, int position) const {
        return static_cast<long long>(row.slot) * a.capacity + position;
    }

    // A row's context is the positions from begin to end - 1. It is empty for a sequence that has ended.
    __device__ __forceinline__ int context_end(int row) const { return shared.rows[row].active ? shared.rows[row].length : 0; }
    __device__ __forceinline__ int context_begin(int end) const { return a.window > 0 ? max(0, end - a.window) : 0; }
    __device__ __forceinline__ int parts_of(int row) const {
        if constexpr (!M::INVARIANT) return splits;
        const int end = context_end(row);
        return max(1, ceil_div(end - context_begin(end), M::PART));
    }

    // Distributes the parts of all contexts over the blocks; `longest` is the length of the longest context. One thread calls it.
    // INVARIANT: the borders of parts and the order of merging follow from the row alone, so its bits do not depend on other
    // rows. Otherwise there are at most as many parts as blocks, and parts become longer where that is too few.
    __device__ __forceinline__ void deal_parts(int longest) {
        const int pieces = ceil_div(longest, M::PART);
        shared.splits = M::INVARIANT ? pieces : min(max(1, M::BLOCKS / (ROWS * HEADS)), min(M::PARTS, pieces));
        const int shares = ROWS * HEADS * (WHOLE_CONTEXTS ? 1 : shared.splits);
        shared.parts = ceil_div(max(0, shares - static_cast<int>(blockIdx.x)), M::BLOCKS) * (WHOLE_CONTEXTS ? shared.splits : 1);
        if (shared.parts > 0) set_part(0);
    }

    // The block's i-th part. Parts of all heads are dealt to the blocks in turn; with WHOLE_CONTEXTS the contexts of all heads
    // are.
    __device__ __forceinline__ Part part_of(int i) const {
        const int cuts = shared.splits;
        const int share = blockIdx.x + (WHOLE_CONTEXTS ? i / cuts : i) * M::BLOCKS;
        const int split = WHOLE_CONTEXTS ? i % cuts : share % cuts, context = WHOLE_CONTEXTS ? share : share / cuts, row = context / HEADS;
        const int end = M::INVARIANT ? context_end(row) : shared.rows[row].length, begin = context_begin(end);
        const int size = M::INVARIANT ? M::PART : max(M::PART, ceil_div(end - begin, cuts)), from = min(end, begin + split * size);
        return {row, context % HEADS, split, from, min(end, from + size), end};
    }

    // Stores the part in shared memory, with the offset of its keys and values in the cache of layer 0.
    __device__ __forceinline__ void set_part(int i) {
        const Part part = part_of(i);
        shared.part = part;
        shared.place = (static_cast<long long>(shared.rows[part.row].slot) * HEADS + part.head) * a.capacity * DEPTH;
    }

    // Offset in the cache of the current layer.
    __device__ __forceinline__ long long place() const { return shared.place + layer * a.layer_stride; }

    // Starts copying keys and values that do not depend on the query.
    __device__ __forceinline__ void begin_attention() {
        if (shared.parts > 0) Attention::begin(shared.attention, a.k + place(), a.v + place(), shared.part);
    }

    // Attends to all parts of the block. take(part, newest, all) loads the query and, if `all`, the newest key and value;
    // done(part) uses the result in shared.attention.
    template <typename Take, typename Done>
    __device__ __forceinline__ void attend(Take take, Done done) {
        const int parts = ONE_PART ? min(shared.parts, 1) : shared.parts;
        typename Attention::Newest newest;
#pragma unroll 1
        for (int i = 0; i < parts; ++i) {
            if (!ONE_PART && i > 0) {
                if (M::INVARIANT && part_of(i).is_empty()) continue;  // this row's context is shorter
                change_part(i);
            }
            const Part part = shared.part;
            const long long at = place();
            const float factor = a.scale * LOG2_E * (a.scale_by_layer ? rcp_approx(layer + 1.f) : 1.f);
            // With WHOLE_CONTEXTS one query serves all parts of a context.
            const bool brings = Attention::sees_to_newest() && (WHOLE_CONTEXTS || part.has_newest());
            typename Attention::Loaded loaded;
            Attention::load(loaded, shared.attention);
            constexpr bool AHEAD = Attention::IN_REGISTERS;
            if constexpr (AHEAD) Attention::begin_second(shared.attention, a.k + at, a.v + at, part);
            if (!WHOLE_CONTEXTS || part.split == 0) take(part, newest, brings);
            Attention::template run<AHEAD>(shared.attention, a.k + at, a.v + at, part, factor, loaded, newest);
            done(part);
            if (brings && (!WHOLE_CONTEXTS || part.has_newest())) Attention::keep(newest, a.k + at, a.v + at, part.end - 1);
        }
        if (!ONE_PART && parts > 1) change_part(0);  // for the next layer
    }

    __device__ __forceinline__ void change_part(int i) {
        sync_threads<THREADS>();  // no thread needs the last part any more
        if (thread_index() == 0) set_part(i);
        sync_threads<THREADS>();
        if (i > 0) begin_attention();
    }

    // Stores the layer's rows, times gamma, in shared.h. They come from the layer before, or from the embedding.
    __device__ __forceinline__ void scale_first_rows(unsigned begun, float (&sums)[2 * ROWS]) {
        if (layer > 0) {
            auto rows = rows_at(words_before() + Memory::END_AT);
            rows.ask(begun, M::PAUSE_ROWS);
            scale_rows(vector(layer, M::LN_1_WEIGHT), 0, sums, tag - 1, rows);
        } else {
            scale_rows(vector(layer, M::LN_1_WEIGHT), 0, sums, [&](auto& v) { embed(v); });
        }
    }

    // Token and position embedding of the rows, for the columns of this lane.
    template <typename V>
    __device__ __forceinline__ void embed(V& v) {
#pragma unroll
        for (int i = 0; i < ROWS * EACH; ++i) {
            const Row& row = shared.rows[i / EACH];
            const int column = max(column_of(i % EACH), 0);
            const auto t = *reinterpret_cast<const Vec<T, 2>*>(a.wte + static_cast<long long>(row.token) * WIDTH + column);
            const auto p = *reinterpret_cast<const Vec<T, 2>*>(a.wpe + static_cast<long long>(max(row.length - 1, 0)) * WIDTH + column);
            v[i][0] = to_float(t.at[0]) + to_float(p.at[0]);
            v[i][1] = to_float(t.at[1]) + to_float(p.at[1]);
        }
    }
};

}  // namespace warpline
