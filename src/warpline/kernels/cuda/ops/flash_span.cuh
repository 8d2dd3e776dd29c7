// The queries and keys of a block of FlashAttention, their addresses, and what the block stores in the KV cache.
//
// The idea: steps begin at multiples of KEYS whatever is in the cache, so only fetching depends on where a key comes from.
// Tried and lost: steps of cached keys, the last one cut short, then steps of new ones. The wider mask costs nine registers, and
// 16 prompts of 1,024 tokens took 118 us on an H200 instead of 105.
#pragma once
#include "kv_codes.cuh"
#include "tile.cuh"

namespace warpline {

// The work of one block: some queries of one head of one sequence, and the keys that they see together, in steps of KEYS. With a
// cache, keys at positions below `start` are in it, and those from `start` on are new.
template <int QUERIES, int KEYS, bool HAS_CACHE>
struct AttentionSpan {
    static constexpr int COUNT = QUERIES;
    static constexpr bool CACHED = HAS_CACHE;
    int sequence, head;               // of q, k and v
    int slot, start;                  // of the cache
    int query_row, key_row;           // row of query 0 in q; row of position 0 in k and v, or where it would be
    int queries, first_query, shift;  // of the sequence; of the block; position of a query minus its index
    int positions;                    // of the sequence
    int first_step, last_step;

    // Of a rectangle. The last queries see the most keys, so they come first, and no SM has to wait for them at the end.
    __device__ __forceinline__ AttentionSpan(const long long* length, int batch, int heads, int queries, int keys, int window)
        : slot(0), start(0), query_row(0), key_row(0), queries(queries), shift(keys - queries) {
        const int lanes = batch * heads, tiles = ceil_div(queries, QUERIES);
        sequence = blockIdx.x % lanes / heads;
        head = blockIdx.x % lanes % heads;
        first_query = (tiles - 1 - static_cast<int>(blockIdx.x) / lanes) * QUERIES;
        positions = min(static_cast<int>(length[sequence]), keys);
        count_steps(window);
    }

    // Of a table entry: slot, start, row of the first new token, first query, number of new tokens.
    __device__ __forceinline__ AttentionSpan(const int* tiles, int heads, int window) : sequence(0) {
        const int* entry = tiles + static_cast<int>(blockIdx.x) / heads * 8;
        head = static_cast<int>(blockIdx.x) % heads;
        slot = entry[0];
        start = shift = entry[1];
        query_row = entry[2];
        key_row = query_row - start;
        first_query = entry[3];
        queries = entry[4];
        positions = start + queries;
        count_steps(window);
    }

    // Address of query 0, and of the key or value of position 0 (or where it would be if it were new).
    template <typename T>
    __device__ __forceinline__ const T* query(const View<T>& q) const { return q.rows(sequence, head) + query_row * q.row; }
    template <typename T>
    __device__ __forceinline__ const T* key(const View<T>& k) const { return k.rows(sequence, head) + key_row * k.row; }

    // Address of a query's output.
    template <typename T>
    __device__ __forceinline__ T* output(T* y, int query, int heads, int depth) const {
        return y + ((static_cast<long long>(sequence) * queries + query_row + query) * heads + head) * depth;
    }

    // Whether the first of a step's keys is in the cache; the others may be new.
    __device__ __forceinline__ bool is_cached(int first_key) const { return CACHED && first_key < start; }

   private:
    __device__ __forceinline__ void count_steps(int window) {
        const int position = first_query + shift;
        first_step = window > 0 ? max(0, position - window + 1) / KEYS : 0;
        last_step = ceil_div(min(positions, position + QUERIES), KEYS);
        if (position >= positions) last_step = first_step;  // none of these queries exists
    }
};

// The KV cache of a block: values, or codes and their scales.
template <typename S>
struct CacheViews {
    View<S> k, v;
    View<float> scales;
};

// A chunk of a row as a tile has it, with zeros beyond DEPTH; codes are expanded.
template <typename T, int DEPTH, typename S>
__device__ __forceinline__ Vec<T, CHUNK<T>> read_chunk(const S* row, int column, float scale = 1.f) {
    constexpr int WIDTH = vector_width<S>(DEPTH, CHUNK<T> * sizeof(S));
    Vec<T, CHUNK<T>> held = {};
#pragma unroll
    for (int i = 0; i < CHUNK<T>; i += WIDTH) {
        if (column + i >= DEPTH) break;
        const Vec<S, WIDTH> part = *reinterpret_cast<const Vec<S, WIDTH>*>(row + column + i);
        if constexpr (IS_CODE<S>) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) held.at[i + j] = from_float<T>(number(part, j) * scale);
        } else {
            *reinterpret_cast<Vec<S, WIDTH>*>(held.at + i) = part;
        }
    }
    return held;
}

// Fetches the keys (WHICH = 0) or values (1) of a step that begins in the cache into their tile: ROWS of DEPTH, zeros up to
// COLUMNS, at place(row, chunk), by THREADS threads. Values are copied asynchronously where possible; codes are loaded several
// chunks at once, expanded and stored.
template <typename Mover, int ROWS, int DEPTH, int COLUMNS, int THREADS, int WHICH, typename T, typename S, typename Span,
          typename Place>
__device__ __forceinline__ void fetch_cached(const CacheViews<S>& views, const View<T>& fresh, Span span, int first_key, T* tile,
                                             Place place) {
    // Hidden from the compiler, which would otherwise compute all addresses before the first step and keep them in registers: 139
    // instead of 117 in fp16 on sm_90.
    asm volatile("" : "+r"(span.slot), "+r"(span.head), "+r"(span.key_row));
    const View<S>& cache = WHICH == 0 ? views.k : views.v;
    const S* older = cache.rows(span.slot, span.head);
    const float* scales = IS_CODE<S> ? views.scales.rows(span.slot, span.head) + WHICH : nullptr;
    constexpr int WIDTH = vector_width<T>(DEPTH), PER_ROW = COLUMNS / CHUNK<T>, COUNT = ROWS * PER_ROW;
    using Chunk = Vec<T, CHUNK<T>>;
    if (first_key + ROWS <= span.start) {
        if constexpr (IS_CODE<S>) {
            constexpr int AT_ONCE = COUNT < 4 * THREADS ? ceil_div(COUNT, THREADS) : 4;
#pragma unroll 1
            for (int begin = threadIdx.x; begin < COUNT; begin += AT_ONCE * THREADS) {
                Chunk held[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const int n = min(begin + i * THREADS, COUNT - 1), position = first_key + n / PER_ROW;
                    const float scale = scales[position * views.scales.row];
                    held[i] = read_chunk<T, DEPTH>(older + position * cache.row, n % PER_ROW * CHUNK<T>, scale);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const int n = begin + i * THREADS;
                    if (n < COUNT) *reinterpret_cast<Chunk*>(tile + place(n / PER_ROW, n % PER_ROW)) = held[i];
                }
            }
        } else {
            Mover mover(older, cache.row);
            mover.fetch(tile, first_key * cache.row, ROWS, DEPTH);
            mover.deposit(tile);
        }
        return;
    }
#pragma unroll 1
    for (int n = threadIdx.x; n < COUNT; n += THREADS) {  // some of the rows are new
        const int position = first_key + n / PER_ROW, column = n % PER_ROW * CHUNK<T>;
        const bool inside = position < span.positions && column < DEPTH;
        T* target = tile + place(n / PER_ROW, n % PER_ROW);
        if constexpr (IS_CODE<S>) {
            Chunk held = {};
            if (inside && position < span.start) {
                held = read_chunk<T, DEPTH>(older + position * cache.row, column, scales[position * views.scales.row]);
            } else if (inside) {
                held = read_chunk<T, DEPTH>(span.key(fresh) + position * fresh.row, column);
            }
            *reinterpret_cast<Chunk*>(target) = held;
        } else {
            const T* source = position < span.start ? older + position * cache.row : span.key(fresh) + position * fresh.row;
            if constexpr (WIDTH == CHUNK<T>) {
                copy_async(target, source + column, inside);
            } else {
                *reinterpret_cast<Chunk*>(target) = inside ? read_chunk<T, DEPTH>(source, column) : Chunk{};
            }
        }
    }
}

// With a cache, stores the new keys and values at the positions of the block's queries; every position belongs to one block. It
// reads a step's tile of ROWS keys, or of their values, at place(row, chunk), with THREADS threads. A cache of codes already has
// them (quantise_kv).
template <int ROWS, int DEPTH, int THREADS, typename T, typename S, typename Span, typename Place>
__device__ __forceinline__ void keep(const View<S>& cache, const T* tile, const Span& span, int first_key, Place place) {
    if constexpr (IS_CODE<S>) return;
    const int from = span.first_query + span.shift - first_key, to = min(from + Span::COUNT, span.positions - first_key);
    if (!Span::CACHED || from >= ROWS) return;
    constexpr int WIDTH = vector_width<T>(DEPTH), VECTORS = DEPTH / WIDTH;
    constexpr int COUNT = ROWS * VECTORS, AT_ONCE = COUNT < 4 * THREADS ? ceil_div(COUNT, THREADS) : 4;
    using Pack = Vec<T, WIDTH>;
    S* target = const_cast<S*>(cache.rows(span.slot, span.head)) + first_key * cache.row;
#pragma unroll 1
    for (int begin = threadIdx.x; begin < COUNT; begin += AT_ONCE * THREADS) {
        Pack held[AT_ONCE];  // all loads before the first store: the compiler cannot know that they do not overlap
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int n = min(begin + i * THREADS, COUNT - 1), column = n % VECTORS * WIDTH;
            held[i] = *reinterpret_cast<const Pack*>(tile + place(n / VECTORS, column / CHUNK<T>) + column % CHUNK<T>);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int n = begin + i * THREADS, row = n / VECTORS, column = n % VECTORS * WIDTH;
            if (n < COUNT && row >= from && row < to) *reinterpret_cast<Pack*>(target + row * cache.row + column) = held[i];
        }
    }
}

}  // namespace warpline
