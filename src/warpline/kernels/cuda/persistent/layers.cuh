// One layer of the persistent decode kernel, from the rows that the layer before posted to the rows that it posts.
#pragma once
#include "ops/gelu.cuh"
#include "persistent/attention_half.cuh"

namespace warpline {

template <typename M>
class Layers : protected AttentionHalf<M> {
   protected:
    using Memory = Layout<M>;
    using Base = AttentionHalf<M>;
    using Memory::ROWS, Memory::WARPS, Memory::WIDTH, Memory::INNER, Memory::PER, Memory::INNER_SLAB, Memory::PITCH, Memory::FC_AT, Memory::END_AT;
    using typename Base::NormTerms;
    template <int INPUTS, int UNITS>
    using ProductOf = typename Memory::template ProductOf<INPUTS, UNITS>;
    using Base::shared, Base::tape, Base::tag, Base::AT_ONCE, Base::words, Base::stamp, Base::packed, Base::store_late_sums;
    using Base::Base;

    // The hidden rows (outputs of FC), restricted to this warp's columns.
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
        asked.finish(tag, shared.watchdog, [&](int i, const Pair& pair) {
            const int column = hidden_column(i % HIDDEN_EACH);
            if (column < 0) return;
            *reinterpret_cast<Vec<unsigned, 2>*>(shared.h + i / HIDDEN_EACH * PITCH + column) = {pair.payload(0), pair.payload(1)};
        });
        __syncwarp();
    }

    // Runs one layer. Each stage does what does not depend on other blocks before it gathers their words.
    __device__ __forceinline__ void run_layer() {
        this->run_attention();
        {
            ProductOf<WIDTH, M::FC_UNITS> fc;
            const unsigned begun = cycles();
            const NormTerms terms = this->template first_norm_terms<FC>();
            fc.begin(tape, shared.plan.units[FC]);
            float sums[2 * ROWS];
            this->scale_middle_rows(begun, sums);
            stamp();
            fc.finish(tape, shared.h, PITCH, this->template partial<FC>(), [&] { store_late_sums(sums); });
            this->template normal_outputs<FC, decltype(fc)>(1, terms, [&](int output, int row, float (&value)[PER]) {
#pragma unroll
                for (int j = 0; j < PER; ++j) value[j] = gelu_of<false>(value[j]);
                post(words() + FC_AT + (row * INNER + output) / PER, packed(value), tag);
            });
            stamp();
        }
        if (shared.plan.units[PROJ] == 0) {
            stamp(), stamp();
            return;
        }
        ProductOf<INNER, M::PROJ_UNITS> proj;
        const unsigned begun = cycles();
        proj.begin(tape, shared.plan.units[PROJ]);
        auto hidden = hidden_words();
        hidden.ask(begun, M::PAUSE_HIDDEN);
        gather_hidden(hidden);
        stamp();
        proj.finish(tape, shared.h, PITCH, this->template partial<PROJ>());
        this->template post_residual<PROJ, M::OUT_UNITS * TILE_OUTPUTS, decltype(proj)>(END_AT);
        stamp();
    }
};

}  // namespace warpline
