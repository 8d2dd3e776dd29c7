// Attention of one new query per sequence to its KV cache: y = softmax(q k^T scale) v.
//
// The idea: the kernel reads the cache and does little else, so bytes in flight decide. A few lanes share a key, 16 bytes each; a
// warp has several keys at once, and UNROLL such groups of keys and values in flight. Each group of lanes keeps an online
// softmax; they are merged once, at the end, in a fixed order.
// Parts: where sequences times heads are too few blocks, a cache is cut into SPLITS parts, or into parts of PART positions, longer
// ones where SPLITS are too few. The block that finishes a head last merges them. With PART the cuts, and so the bits, do not
// depend on the rest of the launch.
// Arguments: positions 0 ... length-1 of a slot are read, with window > 0 the last `window` of them. Lane i has slot lanes[i], or
// slot i if `lanes` is null. `new_k` and `new_v`, if given, are key and value of the last position; they are stored in the cache.
// Codes: a cache of codes (kv_codes.cuh) has `scales`. A key's scales its score, a value's its weight, so codes are multiplied
// directly; in fp16 with heads of 64 on tensor cores (code_attention.cuh). The new key and value are quantised first, so that
// this step sees the same values as later steps.
// Contract: `lanes`, `length` and the cache are read before the preceding launches end, so none of them may write these. In the
// engine they were written before the graph of the step began, and graphs do not overlap.
// Memory traffic: keys and values once.
#pragma once
#include "code_attention.cuh"
#include "online.cuh"
#include "ptx.cuh"

namespace warpline {

// The unfinished result over some keys: a lane's part of the output, and its softmax.
template <int SIZE>
struct Partial {
    OnlineSoftmax softmax;
    float out[SIZE] = {};

    // Merges with the partial results of lanes at xor distance FROM, FROM / 2, ... TO.
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

// Merges one column of the first `count` of MOST unfinished results. Each is a row of DEPTH columns, largest score and sum.
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

// S is the storage type of the cache: T, or codes.
template <typename T, int DEPTH, int WARPS, int UNROLL, int SPLITS, int PART, typename S>
__device__ __forceinline__ void decode_attention(View<T> q, View<T> new_k, View<T> new_v, View<S> k, View<S> v,
                                                 View<float> scales, const long long* length, const long long* lanes, T* y,
                                                 float* parts, int* finished, int heads, int positions, int window,
                                                 float scale) {
    constexpr bool CODED = IS_CODE<S>, TENSOR = CODED && IS_SAME<T, __half> && DEPTH == 64;
    constexpr int WIDTH = vector_width<S>(DEPTH), VECTORS = DEPTH / WIDTH;
    constexpr int LANES = VECTORS > 16 ? 32 : VECTORS > 8 ? 16 : VECTORS > 4 ? 8 : 4;  // lanes per key
    constexpr int STEPS = ceil_div(VECTORS, LANES), SIZE = STEPS * WIDTH, AT_ONCE = WARPS * (WARP / LANES);
    using Pack = Vec<S, WIDTH>;
    __shared__ float stored[WARPS * (DEPTH + 2)];

    const int split = blockIdx.x % SPLITS, row = blockIdx.x / SPLITS;  // row: lane of the batch, head
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
    const bool brings = new_k.data != nullptr && from < to && to == end;  // this block has the newest position
    const int cached = brings ? end - 1 : to;
    Pack key[UNROLL][STEPS], value[UNROLL][STEPS];
    // On tensor cores a lane takes an eighth of two values. They belong to another pair of the warp's eight keys, not to the
    // lane's own key; its_first is the position of the first, relative to that key.
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
    // Prefetches into L2 what registers have no room for; only a part of a long context, which L2 would not keep. Not for blocks
    // of few warps: there are so many of them that prefetches would delay the first loads of others.
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
    Pack newest_key[1][STEPS], newest_value[1][STEPS];  // used by the first group
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
            // One after the other, so that they share registers. Lanes of other groups have zeros.
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
    // Adds some keys and values; those count for which is_there(u).
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
    for (int first = from + group; first < cached + group; first += AT_ONCE * UNROLL) {  // same trip count in all groups
        if (first >= from + AT_ONCE) load(first);
        if constexpr (TENSOR) {
            tensor.take(key, value, scaled, factor, [&](int u, int e) { return first + u * AT_ONCE + its_first + e < cached; });
        } else {
            take(key, value, scaled, [&](int u) { return first + u * AT_ONCE < cached; });
        }
    }

    // Merge the groups of a warp, then the warps of the block, then the blocks of the head.
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
