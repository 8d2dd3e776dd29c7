// Tiles of a matrix in shared memory, and copies into them.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

namespace warpline {

// Elements of a chunk: 16 bytes.
template <typename T>
constexpr int CHUNK = 16 / sizeof(T);

// Pitch of a tile's rows. The 16 bytes of padding put eight neighbouring rows on different banks, so that a chunk of each can be
// read at once. Requires: a row has an even number of chunks.
template <typename T, int COLUMNS>
constexpr int PITCH = COLUMNS + CHUNK<T>;

// Moves tiles of ROWS x COLUMNS from global to shared memory, all THREADS of the block together. With asynchronous copies `fetch`
// starts them and `deposit` does nothing; otherwise (Turing, or rows aligned to WIDTH elements only) `fetch` loads into registers
// and `deposit` stores, so that work in between hides the latency. A thread moves the same chunks of every tile, so the
// constructor computes all but the tile's address: tensor cores would otherwise wait for two or three instructions per chunk.
template <typename T, int ROWS, int COLUMNS, int WIDTH, int THREADS>
struct TileMover {
    static constexpr bool ASYNC = HAS_ASYNC_COPIES && WIDTH == CHUNK<T>;
    static constexpr int PER_ROW = COLUMNS / CHUNK<T>;
    // Threads beyond a whole number of rows are idle; every step moves STRIDE rows.
    static constexpr int STRIDE = THREADS / PER_ROW, STEPS = ceil_div(ROWS, STRIDE);
    static_assert(COLUMNS % (2 * CHUNK<T>) == 0 && STRIDE > 0);
    using Chunk = Vec<T, CHUNK<T>>;

    const int row, column;
    const T* mine;           // this thread's first chunk, in the first tile
    const long long stride;  // between the rows it moves
    Chunk held[ASYNC ? 1 : STEPS];

    __device__ __forceinline__ TileMover(const T* source, long long row_stride)
        : row(threadIdx.x / PER_ROW), column(threadIdx.x % PER_ROW * CHUNK<T>), mine(source + row * row_stride + column),
          stride(STRIDE * row_stride) {}

    // The tile begins `offset` elements behind the first one; `rows` and `columns` of it exist, the rest becomes 0.
    __device__ __forceinline__ void fetch(T* tile, long long offset, int rows, int columns) {
        if (THREADS % PER_ROW != 0 && row >= STRIDE) return;
        const T* at = mine + offset;
        T* target = tile + row * PITCH<T, COLUMNS> + column;
        const int left = column < columns ? rows - row : 0;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (ROWS % STRIDE != 0 && row + step * STRIDE >= ROWS) break;
            const bool inside = step * STRIDE < left;
            if constexpr (ASYNC) {
                copy_async(target + step * STRIDE * PITCH<T, COLUMNS>, at + step * stride, inside);
            } else {
                held[step] = {};
#pragma unroll
                for (int i = 0; i < CHUNK<T>; i += WIDTH) {
                    if (inside && (WIDTH == CHUNK<T> || column + i < columns)) {
                        *reinterpret_cast<Vec<T, WIDTH>*>(held[step].at + i) =
                            *reinterpret_cast<const Vec<T, WIDTH>*>(at + step * stride + i);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void deposit(T* tile) const {
        if constexpr (!ASYNC) {
            if (THREADS % PER_ROW != 0 && row >= STRIDE) return;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (ROWS % STRIDE != 0 && row + step * STRIDE >= ROWS) break;
                *reinterpret_cast<Chunk*>(tile + (row + step * STRIDE) * PITCH<T, COLUMNS> + column) = held[step];
            }
        }
    }
};

}  // namespace warpline
