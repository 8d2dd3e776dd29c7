// The lower rungs of causal attention, in float: y = softmax(q k^T scale) v. The rungs above are ops/flash_attention.cuh, first
// in float and then on tensor cores.
//
// The idea: first the scores are stored and read again, as three kernels would do, and the threads that own a query change; then
// keys and values are read once for many queries; then the online softmax makes the stored scores unnecessary.
// Memory traffic at best: q, k, v and y once. Without tiles every query reads all keys and values that it sees.
#pragma once
#include "online.cuh"

namespace warpline {

// One query, by its number among all of them, and the keys that it sees: from `first` to its own position.
template <typename T, int DEPTH>
struct OneQuery {
    int sequence, head, number, position, first;
    bool exists;  // a query beyond the end of its sequence gets zeros
    T* out;

    __device__ __forceinline__ OneQuery(long long i, const long long* length, T* y, int heads, int queries, int keys,
                                        int window) {
        number = static_cast<int>(i % queries);
        head = static_cast<int>(i / queries % heads);
        sequence = static_cast<int>(i / queries / heads);
        position = number + keys - queries;
        first = window > 0 ? max(0, position - window + 1) : 0;
        exists = position < length[sequence];
        out = y + ((static_cast<long long>(sequence) * queries + number) * heads + head) * DEPTH;
    }

    __device__ __forceinline__ const T* row_of(const View<T>& view, int row) const {
        return view.rows(sequence, head) + row * view.row;
    }
};

// One thread per query. Its scores are a row in global memory, far from those of neighbouring threads.
template <typename T, int DEPTH, int BLOCK>
__device__ __forceinline__ void attention_naive(View<T> q, View<T> k, View<T> v, const long long* length, T* y, float* scores,
                                                int batch, int heads, int queries, int keys, int window, float scale) {
    const long long i = static_cast<long long>(blockIdx.x) * BLOCK + threadIdx.x;
    if (i >= static_cast<long long>(batch) * heads * queries) return;
    const OneQuery<T, DEPTH> query(i, length, y, heads, queries, keys, window);
    if (!query.exists) {
        for (int d = 0; d < DEPTH; ++d) query.out[d] = 0.f;
        return;
    }
    const T* own = query.row_of(q, query.number);
    float* mine = scores + i * keys;
    float largest = LOWEST, sum = 0.f;
#pragma unroll 1
    for (int key = query.first; key <= query.position; ++key) {
        const T* row = query.row_of(k, key);
        float dot = 0.f;
#pragma unroll 1
        for (int d = 0; d < DEPTH; ++d) dot += own[d] * row[d];
        mine[key] = dot * scale;
        largest = fmaxf(largest, dot * scale);
    }
#pragma unroll 1
    for (int key = query.first; key <= query.position; ++key) {
        mine[key] = expf(mine[key] - largest);
        sum += mine[key];
    }
#pragma unroll 1
    for (int d = 0; d < DEPTH; ++d) {
        float value = 0.f;
#pragma unroll 1
        for (int key = query.first; key <= query.position; ++key) value += mine[key] * query.row_of(v, key)[d];
        query.out[d] = value / sum;
    }
}

// The online softmax alone, still one thread per query: nothing is stored, but query and output fill a thread's registers, and
// there are only as many threads as queries.
template <typename T, int DEPTH, int BLOCK>
__device__ __forceinline__ void attention_lonely(View<T> q, View<T> k, View<T> v, const long long* length, T* y, int batch,
                                                 int heads, int queries, int keys, int window, float scale) {
    const long long i = static_cast<long long>(blockIdx.x) * BLOCK + threadIdx.x;
    if (i >= static_cast<long long>(batch) * heads * queries) return;
    const OneQuery<T, DEPTH> query(i, length, y, heads, queries, keys, window);
    const T* row_q = query.row_of(q, query.number);
    const float factor = scale * LOG2_E;
    OnlineSoftmax softmax;
    float own[DEPTH], out[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        own[d] = row_q[d];
        out[d] = 0.f;
    }
    const int last = query.exists ? query.position : query.first - 1;
#pragma unroll 1
    for (int key = query.first; key <= last; ++key) {
        const T *row_k = query.row_of(k, key), *row_v = query.row_of(v, key);
        float dot = 0.f;
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) dot += own[d] * row_k[d];
        const float rescale = softmax.raise(dot, factor), weight = softmax.weigh(dot, factor);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) out[d] = out[d] * rescale + weight * row_v[d];
    }
    const float share = query.exists ? 1.f / softmax.sum : 0.f;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) query.out[d] = out[d] * share;
}

// One warp per query: lanes read neighbouring elements of a key, a value or a row of scores.
template <typename T, int DEPTH, int BLOCK>
__device__ __forceinline__ void attention_coalesced(View<T> q, View<T> k, View<T> v, const long long* length, T* y,
                                                    float* scores, int batch, int heads, int queries, int keys, int window,
                                                    float scale) {
    constexpr int STEPS = ceil_div(DEPTH, WARP);
    const auto add = [](float a, float b) { return a + b; };
    const int lane = threadIdx.x % WARP;
    const long long i = (static_cast<long long>(blockIdx.x) * BLOCK + threadIdx.x) / WARP;
    if (i >= static_cast<long long>(batch) * heads * queries) return;  // the whole warp has the same query
    const OneQuery<T, DEPTH> query(i, length, y, heads, queries, keys, window);
    const int last = query.exists ? query.position : query.first - 1;
    float* mine = scores + i * keys;
    float own[STEPS], out[STEPS] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        own[s] = lane + s * WARP < DEPTH ? query.row_of(q, query.number)[lane + s * WARP] * scale : 0.f;
    }
    float largest = LOWEST, sum = 0.f;
    for (int key = query.first; key <= last; ++key) {
        const T* row = query.row_of(k, key);
        float dot = 0.f;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            if (lane + s * WARP < DEPTH) dot += own[s] * row[lane + s * WARP];
        }
        dot = warp_reduce(dot, add);
        largest = fmaxf(largest, dot);
        if (lane == 0) mine[key] = dot;
    }
    __syncwarp();
    for (int key = query.first + lane; key <= last; key += WARP) {
        const float weight = expf(mine[key] - largest);
        mine[key] = weight;
        sum += weight;
    }
    sum = warp_reduce(sum, add);
    __syncwarp();
    for (int key = query.first; key <= last; ++key) {
        const T* row = query.row_of(v, key);
        const float weight = mine[key];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            if (lane + s * WARP < DEPTH) out[s] += weight * row[lane + s * WARP];
        }
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        if (lane + s * WARP < DEPTH) query.out[lane + s * WARP] = query.exists ? out[s] / sum : 0.f;
    }
}

// A block of eight warps for 32 queries of one head, four per warp, and 32 keys at a time: a key or value is read once for all of
// them, into shared memory. For the scores a lane has a key, so no sum is shared; for the output it has columns. ONLINE keeps the
// softmax running, so that keys and values are read once and nothing is stored; otherwise scores are stored.
template <typename T, int DEPTH, bool ONLINE>
__device__ __forceinline__ void attention_tiles(View<T> q, View<T> k, View<T> v, const long long* length, T* y, float* scores,
                                                int batch, int heads, int queries, int keys, int window, float scale) {
    constexpr int WARPS = 8, EACH = 4, QUERIES = WARPS * EACH, KEYS = WARP, STEPS = ceil_div(DEPTH, WARP);
    static_assert(QUERIES == WARP && KEYS == WARP, "fetch brings that many rows");
    constexpr int LANE = DEPTH | 1;  // an odd pitch puts a column's elements on different banks
    constexpr unsigned ALL = 0xffffffffu;
    __shared__ T tile_q[QUERIES * LANE];
    __shared__ T tile_k[KEYS * LANE];
    __shared__ T tile_v[KEYS * LANE];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int tiles = ceil_div(queries, QUERIES), pair = static_cast<int>(blockIdx.x) / tiles;  // of sequence and head
    const int sequence = pair / heads, head = pair % heads;
    const int first_query = static_cast<int>(blockIdx.x) % tiles * QUERIES, shift = keys - queries;
    const int positions = min(static_cast<int>(length[sequence]), keys);
    // The keys that the block's queries see together, in steps of KEYS.
    const int begin = window > 0 ? max(0, first_query + shift - window + 1) / KEYS : 0;
    const int end = ceil_div(min(positions, first_query + QUERIES + shift), KEYS);

    const auto fetch = [&](T* tile, const View<T>& view, int first, int count) {
        const T* rows = view.rows(sequence, head);
        for (int i = threadIdx.x; i < WARP * DEPTH; i += WARPS * WARP) {
            const int row = i / DEPTH, d = i % DEPTH;
            tile[row * LANE + d] = first + row < count ? rows[(first + row) * view.row + d] : 0.f;
        }
    };
    // The scores of the warp's queries with the lane's key; LOWEST where a query does not see it.
    const int query0 = first_query + warp * EACH;
    const auto score_all = [&](float (&score)[EACH], int key) {
#pragma unroll
        for (int m = 0; m < EACH; ++m) score[m] = 0.f;
#pragma unroll 8
        for (int d = 0; d < DEPTH; ++d) {
            const float element = tile_k[lane * LANE + d];
#pragma unroll
            for (int m = 0; m < EACH; ++m) score[m] += tile_q[(warp * EACH + m) * LANE + d] * element;
        }
#pragma unroll
        for (int m = 0; m < EACH; ++m) {
            const int position = query0 + m + shift;
            if (key > position || (window > 0 && key <= position - window)) score[m] = LOWEST;
        }
    };
    float out[EACH][STEPS] = {};
    // Adds the values of a tile; weight_of is the weight of query m and key j.
    const auto add_values = [&](auto weight_of) {
#pragma unroll 8
        for (int j = 0; j < KEYS; ++j) {
#pragma unroll
            for (int m = 0; m < EACH; ++m) {
                const float weight = weight_of(m, j);
#pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    if (lane + s * WARP < DEPTH) out[m][s] += weight * tile_v[j * LANE + lane + s * WARP];
                }
            }
        }
    };

    fetch(tile_q, q, first_query, queries);
    float sum[EACH] = {};
    const float factor = scale * LOG2_E;
    if constexpr (ONLINE) {
        OnlineSoftmax softmax[EACH];
        for (int step = begin; step < end; ++step) {
            __syncthreads();  // the last step's tiles have been read
            fetch(tile_k, k, step * KEYS, positions);
            fetch(tile_v, v, step * KEYS, positions);
            __syncthreads();
            float score[EACH];
            score_all(score, step * KEYS + lane);
#pragma unroll
            for (int m = 0; m < EACH; ++m) {
                const float largest = warp_reduce(score[m], [](float a, float b) { return fmaxf(a, b); });
                const float rescale = softmax[m].raise(largest, factor);
#pragma unroll
                for (int s = 0; s < STEPS; ++s) out[m][s] *= rescale;
                score[m] = softmax[m].weigh(score[m], factor);
            }
            add_values([&](int m, int j) { return __shfl_sync(ALL, score[m], j); });
        }
#pragma unroll
        for (int m = 0; m < EACH; ++m) sum[m] = softmax[m].sum;
    } else {
        float largest[EACH];
#pragma unroll
        for (int m = 0; m < EACH; ++m) largest[m] = LOWEST;
        const auto stored = [&](int m) {
            return scores + (static_cast<long long>(pair) * queries + min(query0 + m, queries - 1)) * keys;
        };
        for (int step = begin; step < end; ++step) {
            const int key = step * KEYS + lane;
            __syncthreads();
            fetch(tile_k, k, step * KEYS, positions);
            __syncthreads();
            float score[EACH];
            score_all(score, key);
#pragma unroll
            for (int m = 0; m < EACH; ++m) {
                largest[m] = fmaxf(largest[m], score[m]);
                if (key < keys && query0 + m < queries) stored(m)[key] = score[m];
            }
        }
#pragma unroll
        for (int m = 0; m < EACH; ++m) {
            largest[m] = warp_reduce(largest[m], [](float a, float b) { return fmaxf(a, b); });
            if (query0 + m >= queries) continue;
            for (int key = begin * KEYS + lane; key < min(end * KEYS, keys); key += WARP) {
                const float weight = exp2_approx((stored(m)[key] - largest[m]) * factor);
                stored(m)[key] = weight;
                sum[m] += weight;
            }
        }
        for (int step = begin; step < end; ++step) {
            __syncthreads();  // the weights are stored, and the last step's tile has been read
            fetch(tile_v, v, step * KEYS, positions);
            __syncthreads();
            const int first = step * KEYS;
            add_values([&](int m, int j) { return first + j < keys ? stored(m)[first + j] : 0.f; });
        }
    }
#pragma unroll
    for (int m = 0; m < EACH; ++m) {
        sum[m] = warp_reduce(sum[m], [](float a, float b) { return a + b; });
        const int query = query0 + m;
        if (query >= queries) continue;
        const float share = query + shift < positions ? 1.f / sum[m] : 0.f;
        T* row = y + ((static_cast<long long>(sequence) * queries + query) * heads + head) * DEPTH;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            if (lane + s * WARP < DEPTH) row[lane + s * WARP] = out[m][s] * share;
        }
    }
}

}  // namespace warpline
