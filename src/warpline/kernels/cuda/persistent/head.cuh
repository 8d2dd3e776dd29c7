// The LM head of the persistent decode kernel: all logits, or only those that can be the largest (screen.cuh).
//
// The idea: for all logits the matrix comes by the tape. For the largest, int8 codes come by the tape, in units of CODE_OUTPUTS
// outputs per warp; outputs that their bounds do not exclude within the block are computed from the matrix, a few rows for most
// tokens. Both ways add the tiles in the same order, so a logit has the same bits.
// Units: warps take whole ones in turn. Where few are left for the last turn, several warps share one: any number with codes,
// whose sums are integers; two with the matrix, of which the second continues the sums of the first.
// Memory traffic: the codes once (half of the matrix in half precision), and a row or a few of the matrix per block.
// Tried and lost: no exchange of bounds between warps (some warps then compute four rows in turn); holding back the tape while
// rows are fetched (they arrive 0.3 us sooner, the next layer 2 us later).
#pragma once
#include "persistent/layers.cuh"
#include "screen.cuh"

namespace warpline {

template <typename M>
class Head : protected Layers<M> {
   protected:
    using Memory = Layout<M>;
    using Layer = Layers<M>;
    using Memory::ROWS, Memory::WARPS, Memory::THREADS, Memory::WIDTH, Memory::PITCH, Memory::SCORES, Memory::BYTES_PITCH;
    using typename Memory::TileOf, typename Memory::Row, typename Memory::T;
    using Layer::a, Layer::shared, Layer::tape, Layer::column_of, Layer::EACH;
    using Layer::Layer;
    static constexpr int RESULTS = ceil_div(ROWS, 4);  // of a lane, for each of its two outputs of a unit of codes

    // The block's outputs: the first one, and their number.
    __device__ __forceinline__ int first_output() const { return shared.plan.first[HEAD] * CODE_OUTPUTS; }
    __device__ __forceinline__ int outputs() const { return min(shared.plan.units[HEAD] * CODE_OUTPUTS, M::VOCAB - first_output()); }

    // The best candidate of a row over the warps of this block.
    __device__ __forceinline__ unsigned long long best_of(int row) const {
        unsigned long long best = shared.best[row][0];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) best = max(best, shared.best[row][warp]);
        return best;
    }

    // One warp computes the logits of `count` <= TILE_OUTPUTS outputs of the block; which(i) is the i-th. Calls
    // f(output, row, logit, index of the lane's result).
    template <typename Which, typename F>
    __device__ __forceinline__ void compute(int count, Which which, F f) {
        constexpr int TILES = ceil_div(WIDTH, TileOf::INPUTS), MOST = sizeof(T) == 2 ? 12 : ROWS > 2 ? 4 : 6, ELEMENTS = 16 / sizeof(T);
        constexpr int SETS = 2 * ceil_div(TILES, 2 * MOST), AT_ONCE = ceil_div(TILES, SETS);
        const int lane = thread_index() % WARP, output = first_output() + which(min(lane / 4, count - 1));
        const Bits* weights = reinterpret_cast<const Bits*>(a.head + static_cast<long long>(output) * WIDTH) + lane % 4;
        const T* x = TileOf::lane_of(thread_index(), shared.h, PITCH);
        Bits held[2][AT_ONCE];
        const auto load = [&](Bits(&into)[AT_ONCE], int tile) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const bool inside = WIDTH % TileOf::INPUTS == 0 ? tile + i < TILES : ((tile + i) * 4 + lane % 4) * ELEMENTS < WIDTH;
                into[i] = inside ? TileOf::from_row(load_streaming(weights + (tile + i) * 4)) : Bits{};
            }
        };
        TileOf sums;
        const auto add = [&](const Bits(&from)[AT_ONCE], int tile) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (TILES % AT_ONCE == 0 || tile + i < TILES) sums.add(from[i], TileOf::load(x + (tile + i) * TileOf::INPUTS, PITCH));
            }
        };
        load(held[0], 0);
#pragma unroll 1
        for (int tile = 0; tile < TILES; tile += 2 * AT_ONCE) {
            load(held[1], tile + AT_ONCE);
            add(held[0], tile);
            if (tile + 2 * AT_ONCE < TILES) load(held[0], tile + 2 * AT_ONCE);
            add(held[1], tile + AT_ONCE);
        }
        float result[TileOf::RESULTS];
        sums.finish(result);
        TileOf::results(thread_index(), [&](int i, int relative, int row) {
            if (relative < count) f(output, row, result[i], i);
        });
    }

    // Computes all logits from the tape: f(output, row, logit).
    template <typename F>
    __device__ __forceinline__ void all_logits(F f) {
        constexpr int TILES = ceil_div(WIDTH, TileOf::INPUTS), AT_ONCE = TILES < MOST_TAKEN ? TILES : MOST_TAKEN;
        const int warp = thread_index() / WARP, units = shared.plan.units[HEAD] * (CODE_OUTPUTS / TILE_OUTPUTS);
        const int whole = M::HEAD_PARTS > 1 ? units / WARPS * WARPS : units;
        const T* x = TileOf::lane_of(thread_index(), shared.h, PITCH);
        const auto report = [&](int unit, TileOf& sums) {
            float result[TileOf::RESULTS];
            sums.finish(result);
            TileOf::results(thread_index(), [&](int i, int relative, int row) {
                const int own = unit * TILE_OUTPUTS + relative;
                if (unit < units && own < outputs()) f(first_output() + own, row, result[i]);
            });
        };
        for (int unit = warp; unit - warp < whole; unit += WARPS) {
            TileOf sums;
            for (int tile = 0; tile < TILES; tile += AT_ONCE) {
                Bits held[AT_ONCE];
                tape.take(held, TILES - tile);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    if (TILES % AT_ONCE == 0 || tile + i < TILES) sums.add(held[i], TileOf::load(x + (tile + i) * TileOf::INPUTS, PITCH));
                }
            }
            report(unit, sums);
        }
        if constexpr (M::HEAD_PARTS > 1) {
            if (whole == units) return;
            constexpr int HALF = TILES / 2, SETS = ceil_div(HALF, MOST_TAKEN), EACH_SET = ceil_div(HALF, SETS);
            static_assert(M::HEAD_PARTS == 2 && HALF * 2 == TILES);
            Bits held[SETS][EACH_SET];
#pragma unroll
            for (int set = 0; set < SETS; ++set) tape.take(held[set], HALF - set * EACH_SET);
            TileOf sums;
            float* left = handover_of<float>(warp | 1);
            const auto add = [&] {
#pragma unroll
                for (int i = 0; i < HALF; ++i) sums.add(held[i / EACH_SET][i % EACH_SET], TileOf::load(x + (warp % 2 * HALF + i) * TileOf::INPUTS, PITCH));
            };
            if (warp % 2 == 0) {
                add();
                sums.each([&](int i, float& sum) { left[i * WARP] = sum; });
            }
            sync_threads<THREADS>();
            if (warp % 2 == 1) {
                sums.each([&](int i, float& sum) { sum = left[i * WARP]; });
                add();
                report(whole + warp / 2, sums);
            }
        }
    }

    // Buffer in which a warp stores a value per lane for another warp of the same unit.
    template <typename Number>
    __device__ __forceinline__ Number* handover_of(int warp) const {
        void* all = Memory::BORROWS ? static_cast<void*>(&shared.attention) : static_cast<void*>(shared.handover);
        return static_cast<Number*>(all) + warp * (Memory::HANDOVER_EACH * WARP) + thread_index() % WARP;
    }

    // Quantises the rows of shared.h into shared.bytes and shared.screened, each warp its own columns.
    // Contract: a barrier of all threads must follow before `screen`.
    __device__ __forceinline__ void quantise_rows() {
        const int lane = thread_index() % WARP, warp = thread_index() / WARP;
        float squares[ROWS] = {};
        Vec<T, 2> v[ROWS * EACH];
#pragma unroll
        for (int i = 0; i < ROWS * EACH; ++i) {
            const int column = column_of(i % EACH);
            if (column < 0) continue;
            v[i] = *reinterpret_cast<const Vec<T, 2>*>(shared.h + i / EACH * PITCH + column);
            squares[i / EACH] += to_float(v[i].at[0]) * to_float(v[i].at[0]) + to_float(v[i].at[1]) * to_float(v[i].at[1]);
        }
        const float sum = scatter_sums(squares);
        constexpr int SHARE = WARP / ROWS;
        if (lane % SHARE == 0) shared.squares[lane / SHARE][warp] = sum;
        sync_threads<THREADS>();
        const ScreenedRow screened = screened_row<WIDTH>(sum_of<WARPS>(shared.squares[lane % ROWS]));
        if (warp == 0 && lane < ROWS) shared.screened[lane] = screened;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const float quantum = __shfl_sync(0xffffffffu, screened.quantum, row), per_one = quantum > 0.f ? rcp_approx(quantum) : 0.f;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int column = column_of(i);
                if (column < 0) continue;
                const Vec<T, 2> pair = v[row * EACH + i];
                const TwoBytes first = in_bytes(to_float(pair.at[0]), per_one), second = in_bytes(to_float(pair.at[1]), per_one);
                signed char* bytes = shared.bytes + 2 * row * BYTES_PITCH + column;
                *reinterpret_cast<Vec<signed char, 2>*>(bytes) = {first.upper, second.upper};
                *reinterpret_cast<Vec<signed char, 2>*>(bytes + BYTES_PITCH) = {first.lower, second.lower};
            }
        }
    }

    // Bounds of every output's logit in all rows: f(output, row, interval, row / 4). A lane sees the same outputs for every row.
    template <typename F>
    __device__ __forceinline__ void screen(F f) {
        constexpr int STEPS = Memory::CODE_STEPS, CODE_TILES = STEPS - 1;  // the last step has the bounds of the outputs
        const int lane = thread_index() % WARP, warp = thread_index() / WARP, column = lane / 4, units = shared.plan.units[HEAD];
        const int whole = M::CODE_PARTS > 1 ? units / WARPS * WARPS : units;
        const signed char* bytes[RESULTS];
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) {
            const int row = 4 * i + column / 2;
            bytes[i] = shared.bytes + (2 * (row < ROWS ? row : 0) + column % 2) * BYTES_PITCH + lane % 4 * (CODE_INPUTS / 4);
        }
        struct Sums {
            int of[RESULTS][2][4] = {};  // two of each, for shorter dependency chains; integer sums do not depend on the order
        };
        const auto add = [&](Sums& sums, int which, int tile, const Bits& codes) {
#pragma unroll
            for (int j = 0; j < RESULTS; ++j) {
                const auto b = *reinterpret_cast<const Vec<unsigned, 2>*>(bytes[j] + tile * CODE_INPUTS);
                multiply_add_codes(sums.of[j][which], codes.at, b.at[0], b.at[1]);
            }
        };
        // sum(j, i) is the i-th sum of results j.
        const auto report = [&](int unit, const Bits& known, auto sum) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int output = first_output() + unit * CODE_OUTPUTS + half * 8 + lane / 4;
                // Error and norm are stored as the upper halves of floats.
                const CodeBounds code = {__uint_as_float(known.at[half]), __uint_as_float(known.at[2 + half] << 16),
                                         __uint_as_float(known.at[2 + half] & 0xffff0000u)};
#pragma unroll
                for (int j = 0; j < RESULTS; ++j) {
                    const int row = 4 * j + lane % 4;
                    if (row >= ROWS || output >= M::VOCAB) continue;
                    f(output, row, logit_between(shared.screened[row], code, sum(j, 2 * half), sum(j, 2 * half + 1)), j);
                }
            }
        };
        constexpr int AT_ONCE = ceil_div(STEPS, ceil_div(STEPS, MOST_TAKEN));
#pragma unroll 1
        for (int unit = warp; unit - warp < whole; unit += WARPS) {
            Sums sums;
            Bits known = {};
#pragma unroll
            for (int step = 0; step < STEPS; step += AT_ONCE) {
                Bits held[AT_ONCE];
                tape.take(held, STEPS - step);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    if (step + i == CODE_TILES) known = held[i];
                    if (step + i < CODE_TILES) add(sums, i % 2, step + i, held[i]);
                }
            }
            if (unit < whole) report(unit, known, [&](int j, int i) { return sums.of[j][0][i] + sums.of[j][1][i]; });
        }
        if constexpr (M::CODE_PARTS == 1) return;
        if (whole < units) {
            constexpr int PARTS = M::CODE_PARTS, MINE = ceil_div(CODE_TILES, PARTS), OWN_STEPS = MINE + 1;
            constexpr int TAKEN = ceil_div(OWN_STEPS, ceil_div(OWN_STEPS, MOST_TAKEN));
            const int unit = whole + warp / PARTS, part = warp % PARTS;
            Sums sums;
            Bits known = {};
#pragma unroll
            for (int step = 0; step < OWN_STEPS; step += TAKEN) {
                Bits held[TAKEN];
                tape.take(held, OWN_STEPS - step);
#pragma unroll
                for (int i = 0; i < TAKEN; ++i) {
                    if (step + i == MINE) known = held[i];
                    if (step + i < MINE) add(sums, i % 2, min(part * MINE + step + i, CODE_TILES - 1), held[i]);  // beyond the last: zeros
                }
            }
            int* own = handover_of<int>(warp);
#pragma unroll
            for (int j = 0; j < RESULTS; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) own[(4 * j + i) * WARP] = sums.of[j][0][i] + sums.of[j][1][i];
            }
            sync_threads<THREADS>();
            if (part == 0 && unit < units) {
                report(unit, known, [&](int j, int i) {
                    int sum = 0;
#pragma unroll
                    for (int other = 0; other < PARTS; ++other) sum += own[(other * 4 * RESULTS + 4 * j + i) * WARP];
                    return sum;
                });
            }
        }
    }

    // For each row, stores the largest of score(row, output, logit) over the block's outputs in shared.best.
    // Requires: score is 0 for an excluded output and does not fall when the logit rises.
    template <typename Score>
    __device__ __forceinline__ void best_scores(Score score) {
        const int thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
        unsigned long long least[RESULTS] = {};  // lower bound of the best score
        screen([&](int output, int row, const Interval& logit, int i) {
            least[i] = max(least[i], score(row, output, logit.low));
            shared.upper_bound[row * SCORES + output - first_output()] = score(row, output, logit.high) >> 32;
        });
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) {
            const int row = 4 * i + lane % 4;
            least[i] = most_of_fours(least[i]);
            if (lane < 4 && row < ROWS) shared.best[row][warp] = least[i];
        }
        sync_threads<THREADS>();
        const unsigned long long lane_least = best_of(lane % ROWS);
        unsigned long long its[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) its[row] = __shfl_sync(0xffffffffu, lane_least, row);
        for (int own = thread; own < outputs(); own += THREADS) {
            bool possible = false;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const unsigned most = shared.upper_bound[row * SCORES + own];
                possible |= most > 0 && with_output(most, first_output() + own) >= its[row];
            }
            if (possible) shared.possible[atomicAdd(&shared.found, 1)] = own;
        }
        sync_threads<THREADS>();
        const int found = shared.found;
        unsigned long long mine[TileOf::RESULTS] = {};
        for (int first = warp * TILE_OUTPUTS; first < found; first += WARPS * TILE_OUTPUTS) {
            compute(min(TILE_OUTPUTS, found - first), [&](int i) { return shared.possible[first + i]; },
                    [&](int output, int row, float logit, int i) { mine[i] = max(mine[i], score(row, output, logit)); });
        }
        TileOf::most(mine, [&](int row, unsigned long long best) { shared.best[row][warp] = best; });
    }
};

}  // namespace warpline
