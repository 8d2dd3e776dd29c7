// The attention half of a layer where blocks hand everything to each other through L2: QKV, attention, out-projection.
#pragma once
#include "persistent/parts.cuh"

namespace warpline {

template <typename M>
class AttentionByWords : protected Parts<M> {
   protected:
    using Place = Layout<M>;
    using Base = Parts<M>;
    using Place::ROWS, Place::WARPS, Place::WIDTH, Place::HEADS, Place::DEPTH, Place::PER, Place::SLAB;
    using Place::PITCH, Place::HEAD_WORDS, Place::QKV_AT, Place::ATTENTION_AT, Place::MIDDLE_AT;
    using typename Place::T, typename Place::Attention, typename Base::Lines;
    template <int INPUTS, int UNITS>
    using ProductOf = typename Place::template ProductOf<INPUTS, UNITS>;
    using Base::a, Base::desk, Base::tape, Base::tag, Base::splits, Base::layer;
    using Base::words, Base::stamp, Base::packed, Base::rows_at, Base::vectors, Base::scale_rows, Base::leave_late;
    using Base::Base;

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

    // From the rows of the layer to those behind its attention.
    __device__ __forceinline__ void run_attention() {
        {
            ProductOf<WIDTH, M::QKV_UNITS> qkv;
            const unsigned begun = cycles();
            this->begin_attention();
            const Lines line = this->template first_lines<QKV>();
            qkv.begin(tape, desk.plan.units[QKV]);
            float sums[2 * ROWS];
            this->scale_first_rows(begun, sums);
            stamp();
            qkv.finish(tape, desk.h, PITCH, this->template partial<QKV>(), [&] { leave_late(sums); });
            this->template normal_outputs<QKV, decltype(qkv)>(0, line, [&](int output, int row, float (&value)[PER]) {
                post(words() + QKV_AT + (row * 3 * WIDTH + output) / PER, packed(value), tag);
            });
            stamp();
        }
        this->attend(
            [&](const Part& part, auto& newest, bool all) {
                const Word* posted = words() + QKV_AT + (part.row * 3 * WIDTH + part.head * DEPTH) / PER;
                Attention::take(newest, all, posted, WIDTH / PER, tag, desk.dog);
            },
            [&](const Part& part) {
                const int thread = thread_index();
                if (thread >= DEPTH / PER) return;
                float value[PER];
                const auto [largest, sum] = Attention::template merge<PER>(desk.attention, part, thread * PER, value);
                const float inverse = sum > 0.f ? rcp_approx(sum) : 0.f;
#pragma unroll
                for (int j = 0; j < PER; ++j) value[j] *= inverse;
                const unsigned weight = __float_as_uint(sum > 0.f ? largest + __log2f(sum) : LOWEST);
                Word* target = words() + ATTENTION_AT + ((part.row * HEADS + part.head) * M::SPLITS + part.split) * HEAD_WORDS;
                post(target + thread, packed(value), tag);
                if (thread < 2) post(target + DEPTH / PER + thread, weight, tag);
            });
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
    }

    // The rows behind attention, times gamma, into desk.h.
    __device__ __forceinline__ void scale_middle_rows(unsigned begun, float (&sums)[2 * ROWS]) {
        auto rows = rows_at(words() + MIDDLE_AT);
        rows.ask(begun, M::PAUSE_MIDDLE);
        scale_rows(vectors(2 * WIDTH), 1, sums, tag, rows);
    }
};

}  // namespace warpline
