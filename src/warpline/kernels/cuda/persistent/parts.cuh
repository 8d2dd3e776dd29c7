// Which parts of which contexts a block of the persistent decode kernel attends to.
#pragma once
#include "persistent/stages.cuh"

namespace warpline {

template <typename M>
class Parts : protected Stages<M> {
   protected:
    using Place = Layout<M>;
    using Base = Stages<M>;
    using Place::ROWS, Place::THREADS, Place::HEADS, Place::DEPTH, Place::WIDTH, Place::IN_CLUSTERS, Place::CONTEXT_SPLITS;
    using typename Place::T, typename Place::Attention, typename Place::Row;
    using Base::a, Base::desk, Base::splits, Base::layer, Base::EACH, Base::column_of, Base::vectors, Base::scale_rows, Base::rows_at, Base::words_before, Base::tag;
    using Base::Base;

    // Whether no block has more than one of them.
    static constexpr bool ONE_PART = IN_CLUSTERS ? ROWS * CONTEXT_SPLITS <= M::CLUSTER : ROWS * HEADS <= M::BLOCKS;

    // Where a row's token at `position` is, and its noise.
    __device__ __forceinline__ long long token_at(const Row& row, int position) const {
        return static_cast<long long>(row.slot) * a.capacity + position;
    }

    // Of the contexts of a token, the longest of which has `longest` positions. By one thread.
    __device__ __forceinline__ void deal_parts(int longest) {
        if constexpr (IN_CLUSTERS) {
            desk.splits = CONTEXT_SPLITS;
            desk.parts = blockIdx.x / M::CLUSTER < HEADS ? ceil_div(ROWS * CONTEXT_SPLITS, M::CLUSTER) : 0;
        } else {
            desk.splits = min(max(1, M::BLOCKS / (ROWS * HEADS)), min(M::SPLITS, ceil_div(longest, M::SPAN)));
            desk.parts = ceil_div(max(0, ROWS * HEADS * desk.splits - static_cast<int>(blockIdx.x)), M::BLOCKS);
        }
        splits = desk.splits;
        if (desk.parts > 0) set_part(0);
    }

    // The block's part number `i`. In clusters a head is a cluster's; otherwise all parts of all heads go around.
    __device__ __forceinline__ Part part_of(int i) const {
        const int index = IN_CLUSTERS ? blockIdx.x % M::CLUSTER + i * M::CLUSTER : blockIdx.x + i * M::BLOCKS;
        const int split = index % splits, head = IN_CLUSTERS ? blockIdx.x / M::CLUSTER : index / splits % HEADS;
        const int row = index / (IN_CLUSTERS ? splits : splits * HEADS);
        const int end = desk.rows[row].length, begin = a.window > 0 ? max(0, end - a.window) : 0;
        const int size = ceil_div(end - begin, splits), from = min(end, begin + split * size);
        return {row, head, split, from, min(end, from + size), end};
    }

    // Puts it on the desk: what it is, and where its keys and values are in the cache of layer 0.
    __device__ __forceinline__ void set_part(int i) {
        const Part part = part_of(i);
        desk.part = part;
        desk.place = (static_cast<long long>(desk.rows[part.row].slot) * HEADS + part.head) * a.capacity * DEPTH;
    }

    // A layer's part of the cache is `a.layer_stride` long.
    __device__ __forceinline__ long long place() const { return desk.place + layer * a.layer_stride; }

    // Starts what can be done before the query is there.
    __device__ __forceinline__ void begin_attention() {
        if (desk.parts > 0) Attention::begin(desk.attention, a.k + place(), a.v + place(), desk.part);
    }

    // Attends to all parts: take(part, newest, all) brings the query, and for `all` the newest key and value; done(part) takes what
    // desk.attention has then.
    template <typename Take, typename Done>
    __device__ __forceinline__ void attend(Take take, Done done) {
        const int parts = ONE_PART ? min(desk.parts, 1) : desk.parts;
#pragma unroll 1
        for (int i = 0; i < parts; ++i) {
            if (!ONE_PART && i > 0) change_part(i);
            const Part part = desk.part;
            const long long at = place();
            const float factor = a.scale * LOG2_E * (a.scale_by_layer ? rcp_approx(layer + 1.f) : 1.f);
            const bool brings = Attention::sees_to_newest() && part.has_newest();
            typename Attention::Loaded loaded;
            Attention::load(loaded, desk.attention);
            typename Attention::Newest newest;
            take(part, newest, brings);
            Attention::run(desk.attention, a.k + at, a.v + at, part, factor, loaded, newest);
            done(part);
            if (brings) Attention::keep(newest, a.k + at, a.v + at, part.end - 1);
        }
        if (!ONE_PART && parts > 1) change_part(0);  // for the next layer
    }

    __device__ __forceinline__ void change_part(int i) {
        sync_threads<THREADS>();  // nobody needs the last one any more
        if (thread_index() == 0) set_part(i);
        sync_threads<THREADS>();
        if (i > 0) begin_attention();
    }

    // The layer's rows, times gamma, into desk.h: what the layer before posted, or the embedding.
    __device__ __forceinline__ void scale_first_rows(unsigned begun, float (&sums)[2 * ROWS]) {
        if (layer > 0) {
            auto rows = rows_at(words_before() + Place::END_AT);
            rows.ask(begun, M::PAUSE_ROWS);
            scale_rows(vectors(0), 0, sums, tag - 1, rows);
        } else {
            scale_rows(vectors(0), 0, sums, [&](auto& v) { embed(v); });
        }
    }

    // Token and position embedding of the rows, as far as a lane has them.
    template <typename V>
    __device__ __forceinline__ void embed(V& v) {
#pragma unroll
        for (int i = 0; i < ROWS * EACH; ++i) {
            const Row& row = desk.rows[i / EACH];
            const int column = max(column_of(i % EACH), 0);
            const auto t = *reinterpret_cast<const Vec<T, 2>*>(a.wte + static_cast<long long>(row.token) * WIDTH + column);
            const auto p = *reinterpret_cast<const Vec<T, 2>*>(a.wpe + static_cast<long long>(max(row.length - 1, 0)) * WIDTH + column);
            v[i][0] = to_float(t.at[0]) + to_float(p.at[0]);
            v[i][1] = to_float(t.at[1]) + to_float(p.at[1]);
        }
    }
};

}  // namespace warpline
