// One layer of the persistent decode kernel: its five stages, from the rows that the layer before posted to its own.
#pragma once
#include "ops/gelu.cuh"
#include "persistent/stages.cuh"

namespace warpline {

template <typename M>
class Layers : protected Stages<M> {
   protected:
    using Place = Layout<M>;
    using Base = Stages<M>;
    using Place::ROWS, Place::WARPS, Place::THREADS, Place::WIDTH, Place::INNER, Place::HEADS, Place::DEPTH, Place::PER, Place::SLAB, Place::INNER_SLAB;
    using Place::PITCH, Place::HEAD_WORDS, Place::QKV_AT, Place::ATTENTION_AT, Place::MIDDLE_AT, Place::FC_AT, Place::END_AT;
    using typename Place::T, typename Place::Attention, typename Place::Row, typename Base::Lines;
    template <int INPUTS, int UNITS>
    using ProductOf = typename Place::template ProductOf<INPUTS, UNITS>;
    using Base::a, Base::desk, Base::tape, Base::tag, Base::splits, Base::layer, Base::EACH, Base::AT_ONCE;
    using Base::words, Base::words_before, Base::stamp, Base::packed, Base::column_of, Base::rows_at, Base::vectors, Base::scale_rows, Base::leave_late;
    using Base::Base;

    __device__ __forceinline__ Part part_of(int index) const {
        const int split = index % splits, head = index / splits % HEADS, row = index / (splits * HEADS);
        const int end = desk.rows[row].length, begin = a.window > 0 ? max(0, end - a.window) : 0;
        const int size = ceil_div(end - begin, splits), from = min(end, begin + split * size);
        return {row, head, split, from, min(end, from + size), end};
    }

    // Where a row's token at `position` is, and its noise.
    __device__ __forceinline__ long long token_at(const Row& row, int position) const {
        return static_cast<long long>(row.slot) * a.capacity + position;
    }

    // Puts the block's part number `i` on the desk: what it is, and where its keys and values are in the cache of layer 0.
    __device__ __forceinline__ void set_part(int i) {
        const Part part = part_of(blockIdx.x + i * M::BLOCKS);
        desk.part = part;
        desk.place = (static_cast<long long>(desk.rows[part.row].slot) * HEADS + part.head) * a.capacity * DEPTH;
    }

    __device__ __forceinline__ long long place() const {
        return desk.place + static_cast<long long>(layer) * a.cache_rows * (HEADS * DEPTH) * a.capacity;
    }

    // Starts what can be done before the query is there.
    __device__ __forceinline__ void begin_attention() {
        if (desk.parts > 0) Attention::begin(desk.attention, a.k + place(), a.v + place(), desk.part);
    }

    __device__ __forceinline__ void attention() {
        const int parts = desk.parts;
        for (int i = 0; i < parts; ++i) {
            if (i > 0) change_part(i);
            const Part& part = desk.part;
            const Word* posted = words() + QKV_AT + (part.row * 3 * WIDTH + part.head * DEPTH) / PER;
            const float factor = a.scale * LOG2_E * (a.scale_by_layer ? rcp_approx(layer + 1.f) : 1.f);
            const bool keeps = Attention::run(desk.attention, a.k + place(), a.v + place(), part, factor, posted, WIDTH / PER, tag, desk.dog);
            const int thread = thread_index();
            if (thread < DEPTH / PER) {
                float value[PER];
                const unsigned weight = __float_as_uint(Attention::template merge<PER>(desk.attention, thread * PER, value));
                Word* target = words() + ATTENTION_AT + ((part.row * HEADS + part.head) * M::SPLITS + part.split) * HEAD_WORDS;
                post(target + thread, packed(value), tag);
                if (thread < 2) post(target + DEPTH / PER + thread, weight, tag);
            }
            if (keeps) Attention::keep(desk.attention, a.k + place(), a.v + place(), part);
        }
        if (parts > 1) change_part(0);  // for the next layer
    }

    __device__ __forceinline__ void change_part(int i) {
        sync_threads<THREADS>();  // nobody needs the last one any more
        if (thread_index() == 0) set_part(i);
        sync_threads<THREADS>();
        if (i > 0) begin_attention();
    }

    // The heads' outputs, as far as they are this warp's columns, into desk.h. Who has attended to a head comes late enough.
    __device__ __forceinline__ void gather_attention(unsigned begun) {
        const unsigned pause = desk.parts == 0 ? M::PAUSE_HEADS : 0;
        constexpr int PAIRS = SLAB / (2 * PER), MINE = ROWS * PAIRS;  // of words, of a row and of all
        constexpr int LANES = MINE < WARP && WARP % MINE == 0 ? MINE : WARP;
        const int lane = thread_index() % WARP, slab = thread_index() / WARP * SLAB;
        // Of a lane's pair i: the row, the column, and where the first part of its head begins.
        struct Spot {
            int row, column;
            bool own;
            const Word* head;
        };
        const auto spot = [&](int i) {
            const int n = lane % LANES + i * LANES, row = min(n, MINE - 1) / PAIRS, at = slab + n % PAIRS * (2 * PER);
            const int column = min(at, WIDTH - 2 * PER);  // a lane without a pair of its own looks at another's
            return Spot{row, column, lane < LANES && n < MINE && at == column, words() + ATTENTION_AT + (row * HEADS + column / DEPTH) * M::SPLITS * HEAD_WORDS};
        };
        const auto leave = [&](const Spot& s, Vec<unsigned, 2> bits) {
            if (s.own) *reinterpret_cast<Vec<unsigned, 2>*>(desk.h + s.row * PITCH + s.column) = bits;
        };
        if (splits == 1) {
            auto heads = gather<ceil_div(MINE, LANES), 4>([&](int i) {
                const Spot s = spot(i);
                return s.head + s.column % DEPTH / PER;
            });
            heads.ask(begun, pause);
            heads.finish(tag, desk.dog, [&](int i, const Pair& pair) { leave(spot(i), {pair.payload(0), pair.payload(1)}); });
        } else {
            let_pass(begun, pause);
#pragma unroll 1
            for (int i = 0; i < ceil_div(MINE, LANES); ++i) leave(spot(i), merged<LANES>(spot(i).head, spot(i).column % DEPTH / PER));
        }
        __syncwarp();
    }

    // A pair of words of a head whose context was attended to in parts; lanes LANES apart share the parts.
    template <int LANES>
    __device__ __forceinline__ Vec<unsigned, 2> merged(const Word* head, int at) {
        constexpr int AT_ONCE = 3;
        float heaviest = LOWEST, total = 0.f, sum[2 * PER] = {};
#pragma unroll 1
        for (int first = thread_index() % WARP / LANES; first - thread_index() % WARP / LANES < splits; first += AT_ONCE * (WARP / LANES)) {
            const auto part = [&](int i) { return min(first + i * (WARP / LANES), splits - 1) * HEAD_WORDS; };
            const auto place = [&](int i) { return head + part(i / 2) + (i % 2 ? DEPTH / PER : at); };
            Pair pair[2 * AT_ONCE];
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; ++i) pair[i].load(place(i));
            await(pair, place, tag, desk.dog);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const float weight = first + i * (WARP / LANES) < splits ? __uint_as_float(pair[2 * i + 1].payload(0)) : LOWEST;
                const Vec<unsigned, 2> bits = {pair[2 * i].payload(0), pair[2 * i].payload(1)};
                add_part(heaviest, total, sum, weight, 1.f, reinterpret_cast<const Vec<T, 2 * PER>&>(bits));
            }
        }
#pragma unroll
        for (int other = LANES; other < WARP; other *= 2) {
            Vec<float, 2 * PER> its;
#pragma unroll
            for (int j = 0; j < 2 * PER; ++j) its.at[j] = __shfl_xor_sync(0xffffffffu, sum[j], other);
            const float weight = __shfl_xor_sync(0xffffffffu, heaviest, other);
            add_part(heaviest, total, sum, weight, __shfl_xor_sync(0xffffffffu, total, other), its);
        }
        const float inverse = rcp_approx(total);
        Vec<T, 2 * PER> value;
#pragma unroll
        for (int j = 0; j < 2 * PER; ++j) value.at[j] = from_float<T>(sum[j] * inverse);
        return reinterpret_cast<const Vec<unsigned, 2>&>(value);
    }

    // What was found in parts that weigh 2^heaviest * total together, and another that weighs 2^weight * amount.
    template <typename V>
    static __device__ __forceinline__ void add_part(float& heaviest, float& total, float (&sum)[2 * PER], float weight, float amount, const V& value) {
        const float before = heaviest;
        heaviest = fmaxf(heaviest, weight);
        const float rescale = exp2_approx(before - heaviest), share = exp2_approx(weight - heaviest);
        total = total * rescale + share * amount;
#pragma unroll
        for (int j = 0; j < 2 * PER; ++j) sum[j] = sum[j] * rescale + share * to_float(value.at[j]);
    }

    // The hidden rows, as far as they are this warp's columns.
    static constexpr int HIDDEN_PAIRS = INNER_SLAB / (2 * PER), HIDDEN_EACH = ceil_div(HIDDEN_PAIRS, WARP);
    static __device__ __forceinline__ int hidden_column(int i) {
        const int within = thread_index() % WARP + i * WARP, column = thread_index() / WARP * INNER_SLAB + within * (2 * PER);
        return (HIDDEN_PAIRS % WARP == 0 || within < HIDDEN_PAIRS) && (WARPS * INNER_SLAB == INNER || column < INNER) ? column : -1;
    }
    __device__ __forceinline__ auto hidden_words() const {
        const Word* from = words() + FC_AT;
        return gather<ROWS * HIDDEN_EACH, AT_ONCE>([from](int i) {
            return from + (i / HIDDEN_EACH * INNER + max(hidden_column(i % HIDDEN_EACH), 0)) / PER;
        });
    }
    template <typename Hidden>
    __device__ __forceinline__ void gather_hidden(Hidden& asked) {
        asked.finish(tag, desk.dog, [&](int i, const Pair& pair) {
            const int column = hidden_column(i % HIDDEN_EACH);
            if (column < 0) return;
            *reinterpret_cast<Vec<unsigned, 2>*>(desk.h + i / HIDDEN_EACH * PITCH + column) = {pair.payload(0), pair.payload(1)};
        });
        __syncwarp();
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

    // A layer. What a stage can do alone it does before it asks the others.
    __device__ __forceinline__ void run_layer() {
        {
            ProductOf<WIDTH, M::QKV_UNITS> qkv;
            const unsigned begun = cycles();
            begin_attention();
            const Lines line = this->template first_lines<QKV>();
            qkv.begin(tape, desk.plan.units[QKV]);
            float sums[2 * ROWS];
            if (layer > 0) {
                auto rows = rows_at(words_before() + END_AT);
                rows.ask(begun, M::PAUSE_ROWS);
                scale_rows(vectors(0), 0, sums, tag - 1, rows);
            } else {
                scale_rows(vectors(0), 0, sums, [&](auto& v) { embed(v); });
            }
            stamp();
            qkv.finish(tape, desk.h, PITCH, this->template partial<QKV>(), [&] { leave_late(sums); });
            this->template normal_outputs<QKV, decltype(qkv)>(0, line, [&](int output, int row, float (&value)[PER]) {
                post(words() + QKV_AT + (row * 3 * WIDTH + output) / PER, packed(value), tag);
            });
            stamp();
        }
        attention();
        stamp();
        {
            ProductOf<WIDTH, M::OUT_UNITS> out;
            const unsigned begun = cycles();
            out.begin(tape, desk.plan.units[OUT]);
            gather_attention(begun);
            stamp();
            out.finish(tape, desk.h, PITCH, this->template partial<OUT>());
            this->template post_residual<OUT, 0, decltype(out)>(MIDDLE_AT);
            stamp();
        }
        {
            ProductOf<WIDTH, M::FC_UNITS> fc;
            const unsigned begun = cycles();
            const Lines line = this->template first_lines<FC>();
            fc.begin(tape, desk.plan.units[FC]);
            float sums[2 * ROWS];
            auto rows = rows_at(words() + MIDDLE_AT);
            rows.ask(begun, M::PAUSE_MIDDLE);
            scale_rows(vectors(2 * WIDTH), 1, sums, tag, rows);
            stamp();
            fc.finish(tape, desk.h, PITCH, this->template partial<FC>(), [&] { leave_late(sums); });
            this->template normal_outputs<FC, decltype(fc)>(1, line, [&](int output, int row, float (&value)[PER]) {
#pragma unroll
                for (int j = 0; j < PER; ++j) value[j] = gelu_of<false>(value[j]);
                post(words() + FC_AT + (row * INNER + output) / PER, packed(value), tag);
            });
            stamp();
        }
        {
            ProductOf<INNER, M::PROJ_UNITS> proj;
            const unsigned begun = cycles();
            proj.begin(tape, desk.plan.units[PROJ]);
            auto hidden = hidden_words();
            hidden.ask(begun, M::PAUSE_HIDDEN);
            gather_hidden(hidden);
            stamp();
            proj.finish(tape, desk.h, PITCH, this->template partial<PROJ>());
            this->template post_residual<PROJ, M::OUT_UNITS * TILE_OUTPUTS, decltype(proj)>(END_AT);
            stamp();
        }
    }
};

}  // namespace warpline
