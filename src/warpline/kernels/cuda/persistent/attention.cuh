// Attention of one query over a part of its KV cache, by one block on whose every cycle all others wait.
//
// The idea: each warp has eight positions at a time, whose keys and values it copies into shared memory before the query is
// there, and keeps a softmax of its own; the warps are merged once, at the end. On tensor cores the query is the first
// operand, in every row, so that each lane ends with the scores that it needs as weights for the values, and nothing is
// exchanged between lanes but the maximum. The newest key and value come with the query; they are not in the cache yet.
// Traffic: keys and values once.
// Tried and lost: the lanes of ops/decode_attention.cuh, in ordinary arithmetic: 1,100 instructions, 4,400 cycles.
#pragma once
#include "online.cuh"
#include "persistent/exchange.cuh"
#include "persistent/tape.cuh"

namespace warpline {

// What one block attends to: positions from ... to - 1 of a sequence whose newest position is end - 1.
struct Part {
    int row, head, split, from, to, end;

    __device__ __forceinline__ bool has_newest() const { return from < to && to == end; }
};

template <typename T, int DEPTH, int WARPS>
class PartAttention {
    static constexpr int KEYS = 8, AT_ONCE = WARPS * KEYS, CHUNK = 16 / sizeof(T), VECTORS = DEPTH / CHUNK;
    static constexpr int PITCH = DEPTH + CHUNK;  // rows on different banks
    static constexpr int COPIES = ceil_div(KEYS * VECTORS, WARP);
    static_assert(VECTORS <= WARP, "one warp brings the newest key and value, a vector to a lane");

   public:
    struct Shared {
        alignas(16) T keys[WARPS][KEYS * PITCH];
        alignas(16) T values[WARPS][KEYS * PITCH];
        alignas(16) float largest[WARPS], sums[WARPS];
        alignas(16) float out[WARPS][DEPTH];
    };

   private:
    // This warp's eight positions from `first` on.
    static __device__ __forceinline__ void copy(Shared& s, const T* keys, const T* values, int first, int to, int newest) {
        const int thread = thread_index(), warp = thread / WARP;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int chunk = thread % WARP + i * WARP, row = chunk / VECTORS, column = chunk % VECTORS * CHUNK;
            if (COPIES * WARP > KEYS * VECTORS && row >= KEYS) continue;
            const int position = first + row;
            const bool inside = position < to && position != newest;
            const long long at = inside ? position * DEPTH + column : 0;
            copy_async(s.keys[warp] + row * PITCH + column, keys + at, inside);
            copy_async(s.values[warp] + row * PITCH + column, values + at, inside);
        }
        end_copy_group();
    }

   public:
    // Starts copying what is in the cache. `keys` and `values`: of the sequence and head, position 0.
    static __device__ __forceinline__ void begin(Shared& s, const T* keys, const T* values, const Part& part) {
        copy(s, keys, values, part.from + thread_index() / WARP * KEYS, part.to, part.end - 1);
    }

    // `posted` is where the query, the newest key and the newest value are exchanged, `apart` from each other, under `tag`.
    // Ends with each warp's result in `s`, behind a barrier. `factor`: scale * log2(e). Returns whether this warp has the
    // newest key and value and still has to `keep` them.
    static __device__ __forceinline__ bool run(Shared& s, T* keys, T* values, const Part& part, float factor,
                                               const Word* posted, int apart, unsigned tag, const Watchdog& dog) {
        const int thread = thread_index(), warp = thread / WARP, lane = thread % WARP, newest = part.end - 1 - part.from;
        const bool brings = part.has_newest() && newest / KEYS % WARPS == warp, at_once = newest < AT_ONCE;
        constexpr int QUADS = ceil_div(VECTORS, 4), AT_ONCE_QUADS = QUADS < 2 ? QUADS : 2, PAIRS = 2 * AT_ONCE_QUADS;
        Bits q[QUADS];
#pragma unroll
        for (int first = 0; first < QUADS; first += AT_ONCE_QUADS) {
            // Pairs of the query, and with the first of them those of the newest key and value: sixteen bytes to a lane.
            const auto place = [&](int i) {
                if (i < PAIRS) return posted + 4 * min((first + i / 2) * 4 + lane % 4, VECTORS - 1) + i % 2 * 2;
                return posted + (1 + (i - PAIRS) / 2) * apart + 4 * min(lane, VECTORS - 1) + i % 2 * 2;
            };
            Pair pair[PAIRS + 4];
            const int needed = first == 0 && brings ? PAIRS + 4 : PAIRS;
#pragma unroll
            for (int i = 0; i < PAIRS + 4; ++i) {
                if (i < needed) pair[i].load(place(i));
            }
            await(pair, place, tag, dog, needed);
            const auto bits = [&](int i) {
                return Bits{pair[i].payload(0), pair[i].payload(1), pair[i + 1].payload(0), pair[i + 1].payload(1)};
            };
#pragma unroll
            for (int i = 0; i < AT_ONCE_QUADS; ++i) {
                if (first + i >= QUADS) continue;
                const Bits found = bits(2 * i);
                q[first + i] = {};
                if ((first + i) * 4 + lane % 4 >= VECTORS) continue;
                if constexpr (sizeof(T) == 2) q[first + i] = {found.at[0], found.at[2], found.at[1], found.at[3]};  // see on_tensor_cores
                else q[first + i] = found;
            }
            if (first > 0) continue;
            wait_for_copies<0>();
            if (brings && lane < VECTORS) {
                const Bits k = bits(PAIRS), v = bits(PAIRS + 2);
                if (at_once) {
                    const int at = newest % KEYS * PITCH + lane * CHUNK;
                    *reinterpret_cast<Bits*>(s.keys[warp] + at) = k;
                    *reinterpret_cast<Bits*>(s.values[warp] + at) = v;
                } else {  // it will be copied like the others
                    reinterpret_cast<Bits*>(keys + (part.end - 1) * DEPTH)[lane] = k;
                    reinterpret_cast<Bits*>(values + (part.end - 1) * DEPTH)[lane] = v;
                    __threadfence();
                }
            }
        }
        OnlineSoftmax softmax;
        float out[DEPTH / 16][4] = {};
        const T *k = s.keys[warp], *v = s.values[warp];
#pragma unroll 1
        for (int first = part.from + warp * KEYS;; first += AT_ONCE) {
            __syncwarp();
            if constexpr (sizeof(T) == 2) {
                on_tensor_cores(q, k, v, first, part.to, factor, softmax, out);
            } else {
                in_ordinary_arithmetic(q, k, v, first, part.to, factor, softmax, out);
            }
            if (first + AT_ONCE - warp * KEYS >= part.to) break;
            __syncwarp();
            copy(s, keys, values, first + AT_ONCE, part.to, -1);
            wait_for_copies<0>();
        }
        if (lane == 0) {
            s.largest[warp] = softmax.largest;
            s.sums[warp] = softmax.sum;
        }
        if constexpr (sizeof(T) == 2) {
            if (lane % 4 == 0) {
#pragma unroll
                for (int i = 0; i < DEPTH / 16; ++i) {
                    s.out[warp][i * 16 + lane / 4] = out[i][0];
                    s.out[warp][i * 16 + 8 + lane / 4] = out[i][2];
                }
            }
        } else {
            if (lane < 4) {
#pragma unroll
                for (int i = 0; i < DEPTH / 16; ++i) {
                    *reinterpret_cast<Vec<float, 4>*>(s.out[warp] + i * 16 + lane * 4) = {out[i][0], out[i][1], out[i][2], out[i][3]};
                }
            }
        }
        sync_threads<WARPS * WARP>();
        return brings && at_once;
    }

    // Puts the newest key and value into the cache, for the next token: when nobody waits for this block any more.
    static __device__ __forceinline__ void keep(const Shared& s, T* keys, T* values, const Part& part) {
        const int warp = thread_index() / WARP, lane = thread_index() % WARP, newest = part.end - 1;
        if (lane >= VECTORS) return;
        const int at = (newest - part.from) % KEYS * PITCH + lane * CHUNK;
        reinterpret_cast<Bits*>(keys + newest * DEPTH)[lane] = *reinterpret_cast<const Bits*>(s.keys[warp] + at);
        reinterpret_cast<Bits*>(values + newest * DEPTH)[lane] = *reinterpret_cast<const Bits*>(s.values[warp] + at);
    }

    // PER columns of the block's result from `column` on; returns the logarithm (base 2) of what it weighs.
    template <int PER>
    static __device__ __forceinline__ float merge(const Shared& s, int column, float (&value)[PER]) {
        float largest = LOWEST, sum = 0.f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) largest = fmaxf(largest, s.largest[warp]);
#pragma unroll
        for (int j = 0; j < PER; ++j) value[j] = 0.f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const float share = exp2_approx(s.largest[warp] - largest);
            sum = fmaf(share, s.sums[warp], sum);
            const auto its = *reinterpret_cast<const Vec<float, PER>*>(s.out[warp] + column);
#pragma unroll
            for (int j = 0; j < PER; ++j) value[j] = fmaf(share, its.at[j], value[j]);
        }
        const float inverse = sum > 0.f ? rcp_approx(sum) : 0.f;
#pragma unroll
        for (int j = 0; j < PER; ++j) value[j] *= inverse;
        return sum > 0.f ? largest + __log2f(sum) : LOWEST;
    }

   private:
    // Lane 4g + t: of the scores those of positions 2t and 2t + 1, the same for all g; of the output columns g and g + 8 of every
    // sixteen, the same for all t, because there the values are the first operand and the weights, in every column, the
    // second. For the scores the query is the first: pairs 0 and 1 of a lane's sixteen bytes in the upper eight rows, 2 and 3
    // in the lower ones, so that each is looked at where it means something.
    template <int Q, int N>
    static __device__ __forceinline__ void on_tensor_cores(const Bits (&q)[Q], const T* k, const T* v, int first, int to,
                                                           float factor, OnlineSoftmax& softmax, float (&out)[N][4]) {
        const int lane = thread_index() % WARP;
        float upper[4] = {}, lower[4] = {};
#pragma unroll
        for (int i = 0; i < VECTORS; i += 4) {
            Bits b = {};
            if (i + lane % 4 < VECTORS) b = *reinterpret_cast<const Bits*>(k + lane / 4 * PITCH + (i + lane % 4) * CHUNK);
            multiply_add<T>(upper, q[i / 4].at, b.at[0], b.at[1]);
            multiply_add<T>(lower, q[i / 4].at, b.at[2], b.at[3]);
        }
        const int position = first + lane % 4 * 2;
        const float even = position < to ? (upper[0] + lower[2]) * factor : LOWEST;
        const float odd = position + 1 < to ? (upper[1] + lower[3]) * factor : LOWEST;
        float largest = fmaxf(even, odd);
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const float rescale = softmax.raise(largest, 1.f);
        float sum_even = position < to ? exp2_approx(even - softmax.largest) : 0.f, sum_odd = position + 1 < to ? exp2_approx(odd - softmax.largest) : 0.f;
        const unsigned weights = pack_pair<T>(sum_even, sum_odd);
        sum_even += sum_odd;
        sum_even += __shfl_xor_sync(0xffffffffu, sum_even, 1);
        softmax.sum += sum_even + __shfl_xor_sync(0xffffffffu, sum_even, 2);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            unsigned a[4];
            // Matrix m is columns 8 (2i + m) of the eight positions; where there are fewer columns, the last ones again.
            const int column = min(2 * i + lane / 8, 2 * N - 1) * 8;
            load_matrices_transposed(a, v + lane % 8 * PITCH + column);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                if (i + m >= N) continue;
                float(&c)[4] = out[i + m];
                c[0] *= rescale;
                c[2] *= rescale;
                multiply_add_short<T>(c, a[2 * m], a[2 * m + 1], weights);
            }
        }
    }

    // Lane 4g + t: a quarter of position g's key; then of every sixteen output columns the four from 4t on. All g end with
    // the same.
    template <int Q, int N>
    static __device__ __forceinline__ void in_ordinary_arithmetic(const Bits (&q)[Q], const T* k, const T* v, int first, int to,
                                                                  float factor, OnlineSoftmax& softmax, float (&out)[N][4]) {
        const int lane = thread_index() % WARP, position = first + lane / 4;
        float score = 0.f;
#pragma unroll
        for (int i = 0; i < Q; ++i) {
            Vec<float, 4> b = {};
            if (i * 4 + lane % 4 < VECTORS) b = *reinterpret_cast<const Vec<float, 4>*>(k + lane / 4 * PITCH + (i * 4 + lane % 4) * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) score = fmaf(__uint_as_float(q[i].at[j]), b.at[j], score);
        }
        score += __shfl_xor_sync(0xffffffffu, score, 1);
        score += __shfl_xor_sync(0xffffffffu, score, 2);
        score = position < to ? score * factor : LOWEST;
        float largest = score;
#pragma unroll
        for (int other = 4; other < WARP; other *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, other));
        const float rescale = softmax.raise(largest, 1.f);
        const float weight = position < to ? exp2_approx(score - softmax.largest) : 0.f;
        float sum = weight;
#pragma unroll
        for (int other = 4; other < WARP; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
        softmax.sum += sum;
#pragma unroll
        for (int i = 0; i < N; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) out[i][j] *= rescale;
        }
#pragma unroll 2  // all eight at once would be more registers than there are
        for (int r = 0; r < KEYS; ++r) {
            const float its = __shfl_sync(0xffffffffu, weight, r * 4);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const auto b = *reinterpret_cast<const Vec<float, 4>*>(v + r * PITCH + i * 16 + lane % 4 * 4);
#pragma unroll
                for (int j = 0; j < 4; ++j) out[i][j] = fmaf(its, b.at[j], out[i][j]);
            }
        }
    }
};

}  // namespace warpline
