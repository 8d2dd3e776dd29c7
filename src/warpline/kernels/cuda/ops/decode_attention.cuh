// Attention of one new query per sequence over its KV cache: y = softmax(q k^T scale) v.
//
// The idea: this is a read of the cache and hardly anything else, so all that matters is bytes in flight. A few lanes
// share a key, 16 bytes each, a warp has several keys at once and UNROLL such groups of keys and values on their way.
// Every group of lanes keeps its own online softmax; they are merged once, at the end, in a fixed order. Where sequences
// and heads alone would leave the GPU idle, the cache is cut into SPLITS parts, and whichever block finishes a head last
// merges its parts. Parts are as many as SPLITS; or, where PART says so, they have that many positions, as long as SPLITS of
// them are enough. A head is then cut in the same places whatever else is in the launch, and has the same bits.
// Of a slot of the cache the positions 0 ... length-1 count; with window > 0 only the last that many of them are read. Lane i
// of the batch has slot lanes[i], or slot i where there are no `lanes`. Where there are `new_k` and `new_v`, they are the key
// and value of the last position and are put into the cache on the way. `lanes`, `length` and the cache are read before the
// launches ahead have ended: where launches overlap, none of those may write them. In the engine's graphs of one step each,
// they were written before the graph began, and graphs do not overlap.
// A cache of codes (kv_codes.cuh) has `scales`: a key's is a factor of its score, a value's one of its weight, so that codes are
// multiplied as they are; in fp16, for heads of 64, on tensor cores (code_attention.cuh). The new key and value are rounded to
// codes before anything is computed: what a step sees is what any later one reads again.
// Traffic: keys and values once.
#pragma once
#include "code_attention.cuh"
#include "online.cuh"
#include "ptx.cuh"

namespace warpline {

// An unfinished result over some of the keys: a lane's part of the output, and the softmax it belongs to.
template <int SIZE>
struct Partial {
    OnlineSoftmax softmax;
    float out[SIZE] = {};

    // Merge with the partial results of lanes at xor-distance FROM, FROM / 2, ... TO.
    template <int FROM, int TO>
    __device__ __forceinline__ void merge_lanes(float factor) {
#pragma unroll
        for (int other = FROM; other >= TO; other /= 2) {
            const float largest = __shfl_xor_sync(0xffffffffu, softmax.largest, other);
            const float rescale = softmax.raise(largest, factor);
            softmax.sum += __shfl_xor_sync(0xffffffffu, softmax.sum, other);
#pragma unroll
            for (int i = 0; i < SIZE; ++i) {
                out[i] *= rescale;
                out[i] += __shfl_xor_sync(0xffffffffu, out[i], other);
            }
        }
    }
};

// One column of unfinished results, merged: the first `count` of MOST. Each lies in a row of DEPTH columns, largest score and sum.
template <int MOST, int DEPTH, typename Load>
__device__ __forceinline__ Partial<1> merge_rows(Load load, int column, float factor, int count = MOST) {
    Partial<1> merged;
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (i < count) merged.softmax.largest = fmaxf(merged.softmax.largest, load(i * (DEPTH + 2) + DEPTH));
    }
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (i >= count) break;
        const float share = exp2_approx((load(i * (DEPTH + 2) + DEPTH) - merged.softmax.largest) * factor);
        merged.softmax.sum += share * load(i * (DEPTH + 2) + DEPTH + 1);
        merged.out[0] += share * load(i * (DEPTH + 2) + column);
    }
    return merged;
}

// S is what the cache holds: T, or codes.
template <typename T, int DEPTH, int WARPS, int UNROLL, int SPLITS, int PART, typename S>
__device__ __forceinline__ void decode_attention(View<T> q, View<T> new_k, View<T> new_v, View<S> k, View<S> v,
                                                 View<float> scales, const long long* length, const long long* lanes, T* y,
                                                 float* parts, int* finished, int heads, int positions, int window,
                                                 float scale) {
    constexpr bool CODED = IS_CODE<S>, TENSOR = CODED && IS_SAME<T, __half> && DEPTH == 64;
    constexpr int WIDTH = vector_width<S>(DEPTH), VECTORS = DEPTH / WIDTH;
    constexpr int LANES = VECTORS > 16 ? 32 : VECTORS > 8 ? 16 : VECTORS > 4 ? 8 : 4;  // that share a key
    constexpr int STEPS = ceil_div(VECTORS, LANES), SIZE = STEPS * WIDTH, AT_ONCE = WARPS * (WARP / LANES);
    using Pack = Vec<S, WIDTH>;
    __shared__ float stored[WARPS * (DEPTH + 2)];

    const int split = blockIdx.x % SPLITS, row = blockIdx.x / SPLITS;  // row: lane of the batch and head
    const int sequence = row / heads, head = row % heads;
    const int slot = lanes == nullptr ? sequence : static_cast<int>(lanes[sequence]);
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const float factor = scale * LOG2_E;
    const int end = min(static_cast<int>(length[slot]), positions);
    const int begin = window > 0 ? max(0, end - window) : 0;
    static_assert(PART % AT_ONCE == 0);
    const int part = max(PART, ceil_div(ceil_div(end - begin, SPLITS), AT_ONCE) * AT_ONCE);
    const int from = begin + split * part, to = min(end, from + part);
    const int parts_of_row = PART > 0 ? max(1, ceil_div(end - begin, part)) : SPLITS;
    if (PART > 0 && split >= parts_of_row) return;

    const S* keys = k.rows(slot, head);
    const S* values = v.rows(slot, head);
    const float* scale_pairs = CODED ? scales.rows(slot, head) : nullptr;
    const bool brings = new_k.data != nullptr && from < to && to == end;  // whether the newest position is this block's
    const int cached = brings ? end - 1 : to;
    Pack key[UNROLL][STEPS], value[UNROLL][STEPS];
    // Tensor cores take from a lane an eighth of two values, which are not those of its key but of a pair of the warp's eight:
    // where the first is, seen from its key.
    constexpr int OWN = TENSOR ? 2 : 1;
    const int eighth = group % (WARP / LANES), its_first = TENSOR ? 2 * lane - eighth : 0;
    ScalePair scaled[UNROLL][OWN];
    const auto load = [&](int first) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int position = first + u * AT_ONCE;
#pragma unroll
            for (int e = 0; e < OWN; ++e) {
                const int its = position + its_first + e;
                scaled[u][e] = {};
                if (CODED && its < cached) scaled[u][e] = *reinterpret_cast<const ScalePair*>(scale_pairs + its * scales.row);
            }
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                key[u][s] = {};
                value[u][s] = {};
                const int at = s * LANES + lane;
                if (position < cached && at < VECTORS) {
                    key[u][s] = reinterpret_cast<const Pack*>(keys + position * k.row)[at];
                    if constexpr (!TENSOR) value[u][s] = reinterpret_cast<const Pack*>(values + position * v.row)[at];
                }
                if constexpr (TENSOR) {
#pragma unroll
                    for (int e = 0; e < OWN; ++e) {
                        const int its = position + its_first + e;
                        const auto* row = reinterpret_cast<const Vec<S, 8>*>(values + its * v.row);
                        if (its < cached) CodeAttention::value_of(value[u][s], e) = row[eighth];
                    }
                }
            }
        }
    };
    load(from + group);
    // What registers have no room for is on its way to L2 meanwhile; not all of a long context, which L2 would not keep.
    // Blocks of a few warps are so many that what the first ask for would be in the way of the others.
    constexpr int HELD = AT_ONCE * UNROLL, PREFETCHED = WARPS < 4 ? 0 : 128, LINE = 128 / static_cast<int>(sizeof(S));
    for (int i = threadIdx.x; i < PREFETCHED && from + HELD + i < cached; i += WARPS * WARP) {
        const int position = from + HELD + i;
#pragma unroll
        for (int column = 0; column < DEPTH; column += LINE) {
            prefetch_line(keys + position * k.row + column);
            prefetch_line(values + position * v.row + column);
        }
    }
    await_previous_launch();

    float query[SIZE];
    CodeAttention tensor;
    Pack newest_key[1][STEPS], newest_value[1][STEPS];  // the first group's
    ScalePair newest_scaled[1][OWN] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int at = s * LANES + lane;
        Vec<T, WIDTH> pack = {};
        if constexpr (CODED) {
            if (at < VECTORS) pack = read_vector<WIDTH>(q.rows(sequence, head), at);
            if constexpr (TENSOR) tensor.ask(pack);
        } else {
            if (at < VECTORS) pack = reinterpret_cast<const Pack*>(q.rows(sequence, head))[at];
        }
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) query[s * WIDTH + i] = to_float(pack.at[i]);
        newest_key[0][s] = {};
        newest_value[0][s] = {};
        if (CODED || !brings || group > 0 || at >= VECTORS) continue;
        newest_key[0][s] = reinterpret_cast<const Pack*>(new_k.rows(sequence, head))[at];
        newest_value[0][s] = reinterpret_cast<const Pack*>(new_v.rows(sequence, head))[at];
        reinterpret_cast<Pack*>(const_cast<S*>(keys + cached * k.row))[at] = newest_key[0][s];
        reinterpret_cast<Pack*>(const_cast<S*>(values + cached * v.row))[at] = newest_value[0][s];
    }
    if constexpr (CODED) {
        if (brings && threadIdx.x < WARP) {
            // One after the other, so that both need the registers of one. Lanes of other groups have zeros.
            const auto encode = [&](const View<T>& fresh, Pack (&packs)[STEPS], const S* row) {
                float numbers[SIZE];
                S codes[SIZE];
#pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    const int at = s * LANES + lane;
                    Vec<T, WIDTH> held = {};
                    if (group == 0 && at < VECTORS) held = read_vector<WIDTH>(fresh.rows(sequence, head), at);
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) numbers[s * WIDTH + i] = to_float(held.at[i]);
                }
                const float its_scale = encode_row<LANES>(numbers, codes);
#pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    const int at = s * LANES + lane;
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) packs[s].at[i] = codes[s * WIDTH + i];
                    if (group == 0 && at < VECTORS) reinterpret_cast<Pack*>(const_cast<S*>(row))[at] = packs[s];
                }
                return its_scale;
            };
            newest_scaled[0][0].at[0] = encode(new_k, newest_key[0], keys + cached * k.row);
            newest_scaled[0][0].at[1] = encode(new_v, newest_value[0], values + cached * v.row);
            if (threadIdx.x == 0) {
                *reinterpret_cast<ScalePair*>(const_cast<float*>(scale_pairs + cached * scales.row)) = newest_scaled[0][0];
            }
        }
    }
    Partial<SIZE> mine;
    // Keys and values of some positions, of which those count that `is_there`.
    const auto take = [&](auto& key, auto& value, auto& scaled, auto is_there) {
        constexpr int COUNT = sizeof(key) / sizeof(key[0]);
        float score[COUNT], largest = LOWEST;
#pragma unroll
        for (int u = 0; u < COUNT; ++u) {
            float dot = 0.f;
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) dot = fmaf(query[s * WIDTH + i], number(key[u][s], i), dot);
            }
#pragma unroll
            for (int other = LANES / 2; other > 0; other /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, other);
            if (CODED) dot *= scaled[u][0].at[0];
            score[u] = is_there(u) ? dot : LOWEST;
            largest = fmaxf(largest, score[u]);
        }
        const float rescale = mine.softmax.raise(largest, factor);
#pragma unroll
        for (int i = 0; i < SIZE; ++i) mine.out[i] *= rescale;
#pragma unroll
        for (int u = 0; u < COUNT; ++u) {
            float weight = mine.softmax.weigh(score[u], factor);
            if (CODED) weight *= scaled[u][0].at[1];
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    mine.out[s * WIDTH + i] = fmaf(weight, number(value[u][s], i), mine.out[s * WIDTH + i]);
                }
            }
        }
    };
    if (brings && threadIdx.x < WARP) {
        if constexpr (TENSOR) {
            CodeAttention::spread(newest_value[0][0], newest_scaled[0][0]);
            tensor.take(newest_key, newest_value, newest_scaled, factor, [&](int, int e) { return lane == 0 && e == 0; });
        } else {
            take(newest_key, newest_value, newest_scaled, [&](int) { return group == 0; });
        }
    }
    for (int first = from + group; first < cached + group; first += AT_ONCE * UNROLL) {  // as often for every group
        if (first >= from + AT_ONCE) load(first);
        if constexpr (TENSOR) {
            tensor.take(key, value, scaled, factor, [&](int u, int e) { return first + u * AT_ONCE + its_first + e < cached; });
        } else {
            take(key, value, scaled, [&](int u) { return first + u * AT_ONCE < cached; });
        }
    }

    // The groups of a warp, then the warps of the block, then the blocks of the head.
    if constexpr (TENSOR) {
        tensor.finish(mine.softmax, mine.out);
    } else {
        mine.template merge_lanes<WARP / 2, LANES>(factor);
    }
    float* own = stored + threadIdx.x / WARP * (DEPTH + 2);
    if (threadIdx.x % WARP < LANES) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                if (s * LANES + lane < VECTORS) own[(s * LANES + lane) * WIDTH + i] = mine.out[s * WIDTH + i];
            }
        }
        if (lane == 0) {
            own[DEPTH] = mine.softmax.largest;
            own[DEPTH + 1] = mine.softmax.sum;
        }
    }
    __syncthreads();
    T* target = y + static_cast<long long>(row) * DEPTH;
    float* all = parts + static_cast<long long>(row) * SPLITS * (DEPTH + 2);
    for (int column = threadIdx.x; column < DEPTH; column += WARPS * WARP) {
        const Partial<1> merged = merge_rows<WARPS, DEPTH>([&](int i) { return stored[i]; }, column, factor);
        if (parts_of_row == 1) {
            target[column] = from_float<T>(merged.out[0] / merged.softmax.sum);
        } else {
            float* own = all + split * (DEPTH + 2);
            own[column] = merged.out[0];
            if (column == 0) {
                own[DEPTH] = merged.softmax.largest;
                own[DEPTH + 1] = merged.softmax.sum;
            }
        }
    }
    if (SPLITS > 1 && parts_of_row > 1) {
        if (!finishes_last(finished + row, parts_of_row)) return;
        for (int column = threadIdx.x; column < DEPTH; column += WARPS * WARP) {
            const Partial<1> merged = merge_rows<SPLITS, DEPTH>([&](int i) { return __ldcg(all + i); }, column, factor, parts_of_row);
            target[column] = from_float<T>(merged.out[0] / merged.softmax.sum);
        }
    }
}

}  // namespace warpline
