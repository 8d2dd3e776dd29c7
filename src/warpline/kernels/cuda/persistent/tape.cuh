// The weights as a tape that every block reads from its own beginning to its own end, once per token, and around again.
//
// A tape is made of steps, a step of one tile per warp, a tile of 16 bytes per lane. Each lane copies its own 16 bytes
// ahead into shared memory and is the only one to read them back, so nothing is synchronised: a lane waits for its own
// copies. RING steps are on their way or waiting at any time, across all the places where the blocks wait for each other.
// Without asynchronous copies (Turing) a lane loads its bytes into registers when it takes them, which is before it waits
// for what they are multiplied with.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

namespace warpline {

using Bits = Vec<unsigned, 4>;

// Outputs of a tile, whatever the type.
constexpr int TILE_OUTPUTS = 8;

// Sums of products of tiles and up to eight rows. Lane 4g + t has of output g (of the tile) the inputs from t * WIDTH on.
// `results` names the sums that a lane ends with: f(which, output, row).
template <typename T, int ROWS>
struct TileSums {  // on tensor cores: the rows are a, the tile is b
    static constexpr int INPUTS = 32, WIDTH = 8, RESULTS = 2;
    float even[4] = {}, odd[4] = {};

    // x: the rows in shared memory, at the tile's first input.
    __device__ __forceinline__ void add(const Bits& tile, const T* x, int pitch) {
        const int row = threadIdx.x % WARP / 4;
        Bits rows = {};
        if (row < ROWS) rows = *reinterpret_cast<const Bits*>(x + row * pitch + threadIdx.x % 4 * WIDTH);
        const unsigned first[4] = {rows.at[0], 0, rows.at[1], 0}, second[4] = {rows.at[2], 0, rows.at[3], 0};
        multiply_add<T>(even, first, tile.at[0], tile.at[1]);
        multiply_add<T>(odd, second, tile.at[2], tile.at[3]);
    }
    __device__ __forceinline__ void finish(float (&result)[RESULTS]) {
        result[0] = even[0] + odd[0];
        result[1] = even[1] + odd[1];
    }
    template <typename F>
    static __device__ __forceinline__ void results(F f) {
        const int row = threadIdx.x % WARP / 4, output = threadIdx.x % 4 * 2;
        if (row >= ROWS) return;
        f(0, output, row);
        f(1, output + 1, row);
    }
};

template <int ROWS>
struct TileSums<float, ROWS> {
    static constexpr int INPUTS = 16, WIDTH = 4, RESULTS = ROWS;
    float sum[ROWS] = {};

    __device__ __forceinline__ void add(const Bits& tile, const float* x, int pitch) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const Vec<float, 4> v = *reinterpret_cast<const Vec<float, 4>*>(x + row * pitch + threadIdx.x % 4 * WIDTH);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[row] = fmaf(__uint_as_float(tile.at[i]), v.at[i], sum[row]);
        }
    }
    __device__ __forceinline__ void finish(float (&result)[RESULTS]) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            result[row] = sum[row] + __shfl_xor_sync(0xffffffffu, sum[row], 1);
            result[row] += __shfl_xor_sync(0xffffffffu, result[row], 2);
        }
    }
    template <typename F>
    static __device__ __forceinline__ void results(F f) {
        if (threadIdx.x % 4 != 0) return;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) f(row, static_cast<int>(threadIdx.x % WARP / 4), row);
    }
};

template <int WARPS, int RING>
class Tape {
    static constexpr int STEP = WARPS * WARP;  // in Bits
    const Bits* source;                        // this lane's part of step 0
    Bits* slots;
    int steps, ahead = 0, slot = 0;

    __device__ __forceinline__ void copy_next(int into) {
        copy_async(slots + into * STEP, source + static_cast<long long>(ahead) * STEP, true);
        end_copy_group();
        ahead = ahead + 1 == steps ? 0 : ahead + 1;
    }

   public:
    __device__ __forceinline__ Tape(const Bits* block, int steps, Bits* slots)
        : source(block + threadIdx.x), slots(slots + threadIdx.x), steps(steps) {
        if constexpr (HAS_ASYNC_COPIES) {
            for (int i = 0; i < RING; ++i) copy_next(i);
        }
    }

    // The next `count` steps, at most N, into registers; their places are filled again.
    template <int N>
    __device__ __forceinline__ void take(Bits (&held)[N], int count) {
        static_assert(N < RING || !HAS_ASYNC_COPIES);
        if constexpr (HAS_ASYNC_COPIES) wait_for_copies<(RING > N ? RING - N : 0)>();
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i >= count) continue;
            if constexpr (HAS_ASYNC_COPIES) {
                held[i] = slots[slot * STEP];
                copy_next(slot);
                slot = slot + 1 == RING ? 0 : slot + 1;
            } else {
                held[i] = load_once(source + static_cast<long long>(ahead) * STEP);
                ahead = ahead + 1 == steps ? 0 : ahead + 1;
            }
        }
    }

    // Copies that are still under way must not outlive the block.
    __device__ __forceinline__ void stop() { wait_for_copies<0>(); }
};

// One stage's product: y = W x for the outputs that this block owns, its tiles spread over the warps. `begin` may be
// called before x is there.
template <typename T, int INPUTS, int ROWS, int WARPS, int RING, int MOST_UNITS>
class Product {
    using Sums = TileSums<T, ROWS>;
    static constexpr int TILES = ceil_div(INPUTS, Sums::INPUTS);

   public:
    static constexpr int STEPS = ceil_div(TILES, WARPS);  // to a unit of TILE_OUTPUTS outputs
    static constexpr int PADDED = STEPS * WARPS * Sums::INPUTS;

   private:
    static constexpr int MOST = MOST_UNITS * STEPS, HELD = MOST < 8 ? MOST : 8;
    Bits held[HELD];
    int steps;

    // Sums go to partial[(unit * TILE_OUTPUTS + output) * ROWS + row][warp].
    __device__ __forceinline__ static void leave(Sums& sums, int unit, float* partial) {
        float result[Sums::RESULTS];
        sums.finish(result);
        Sums::results([&](int i, int output, int row) {
            partial[((unit * TILE_OUTPUTS + output) * ROWS + row) * WARPS + threadIdx.x / WARP] = result[i];
        });
        sums = {};
    }

   public:
    __device__ __forceinline__ void begin(Tape<WARPS, RING>& tape, int units) {
        steps = units * STEPS;
        tape.take(held, steps);
    }

    __device__ __forceinline__ void finish(Tape<WARPS, RING>& tape, const T* x, int pitch, float* partial) {
        x += threadIdx.x / WARP * Sums::INPUTS;
        Sums sums;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (i >= steps) break;
            sums.add(held[i], x + i % STEPS * (WARPS * Sums::INPUTS), pitch);
            if (i % STEPS == STEPS - 1) leave(sums, i / STEPS, partial);
        }
        if constexpr (MOST > HELD) {
            for (int first = HELD; first < steps; first += HELD) {
                tape.take(held, steps - first);
#pragma unroll
                for (int i = 0; i < HELD; ++i) {
                    if (first + i >= steps) break;
                    const int within = (first + i) % STEPS;
                    sums.add(held[i], x + within * (WARPS * Sums::INPUTS), pitch);
                    if (within == STEPS - 1) leave(sums, (first + i) / STEPS, partial);
                }
            }
        }
        __syncthreads();
    }

    // The finished sums, PER neighbouring outputs of a row to a thread: f(first output within the block, row, values).
    template <int PER, typename F>
    static __device__ __forceinline__ void each(int units, const float* partial, F f) {
        for (int i = threadIdx.x; i < units * (TILE_OUTPUTS / PER) * ROWS; i += WARPS * WARP) {
            const int output = i / ROWS * PER, row = i % ROWS;
            float value[PER];
#pragma unroll
            for (int j = 0; j < PER; ++j) {
                const float* from = partial + ((output + j) * ROWS + row) * WARPS;
                float sum = from[0];
#pragma unroll
                for (int warp = 1; warp < WARPS; ++warp) sum += from[warp];
                value[j] = sum;
            }
            f(output, row, value);
        }
    }
};

}  // namespace warpline
