// Attention of one query to a part of its context, by one block. All other blocks wait for the result, so latency counts.
//
// The idea: each warp loads eight keys and values into registers before the query arrives, and keeps its own online softmax; the
// warps are merged once, at the end. On tensor cores the query fills every row of operand a, so each lane ends with the scores
// that it needs as weights of the values, and lanes exchange only the maximum. The newest key and value come with the query; the
// last warp handles them separately: a softmax over one position has weight 1.
// Memory traffic: keys and values once.
// Tried and lost: the lanes of ops/decode_attention.cuh without tensor cores (1,100 instructions, 4,400 cycles); merging only
// the warps that have positions, in a loop (attention and merge: 2,950 cycles instead of 2,590).
#pragma once
#include "online.cuh"
#include "persistent/exchange.cuh"
#include "persistent/tape.cuh"

namespace warpline {

// Positions from ... to - 1 of a sequence whose newest position is end - 1.
struct Part {
    int row, head, split, from, to, end;

    __device__ __forceinline__ bool is_empty() const { return split > 0 && from >= to; }  // part 0 is always attended to
    __device__ __forceinline__ bool has_newest() const { return from < to && to == end; }
    __device__ __forceinline__ int cached() const { return min(to, end - 1); }  // the cached positions end here
};

template <typename T, int DEPTH, int WARPS>
class PartAttention {
    static constexpr int KEYS = 8, AT_ONCE = WARPS * KEYS, CHUNK = 16 / sizeof(T), VECTORS = DEPTH / CHUNK;
    static constexpr int PITCH = DEPTH + CHUNK;  // rows on different banks
    static constexpr int COPIES = ceil_div(KEYS * VECTORS, WARP), QUADS = ceil_div(VECTORS, 4), COLUMNS = DEPTH / 16;
    static constexpr int NEWEST = WARPS;  // index of its result, after those of the warps

   public:
    static constexpr bool IN_REGISTERS = sizeof(T) == 2;  // keys and values; otherwise they are read from shared memory

    struct Shared {
        alignas(16) T keys[WARPS][KEYS * PITCH];
        alignas(16) T values[WARPS][KEYS * PITCH];
        alignas(16) float largest[WARPS + 1], sums[WARPS + 1];
        alignas(16) float out[WARPS + 1][DEPTH];
    };

    // Vectors lane % 4, lane % 4 + 4, ... of the query; in the last warp also vector `lane` of the newest key and value.
    struct Newest {
        Bits q[QUADS], k, v;
    };

    // A warp's eight positions in the register layout of the products.
    struct Loaded {
        Bits k[QUADS];
        unsigned v[ceil_div(COLUMNS, 2)][4];
    };

    static __device__ __forceinline__ bool sees_to_newest() { return thread_index() / WARP == WARPS - 1; }

   private:
    // Starts copying this warp's eight positions from `first` on.
    static __device__ __forceinline__ void copy(Shared& s, const T* keys, const T* values, int first, int to) {
        const int thread = thread_index(), warp = thread / WARP;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int chunk = thread % WARP + i * WARP, row = chunk / VECTORS, column = chunk % VECTORS * CHUNK;
            if (COPIES * WARP > KEYS * VECTORS && row >= KEYS) continue;
            const bool inside = first + row < to;
            const long long at = inside ? (first + row) * DEPTH + column : 0;
            copy_async(s.keys[warp] + row * PITCH + column, keys + at, inside);
            copy_async(s.values[warp] + row * PITCH + column, values + at, inside);
        }
        end_copy_group();
    }

    // Sets the query's vectors beyond VECTORS to zero.
    static __device__ __forceinline__ void blank(Bits (&q)[QUADS]) {
        if (VECTORS % 4 != 0 && (QUADS - 1) * 4 + thread_index() % 4 >= VECTORS) q[QUADS - 1] = {};
    }

   public:
    // Starts copying the cached positions. `keys` and `values` point to position 0 of the sequence and head.
    static __device__ __forceinline__ void begin(Shared& s, const T* keys, const T* values, const Part& part) {
        copy(s, keys, values, part.from + thread_index() / WARP * KEYS, part.cached());
    }

    // Starts copying the next positions. Requires: the first ones are in registers, because their buffers are reused.
    static __device__ __forceinline__ void begin_second(Shared& s, const T* keys, const T* values, const Part& part) {
        const int first = part.from + thread_index() / WARP * KEYS + AT_ONCE;
        __syncwarp();
        if (first < part.cached()) copy(s, keys, values, first, part.cached());
    }

    // Waits for the copies and loads them into registers.
    static __device__ __forceinline__ void load(Loaded& loaded, const Shared& s) {
        wait_for_copies<0>();
        __syncwarp();
        if constexpr (sizeof(T) == 2) {
            const int lane = thread_index() % WARP, warp = thread_index() / WARP;
#pragma unroll
            for (int i = 0; i < QUADS; ++i) {
                loaded.k[i] = {};
                if (i * 4 + lane % 4 < VECTORS) loaded.k[i] = *reinterpret_cast<const Bits*>(s.keys[warp] + lane / 4 * PITCH + (i * 4 + lane % 4) * CHUNK);
            }
#pragma unroll
            for (int i = 0; i < COLUMNS; i += 2) {
                // Matrix m: columns 8 (2i + m) of the eight positions. Beyond the last column, the last ones are repeated.
                const int column = min(2 * i + lane / 8, 2 * COLUMNS - 1) * 8;
                load_matrices_transposed(loaded.v[i / 2], s.values[warp] + lane % 8 * PITCH + column);
            }
        }
    }

    // Loads the query from exchange words: `posted` is its address, and those of the newest key and value follow at `apart` each.
    static __device__ __forceinline__ void take(Newest& newest, bool all, const Word* posted, int apart, unsigned tag, const Watchdog& watchdog) {
        constexpr int AT_ONCE_QUADS = QUADS < 2 ? QUADS : 2, PAIRS = 2 * AT_ONCE_QUADS;
        const int lane = thread_index() % WARP;
#pragma unroll
        for (int first = 0; first < QUADS; first += AT_ONCE_QUADS) {
            // Pairs of the query; the first load includes those of the newest key and value.
            const auto place = [&](int i) {
                if (i < PAIRS) return posted + 4 * min((first + i / 2) * 4 + lane % 4, VECTORS - 1) + i % 2 * 2;
                return posted + (1 + (i - PAIRS) / 2) * apart + 4 * min(lane, VECTORS - 1) + i % 2 * 2;
            };
            Pair pair[PAIRS + 4];
            const int needed = first == 0 && all ? PAIRS + 4 : PAIRS;
#pragma unroll
            for (int i = 0; i < PAIRS + 4; ++i) {
                if (i < needed) pair[i].load(place(i));
            }
            await(pair, place, tag, watchdog, needed);
            const auto bits = [&](int i) {
                return Bits{pair[i].payload(0), pair[i].payload(1), pair[i + 1].payload(0), pair[i + 1].payload(1)};
            };
#pragma unroll
            for (int i = 0; i < AT_ONCE_QUADS; ++i) {
                if (first + i < QUADS) newest.q[first + i] = bits(2 * i);
            }
            if (first == 0 && all) {
                newest.k = bits(PAIRS);
                newest.v = bits(PAIRS + 2);
            }
        }
        blank(newest.q);
    }

    // Attends to the part. Each warp's result is in `s` after the barrier at the end. `factor` is scale * log2(e). AHEAD: the
    // second positions are in flight already.
    template <bool AHEAD>
    static __device__ __forceinline__ void run(Shared& s, const T* keys, const T* values, const Part& part, float factor, Loaded& loaded, const Newest& newest) {
        const int warp = thread_index() / WARP;
        int first = part.from + warp * KEYS;
        OnlineSoftmax softmax;
        float out[COLUMNS][4] = {};
        Bits q[QUADS];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const Bits& its = newest.q[i];
            q[i] = sizeof(T) == 2 ? Bits{its.at[0], its.at[2], its.at[1], its.at[3]} : its;  // see on_tensor_cores
        }
        if (first < part.cached()) {
            while (true) {
                if constexpr (sizeof(T) == 2) {
                    on_tensor_cores(q, loaded, first, part.cached(), factor, softmax, out);
                } else {
                    in_ordinary_arithmetic(q, s.keys[warp], s.values[warp], first, part.cached(), factor, softmax, out);
                }
                first += AT_ONCE;
                if (first >= part.cached()) break;
                if (!AHEAD || first > part.from + warp * KEYS + AT_ONCE) {
                    __syncwarp();
                    copy(s, keys, values, first, part.cached());
                }
                load(loaded, s);
            }
        }
        leave(s, warp, softmax, out);
        if (sees_to_newest()) leave_newest(s, part.has_newest(), factor, newest);
        sync_threads<WARPS * WARP>();
    }

    // Stores the newest key and value in the cache, for the next token. Called when no other block waits for this one any more.
    static __device__ __forceinline__ void keep(const Newest& newest, T* keys, T* values, int position) {
        const int lane = thread_index() % WARP;
        if (lane >= VECTORS) return;
        reinterpret_cast<Bits*>(keys + position * DEPTH)[lane] = newest.k;
        reinterpret_cast<Bits*>(values + position * DEPTH)[lane] = newest.v;
    }

    // The weight of a block's result: 2^largest * sum.
    struct Weight {
        float largest, sum;
    };

    // PER columns of the block's result from `column` on, not divided by its sum.
    template <int PER>
    static __device__ __forceinline__ Weight merge(const Shared& s, const Part& part, int column, float (&value)[PER]) {
        constexpr int FEW = 3;  // enough for a short context, and faster to merge
        if (WARPS > FEW && part.cached() - part.from <= FEW * KEYS) return merge_first<FEW>(s, column, value);
        return merge_first<WARPS>(s, column, value);
    }

   private:
    template <int COUNT, int PER>
    static __device__ __forceinline__ Weight merge_first(const Shared& s, int column, float (&value)[PER]) {
        float largest = s.largest[NEWEST], sum = 0.f;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) largest = fmaxf(largest, s.largest[i]);
#pragma unroll
        for (int j = 0; j < PER; ++j) value[j] = 0.f;
#pragma unroll
        for (int i = 0; i <= COUNT; ++i) {
            const int which = i < COUNT ? i : NEWEST;
            const float share = exp2_approx(s.largest[which] - largest);
            sum = fmaf(share, s.sums[which], sum);
            const auto its = *reinterpret_cast<const Vec<float, PER>*>(s.out[which] + column);
#pragma unroll
            for (int j = 0; j < PER; ++j) value[j] = fmaf(share, its.at[j], value[j]);
        }
        return {largest, sum};
    }

    static __device__ __forceinline__ void leave(Shared& s, int warp, const OnlineSoftmax& softmax, const float (&out)[COLUMNS][4]) {
        const int lane = thread_index() % WARP;
        if (lane == 0) {
            s.largest[warp] = softmax.largest;
            s.sums[warp] = softmax.sum;
        }
        if constexpr (sizeof(T) == 2) {
            if (lane % 4 != 0) return;
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                s.out[warp][i * 16 + lane / 4] = out[i][0];
                s.out[warp][i * 16 + 8 + lane / 4] = out[i][2];
            }
        } else {
            if (lane >= 4) return;
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                *reinterpret_cast<Vec<float, 4>*>(s.out[warp] + i * 16 + lane * 4) = {out[i][0], out[i][1], out[i][2], out[i][3]};
            }
        }
    }

    static __device__ __forceinline__ void unpack(const Bits& bits, float (&value)[CHUNK]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned its = bits.at[i];
            const auto& elements = reinterpret_cast<const Vec<T, CHUNK / 4>&>(its);
#pragma unroll
            for (int j = 0; j < CHUNK / 4; ++j) value[i * (CHUNK / 4) + j] = to_float(elements.at[j]);
        }
    }

    // The result of the newest position alone: its weight is 1.
    static __device__ __forceinline__ void leave_newest(Shared& s, bool there, float factor, const Newest& newest) {
        const int lane = thread_index() % WARP;
        float q[CHUNK], k[CHUNK], v[CHUNK], score = 0.f;
        unpack(newest.k, k);
        unpack(newest.v, v);
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {  // all of them: a runtime index would put the array into local memory
            float its = 0.f;
            unpack(newest.q[i], q);
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) its = fmaf(q[j], k[j], its);
            if (there && lane / 4 == i && lane < VECTORS) score = its;
        }
#pragma unroll
        for (int other = 1; other < VECTORS; other *= 2) score += __shfl_xor_sync(0xffffffffu, score, other);
        if (lane < VECTORS) {
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) s.out[NEWEST][lane * CHUNK + j] = there ? v[j] : 0.f;
        }
        if (lane == 0) {
            s.largest[NEWEST] = there ? score * factor : LOWEST;
            s.sums[NEWEST] = there ? 1.f : 0.f;
        }
    }

    // Lane 4g + t has the scores of positions 2t and 2t + 1, the same for all g. Of every 16 output columns it has g and g + 8,
    // the same for all t: there the values are operand a, and the weights fill every column of b. For the scores the query is
    // operand a: pairs 0 and 1 of a lane's 16 bytes in the upper eight rows, 2 and 3 in the lower ones; each lane uses the
    // meaningful sums.
    static __device__ __forceinline__ void on_tensor_cores(const Bits (&q)[QUADS], const Loaded& loaded, int first, int to, float factor,
                                                           OnlineSoftmax& softmax, float (&out)[COLUMNS][4]) {
        const int lane = thread_index() % WARP;
        float upper[4] = {}, lower[4] = {};
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            multiply_add<T>(upper, q[i].at, loaded.k[i].at[0], loaded.k[i].at[1]);
            multiply_add<T>(lower, q[i].at, loaded.k[i].at[2], loaded.k[i].at[3]);
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
        for (int i = 0; i < COLUMNS; ++i) {
            out[i][0] *= rescale;
            out[i][2] *= rescale;
            const unsigned(&v)[4] = loaded.v[i / 2];
            multiply_add_short<T>(out[i], v[i % 2 * 2], v[i % 2 * 2 + 1], weights);
        }
    }

    // Lane 4g + t has a quarter of position g's key, and of every 16 output columns the four from 4t on. All g end with the same
    // outputs.
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
#pragma unroll 2  // unrolling all eight needs more registers than there are
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
