// The persistent decode kernel: one launch generates many tokens. Its blocks stay resident and do the embedding, all layers,
// the LM head and the choice of each token.
//
// The idea: only streaming the weights may take time, so it never stops (tape.cuh); everything else is a chain of short stages
// whose latency counts. A layer has five stages. At the end of a stage every block posts its results, and at the beginning of the
// next one every block gathers what it needs (exchange.cuh):
//   LayerNorm, QKV -> attention of a head (or a part of its context) -> out-projection and residual
//   -> LayerNorm, FC, GELU -> projection and residual
// While a block waits for its inputs it loads what does not depend on them: weights, LayerNorm parameters, past keys and values.
// One block sums each output in a fixed order, so runs repeat to the bit. Residual rows are float32; inputs of products are
// rounded to the storage type.
// Memory traffic per token: every weight once, keys and values of the context once, and for each of the five exchanges of a
// layer one row to every block, through L2.
#pragma once
#include "persistent/sampler.cuh"

namespace warpline {

template <typename M>
class Decode : Sampler<M> {
    using Memory = Layout<M>;
    using Layer = Layers<M>;
    using Ending = Sampler<M>;
    using Memory::ROWS, Memory::THREADS, Memory::WIDTH, Memory::INNER, Memory::HEADS;
    using Memory::BIASES, Memory::PITCH, Memory::RING_BYTES, Memory::END_AT, Memory::SCORES;
    using typename Memory::T, typename Memory::BlockShared, typename Memory::Row, typename Memory::Ring, typename Memory::TapeOf;
    using Layer::a, Layer::shared, Layer::tape, Layer::tag, Layer::splits, Layer::layer;
    using Layer::stamp, Layer::words_before, Layer::vector, Layer::rows_at, Layer::normalise, Layer::token_at;
    using Layer::run_layer;
    using Ending::all_logits, Ending::quantise_rows, Ending::best_scores, Ending::exchange_best, Ending::choose, Ending::first_output;

   public:
    using Memory::WORDS;

   private:
    using Ending::Ending;

    // Loads what is constant during the launch: biases of both projections of every layer, and scales, for this block's outputs.
    __device__ __forceinline__ void look_up_biases() {
        constexpr int OF_OUT = M::OUT_UNITS * TILE_OUTPUTS;
        for (int i = thread_index(); i < M::LAYERS * BIASES; i += THREADS) {
            const bool second = i % BIASES >= OF_OUT;
            const int output = shared.plan.first[second ? PROJ : OUT] * TILE_OUTPUTS + i % BIASES - (second ? OF_OUT : 0);
            layer = i / BIASES;
            const int which = second ? M::MLP_C_PROJ_BIAS : M::ATTN_C_PROJ_BIAS;
            shared.bias[i] = output < WIDTH ? vector(layer, which)[output] : from_float<T>(0.f);
            if constexpr (M::CODED) shared.scale[i] = output < WIDTH ? a.scales[(2 * layer + second) * WIDTH + output] : 0.f;
        }
    }

    // Loads the record of each row's slot.
    __device__ __forceinline__ void look_up_rows() {
        const int row = thread_index();
        if (row < ROWS) {
            Row& r = shared.rows[row];
            r = {};
            if (row < a.batch) {
                const int slot = r.slot = static_cast<int>(a.lanes[row]);
                r.length = static_cast<int>(a.length[slot]);
                r.token = static_cast<int>(a.tokens[token_at(r, r.length - 1)]);
                r.known = static_cast<int>(a.known[slot]);
                r.limit = static_cast<int>(a.limit[slot]);
                r.min_length = static_cast<int>(a.min_length[slot]);
                r.stops_at_eos = a.stops_at_eos[slot];
                r.active = !a.done[slot];
                r.inverse_temperature = a.temperature[slot] > 0.f ? 1.f / a.temperature[slot] : 0.f;
                if constexpr (M::FILTERS) {
                    r.top_k = static_cast<int>(a.top_k[slot]);
                    r.top_p = a.top_p[slot];
                    r.log_min_p = logf(a.min_p[slot]);
                    r.penalty = a.penalty[slot];
                    r.presence = a.presence[slot];
                    r.frequency = a.frequency[slot];
                    r.biased = a.biased[slot];
                }
            }
        }
        sync_threads<THREADS>();
        if constexpr (M::FILTERS) this->reset_seen();
    }

    // Prepares the next token from the rows' lengths; every block computes the same.
    __device__ __forceinline__ void prepare_token() {
        const int thread = thread_index();
        if (thread < ROWS) {
            Row& r = shared.rows[thread];
            r.banned = r.stops_at_eos && r.length < r.min_length ? a.eos : -1;
            r.key = r.inverse_temperature > 0.f ? a.noise[token_at(r, min(r.length, a.capacity - 1))] : 0;
            shared.row_scale[0][thread] = shared.row_scale[1][thread] = 1.f;
        }
        if (thread == WARP) {
            int longest = 1;
            bool active = false;
            for (int i = 0; i < ROWS; ++i) {
                longest = max(longest, M::INVARIANT ? this->context_end(i) : shared.rows[i].length);
                active |= shared.rows[i].active;
            }
            if (a.window > 0) longest = min(longest, a.window);
            shared.found = 0;
            shared.goes_on = active && !shared.watchdog.timed_out;
            this->deal_parts(longest);
        }
        sync_threads<THREADS>();
        splits = Memory::WHOLE_CONTEXTS ? 1 : shared.splits;
    }

    // Appends the chosen tokens to the rows in shared memory; block 0 also writes them to the slots.
    __device__ __forceinline__ void append() {
        const int row = thread_index();
        if (row < ROWS && shared.rows[row].active) {
            Row& r = shared.rows[row];
            const unsigned long long best = this->best_of(row);
            r.token = min(static_cast<unsigned>(output_of(best)), static_cast<unsigned>(M::VOCAB - 1));
            if (r.length < r.known) r.token = static_cast<int>(a.tokens[token_at(r, r.length)]);
            if constexpr (M::FILTERS) {
                this->mark_seen(row, r.token);
                this->penalise_own(r, r.token);
            }
            r.length += 1;
            r.active = !(r.token == a.eos && r.stops_at_eos) && r.length < r.limit;
            if (blockIdx.x == 0) {
                a.tokens[token_at(r, r.length - 1)] = r.token;
                a.length[r.slot] = r.length;
                if (!r.active) a.done[r.slot] = true;
                if (!isfinite(value_of(best)) || r.not_finite) a.not_finite[r.slot] = true;
            }
        }
        sync_threads<THREADS>();
    }

   public:
    __device__ __forceinline__ void run() {
        look_up_biases();
        look_up_rows();
        for (int token = 0; token < a.count; ++token) {
            prepare_token();
            if (!shared.goes_on) break;
            one_token(token);
        }
        if (thread_index() == 0) shared.watchdog.finished = true;
        tape.stop();
    }

   private:
    __device__ __forceinline__ void one_token(int token) {
        for (layer = 0; layer < M::LAYERS; ++layer, ++tag) {
            if (thread_index() == 0) shared.watchdog.turn = tag;
            run_layer();
        }
        auto rows = rows_at(words_before() + END_AT);
        rows.ask(cycles(), M::PAUSE_ROWS);
        normalise(vector(layer, M::LN_F_WEIGHT), vector(layer, M::LN_F_BIAS), tag - 1, rows);  // layer is LAYERS
        if constexpr (M::SCREENED) quantise_rows();
        sync_threads<THREADS>();  // the LM head reads all columns in every warp
        stamp();
        if (shared.parts > 0) __threadfence();  // keys and values are in the cache before the next token
        if constexpr (M::LOGITS || M::FILTERS) {
            all_logits([&](int output, int row, float value) {
                if (M::LOGITS && row < a.batch) a.logits[static_cast<long long>(row) * M::LOGITS_PITCH + output] = value;
                if constexpr (M::FILTERS) shared.scores[row * SCORES + output - first_output()] = value;
            });
            if constexpr (M::FILTERS) {
                stamp();
                choose();
                append();
            }
        } else {
            best_scores([&](int row, int output, float logit) {
                const Row& r = shared.rows[row];
                if (output == r.banned || !r.active) return 0ull;
                // Rounded twice, because the filtered path rounds between the two operations.
                if (r.inverse_temperature > 0.f) logit = __fadd_rn(__fmul_rn(logit, r.inverse_temperature), gumbel_noise(r.key, output));
                return candidate(logit, output);
            });
            stamp();
            exchange_best(token);
            ++tag;
            append();
        }
        stamp();
    }

   public:
    static __device__ __forceinline__ void launch(const typename M::Arguments& arguments) {
        unsigned char* memory = dynamic_shared<unsigned char>();
        Ring& ring = *reinterpret_cast<Ring*>(memory);
        BlockShared& shared = *reinterpret_cast<BlockShared*>(memory + RING_BYTES);
        for (int i = thread_index(); i < ROWS * PITCH; i += THREADS) shared.h[i] = from_float<T>(0.f);
        if (thread_index() == 0) {
            shared.watchdog.prepare();
            shared.plan = arguments.plans[blockIdx.x];
        }
        TapeOf::prepare(ring);
        __syncthreads();
        if (thread_index() < THREADS) {
            Decode(arguments, shared, ring).run();
        } else if (thread_index() == THREADS) {
            WatchdogTimer timer(shared.watchdog, arguments.fault, arguments.patience);
            TapeOf::feed(arguments.tape, shared.plan.range(M::SCREENED), HAS_BULK_COPIES ? arguments.count : 0, ring, timer);
            while (!timer.poll()) __nanosleep(200);
        }
    }
};

}  // namespace warpline
