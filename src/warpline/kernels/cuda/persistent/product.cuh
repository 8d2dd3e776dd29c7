// A stage's product: weights from the tape times a few rows in shared memory. Also the product of one tile.
#pragma once
#include "codes.cuh"
#include "common.cuh"
#include "persistent/tape.cuh"
#include "ptx.cuh"

namespace warpline {

// Outputs of a tile, for every type.
constexpr int TILE_OUTPUTS = 8;

// Maximum over the lanes with the same lane % 4.
__device__ __forceinline__ unsigned long long most_of_fours(unsigned long long value) {
#pragma unroll
    for (int other = WARP / 2; other >= 4; other /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, other));
    return value;
}

// Sums of products of tiles and up to eight rows. Lane 4g + t holds inputs t * WIDTH and following of the tile's output g.
// `results` enumerates the sums that a lane ends with: f(which, output, row).
//
// On tensor cores the tile is operand a (16 rows) and the rows are operand b (8 columns). A tile has eight outputs, so a lane's
// 16 bytes fill two rows of a: pairs 0 and 1 in its own row, 2 and 3 eight rows below. The tape stores the pairs in the order
// 0, 2, 1, 3 for that. b has two columns for each of four rows: the factors of pairs 0 and 1, and those of pairs 2 and 3. A lane
// uses the two sums that are meaningful; no data moves between registers. CODED: weights are int8 codes, and sums are in units of
// each output's scale.
template <typename T, int ROWS, bool CODED = false>
struct TileSums {
    static constexpr int INPUTS = 32, WIDTH = 8, RESULTS = ceil_div(ROWS, 4), SUMS = 4 * RESULTS;
    struct Rows {
        Vec<unsigned, 2> of[RESULTS];
    };
    float sum[RESULTS][4] = {};

    // Calls f(which, sum) for all sums of a lane.
    template <typename F>
    __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) f(i, sum[i / 4][i % 4]);
    }

    // Reorders 16 bytes of neighbouring inputs as the tape has them.
    static __device__ __forceinline__ Bits from_row(const Bits& inputs) { return {inputs.at[0], inputs.at[2], inputs.at[1], inputs.at[3]}; }

    // Address of a lane's part of the rows x in shared memory. Lanes without a row of their own read another lane's row, and
    // their results are not used.
    template <int INPUTS_OF_LANE = WIDTH>
    static __device__ __forceinline__ const T* lane_of(int thread, const T* x, int pitch) {
        const int lane = thread % WARP, column = lane / 4, row = column / 2;
        return x + (ROWS > 1 && row < ROWS ? row : 0) * pitch + lane % 4 * INPUTS_OF_LANE + column % 2 * (INPUTS_OF_LANE / 2);
    }
    static __device__ __forceinline__ Rows load(const T* x, int pitch) {
        Rows rows;
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) rows.of[i] = *reinterpret_cast<const Vec<unsigned, 2>*>(x + 4 * i * pitch);
        return rows;
    }
    __device__ __forceinline__ void add(const Bits& tile, const Rows& rows) {
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) multiply_add<T>(sum[i], tile.at, rows.of[i].at[0], rows.of[i].at[1]);
    }
    __device__ __forceinline__ void finish(float (&result)[RESULTS]) {
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) result[i] = sum[i][0] + sum[i][3];
    }
    template <typename F>
    static __device__ __forceinline__ void results(int thread, F f) {
        const int row = thread % 4;
        if (row >= ROWS) return;
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) f(i, thread % WARP / 4, row + 4 * i);
    }
    // Maximum of the warp's results per row: f(row, largest), called by one lane per row.
    template <typename F>
    static __device__ __forceinline__ void most(const unsigned long long (&result)[RESULTS], F f) {
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) {
            const unsigned long long largest = most_of_fours(result[i]);
            const int row = thread_index() % WARP + 4 * i;
            if (row < 4 * i + 4 && row < ROWS) f(row, largest);
        }
    }
};

// A lane's 16 codes: eight inputs for its own row of a, the next eight for the row below. Pairs 0, 4, 1, 5 are one mma, pairs
// 2, 6, 3, 7 another.
template <typename T, int ROWS>
struct TileSums<T, ROWS, true> : TileSums<T, ROWS> {
    using TileSums<T, ROWS>::RESULTS, TileSums<T, ROWS>::sum;
    static constexpr int INPUTS = 64, WIDTH = 16;
    struct Rows {
        Bits of[RESULTS];
    };

    static __device__ __forceinline__ const T* lane_of(int thread, const T* x, int pitch) {
        return TileSums<T, ROWS>::template lane_of<WIDTH>(thread, x, pitch);
    }
    static __device__ __forceinline__ Rows load(const T* x, int pitch) {
        Rows rows;
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) rows.of[i] = *reinterpret_cast<const Bits*>(x + 4 * i * pitch);
        return rows;
    }
    __device__ __forceinline__ void add(const Bits& tile, const Rows& rows) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned a[4];
            pairs_of_codes<T>(tile.at[2 * half], a[0], a[1]);
            pairs_of_codes<T>(tile.at[2 * half + 1], a[2], a[3]);
#pragma unroll
            for (int i = 0; i < RESULTS; ++i) multiply_add<T>(sum[i], a, rows.of[i].at[2 * half], rows.of[i].at[2 * half + 1]);
        }
    }
};

template <int ROWS>
struct TileSums<float, ROWS> {
    static constexpr int INPUTS = 16, WIDTH = 4, RESULTS = ROWS, SUMS = ROWS;
    struct Rows {
        Vec<float, 4> of[ROWS];
    };
    float sum[ROWS] = {};

    template <typename F>
    __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) f(i, sum[i]);
    }
    static __device__ __forceinline__ const Bits& from_row(const Bits& inputs) { return inputs; }
    static __device__ __forceinline__ const float* lane_of(int thread, const float* x, int) { return x + thread % 4 * WIDTH; }
    static __device__ __forceinline__ Rows load(const float* x, int pitch) {
        Rows rows;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) rows.of[row] = *reinterpret_cast<const Vec<float, 4>*>(x + row * pitch);
        return rows;
    }
    __device__ __forceinline__ void add(const Bits& tile, const Rows& rows) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[row] = fmaf(__uint_as_float(tile.at[i]), rows.of[row].at[i], sum[row]);
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
    static __device__ __forceinline__ void results(int thread, F f) {
        if (thread % 4 != 0) return;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) f(row, thread % WARP / 4, row);
    }
    template <typename F>
    static __device__ __forceinline__ void most(const unsigned long long (&result)[RESULTS], F f) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const unsigned long long largest = most_of_fours(result[row]);
            if (thread_index() % WARP == 0) f(row, largest);
        }
    }
};

// Sum of COUNT neighbours in shared memory, in a fixed order. Requires: the first is aligned to its vector width.
template <int COUNT>
__device__ __forceinline__ float sum_of(const float* from) {
    constexpr int WIDTH = vector_width<float>(COUNT);
    auto sum = *reinterpret_cast<const Vec<float, WIDTH>*>(from);
#pragma unroll
    for (int i = WIDTH; i < COUNT; i += WIDTH) {
        const auto pack = *reinterpret_cast<const Vec<float, WIDTH>*>(from + i);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) sum.at[j] += pack.at[j];
    }
#pragma unroll
    for (int width = WIDTH / 2; width > 0; width /= 2) {
#pragma unroll
        for (int j = 0; j < width; ++j) sum.at[j] += sum.at[j + width];
    }
    return sum.at[0];
}

// Columns of x per warp: neighbours, in whole tiles.
template <typename T, int INPUTS, int WARPS, bool CODED>
constexpr int SLAB_OF = ceil_div(ceil_div(INPUTS, TileSums<T, 1, CODED>::INPUTS), WARPS) * TileSums<T, 1, CODED>::INPUTS;

// The product of one stage, y = W x, for the outputs that this block owns. Every warp multiplies its own columns of x; the
// warps' sums are added in `partial`. `begin` may be called before x is available.
template <typename T, int INPUTS, int ROWS, int WARPS, int MOST_UNITS, int RING, bool CODED>
class Product {
    using Sums = TileSums<T, ROWS, CODED>;
    static constexpr int SLAB = SLAB_OF<T, INPUTS, WARPS, CODED>, STEPS = SLAB / Sums::INPUTS;  // steps of a unit of TILE_OUTPUTS
    // A stage is computed in rounds of several units, or of one of an even number of parts of a unit. Few rows leave registers
    // free, so there are two sets of them: the next round is loaded while one is multiplied, or the whole stage is loaded before
    // its rows arrive. Where a stage needs more than two sets, both take at most half of the ring, so that the rest stays in
    // flight.
    static constexpr int ALL = STEPS * MOST_UNITS, SETS = ALL > MOST_TAKEN && ROWS * sizeof(T) <= 4 ? 2 : 1;
    static constexpr int MOST = SETS == 2 && ALL > 2 * MOST_TAKEN && HAS_ASYNC_COPIES && RING / 4 < MOST_TAKEN ? RING / 4 : MOST_TAKEN;
    static constexpr int PARTS = STEPS > MOST ? 2 * ceil_div(STEPS, 2 * MOST) : 1, PART = ceil_div(STEPS, PARTS);
    static constexpr int UNITS = PARTS > 1 ? 1 : MOST / PART < MOST_UNITS ? MOST / PART : MOST_UNITS;
    static constexpr int ROUNDS = ceil_div(MOST_UNITS, UNITS) * PARTS, TOGETHER = PARTS > 1 ? PARTS : SETS;
    Bits held[SETS][UNITS * PART];
    int units;

    // Stores a lane's sums in partial[(unit * TILE_OUTPUTS + output) * ROWS + row][warp].
    static __device__ __forceinline__ void leave(Sums& sums, int unit, float* partial, int thread) {
        float result[Sums::RESULTS];
        sums.finish(result);
        Sums::results(thread, [&](int i, int output, int row) {
            partial[((unit * TILE_OUTPUTS + output) * ROWS + row) * WARPS + thread / WARP] = result[i];
        });
    }

    // Takes the steps of round `i` after `done` units, if there are units left.
    template <typename Tape>
    __device__ __forceinline__ void take(Tape& tape, int done, int i) {
        const int unit = done + i / PARTS * UNITS;
        forget(held[i % SETS]);
        if (ROUNDS == 1 || unit < units) tape.take(held[i % SETS], PARTS > 1 ? max(0, min(PART, STEPS - i % PARTS * PART)) : (units - unit) * STEPS);
    }

   public:
    template <typename Tape>
    __device__ __forceinline__ void begin(Tape& tape, int count) {
        units = count;
#pragma unroll
        for (int i = 0; i < SETS; ++i) take(tape, 0, i);
    }

    // Multiplies and stores the sums; `also` runs before the barrier at the end.
    template <typename Tape, typename Also>
    __device__ __forceinline__ void finish(Tape& tape, const T* x, int pitch, float* partial, Also also) {
        const int thread = thread_index();
        x = Sums::lane_of(thread, x, pitch) + thread / WARP * SLAB;
        constexpr int STRIDE = Sums::INPUTS;
        constexpr bool KEEPS = PARTS == 1 && sizeof(typename Sums::Rows) * STEPS <= 64;  // rows in registers for several units
        typename Sums::Rows kept[KEEPS ? STEPS : 1];
        if constexpr (KEEPS) {
#pragma unroll
            for (int i = 0; i < STEPS; ++i) kept[i] = Sums::load(x + i * STRIDE, pitch);
        }
        Sums sums;
        constexpr bool LOOPS = ROUNDS > TOGETHER;
#pragma unroll 1
        for (int done = 0; done < (LOOPS ? units : 1); done += TOGETHER / PARTS * UNITS) {
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int first = done + i / PARTS * UNITS, part = i % PARTS;
#pragma unroll
                for (int j = 0; j < UNITS * PART; ++j) {  // units beyond the last give undefined sums, which are not used
                    const int step = part * PART + j % PART;
                    if (step >= STEPS) continue;
                    sums.add(held[i % SETS][j], KEEPS ? kept[KEEPS ? step : 0] : Sums::load(x + step * STRIDE, pitch));
                    if (step < STEPS - 1) continue;
                    if (first + j / PART < (LOOPS ? units : MOST_UNITS)) leave(sums, first + j / PART, partial, thread);
                    sums = {};
                }
                if constexpr (ROUNDS > SETS) take(tape, done, i + SETS);
            }
        }
        also();
        sync_threads<WARPS * WARP>();
    }
    template <typename Tape>
    __device__ __forceinline__ void finish(Tape& tape, const T* x, int pitch, float* partial) {
        finish(tape, x, pitch, partial, [] {});
    }

    // The finished sums, PER neighbouring outputs of a row per thread: f(first output within the block, row, values).
    template <int PER, typename F>
    static __device__ __forceinline__ void each(int units, const float* partial, F f) {
        for (int i = thread_index(); i < units * (TILE_OUTPUTS / PER * ROWS); i += WARPS * WARP) {
            const int output = i / ROWS * PER, row = i % ROWS;
            float value[PER];
            sums_of(partial, output, row, value);
            f(output, row, value);
        }
    }
    template <int PER>
    static __device__ __forceinline__ void sums_of(const float* partial, int output, int row, float (&value)[PER]) {
#pragma unroll
        for (int j = 0; j < PER; ++j) value[j] = sum_of<WARPS>(partial + ((output + j) * ROWS + row) * WARPS);
    }
};

}  // namespace warpline
