// The weights as a tape that every block reads from its own beginning to its own end, once per token, and around again.
//
// A tape is made of steps, a step of one tile per warp, a tile of 16 bytes per lane. RING steps are on their way or
// waiting in shared memory at any time, across all the places where the blocks wait for each other. With bulk copies
// (sm_90) one thread of an extra warp does nothing but copy, at its own pace. With cp.async (sm_80) each lane copies its
// own 16 bytes and is the only one to read them back, so it waits for nobody. Without (Turing) a lane loads its bytes into
// registers when it takes them, which is before it waits for what they are multiplied with.
// Tried and lost: every lane's own copies on sm_90 too, which keep addresses in registers that the stages need; a warp whose
// lanes each copy into a slot, which takes longer for one; pauses between the copies, which memory spends waiting; having L2
// fetch steps before they are copied, which gained gpt2-xl less than copying sooner; having L2 keep a part of the LM head from
// one token to the next.
#pragma once
#include "common.cuh"
#include "persistent/exchange.cuh"
#include "ptx.cuh"

namespace warpline {

using Bits = Vec<unsigned, 4>;

// Bytes on their way to a block at most. On an H200, 32 kB cost gpt2-xl 4 % and gpt2 2 %, and no limit costs gpt2 in float32 8 %.
constexpr int IN_FLIGHT = 48 << 10;

// As barrier_passed, but an answer at once.
__device__ __forceinline__ bool has_passed(unsigned long long* barrier, unsigned parity) {
    unsigned passed = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#endif
    return passed != 0;
}

// What was in these registers is not kept: they may hold anything.
template <int N>
__device__ __forceinline__ void forget(Bits (&held)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) asm("" : "=r"(held[i].at[j]));
    }
}

// Outputs of a tile, whatever the type.
constexpr int TILE_OUTPUTS = 8;

// The largest of what every fourth lane has.
__device__ __forceinline__ unsigned long long most_of_fours(unsigned long long value) {
#pragma unroll
    for (int other = WARP / 2; other >= 4; other /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, other));
    return value;
}

// Sums of products of tiles and up to eight rows. Lane 4g + t has of output g (of the tile) the inputs from t * WIDTH on.
// `results` names the sums that a lane ends with: f(which, output, row).
//
// On tensor cores the tile is a and the rows are b. a has sixteen rows and a tile eight outputs, so a lane's sixteen bytes
// fill two of them: pairs of inputs 0 and 1 in its own row, 2 and 3 eight rows below, for which the tape has them in the
// order 0, 2, 1, 3. b has eight columns, two for each of four rows: what pairs 0 and 1 are multiplied with, and what pairs
// 2 and 3 are. Of the products a lane looks at the two that mean something, and nothing is moved between registers.
template <typename T, int ROWS>
struct TileSums {
    static constexpr int INPUTS = 32, WIDTH = 8, RESULTS = ceil_div(ROWS, 4);
    struct Rows {
        Vec<unsigned, 2> of[RESULTS];
    };
    float sum[RESULTS][4] = {};

    // Where a lane finds its part of the rows, x: rows in shared memory. Lanes without a row of their own read another's,
    // and nobody reads what they make of it.
    static __device__ __forceinline__ const T* lane_of(int thread, const T* x, int pitch) {
        const int lane = thread % WARP, column = lane / 4, row = column / 2;
        return x + (ROWS > 1 && row < ROWS ? row : 0) * pitch + lane % 4 * WIDTH + column % 2 * (WIDTH / 2);
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
    // The largest of the warp's results, for each row: f(row, largest), by one lane.
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

template <int ROWS>
struct TileSums<float, ROWS> {
    static constexpr int INPUTS = 16, WIDTH = 4, RESULTS = ROWS;
    struct Rows {
        Vec<float, 4> of[ROWS];
    };
    float sum[ROWS] = {};

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

// Where copies arrive, in shared memory.
template <int WARPS, int RING>
struct TapeRing {
    Bits slot[RING][WARPS * WARP];
    unsigned long long full[RING], empty[RING];
};

template <int WARPS, int RING>
class Tape {
    static constexpr int STEP = WARPS * WARP;  // in Bits
    using Ring = TapeRing<WARPS, RING>;
    const Bits* source;  // this lane's part of step 0
    Ring& ring;
    int steps, ahead = 0, slot = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void copy_next(int into) {
        copy_async(&ring.slot[into][thread_index()], source + static_cast<long long>(ahead) * STEP, true);
        end_copy_group();
        ahead = ahead + 1 == steps ? 0 : ahead + 1;
    }

   public:
    // All threads of the block; a barrier of all must follow.
    static __device__ __forceinline__ void prepare(Ring& ring) {
        if constexpr (HAS_BULK_COPIES) {
            if (thread_index() == 0) {
                for (int i = 0; i < RING; ++i) {
                    barrier_init(ring.full + i, 1);
                    barrier_init(ring.empty + i, WARPS);
                }
                barriers_are_ready();
            }
        }
    }

    // What the thread does that copies for the block: all steps `times` over. It ends early when the block has.
    // It has 300 cycles for a step of gpt2-xl, or memory waits for it (at 320 a token took 960 us instead of 891): so it finds out
    // about the next slot while it fills this one, and where `all` lies is hidden, because the compiler would work it out each time.
    // But what is on its way to a multiprocessor delays what blocks say to each other: no more than IN_FLIGHT bytes may be.
    static __device__ __forceinline__ void feed(const Bits* block, int steps, int times, Ring& all, Watch& watch) {
        constexpr int MOST = static_cast<int>(IN_FLIGHT / (STEP * sizeof(Bits)));
        constexpr int WINDOW = MOST < RING ? (MOST > 1 ? MOST : 1) : RING;  // steps
        Ring* ring = &all;
        asm volatile("" : "+l"(ring));
        const Bits* from = block;
        int step = 0, into = 0, before = RING - WINDOW;  // the next step, its slot, and that of the step WINDOW before it
        unsigned free = 1, landed = 1;                   // the first round finds every slot empty
        bool ready = true;
        for (int left = steps * times; left > 0; --left) {
            bool ended = false;
            while (!ready && !ended) {
                ended = watch.look();
                ready = barrier_passed(ring->empty + into, free) && barrier_passed(ring->full + before, landed);
            }
            if (ended) break;
            const Bits* source = from;
            const int slot = into;
            from += STEP;
            if (++step == steps) {
                step = 0;
                from = block;
            }
            if (++into == RING) {
                into = 0;
                free ^= 1;
            }
            if (++before == RING) {
                before = 0;
                landed ^= 1;
            }
            ready = has_passed(ring->empty + into, free) & has_passed(ring->full + before, landed);
            copy_bulk(ring->slot[slot], source, STEP * sizeof(Bits), ring->full + slot);
        }
        for (int i = 0; i < RING && times > 0; ++i) {  // copies under way must not outlive the block
            while (!barrier_passed(ring->full + i, i < into ? free ^ 1 : free)) continue;
        }
    }

    __device__ __forceinline__ Tape(const Bits* block, int steps, Ring& ring)
        : source(block + thread_index()), ring(ring), steps(steps) {
        if constexpr (HAS_ASYNC_COPIES && !HAS_BULK_COPIES) {
            for (int i = 0; i < RING; ++i) copy_next(i);
        }
    }

    // The next `count` steps into registers, at most N; the rest may be anything. Their places are filled again.
    template <int N>
    __device__ __forceinline__ void take(Bits (&held)[N], int count) {
        static_assert(N < RING || !HAS_ASYNC_COPIES);
        forget(held);
        count = min(count, N);
        const int thread = thread_index(), lane = thread % WARP;
        // Each lane waits for, and later gives back, the slot of one step.
        const int later = slot + lane < RING ? slot + lane : slot + lane - RING;
        if constexpr (HAS_BULK_COPIES) {
            const unsigned its_parity = slot + lane < RING ? parity : parity ^ 1;
            if (lane < count) {
                while (!barrier_passed(ring.full + later, its_parity)) continue;
            }
            __syncwarp();
        } else if constexpr (HAS_ASYNC_COPIES) {
            wait_for_copies<(RING > N ? RING - N : 0)>();
        }
        if (HAS_ASYNC_COPIES && slot + N <= RING) {
            const Bits* from = &ring.slot[slot][thread];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (i < count) held[i] = from[i * STEP];
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (i >= count) continue;
                if constexpr (HAS_ASYNC_COPIES) {
                    held[i] = ring.slot[slot + i < RING ? slot + i : slot + i - RING][thread];
                } else {
                    held[i] = load_once(source + static_cast<long long>(ahead + i < steps ? ahead + i : ahead + i - steps) * STEP);
                }
            }
        }
        if constexpr (HAS_BULK_COPIES) {
            __syncwarp();
            if (lane < count) barrier_arrive(ring.empty + later);
        } else if constexpr (HAS_ASYNC_COPIES) {
            for (int i = 0; i < count; ++i) copy_next(slot + i < RING ? slot + i : slot + i - RING);
        } else {
            ahead = ahead + count < steps ? ahead + count : ahead + count - steps;
        }
        if (slot + count >= RING) parity ^= 1;
        slot = slot + count < RING ? slot + count : slot + count - RING;
    }

    // Copies that are still under way must not outlive the block.
    __device__ __forceinline__ void stop() { wait_for_copies<0>(); }
};

// COUNT neighbours in shared memory, added in a fixed order; the first is aligned to as many as fit into 16 bytes.
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

// Steps that are taken from the tape at once.
constexpr int MOST_TAKEN = 8;

// One stage's product: y = W x for the outputs that this block owns. Of x every warp has SLAB neighbouring columns, which it
// alone multiplies; the warps' sums meet in `partial`. `begin` may be called before x is there.
template <typename T, int INPUTS, int ROWS, int WARPS, int MOST_UNITS>
class Product {
    using Sums = TileSums<T, ROWS>;
    static constexpr int TILES = ceil_div(INPUTS, Sums::INPUTS);
    static constexpr int STEPS = ceil_div(TILES, WARPS);  // to a unit of TILE_OUTPUTS outputs
    // A stage comes in rounds: some units, or one of an even number of parts of a unit. Where there are few rows, which leave
    // registers free, there are two sets of these, so that one round is on its way while another is multiplied, or all of a stage
    // is there before its rows are. Where it is more than that, rounds of five are better than of ten (gpt2-xl: 957 µs, not 1,039).
    static constexpr int ALL = STEPS * MOST_UNITS, SETS = ALL > MOST_TAKEN && ROWS * sizeof(T) <= 4 ? 2 : 1;
    static constexpr int MOST = SETS == 2 && ALL > 2 * MOST_TAKEN ? 5 : MOST_TAKEN;
    static constexpr int PARTS = STEPS > MOST ? 2 * ceil_div(STEPS, 2 * MOST) : 1, PART = ceil_div(STEPS, PARTS);
    static constexpr int UNITS = PARTS > 1 ? 1 : MOST / PART < MOST_UNITS ? MOST / PART : MOST_UNITS;
    static constexpr int ROUNDS = ceil_div(MOST_UNITS, UNITS) * PARTS, TOGETHER = PARTS > 1 ? PARTS : SETS;
    Bits held[SETS][UNITS * PART];
    int units;

   public:
    static constexpr int SLAB = STEPS * Sums::INPUTS;

   private:
    // Sums go to partial[(unit * TILE_OUTPUTS + output) * ROWS + row][warp].
    static __device__ __forceinline__ void leave(Sums& sums, int unit, float* partial, int thread) {
        float result[Sums::RESULTS];
        sums.finish(result);
        Sums::results(thread, [&](int i, int output, int row) {
            partial[((unit * TILE_OUTPUTS + output) * ROWS + row) * WARPS + thread / WARP] = result[i];
        });
    }

    // Steps of round `i` behind those of whole units that are done, if there are units left.
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

    // `also` is done before the warps meet.
    template <typename Tape, typename Also>
    __device__ __forceinline__ void finish(Tape& tape, const T* x, int pitch, float* partial, Also also) {
        const int thread = thread_index();
        x = Sums::lane_of(thread, x, pitch) + thread / WARP * SLAB;
        constexpr int STRIDE = Sums::INPUTS;
        constexpr bool KEEPS = PARTS == 1 && sizeof(typename Sums::Rows) * STEPS <= 64;  // what several units are multiplied with
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
                for (int j = 0; j < UNITS * PART; ++j) {  // units that there are not come out as anything
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

    // The finished sums, PER neighbouring outputs of a row to a thread: f(first output within the block, row, values).
    template <int PER, typename F>
    static __device__ __forceinline__ void each(int units, const float* partial, F f) {
        for (int i = thread_index(); i < units * (TILE_OUTPUTS / PER * ROWS); i += WARPS * WARP) {
            const int output = i / ROWS * PER, row = i % ROWS;
            float value[PER];
#pragma unroll
            for (int j = 0; j < PER; ++j) {
                value[j] = sum_of<WARPS>(partial + ((output + j) * ROWS + row) * WARPS);
            }
            f(output, row, value);
        }
    }
};

}  // namespace warpline
