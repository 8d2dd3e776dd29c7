// Attention of one query over a part of its KV cache, by one block that has nothing else to do and whose every cycle counts.
//
// The idea: as in ops/decode_attention.cuh a few lanes share a key, but the softmax is not kept online: all scores come
// first, the block agrees on their maximum, and everything behind it is plain sums, which take two barriers and no
// exponentials but one for each score. The first keys and values are asked for before the query is there. The newest
// key and value come with the query; they are not in the cache yet.
#pragma once
#include "ops/decode_attention.cuh"
#include "persistent/exchange.cuh"
#include "persistent/tape.cuh"

namespace warpline {

template <typename T, int DEPTH, int WARPS, int UNROLL>
class PartAttention {
    using Lanes = KeyLanes<T, DEPTH>;
    static constexpr int LANES = Lanes::LANES, STEPS = Lanes::STEPS, WIDTH = Lanes::WIDTH, VECTORS = Lanes::VECTORS;
    static constexpr int SIZE = Lanes::SIZE, GROUPS = WARP / LANES, AT_ONCE = WARPS * GROUPS, THREADS = WARPS * WARP;

   public:
    using Pack = typename Lanes::Pack;

    struct Shared {
        alignas(16) float largest[WARPS], sums[WARPS];
        alignas(16) float parts[WARPS][DEPTH];
    };

   private:
    const T *keys, *values;  // of the sequence and head, slot 0
    const int from, to, fresh, thread, lane, group;
    Pack key[UNROLL][STEPS], value[UNROLL][STEPS], fresh_key[STEPS], fresh_value[STEPS];

    __device__ __forceinline__ void load(const T* rows, Pack (&pack)[UNROLL][STEPS], int first) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int slot = first + u * AT_ONCE;
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int v = s * LANES + lane;
                pack[u][s] = {};
                if (slot < to && slot != fresh && v < VECTORS) {
                    pack[u][s] = load_shared_between_blocks(reinterpret_cast<const Pack*>(rows + slot * DEPTH) + v);
                }
            }
        }
    }

   public:
    // Slots from ... to - 1 of a cache whose slot `fresh` is still to be written.
    __device__ __forceinline__ PartAttention(const T* keys, const T* values, int from, int to, int fresh)
        : keys(keys),
          values(values),
          from(from),
          to(to),
          fresh(fresh),
          thread(thread_index()),
          lane(thread % LANES),
          group(thread / LANES) {
        load(keys, key, from + group);
        load(values, value, from + group);
    }

    // query(v, key, value) has vector v of the query and of the newest key and value. Leaves the sums in `s`; returns
    // the largest score times `factor`, scale * log2(e).
    template <typename Query>
    __device__ __forceinline__ float run(float factor, Shared& s, Query query) {
        float q[SIZE];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            Pack pack = {};
            fresh_key[step] = fresh_value[step] = {};
            if (step * LANES + lane < VECTORS) pack = query(step * LANES + lane, fresh_key[step], fresh_value[step]);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) q[step * WIDTH + i] = to_float(pack.at[i]) * factor;
        }
        float score[UNROLL];
        const auto scores = [&](int first) {
            float largest = LOWEST;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int slot = first + u * AT_ONCE;
                float dot = 0.f;
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    Pack k = key[u][step];
                    if (slot == fresh) k = fresh_key[step];
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) dot = fmaf(q[step * WIDTH + i], to_float(k.at[i]), dot);
                }
#pragma unroll
                for (int other = LANES / 2; other > 0; other /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, other);
                score[u] = slot < to ? dot : LOWEST;
                largest = fmaxf(largest, score[u]);
            }
            return largest;
        };

        // The keys; those of the first round are looked at last, so that their scores are still there.
        float largest = LOWEST;
        for (int first = from + group + AT_ONCE * UNROLL; first < to + group; first += AT_ONCE * UNROLL) {
            Pack kept[UNROLL][STEPS];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
                for (int step = 0; step < STEPS; ++step) kept[u][step] = key[u][step];
            }
            load(keys, key, first);
            largest = fmaxf(largest, scores(first));
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
                for (int step = 0; step < STEPS; ++step) key[u][step] = kept[u][step];
            }
        }
        largest = fmaxf(largest, scores(from + group));
#pragma unroll
        for (int other = WARP / 2; other >= LANES; other /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, other));
        if (thread % WARP == 0) s.largest[thread / WARP] = largest;
        sync_threads<THREADS>();
        largest = max_of(s.largest);

        // The values; scores behind the first round are computed again, which costs less than keeping them.
        float out[SIZE] = {}, sum = 0.f;
        const auto weigh = [&](int first) {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int slot = first + u * AT_ONCE;
                const float weight = slot < to ? exp2_approx(score[u] - largest) : 0.f;
                sum += weight;
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    Pack v = value[u][step];
                    if (slot == fresh) v = fresh_value[step];
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) {
                        out[step * WIDTH + i] = fmaf(weight, to_float(v.at[i]), out[step * WIDTH + i]);
                    }
                }
            }
        };
        weigh(from + group);
        for (int first = from + group + AT_ONCE * UNROLL; first < to + group; first += AT_ONCE * UNROLL) {
            load(keys, key, first);
            load(values, value, first);
            scores(first);
            weigh(first);
        }
#pragma unroll
        for (int other = WARP / 2; other >= LANES; other /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, other);
#pragma unroll
            for (int i = 0; i < SIZE; ++i) out[i] += __shfl_xor_sync(0xffffffffu, out[i], other);
        }
        if (thread % WARP < LANES) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (step * LANES + lane >= VECTORS) continue;
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) s.parts[thread / WARP][(step * LANES + lane) * WIDTH + i] = out[step * WIDTH + i];
            }
            if (lane == 0) s.sums[thread / WARP] = sum;
        }
        sync_threads<THREADS>();
        return largest;
    }

   private:
    static __device__ __forceinline__ float max_of(const float (&from)[WARPS]) {
        float largest = from[0];
#pragma unroll
        for (int i = 1; i < WARPS; ++i) largest = fmaxf(largest, from[i]);
        return largest;
    }
};

}  // namespace warpline
