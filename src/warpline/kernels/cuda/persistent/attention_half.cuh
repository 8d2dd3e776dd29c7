// The attention half of a layer: QKV, attention, out-projection.
#pragma once
#include "persistent/parts.cuh"

namespace warpline {

template <typename M>
class AttentionHalf : protected Parts<M> {
   protected:
    using Memory = Layout<M>;
    using Base = Parts<M>;
    using Memory::ROWS, Memory::WARPS, Memory::WIDTH, Memory::HEADS, Memory::DEPTH, Memory::PER, Memory::SLAB;
    using Memory::PITCH, Memory::HEAD_WORDS, Memory::QKV_AT, Memory::ATTENTION_AT, Memory::MIDDLE_AT, Memory::WHOLE_CONTEXTS;
    using typename Memory::T, typename Memory::Attention, typename Base::NormTerms;
    template <int INPUTS, int UNITS>
    using ProductOf = typename Memory::template ProductOf<INPUTS, UNITS>;
    using Base::a, Base::shared, Base::tape, Base::tag, Base::splits, Base::layer;
    using Base::words, Base::stamp, Base::packed, Base::rows_at, Base::vector, Base::scale_rows, Base::store_late_sums;
    using Base::Base;

    // Gathers the heads' outputs for this warp's columns into shared.h. A block that attended to a part arrives late enough and
    // does not pause.
    __device__ __forceinline__ void gather_attention(unsigned begun) {
        const unsigned pause = shared.parts == 0 ? M::PAUSE_HEADS : 0;
        constexpr int PAIRS = SLAB / (2 * PER), MINE = ROWS * PAIRS, LANES = WARP / HALVES;  // of words: of a row, of all
        const int lane = thread_index() % WARP, slab = thread_index() / WARP * SLAB;
        // Of a lane's pair i: the row, the column, and the address of the first part of its head.
        struct Spot {
            int row, column;
            bool own;
            const Word* head;
        };
        const auto spot = [&](int i) {
            const int n = lane % LANES + i * LANES, row = min(n, MINE - 1) / PAIRS, at = slab + n % PAIRS * (2 * PER);
            const int column = min(at, WIDTH - 2 * PER);  // a lane without a pair of its own reads another lane's
            return Spot{row, column, lane < LANES && n < MINE && at == column, words() + ATTENTION_AT + (row * HEADS + column / DEPTH) * M::PARTS * HEAD_WORDS};
        };
        const auto leave = [&](const Spot& s, Vec<unsigned, 2> bits) {
            if (s.own) *reinterpret_cast<Vec<unsigned, 2>*>(shared.h + s.row * PITCH + s.column) = bits;
        };
        if (!Memory::MERGES || splits == 1) {
            auto heads = gather<ceil_div(MINE, LANES), 4>([&](int i) {
                const Spot s = spot(i);
                return s.head + s.column % DEPTH / PER;
            });
            heads.ask(begun, pause);
            heads.finish(tag, shared.watchdog, [&](int i, const Pair& pair) { leave(spot(i), {pair.payload(0), pair.payload(1)}); });
        } else if constexpr (Memory::MERGES) {
            wait_cycles(begun, pause);
#pragma unroll 1
            for (int i = 0; i < ceil_div(MINE, LANES); ++i) {
                const Spot s = spot(i);
                leave(s, merged(s.head, s.column % DEPTH / PER, this->parts_of(s.row)));
            }
        }
        __syncwarp();
    }

    // Merges parts of a context, each a normalised result and the logarithm of its weight: first the even parts in order and the
    // odd ones in order, then both. The order does not depend on the block that merges. A single part is not changed.
    template <int COUNT>
    struct Merger {
        float heaviest = LOWEST, total = 0.f, sum[COUNT] = {};

        template <typename V>
        __device__ __forceinline__ void add(float weight, float amount, const V& value) {
            const float before = heaviest;
            heaviest = fmaxf(heaviest, weight);
            const float rescale = exp2_approx(before - heaviest), share = exp2_approx(weight - heaviest);
            total = fmaf(share, amount, __fmul_rn(total, rescale));
#pragma unroll
            for (int j = 0; j < COUNT; ++j) sum[j] = fmaf(share, to_float(value.at[j]), __fmul_rn(sum[j], rescale));
        }
        __device__ __forceinline__ void add(const Merger& other) { add(other.heaviest, other.total, other.sums()); }
        __device__ __forceinline__ Vec<float, COUNT> sums() const {
            Vec<float, COUNT> found;
#pragma unroll
            for (int j = 0; j < COUNT; ++j) found.at[j] = sum[j];
            return found;
        }
        __device__ __forceinline__ Merger of_lane(int other) const {
            Merger found;
            found.heaviest = __shfl_xor_sync(0xffffffffu, heaviest, other), found.total = __shfl_xor_sync(0xffffffffu, total, other);
#pragma unroll
            for (int j = 0; j < COUNT; ++j) found.sum[j] = __shfl_xor_sync(0xffffffffu, sum[j], other);
            return found;
        }
        __device__ __forceinline__ Vec<T, COUNT> rounded() const {
            const float inverse = rcp_approx(total);
            Vec<T, COUNT> found;
#pragma unroll
            for (int j = 0; j < COUNT; ++j) found.at[j] = from_float<T>(sum[j] * inverse);
            return found;
        }
    };

    // A pair of words of a head whose context has `parts` parts, perhaps fewer than others. Where a warp has lanes to spare, its
    // upper half merges the odd parts.
    static constexpr int HALVES = ROWS * SLAB / (2 * PER) <= WARP / 2 ? 2 : 1;
    __device__ __forceinline__ Vec<unsigned, 2> merged(const Word* head, int at, int parts) {
        constexpr int AT_ONCE = HALVES == 2 ? 3 : 4;
        const int half = HALVES == 2 ? thread_index() % WARP / (WARP / 2) : 0;
        Merger<2 * PER> mergers[2 / HALVES];
        Vec<unsigned, 2> single = {};
#pragma unroll 1
        for (int first = half; first - half < splits; first += AT_ONCE * HALVES) {
            const auto place = [&](int i) { return head + min(first + i / 2 * HALVES, parts - 1) * HEAD_WORDS + (i % 2 ? DEPTH / PER : at); };
            Pair pair[2 * AT_ONCE];
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; ++i) pair[i].load(place(i));
            await(pair, place, tag, shared.watchdog);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const Vec<unsigned, 2> bits = {pair[2 * i].payload(0), pair[2 * i].payload(1)};
                if (first + i == 0) single = bits;
                if (first + i * HALVES >= parts) continue;
                mergers[HALVES == 2 ? 0 : i % 2].add(__uint_as_float(pair[2 * i + 1].payload(0)), 1.f, reinterpret_cast<const Vec<T, 2 * PER>&>(bits));
            }
        }
        mergers[0].add(HALVES == 2 ? mergers[0].of_lane(WARP / 2) : mergers[2 / HALVES - 1]);
        const Vec<T, 2 * PER> value = mergers[0].rounded();
        return parts == 1 ? single : reinterpret_cast<const Vec<unsigned, 2>&>(value);
    }

    // From the layer's input rows to the rows behind its attention.
    __device__ __forceinline__ void run_attention() {
        {
            ProductOf<WIDTH, M::QKV_UNITS> qkv;
            const unsigned begun = cycles();
            this->begin_attention();
            const NormTerms terms = this->template first_norm_terms<QKV>();
            qkv.begin(tape, shared.plan.units[QKV]);
            float sums[2 * ROWS];
            this->scale_first_rows(begun, sums);
            stamp();
            qkv.finish(tape, shared.h, PITCH, this->template partial<QKV>(), [&] { store_late_sums(sums); });
            this->template normal_outputs<QKV, decltype(qkv)>(0, terms, [&](int output, int row, float (&value)[PER]) {
                post(words() + QKV_AT + (row * 3 * WIDTH + output) / PER, packed(value), tag);
            });
            stamp();
        }
        Merger<PER> even, odd;  // of the current context, where the block attends to all of it
        this->attend(
            [&](const Part& part, auto& newest, bool all) {
                const Word* posted = words() + QKV_AT + (part.row * 3 * WIDTH + part.head * DEPTH) / PER;
                Attention::take(newest, all, posted, WIDTH / PER, tag, shared.watchdog);
            },
            [&](const Part& part) {
                const int thread = thread_index();
                if (thread >= DEPTH / PER) return;
                float value[PER];
                const auto [largest, sum] = Attention::template merge<PER>(shared.attention, part, thread * PER, value);
                const float inverse = sum > 0.f ? rcp_approx(sum) : 0.f, weight = sum > 0.f ? largest + __log2f(sum) : LOWEST;
                Vec<T, PER> rounded;
#pragma unroll
                for (int j = 0; j < PER; ++j) rounded.at[j] = from_float<T>(value[j] * inverse);
                if (WHOLE_CONTEXTS && (part.split > 0 || part.to < part.end)) {
                    if (part.split == 0) even = {}, odd = {};
                    if (part.split % 2 == 0) even.add(weight, 1.f, rounded);
                    else odd.add(weight, 1.f, rounded);
                    if (part.to < part.end) return;
                    even.add(odd);
                    rounded = even.rounded();
                }
                Word* target = words() + ATTENTION_AT + ((part.row * HEADS + part.head) * M::PARTS + (WHOLE_CONTEXTS ? 0 : part.split)) * HEAD_WORDS;
                post(target + thread, reinterpret_cast<const unsigned&>(rounded), tag);
                if (!WHOLE_CONTEXTS && thread < 2) post(target + DEPTH / PER + thread, __float_as_uint(weight), tag);
            });
        stamp();
        {
            ProductOf<WIDTH, M::OUT_UNITS> out;
            const unsigned begun = cycles();
            out.begin(tape, shared.plan.units[OUT]);
            gather_attention(begun);
            stamp();
            out.finish(tape, shared.h, PITCH, this->template partial<OUT>());
            this->template post_residual<OUT, 0, decltype(out)>(MIDDLE_AT);
            stamp();
        }
    }

    // Stores the rows behind attention, times gamma, in shared.h.
    __device__ __forceinline__ void scale_middle_rows(unsigned begun, float (&sums)[2 * ROWS]) {
        auto rows = rows_at(words() + MIDDLE_AT);
        rows.ask(begun, M::PAUSE_MIDDLE);
        scale_rows(vector(layer, M::LN_2_WEIGHT), 1, sums, tag, rows);
    }
};

}  // namespace warpline
