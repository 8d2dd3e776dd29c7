// Causal attention of many queries without storing the scores: y = softmax(q k^T scale) v.
//
// The idea: a block owns QUERIES neighbouring queries of one head and walks over their visible keys, KEYS at a time, with an
// online softmax in registers. In half precision it uses tensor cores: the scores leave the first product in the registers in
// which the second one takes its left operand. The next keys and values are in flight meanwhile. Where there are few blocks,
// TEAMS of warps take steps in turn, each with its own softmax and ring; their results are merged in order at the end.
// Two ops differ in where queries and keys are (AttentionSpan):
//   flash_attention   a rectangle: the queries are the last positions, query i at position i + keys - queries. Sequence b has
//                     length[b] positions; queries beyond them get zeros
//   prompt_attention  packed rows: the new tokens of a slot; older ones are in its cache. New keys and values are stored in the
//                     cache. A cache of codes has them already, and k and v hold their rounded values. A table has one entry per
//                     QUERIES new tokens; the host puts the longest work first
// With window > 0 a query sees that many positions, its own included; keys that no query of the block sees are not read.
// Contract: `length` and the table are read before the preceding launches end, so none of them may write these. In the engine a
// copy at the start of the pass writes the table, and no kernel of the pass begins before it has ended.
// Memory traffic: q and y once; k and v once per block, mostly from L2.
#pragma once
#include "online.cuh"
#include "ops/flash_span.cuh"
#include "ops/flash_tiles.cuh"

namespace warpline {

// A barrier of one team.
template <int TEAM, int TEAMS>
__device__ __forceinline__ void sync_team(int team) {
    if constexpr (TEAMS == 1) {
        __syncthreads();
    } else {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(TEAM) : "memory");
    }
}

// Half precision on tensor cores: TEAMS of WARPS; `Tiles` does the products.
template <typename Tiles, typename T, int DEPTH, int QUERIES, int KEYS, int WARPS, int TEAMS, int STAGES, typename S,
          typename Span>
__device__ __forceinline__ void flash_tensor(const Span& span, View<T> q, View<T> k, View<T> v, const CacheViews<S>& cache,
                                             T* y, int heads, int window, float scale) {
    constexpr int TEAM = WARPS * WARP, MS = QUERIES / WARPS / 16, NS = KEYS / 8;
    constexpr int D = Tiles::D, ROW = Tiles::ROW, STAGE = 2 * KEYS * ROW;
    static_assert(MS * WARPS * 16 == QUERIES && KEYS % 16 == 0);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, team = TEAMS > 1 ? threadIdx.y : 0;
    T* tile_q = Tiles::memory();
    T* ring = tile_q + QUERIES * ROW + team * (STAGES * STAGE);

    constexpr int SHARE = QUERIES / TEAMS;  // queries that a team fetches
    const int its_query = span.first_query + team * SHARE;
    typename Tiles::template Mover<SHARE, TEAM> move_q(span.query(q), q.row);
    move_q.fetch(tile_q + team * (SHARE * ROW), its_query * q.row, span.queries - its_query, DEPTH);
    move_q.deposit(tile_q + team * (SHARE * ROW));
    using Mover = typename Tiles::template Mover<KEYS, TEAM>;
    constexpr int AHEAD = Mover::ASYNC ? STAGES - 1 : 1;
    Mover move_k(span.key(k), k.row);
    Mover move_v(span.key(v), v.row);
    // A team takes the steps with its number modulo TEAMS, whatever the block's first step is.
    const int first_step = span.first_step + (team + TEAMS - span.first_step % TEAMS) % TEAMS;
    const int turns = ceil_div(max(0, span.last_step - first_step), TEAMS);
    const auto fetch = [&](int turn) {
        T* stage = ring + turn % STAGES * STAGE;
        const int first = (first_step + turn * TEAMS) * KEYS;
        if (span.is_cached(first)) {
            fetch_cached<Mover, KEYS, DEPTH, D, TEAM, 0>(cache, k, span, first, stage, Tiles::place);
            fetch_cached<Mover, KEYS, DEPTH, D, TEAM, 1>(cache, v, span, first, stage + KEYS * ROW, Tiles::place);
        } else {
            move_k.fetch(stage, first * k.row, span.positions - first, DEPTH);
            move_v.fetch(stage + KEYS * ROW, first * v.row, span.positions - first, DEPTH);
        }
    };
    const auto deposit = [&](int turn) {
        T* stage = ring + turn % STAGES * STAGE;
        if (span.is_cached((first_step + turn * TEAMS) * KEYS)) return;  // fetch_cached stored it already
        move_k.deposit(stage);
        move_v.deposit(stage + KEYS * ROW);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        if (i < turns) {
            fetch(i);
            deposit(i);
        }
        end_copy_group();
    }
    wait_for_copies<AHEAD - 1>();
    Tiles::show();
    __syncthreads();
    Tiles tiles(tile_q, warp);

    const float factor = scale * LOG2_E;
    const int position0 = span.first_query + span.shift + warp * MS * 16;  // of the warp's first query
    OnlineSoftmax softmax[MS][2];
    float out[MS][D / 8][4] = {};
    for (int turn = 0; turn < turns; ++turn) {
        wait_for_copies<AHEAD - 1>();
        Tiles::show();
        sync_team<TEAM, TEAMS>(team);
        if (turn + AHEAD < turns) fetch(turn + AHEAD);
        end_copy_group();
        const int first_key = (first_step + turn * TEAMS) * KEYS;
        const T* tile_k = ring + turn % STAGES * STAGE;
        const T* tile_v = tile_k + KEYS * ROW;
        keep<KEYS, DEPTH, TEAM>(cache.k, tile_k, span, first_key, Tiles::place);
        keep<KEYS, DEPTH, TEAM>(cache.v, tile_v, span, first_key, Tiles::place);

        float score[MS][NS][4];
        tiles.score(score, tile_k);
        const bool all_visible = first_key + KEYS - 1 <= position0 &&
                                 (window <= 0 || first_key > position0 + MS * 16 - 1 - window);
        if (!all_visible) {
#pragma unroll
            for (int m = 0; m < MS; ++m) {
#pragma unroll
                for (int n = 0; n < NS; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int position = position0 + m * 16 + lane / 4 + i / 2 * 8;
                        const int key = first_key + n * 8 + lane % 4 * 2 + i % 2;
                        if (key > position || (window > 0 && key <= position - window)) score[m][n][i] = LOWEST;
                    }
                }
            }
        }

#pragma unroll
        for (int m = 0; m < MS; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // rows lane / 4 and lane / 4 + 8 of the 16
                float largest = LOWEST;
#pragma unroll
                for (int n = 0; n < NS; ++n) {
                    largest = fmaxf(largest, fmaxf(score[m][n][2 * half], score[m][n][2 * half + 1]));
                }
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                OnlineSoftmax& s = softmax[m][half];
                const float rescale = s.raise(largest, factor);
#pragma unroll
                for (int d = 0; d < D / 8; ++d) {
                    out[m][d][2 * half] *= rescale;
                    out[m][d][2 * half + 1] *= rescale;
                }
#pragma unroll
                for (int n = 0; n < NS; ++n) {
                    score[m][n][2 * half] = s.weigh(score[m][n][2 * half], factor);
                    score[m][n][2 * half + 1] = s.weigh(score[m][n][2 * half + 1], factor);
                }
            }
        }

        tiles.add_values(out, score, tile_v);
        if (turn + AHEAD < turns) deposit(turn + AHEAD);
    }
    if constexpr (TEAMS > 1) {
        // Each thread's results of its team: for each of its rows the softmax and its columns of the output.
        constexpr int COUNT = 2 + D / 4;
        float* all = dynamic_shared<float>() + threadIdx.x;
        __syncthreads();  // keys and values have been read
        if (team > 0) {
#pragma unroll
            for (int i = 0; i < MS * 2; ++i) {
                const int m = i / 2, half = i % 2;
                float* own = all + ((team - 1) * MS * 2 + i) * COUNT * TEAM;
                own[0] = softmax[m][half].largest;
                own[TEAM] = softmax[m][half].sum;
#pragma unroll
                for (int d = 0; d < D / 4; ++d) own[(2 + d) * TEAM] = out[m][d / 2][2 * half + d % 2];
            }
        }
        __syncthreads();
        if (team > 0) return;
#pragma unroll
        for (int i = 0; i < (TEAMS - 1) * MS * 2; ++i) {
            const int m = i / 2 % MS, half = i % 2;
            const float* its = all + i * COUNT * TEAM;
            OnlineSoftmax other{its[0], its[TEAM]};
            const float rescale = softmax[m][half].raise(other.largest, factor), share = other.raise(softmax[m][half].largest, factor);
            softmax[m][half].sum += other.sum;
#pragma unroll
            for (int d = 0; d < D / 4; ++d) {
                float& sum = out[m][d / 2][2 * half + d % 2];
                sum = sum * rescale + share * its[(2 + d) * TEAM];
            }
        }
    }

#pragma unroll
    for (int m = 0; m < MS; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = softmax[m][half].sum;
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            const int query = span.first_query + warp * MS * 16 + m * 16 + lane / 4 + half * 8;
            if (query >= span.queries) continue;
            const float share = query + span.shift < span.positions ? 1.f / sum : 0.f;
            T* row = span.output(y, query, heads, DEPTH);
#pragma unroll
            for (int d = 0; d < D / 8; ++d) {
                const int column = d * 8 + lane % 4 * 2;
                const float low = out[m][d][2 * half] * share, high = out[m][d][2 * half + 1] * share;
                if constexpr (DEPTH % 2 == 0) {
                    if (column < DEPTH) *reinterpret_cast<unsigned*>(row + column) = pack_pair<T>(low, high);
                } else {
                    if (column < DEPTH) row[column] = from_float<T>(low);
                    if (column + 1 < DEPTH) row[column + 1] = from_float<T>(high);
                }
            }
        }
    }
}

// float without tensor cores: 256 threads as 16 x 16, each with every sixteenth query, key and column of the output.
template <int DEPTH, int QUERIES, int KEYS, int WARPS, typename S, typename Span>
__device__ __forceinline__ void flash_plain(const Span& span, View<float> q, View<float> k, View<float> v,
                                            const CacheViews<S>& cache, float* y, int heads, int window, float scale) {
    static_assert(WARPS == 8 && QUERIES % 16 == 0 && KEYS % 16 == 0);
    constexpr int D = ceil_div(DEPTH, 16) * 16, LANE = PITCH<float, D>, WIDTH = vector_width<float>(DEPTH);
    constexpr int MS = QUERIES / 16, NS = KEYS / 16, DS = D / 16, P = PITCH<float, KEYS>;
    using Four = Vec<float, 4>;
    const int row0 = threadIdx.x / 16, column0 = threadIdx.x % 16;
    float* tile_q = dynamic_shared<float>();
    float* tile_k = tile_q + QUERIES * LANE;
    float* tile_v = tile_k + KEYS * LANE;
    float* weights = tile_v + KEYS * LANE;

    using Mover = TileMover<float, KEYS, D, WIDTH, 256>;
    TileMover<float, QUERIES, D, WIDTH, 256> move_q(span.query(q), q.row);
    Mover move_k(span.key(k), k.row), move_v(span.key(v), v.row);
    move_q.fetch(tile_q, span.first_query * q.row, span.queries - span.first_query, DEPTH);
    move_q.deposit(tile_q);

    const float factor = scale * LOG2_E;
    OnlineSoftmax softmax[MS];
    float out[MS][DS] = {};
    for (int step = span.first_step; step < span.last_step; ++step) {
        const int first = step * KEYS;
        const auto place = [](int row, int chunk) { return row * LANE + chunk * CHUNK<float>; };
        __syncthreads();  // the last step's tiles have been read
        if (span.is_cached(first)) {
            fetch_cached<Mover, KEYS, DEPTH, D, 256, 0>(cache, k, span, first, tile_k, place);
            fetch_cached<Mover, KEYS, DEPTH, D, 256, 1>(cache, v, span, first, tile_v, place);
        } else {
            move_k.fetch(tile_k, first * k.row, span.positions - first, DEPTH);
            move_v.fetch(tile_v, first * v.row, span.positions - first, DEPTH);
            move_k.deposit(tile_k);
            move_v.deposit(tile_v);
        }
        end_copy_group();
        wait_for_copies<0>();
        __syncthreads();
        keep<KEYS, DEPTH, 256>(cache.k, tile_k, span, first, place);
        keep<KEYS, DEPTH, 256>(cache.v, tile_v, span, first, place);

        float score[MS][NS] = {};
#pragma unroll 4
        for (int d = 0; d < D; d += 4) {
            Four fq[MS], fk[NS];
#pragma unroll
            for (int m = 0; m < MS; ++m) fq[m] = *reinterpret_cast<const Four*>(tile_q + (row0 + m * 16) * LANE + d);
#pragma unroll
            for (int n = 0; n < NS; ++n) fk[n] = *reinterpret_cast<const Four*>(tile_k + (column0 + n * 16) * LANE + d);
#pragma unroll
            for (int m = 0; m < MS; ++m) {
#pragma unroll
                for (int n = 0; n < NS; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) score[m][n] = fmaf(fq[m].at[i], fk[n].at[i], score[m][n]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < MS; ++m) {
            const int position = span.first_query + span.shift + row0 + m * 16;
            float largest = LOWEST;
#pragma unroll
            for (int n = 0; n < NS; ++n) {
                const int key = first + column0 + n * 16;
                if (key > position || (window > 0 && key <= position - window)) score[m][n] = LOWEST;
                largest = fmaxf(largest, score[m][n]);
            }
#pragma unroll
            for (int other = 8; other > 0; other /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, other));
            }
            const float rescale = softmax[m].raise(largest, factor);
#pragma unroll
            for (int d = 0; d < DS; ++d) out[m][d] *= rescale;
#pragma unroll
            for (int n = 0; n < NS; ++n) {
                weights[(row0 + m * 16) * P + column0 + n * 16] = softmax[m].weigh(score[m][n], factor);
            }
        }
        __syncwarp();  // a row of weights is written and read by the same half warp
#pragma unroll 4
        for (int n = 0; n < KEYS; n += 4) {
            Four fp[MS];
#pragma unroll
            for (int m = 0; m < MS; ++m) fp[m] = *reinterpret_cast<const Four*>(weights + (row0 + m * 16) * P + n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int d = 0; d < DS; ++d) {
                    const float value = tile_v[(n + i) * LANE + column0 + d * 16];
#pragma unroll
                    for (int m = 0; m < MS; ++m) out[m][d] = fmaf(fp[m].at[i], value, out[m][d]);
                }
            }
        }
    }

#pragma unroll
    for (int m = 0; m < MS; ++m) {
        float sum = softmax[m].sum;
#pragma unroll
        for (int other = 8; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
        const int query = span.first_query + row0 + m * 16;
        if (query >= span.queries) continue;
        const float share = query + span.shift < span.positions ? 1.f / sum : 0.f;
        float* row = span.output(y, query, heads, DEPTH);
#pragma unroll
        for (int d = 0; d < DS; ++d) {
            if (column0 + d * 16 < DEPTH) row[column0 + d * 16] = out[m][d] * share;
        }
    }
}

template <typename T, int DEPTH, int QUERIES, int KEYS, int WARPS, int TEAMS, int STAGES, typename S, typename Span>
__device__ __forceinline__ void attend(const Span& span, View<T> q, View<T> k, View<T> v, const CacheViews<S>& cache, T* y,
                                       int heads, int window, float scale) {
    if constexpr (sizeof(T) == 4) {
        flash_plain<DEPTH, QUERIES, KEYS, WARPS>(span, q, k, v, cache, y, heads, window, scale);
    } else {
        // Four warps with 16 queries each use wgmma, where the GPU has it.
        constexpr int MS = QUERIES / WARPS / 16;
        constexpr bool GROUPS = HAS_WARPGROUPS && DEPTH == GROUP_ROW && MS == 1 && WARPS % 4 == 0 && KEYS % 64 == 0;
        using Tiles = typename FlashTiles<GROUPS, T, DEPTH, MS, KEYS>::Type;
        flash_tensor<Tiles, T, DEPTH, QUERIES, KEYS, WARPS, TEAMS, STAGES>(span, q, k, v, cache, y, heads, window, scale);
    }
}

template <typename T, int DEPTH, int QUERIES, int KEYS, int WARPS, int TEAMS, int STAGES>
__device__ __forceinline__ void flash_attention(View<T> q, View<T> k, View<T> v, const long long* length, T* y, int batch,
                                                int heads, int queries, int keys, int window, float scale) {
    const AttentionSpan<QUERIES, KEYS, false> span(length, batch, heads, queries, keys, window);
    await_previous_launch();
    attend<T, DEPTH, QUERIES, KEYS, WARPS, TEAMS, STAGES>(span, q, k, v, CacheViews<T>{}, y, heads, window, scale);
}

// S is the storage type of the cache: T, or codes.
template <typename T, int DEPTH, int QUERIES, int KEYS, int WARPS, int TEAMS, int STAGES, typename S>
__device__ __forceinline__ void prompt_attention(View<T> q, View<T> k, View<T> v, const int* tiles, View<S> cache_k,
                                                 View<S> cache_v, View<float> scales, T* y, int heads, int window,
                                                 float scale) {
    const AttentionSpan<QUERIES, KEYS, true> span(tiles, heads, window);
    // Entries without tokens pad the table. Block 0 waits even then: launches that wait for this one rely on those before it.
    if (span.queries == 0 && blockIdx.x > 0) return;
    await_previous_launch();
    if (span.queries == 0) return;
    attend<T, DEPTH, QUERIES, KEYS, WARPS, TEAMS, STAGES>(span, q, k, v, CacheViews<S>{cache_k, cache_v, scales}, y, heads, window, scale);
}

}  // namespace warpline
