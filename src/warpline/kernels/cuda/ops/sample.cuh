// The next token of each row from its logits: penalties, biases, temperature, top-k, top-p, min-p, and a random draw.
//
// The idea: a draw is the maximum of score + Gumbel noise, and the noise of a token is a hash of the row's key and the token. So
// nothing is sorted, no generator has a state, and the result depends on the arguments alone. Top-k and top-p need the least
// score that they keep: scores are counted (or weighed) into bins of equal width, then the bin with the cutoff is refined.
// Weights are integers of 2^-31 of the total: their sum does not depend on thread order and rounds no worse than in float32.
// Row r of the logits belongs to slot lanes[r], whose record has all parameters. The key is the slot's `noise` at the length of
// its sequence. `eos` cannot be drawn before `min_length` where it would stop the sequence. If `biased`, the slot's row of `bias`
// is added. `logit` is the row's largest, or infinity if one of them is NaN or infinite.
// Contract: `lanes` and the slot's record are read before the preceding launches end, so none of them may write these.
// Memory traffic: the logits once, or up to eight times with filters, from L2 after the first; one block per row.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

namespace warpline {

// Standard Gumbel noise of a token from 32 hashed bits; finest near 0, where the largest noise comes from.
__device__ __forceinline__ float gumbel_noise(unsigned key, unsigned token) {
    unsigned bits = key + token;
    bits = (bits ^ (bits >> 16)) * 0x7feb352du;
    bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
    bits ^= bits >> 16;
    // The last few values would round up to 1, with noise -infinity; noise must not make a token impossible.
    const float uniform = fminf((__uint2float_rn(bits) + 0.5f) * 0x1p-32f, 1.f - 0x1p-24f);
    return -logf(-log1pf(-uniform));
}

// Maps floats to unsigned integers of the same order.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The larger one, or NaN if one is NaN; fmaxf would return the other.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return a >= b || a != a ? a : b;
#endif
}

// Shared memory of the block that chooses a row's token.
template <int VOCAB, int BLOCK>
struct SampleScratch {
    static constexpr int BINS = 2048, LISTED = 1024, WARPS = BLOCK / WARP;
    static_assert(BINS % BLOCK == 0);
    unsigned seen[ceil_div(VOCAB, 32)];
    unsigned bins[BINS];
    unsigned keys[LISTED], weights[LISTED];
    unsigned per_warp[WARPS];
    float reduced[WARPS];
    int index[WARPS];
    // Per row, kept here to save registers: the repetition penalty and its inverse, the biases, and the number of logits that
    // they are added to: 0, or all without padding.
    float penalty, inverse_penalty;
    const float* bias;
    int adjusted;
    unsigned above;
    int listed, crossing, first;
};

// The bin with the cutoff: from the top, the last bin above which the total is less than `target`. `above` is the total above all
// bins, and on return above that bin. Requires: all threads call it; all get the same result.
template <int VOCAB, int BLOCK>
__device__ __forceinline__ int crossing_bin(SampleScratch<VOCAB, BLOCK>& s, unsigned target, unsigned& above) {
    constexpr int BINS = SampleScratch<VOCAB, BLOCK>::BINS, EACH = BINS / BLOCK;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (threadIdx.x == 0) s.crossing = 0;
    unsigned own = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) own += s.bins[BINS - 1 - (threadIdx.x * EACH + i)];
    unsigned before = own;  // inclusive prefix sum within the warp, from the top
#pragma unroll
    for (int other = 1; other < WARP; other *= 2) {
        const unsigned more = __shfl_up_sync(0xffffffffu, before, other);
        if (lane >= other) before += more;
    }
    if (lane == WARP - 1) s.per_warp[warp] = before;
    __syncthreads();
    before += above - own;
    for (int i = 0; i < warp; ++i) before += s.per_warp[i];
    int last = -1;
    unsigned above_last = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (before < target) {
            last = threadIdx.x * EACH + i;
            above_last = before;
        }
        before += s.bins[BINS - 1 - (threadIdx.x * EACH + i)];
    }
    if (last >= 0) atomicMax(&s.crossing, last);
    __syncthreads();
    if (last == s.crossing) s.above = above_last;
    __syncthreads();
    above = s.above;
    return BINS - 1 - s.crossing;
}

// The least key to keep: a score is kept if the total above it is less than `target`. each(f) calls f(score, weight) for the
// scores to consider; `largest` is the largest score.
template <int VOCAB, int BLOCK, typename Each>
__device__ __forceinline__ unsigned least_kept(SampleScratch<VOCAB, BLOCK>& s, float largest, unsigned target, Each each) {
    const auto clear = [&] {
        __syncthreads();
        for (int i = threadIdx.x; i < s.BINS; i += BLOCK) s.bins[i] = 0;
        if (threadIdx.x == 0) s.listed = 0;
        __syncthreads();
    };
    // Bins of 1/64 hold few scores each; scores more than 32 below the largest share the last one.
    const auto bin_of = [&](float score) { return s.BINS - 1 - static_cast<int>(fminf((largest - score) * 64.f, s.BINS - 1.f)); };
    clear();
    each([&](float score, unsigned weight) { atomicAdd(&s.bins[bin_of(score)], weight); });
    __syncthreads();
    unsigned above = 0;
    const int bin = crossing_bin(s, target, above);
    __syncthreads();
    each([&](float score, unsigned weight) {
        if (bin_of(score) != bin) return;
        const int at = atomicAdd(&s.listed, 1);
        if (at < s.LISTED) {
            s.keys[at] = ordered(score);
            s.weights[at] = weight;
        }
    });
    __syncthreads();
    const int listed = s.listed;
    // Within the bin: 11, 11 and 10 bits of the key, from the top.
    unsigned prefix = 0;
#pragma unroll 1  // three copies would triple the compile time
    for (int level = 0; level < 3; ++level) {
        const int shift = level == 0 ? 21 : level == 1 ? 10 : 0, width = level == 2 ? 10 : 11;
        const auto consider = [&](unsigned key, unsigned weight) {
            if (level > 0 && key >> (shift + width) != prefix) return;
            atomicAdd(&s.bins[key >> shift & ((1u << width) - 1)], weight);
        };
        clear();
        if (listed <= s.LISTED) {
            for (int i = threadIdx.x; i < listed; i += BLOCK) consider(s.keys[i], s.weights[i]);
        } else {
            each([&](float score, unsigned weight) {
                if (bin_of(score) == bin) consider(ordered(score), weight);
            });
        }
        __syncthreads();
        prefix = prefix << width | crossing_bin(s, target, above);
    }
    return prefix;
}

template <typename T, int VOCAB, int BLOCK, int UNROLL>
__device__ __forceinline__ void sample(const T* logits, const long long* tokens, const long long* length, const int* noise,
                                       const float* temperature, const long long* top_k, const float* top_p,
                                       const float* min_p, const float* penalty, const long long* min_length,
                                       const bool* stops_at_eos, const bool* biased, const float* bias, const long long* lanes,
                                       long long* token, float* logit, int capacity, int entries, int eos) {
    constexpr int WARPS = BLOCK / WARP;
    __shared__ SampleScratch<VOCAB, BLOCK> s;
    const int row = blockIdx.x;
    const long long slot = lanes[row];
    logits += static_cast<long long>(row) * VOCAB;
    tokens += slot * capacity;
    const bool greedy = temperature[slot] <= 0.f, punishes = penalty[slot] != 1.f;
    const float inverse_temperature = greedy ? 1.f : 1.f / temperature[slot];
    const int past = static_cast<int>(length[slot]), banned = stops_at_eos[slot] && past < min_length[slot] ? eos : -1;
    if (threadIdx.x == 0) {
        s.penalty = penalty[slot];
        s.inverse_penalty = 1.f / penalty[slot];
        s.bias = bias + slot * entries;
        s.adjusted = biased[slot] ? entries : 0;
        s.first = VOCAB;
    }
    await_previous_launch();
    __syncthreads();
    const bool adjusts = punishes || s.adjusted > 0 || banned >= 0;

    if (punishes) {
        for (int i = threadIdx.x; i < ceil_div(VOCAB, 32); i += BLOCK) s.seen[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < min(past, capacity); i += BLOCK) atomicOr(&s.seen[tokens[i] / 32], 1u << tokens[i] % 32);
        __syncthreads();
    }
    const auto score = [&](int i, float v) {
        if (punishes && s.seen[i / 32] >> i % 32 & 1) v *= v > 0.f ? s.inverse_penalty : s.penalty;
        if (i < s.adjusted) v += s.bias[i];
        return i == banned ? -infinity() : v * inverse_temperature;
    };

    constexpr int WIDTH = vector_width<T>(VOCAB), STEP = BLOCK * WIDTH;
    using Pack = Vec<T, WIDTH>;
    const auto pack_at = [&](int i) { return *reinterpret_cast<const Pack*>(logits + i); };

    // Calls f(token, logit) once for each token, spread over the threads.
    const auto each = [&](auto f) {
        constexpr int AT_ONCE = UNROLL > WIDTH ? UNROLL / WIDTH : 1;
#pragma unroll AT_ONCE
        for (int i = threadIdx.x * WIDTH; i < VOCAB; i += STEP) {
            const Pack pack = pack_at(i);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) f(i + j, to_float(pack.at[j]));
        }
    };

    // The token with the largest value, of equals the first: first over the lanes of a warp, then over the warps.
    const auto choose = [&](auto value_of) {
        float best = -infinity();
        int at = VOCAB;
        const auto take = [&](float v, int i) {
            if (i < VOCAB && (v > best || (v == best && i < at) || at == VOCAB)) {
                best = v;
                at = i;
            }
        };
        const auto take_over_lanes = [&] {
#pragma unroll
            for (int other = WARP / 2; other > 0; other /= 2) {
                take(__shfl_xor_sync(0xffffffffu, best, other), __shfl_xor_sync(0xffffffffu, at, other));
            }
        };
        each([&](int i, float v) { take(value_of(i, v), i); });
        take_over_lanes();
        __syncthreads();
        if (threadIdx.x % WARP == 0) {
            s.reduced[threadIdx.x / WARP] = best;
            s.index[threadIdx.x / WARP] = at;
        }
        __syncthreads();
        best = s.reduced[threadIdx.x % WARPS];
        at = s.index[threadIdx.x % WARPS];
        take_over_lanes();
        return at;
    };

    // The likeliest token, and the largest logit.
    float highest = -infinity();
    bool not_finite = false;  // some logit is NaN or +infinity
    int likeliest, found = threadIdx.x * WIDTH;  // found: the pack of this thread's largest logit, without adjustments
    if (adjusts) {
        likeliest = choose([&](int i, float v) {
            highest = fmaxf(highest, v);
            not_finite |= !(v < infinity());
            return score(i, v);
        });
    } else {
        // Without adjustments scores have the order of logits: only the largest logit is searched for, then the thread that has
        // it finds its token. All loads are in flight at once if registers allow.
        constexpr int STEPS = ceil_div(VOCAB, STEP), AT_ONCE = STEPS < 7 ? STEPS : 7;
        for (int first = threadIdx.x * WIDTH; first < VOCAB; first += AT_ONCE * STEP) {
            Pack pack[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                if (first + u * STEP < VOCAB) pack[u] = pack_at(first + u * STEP);
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                if (first + u * STEP >= VOCAB) continue;
                const float before = highest;
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) highest = max_or_nan(highest, to_float(pack[u].at[j]));
                if (highest > before) found = first + u * STEP;
            }
        }
        not_finite = !(highest < infinity());
    }
    const float own = highest;
    highest = group_max<WARPS>(highest, s.reduced);
    if (!adjusts) {
        if (own == highest && found < VOCAB) {
            const Pack pack = pack_at(found);
#pragma unroll
            for (int j = WIDTH - 1; j >= 0; --j) {
                if (to_float(pack.at[j]) == highest) atomicMin(&s.first, found + j);
            }
        }
        __syncthreads();
        likeliest = min(s.first, VOCAB - 1);  // no token matched if no logit is a number
    }
    if (__syncthreads_or(not_finite)) highest = infinity();
    if (threadIdx.x == 0) logit[row] = highest;
    if (greedy) {
        if (threadIdx.x == 0) token[row] = likeliest;
        return;
    }

    // Top-k keeps a score that fewer than k scores exceed; top-p one that scores of less than p in total exceed.
    const float largest = score(likeliest, to_float(logits[likeliest]));
    unsigned cutoff = 0;  // least key that is kept
#pragma unroll 1
    for (int rule = 0; rule < 2; ++rule) {
        const bool by_count = rule == 0;
        if (by_count ? top_k[slot] >= VOCAB : top_p[slot] >= 1.f) continue;
        const auto each_kept = [&](auto f) {
            each([&](int i, float logit) {
                const float v = score(i, logit);
                if (ordered(v) >= cutoff) f(v);
            });
        };
        float sum = 0.f;
        if (!by_count) each_kept([&](float v) { sum += exp2_approx((v - largest) * LOG2_E); });
        const float scale = 0x1p31f / group_sum<WARPS>(sum, s.reduced);
        const unsigned target = by_count ? static_cast<unsigned>(top_k[slot]) : max(1u, __float2uint_rn(top_p[slot] * 0x1p31f));
        const unsigned least = least_kept(s, largest, target, [&](auto f) {
            each_kept([&](float v) { f(v, by_count ? 1u : __float2uint_rn(exp2_approx((v - largest) * LOG2_E) * scale)); });
        });
        cutoff = max(cutoff, least);
    }
    const float log_min_p = largest + logf(min_p[slot]);
    const unsigned key = static_cast<unsigned>(noise[slot * capacity + min(past, capacity - 1)]);
    const int drawn = choose([&](int i, float logit) {
        const float v = score(i, logit);
        return ordered(v) >= cutoff && v >= log_min_p ? v + gumbel_noise(key, i) : -infinity();
    });
    if (threadIdx.x == 0) token[row] = drawn;
}

}  // namespace warpline
