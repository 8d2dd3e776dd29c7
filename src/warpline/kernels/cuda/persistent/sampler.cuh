// The choice of a token in the persistent decode kernel, on which all blocks agree.
//
// The idea: without filters a token is the largest score (plus noise), so each block posts its best one and one exchange decides.
// With filters (M::FILTERS) scores stay in the shared memory of the block that computed them, and all blocks find out together
// how far below the largest a score may lie:
//   top-k  digit by digit: every block counts its scores by the next digit of their distance
//   top-p  a token is drawn without top-p. If the scores above it hold too much probability, it and all below are excluded and
//          another is drawn. Usually the first one stays. The result is what a draw from the filtered scores would give, because
//          a draw is a maximum, and the filtered scores are a subset
// Each exchange is one trip through L2, and sums are added in a fixed order.
// Tried and lost: bins of scores in global memory (25 us for top-p, 35 for top-k); ops/sample.cuh with one block (about as long,
// and a launch).
#pragma once
#include "ops/append_token.cuh"
#include "ops/sample.cuh"
#include "persistent/head.cuh"

namespace warpline {

template <typename M>
class Sampler : protected Head<M> {
   protected:
    using Memory = Layout<M>;
    using Layer = Layers<M>;
    using LastStage = Head<M>;
    using Memory::ROWS, Memory::WARPS, Memory::THREADS, Memory::SCORES, Memory::SEEN;
    using Memory::CANDIDATE, Memory::CANDIDATES_AT, Memory::SUMS_AT, Memory::DIGITS_AT, Memory::DIGITS;
    using typename Memory::Row;
    using Layer::a, Layer::shared, Layer::tag, Layer::token_at;
    using LastStage::first_output, LastStage::outputs, LastStage::best_of;
    using LastStage::LastStage;

    // Exchanges each row's best candidate: from shared.best of every block to shared.best of all blocks; with filters also its
    // distance to the largest score. Two buffers alternate.
    __device__ __forceinline__ void exchange_best(int turn) {
        Word* candidates = a.words + CANDIDATES_AT + turn % 2 * (M::BLOCKS * ROWS * CANDIDATE);
        sync_threads<THREADS>();
        if (thread_index() < ROWS) {
            const unsigned long long best = best_of(thread_index());
            Word* own = candidates + (blockIdx.x * ROWS + thread_index()) * CANDIDATE;
            post(own, static_cast<unsigned>(best), tag);
            post(own + 1, static_cast<unsigned>(best >> 32), tag);
            if constexpr (M::FILTERS) {
                post(own + 2, shared.rows[thread_index()].distance, tag);
                post(own + 3, 0, tag);
            }
        }
        sync_threads<THREADS>();
        // Candidates of a row are ROWS apart, and so are the threads that gather them.
        static_assert(WARP % ROWS == 0);
        constexpr int PAIRS = CANDIDATE / 2, EACH = ceil_div(M::BLOCKS * ROWS, THREADS);
        unsigned long long best = 0, found = 0;
        unsigned distance = 0;
        const int thread = thread_index();
        auto asked = gather<EACH * PAIRS, 4>([&](int i) {
            // A thread without a candidate of its own reads one of the same row again.
            const int at = thread + i / PAIRS * THREADS, last = (M::BLOCKS - 1) * ROWS + thread % ROWS;
            return candidates + CANDIDATE * min(at, last) + i % PAIRS * 2;
        });
        asked.ask();
        asked.finish(tag, shared.watchdog, [&](int i, const Pair& pair) {
            if (i % PAIRS == 0) {
                found = static_cast<unsigned long long>(pair.payload(1)) << 32 | pair.payload(0);
                best = max(best, found);
            } else if (found == best) {
                distance = pair.payload(0);
            }
        });
        const unsigned long long own = best;
#pragma unroll
        for (int other = WARP / 2; other >= ROWS; other /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, other));
        if (thread % WARP < ROWS) shared.best[thread % ROWS][thread / WARP] = best;
        sync_threads<THREADS>();
        if constexpr (M::FILTERS) {
            if (own == best_of(thread % ROWS)) shared.rows[thread % ROWS].distance = distance;  // all that have it agree
            sync_threads<THREADS>();
        }
    }

    // --- filters ---

    // Marks the block's own outputs that occur in a row's text: first from `tokens`, then token by token.
    __device__ __forceinline__ void reset_seen() {
        for (int i = thread_index(); i < ROWS * SEEN; i += THREADS) shared.seen[i] = 0;
        sync_threads<THREADS>();
        for (int row = 0; row < a.batch; ++row) {
            if (shared.rows[row].penalty == 1.f) continue;
            for (int i = thread_index(); i < shared.rows[row].length; i += THREADS) mark_seen(row, static_cast<int>(a.tokens[token_at(shared.rows[row], i)]));
        }
        sync_threads<THREADS>();
    }
    __device__ __forceinline__ void mark_seen(int row, int token) {
        const int own = token - first_output();
        if (own >= 0 && own < SCORES) atomicOr(&shared.seen[row * SEEN + own / 32], 1u << own % 32);
    }

    // Only the block that owns an output reads and changes what is added to its logit.
    __device__ __forceinline__ long long bias_at(const Row& r) const { return static_cast<long long>(r.slot) * M::VOCAB; }
    __device__ __forceinline__ void penalise_own(const Row& r, int token) {
        const int own = token - first_output();
        if (r.biased && own >= 0 && own < outputs()) lower(a.bias, a.counts, bias_at(r) + token, r.presence, r.frequency);
    }

    // Distance of a score below the largest, in steps of 2^-26. Distances of 64 and above are all the same.
    static constexpr unsigned NOTHING = 0xffffffffu;  // no distance is as large
    static __device__ __forceinline__ unsigned distance_of(float largest, float score) {
        return static_cast<unsigned>(fminf((largest - score) * 0x1p26f, 4294967040.f));
    }

    // Calls f(index among the block's outputs, score) for every allowed output of a row; a thread always has the same outputs.
    template <typename F>
    __device__ __forceinline__ void each_score(int row, F f) {
        const int banned = shared.rows[row].banned;
        for (int own = thread_index(); own < outputs(); own += THREADS) {
            if (first_output() + own != banned) f(own, shared.scores[row * SCORES + own]);
        }
    }

    // Stores the maximum of f(index, score) over a row's scores in shared.best, per warp.
    template <typename F>
    __device__ __forceinline__ void reduce_best(int row, F f) {
        unsigned long long best = 0;
        each_score(row, [&](int own, float score) { best = max(best, f(own, score)); });
        __syncwarp();
#pragma unroll
        for (int other = WARP / 2; other > 0; other /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, other));
        if (thread_index() % WARP == 0) shared.best[row][thread_index() / WARP] = best;
    }

    // Two sums over a row's scores, for rows without a token yet: f(row, score, sums) adds to them. The totals of all blocks are
    // the first elements of shared.sums[2 * row] and shared.sums[2 * row + 1].
    template <typename F>
    __device__ __forceinline__ void exchange_sums(F f) {
        Word* sums = a.words + SUMS_AT;
        const int thread = thread_index(), warp = thread / WARP;
        for (int row = 0; row < ROWS; ++row) {
            if (shared.rows[row].drawn) continue;
            float own[2] = {};
            each_score(row, [&](int, float score) { f(row, score, own); });
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2; ++i) own[i] = warp_reduce(own[i], [](float x, float y) { return x + y; });
            if (thread % WARP < 2) shared.sums[2 * row + thread % WARP][warp] = thread % WARP == 0 ? own[0] : own[1];
        }
        sync_threads<THREADS>();
        if (thread < 2 * ROWS) post(sums + blockIdx.x * (2 * ROWS) + thread, __float_as_uint(sum_of<WARPS>(shared.sums[thread])), tag);
        // A warp adds up all blocks' sums of a row, in an order that does not depend on the other rows.
        static_assert(ROWS <= WARPS);
        const int lane = thread % WARP;
        float total[2] = {};
        if (warp < ROWS) {
            auto asked = gather<ceil_div(M::BLOCKS, WARP), 5>([&](int i) { return sums + 2 * (min(lane + i * WARP, M::BLOCKS - 1) * ROWS + warp); });
            asked.ask();
            asked.finish(tag, shared.watchdog, [&](int i, const Pair& pair) {
                if (lane + i * WARP >= M::BLOCKS) return;
                total[0] += __uint_as_float(pair.payload(0));
                total[1] += __uint_as_float(pair.payload(1));
            });
#pragma unroll
            for (int i = 0; i < 2; ++i) total[i] = warp_reduce(total[i], [](float x, float y) { return x + y; });
        }
        sync_threads<THREADS>();  // the block's own sums have been read
        if (warp < ROWS && lane < 2) shared.sums[2 * warp + lane][0] = lane == 0 ? total[0] : total[1];
        sync_threads<THREADS>();
    }

    // Finds the next digit of a row's k-th distance. One warp calls it. Requires: all blocks' counts have been added up.
    static constexpr int FEWEST_BITS = 3, BITS = DIGITS == 32 ? 5 : FEWEST_BITS;
    __device__ __forceinline__ void take_digit(int row, int shift) {
        static_assert(ROWS <= WARPS && 1 << BITS == DIGITS);
        const int lane = thread_index() % WARP, wanted = shared.rows[row].wanted;
        const int count = lane < DIGITS ? shared.counts[row * DIGITS + lane] : 0;
        int upto = count;
#pragma unroll
        for (int other = 1; other < DIGITS; other *= 2) {
            const int more = __shfl_up_sync(0xffffffffu, upto, other);
            if (lane >= other) upto += more;
        }
        const unsigned enough = __ballot_sync(0xffffffffu, upto >= wanted && lane < DIGITS);
        if (lane != (enough ? __ffs(enough) - 1 : DIGITS - 1)) return;
        Row& r = shared.rows[row];
        // The last digit overlaps with the one before it.
        r.prefix = (shift == 0 ? r.prefix >> (BITS - r.shift) << BITS : r.prefix << BITS) | lane;
        r.shift = shift;
        r.wanted = wanted - (upto - count);
        // Everything with this digit stays: correct if that is exactly the wanted number, or if no digit is left.
        if (shift == 0 || count == r.wanted) {
            const unsigned long long end = (static_cast<unsigned long long>(r.prefix) + 1) << shift;
            r.cutoff = r.top_k_cutoff = static_cast<unsigned>(min(end, static_cast<unsigned long long>(NOTHING)));
            r.searched = false;
        }
    }

    // Top-k keeps the scores that fewer than k scores exceed. Finds the largest distance that stays, digit by digit, until a
    // digit leaves exactly k.
    __device__ __forceinline__ void count_nearest() {
        constexpr int PER_BLOCK = ROWS * DIGITS / 2;
        static_assert(THREADS % PER_BLOCK == 0 && (PER_BLOCK % WARP == 0 || WARP % PER_BLOCK == 0));
        const int thread = thread_index();
        if (thread < ROWS) {
            Row& r = shared.rows[thread];
            r.searched = r.active && r.inverse_temperature > 0.f && r.top_k < M::VOCAB && !r.not_finite;
            r.prefix = 0;
            r.shift = 32;
            r.wanted = r.top_k;
        }
#pragma unroll 1
        for (int shift = 32 - BITS, round = 0;; shift = max(0, shift - BITS), ++round) {
            Word* digits = a.words + DIGITS_AT + round % 2 * (M::BLOCKS * ROWS * DIGITS);
            for (int i = thread; i < ROWS * DIGITS; i += THREADS) shared.counts[i] = 0;
            sync_threads<THREADS>();
            bool searching = false;
            for (int row = 0; row < ROWS; ++row) {
                const Row& r = shared.rows[row];
                searching |= r.searched;
                if (!r.searched) continue;
                each_score(row, [&](int, float score) {
                    // The bits above `shift` are known; in the last round the digit overlaps with known bits.
                    const unsigned distance = distance_of(r.largest, score);
                    if (r.shift < 32 && distance >> r.shift != r.prefix) return;
                    atomicAdd(&shared.counts[row * DIGITS + (distance >> shift) % DIGITS], 1);
                });
            }
            if (!searching) return;
            sync_threads<THREADS>();
            for (int i = thread; i < ROWS * DIGITS; i += THREADS) post(digits + blockIdx.x * (ROWS * DIGITS) + i, shared.counts[i], tag);
            int sum[2] = {};
            auto asked = gather<ceil_div(M::BLOCKS * PER_BLOCK, THREADS), 8>([&](int i) {
                return digits + 2 * min(thread + i * THREADS, (M::BLOCKS - 1) * PER_BLOCK + thread % PER_BLOCK);
            });
            asked.ask();
            asked.finish(tag, shared.watchdog, [&](int i, const Pair& pair) {
                if (thread + i * THREADS >= M::BLOCKS * PER_BLOCK) return;
                sum[0] += pair.payload(0);
                sum[1] += pair.payload(1);
            });
            sync_threads<THREADS>();  // the block's own counts have been posted
            for (int i = thread; i < ROWS * DIGITS; i += THREADS) shared.counts[i] = 0;
            sync_threads<THREADS>();
            atomicAdd(&shared.counts[2 * (thread % PER_BLOCK)], sum[0]);
            atomicAdd(&shared.counts[2 * (thread % PER_BLOCK) + 1], sum[1]);
            sync_threads<THREADS>();
            if (thread / WARP < ROWS && shared.rows[thread / WARP].searched) take_digit(thread / WARP, shift);
            ++tag;
            sync_threads<THREADS>();
        }
    }

    // Most draws per row; the last one stays. A draw and its check are one turn each, after one turn for the largest score and
    // one per digit of top-k. The limit does not depend on which filters other rows use.
    static constexpr int MOST_DRAWS = (M::SAMPLER_TURNS - 2 - ceil_div(32, FEWEST_BITS)) / 2;

    // Chooses the token of every row from the logits in shared.scores; the result is in shared.best.
    __device__ __forceinline__ void choose() {
        sync_threads<THREADS>();  // the logits are stored
        for (int row = 0; row < ROWS; ++row) {
            const Row& r = shared.rows[row];
            reduce_best(row, [&](int own, float score) {
                if (shared.seen[row * SEEN + own / 32] >> own % 32 & 1) score *= score > 0.f ? 1.f / r.penalty : r.penalty;
                if (r.biased) score += a.bias[bias_at(r) + first_output() + own];
                if (r.inverse_temperature > 0.f) score *= r.inverse_temperature;
                shared.scores[row * SCORES + own] = score;
                return candidate(score, first_output() + own);
            });
        }
        exchange_best(0);
        ++tag;
        bool draws = false, counts = false;
        for (int row = 0; row < ROWS; ++row) {
            draws |= shared.rows[row].inverse_temperature > 0.f;
            counts |= shared.rows[row].inverse_temperature > 0.f && shared.rows[row].top_k < M::VOCAB;
        }
        if (!draws) return;
        if (thread_index() < ROWS) {
            Row& r = shared.rows[thread_index()];
            r.largest = value_of(best_of(thread_index()));
            r.not_finite = !isfinite(r.largest);
            r.cutoff = r.top_k_cutoff = NOTHING;
            r.drawn = !(r.inverse_temperature > 0.f) || !r.active || r.not_finite;
        }
        sync_threads<THREADS>();
        if (counts) count_nearest();
        if (thread_index() < ROWS) {
            Row& r = shared.rows[thread_index()];
            if (r.log_min_p > -64.f) r.cutoff = min(r.cutoff, distance_of(0.f, r.log_min_p) + 1);
        }
        for (int turn = 1;; ++turn) {
            sync_threads<THREADS>();
            draw(turn);
            bool checks = false;
            for (int row = 0; row < ROWS; ++row) checks |= !shared.rows[row].drawn && shared.rows[row].top_p < 1.f;
            if (!checks || turn > MOST_DRAWS) return;
            exchange_sums([&](int row, float score, float (&sums)[2]) {
                const Row& r = shared.rows[row];
                const unsigned distance = distance_of(r.largest, score);
                const float weight = exp2_approx((score - r.largest) * LOG2_E);
                if (distance < r.distance) sums[0] += weight;
                if (distance < r.top_k_cutoff) sums[1] += weight;
            });
            ++tag;
            if (thread_index() < ROWS && !shared.rows[thread_index()].drawn) {
                Row& r = shared.rows[thread_index()];
                const float above = shared.sums[2 * thread_index()][0], all = shared.sums[2 * thread_index() + 1][0];
                r.drawn = r.distance == 0 || above < r.top_p * all;
                if (!r.drawn) r.cutoff = r.distance;
            }
            sync_threads<THREADS>();
            bool left = false;
            for (int row = 0; row < ROWS; ++row) left |= !shared.rows[row].drawn;
            if (!left) return;
        }
    }

    // Draws a token for every row that has none yet, from the scores that are left.
    __device__ __forceinline__ void draw(int turn) {
        for (int row = 0; row < ROWS; ++row) {
            Row& r = shared.rows[row];
            if (r.drawn) continue;
            reduce_best(row, [&](int own, float score) {
                if (distance_of(r.largest, score) >= r.cutoff) return 0ull;
                return candidate(score + gumbel_noise(r.key, first_output() + own), first_output() + own);
            });
            sync_threads<THREADS>();
            // The thread that has the block's best score stores its distance.
            const int likeliest = output_of(best_of(row));
            each_score(row, [&](int own, float score) {
                if (first_output() + own == likeliest) r.distance = distance_of(r.largest, score);
            });
        }
        exchange_best(turn);
        ++tag;
    }
};

}  // namespace warpline
