// Product of many rows with LayerNorm before and activation and residual after it:
// y = act(standardised(x) weight^T + bias) + residual.
//
// The idea: a block owns M rows and N outputs. One producer warp copies tiles, those of x by a tensor map, into a ring of STAGES;
// warp groups multiply 64 rows each (wgmma), or half of the outputs each if M is 64, and release a stage when they have read it.
// Weights are in tiles, and their copies start before the preceding launch ends.
// LayerNorm costs no launch: its weight and bias are folded into the product's, and the sums are corrected by mean and deviation
// of the rows, which the op that wrote x left.
// Many inputs or few outputs: the SPLITS blocks of a cluster share the inputs (split-K). Each warp sends its sums, in register
// layout, to the block that finishes its rows.
// Order of sums: inputs are summed in SEGMENTS, which are added in order, by a cluster or by one block, so a row's bits depend
// only on CHAINS and SEGMENTS, not on the tiles. CHAINS are independent sums of alternate parts of the inputs; two help where
// products are short.
// Memory traffic: x once for every N outputs and weight once for every M rows, from L2; y once, in whole vectors.
// Tried and lost: a ring that all threads fill (cp.async), 17 µs for GPT-2's FC of 1,024 rows; sums finished in shared memory in
// float, 14 µs, of which 5 after the last product; blocks that begin with different tiles, 676 instead of 634 µs for a prompt of
// 1,023 tokens, because L2 merges simultaneous requests.
#pragma once
#include "cluster.cuh"
#include "ops/gelu.cuh"
#include "statistics.cuh"
#include "tensor_map.cuh"
#include "warpgroup.cuh"

namespace warpline {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// `statistics` of x and `weight_sums` of every output are null without LayerNorm. `residual` may be null, and so may
// `left_statistics`, which the op that standardises y needs.
template <typename T, int OUTPUTS, int INPUTS, bool GELU, int M, int N, int SPLITS, int STAGES, int CHAINS, int SEGMENTS, typename B>
__device__ __forceinline__ void group_matmul(const TensorMap& x, const float* statistics, const T* weight,
                                             const float* weight_sums, const B* bias, const T* residual, T* y,
                                             float* left_statistics, int rows, float epsilon) {
    constexpr int PART = INPUTS / SPLITS, TILES = PART / GROUP_ROW, ACROSS = ceil_div(OUTPUTS, N);
    constexpr int X_TILE = M * GROUP_ROW, STAGE = (M + N) * GROUP_ROW, ROW_BYTES = 2 * GROUP_ROW;
    // A warp multiplies 16 rows with NS times eight outputs. The producer warp comes after these.
    constexpr int HALVES = M == 64 && N >= 32 ? 2 : 1, NS = N / 8 / HALVES, COPIER = M / 16 * HALVES, WORKERS = COPIER * WARP;
    constexpr int FINISHERS = M / 16 / SPLITS;  // warps of each half whose rows this block finishes
    constexpr int OWN = SEGMENTS / SPLITS;      // segments of the inputs that this block sums in turn
    static_assert(TILES * GROUP_ROW * SPLITS == INPUTS && OUTPUTS % SLICE == 0 && N % SLICE == 0);
    static_assert((SEGMENTS == SPLITS || SPLITS == 1) && TILES % OWN == 0);
    static_assert(STAGES <= TILES && (STAGES > 1 || TILES == 1));  // a stage is released when the next one is read
    // The stages, which the finished output later reuses; behind them the sums that the cluster's other blocks send.
    constexpr int PITCH = NS * 8 + 8, FINISHED = COPIER * 16 * PITCH, RING = STAGES * STAGE;
    T* stages = group_memory<T>();
    float4* received = reinterpret_cast<float4*>(stages + (RING > FINISHED ? RING : FINISHED));  // [other][half][NS][thread]
    using Standards = RowStandards<INPUTS, M, WORKERS>;
    __shared__ typename Standards::Shared standards;
    __shared__ __align__(16) float2 lines[N];  // level (with the bias) and slope of every column, the factor of the rows' means
    __shared__ unsigned long long filled[STAGES], read[STAGES];

    const int block = static_cast<int>(blockIdx.x) / SPLITS, part = static_cast<int>(blockIdx.x) % SPLITS;
    const int first_row = block / ACROSS * M, first_output = block % ACROSS * N, first_input = part * PART;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % WARP;
    const int warp = __shfl_sync(0xffffffffu, thread / WARP, 0);
    if constexpr (SPLITS > 1) arrive_at_cluster();
    if (thread == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(filled + stage, 1);
            barrier_init(read + stage, COPIER);
        }
        barriers_are_ready();
    }
    __syncthreads();

    // The register layout of the sums: of each eight columns a thread has two neighbours of two rows eight apart.
    const int row_warp = warp % (M / 16), half = warp / (M / 16), pair = lane % 4 * 2;
    const int half_output = first_output + half * NS * 8;
    const auto row_of = [&](int upper) { return row_warp * 16 + upper * 8 + lane / 4; };
    using Pack = Vec<T, 8>;
    constexpr int STEPS = ceil_div(16 * NS, WARP);
    const auto each_vector = [&](auto f) {  // of this warp's rows and outputs
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int i = step * WARP + lane, row = i / NS, column = i % NS * 8, at_row = first_row + row_warp * 16 + row;
            if ((16 * NS % WARP == 0 || i < 16 * NS) && at_row < rows && half_output + column < OUTPUTS) {
                f(step, row, column, static_cast<long long>(at_row) * OUTPUTS + half_output + column);
            }
        }
    };
    const bool finishes = warp < COPIER && row_warp / FINISHERS == part;
    Pack more[STEPS];
    float sums[CHAINS][NS][4] = {}, total[OWN > 1 ? NS : 1][4] = {};
    float(&sum)[NS][4] = sums[0];
    const auto join_chains = [&] {
        wait_for_products<0>();
        for (int i = 0; i < CHAINS; ++i) settle(sums[i]);
#pragma unroll
        for (int i = NS * 4; i < CHAINS * NS * 4; ++i) sum[i / 4 % NS][i % 4] += sums[i / 4 / NS][i / 4 % NS][i % 4];
    };
    const auto add_segment = [&] {
#pragma unroll
        for (int i = 0; i < NS * 4; ++i) total[OWN > 1 ? i / 4 : 0][i % 4] += sum[i / 4][i % 4];
    };
    if (warp == COPIER) {
        if (lane == 0) {
            // A tile has at most `rows` rows. What the stage holds beyond them is multiplied, but not used.
            const int x_rows = rows < M ? rows : M;
            const int outputs = OUTPUTS % N == 0 || first_output + N <= OUTPUTS ? N : OUTPUTS - first_output;
            const T* tiles = weight + (static_cast<long long>(first_input / GROUP_ROW) * OUTPUTS + first_output) * GROUP_ROW;
            const auto fetch_weights = [&](int t) {
                barrier_expect(filled + t % STAGES, (x_rows + outputs) * ROW_BYTES);
                T* target = stages + t % STAGES * STAGE + X_TILE;
                copy_block(target, tiles + t * OUTPUTS * GROUP_ROW, outputs * ROW_BYTES, filled + t % STAGES);
            };
            const auto fetch_x = [&](int t) {
                copy_tile(stages + t % STAGES * STAGE, x, first_input + t * GROUP_ROW, first_row, filled + t % STAGES);
            };
            fetch_description(x);
            // Few blocks begin long before x is there. Many begin late, and their loads of x should not queue behind all weights.
            const int early = rows <= M ? STAGES : ceil_div(STAGES, 2);
            for (int t = 0; t < early; ++t) fetch_weights(t);
            await_previous_launch();
            for (int t = 0; t < STAGES; ++t) {
                if (t >= early) fetch_weights(t);
                fetch_x(t);
            }
            for (int t = STAGES; t < TILES; ++t) {
                while (!barrier_passed(read + t % STAGES, (t / STAGES - 1) % 2)) {}
                fetch_weights(t);
                fetch_x(t);
            }
        }
        __syncwarp();
    } else {
        float level[ceil_div(N, WORKERS)] = {}, slope[ceil_div(N, WORKERS)] = {};  // of the columns that this thread loads
        const auto each_column = [&](auto f) {
#pragma unroll
            for (int i = 0; i < ceil_div(N, WORKERS); ++i) {
                const int column = i * WORKERS + thread;
                if (column < N && first_output + column < OUTPUTS) f(i, column);
            }
        };
        each_column([&](int i, int column) {
            level[i] = to_float(bias[first_output + column]);
            if (weight_sums != nullptr) slope[i] = weight_sums[first_output + column];
        });
        await_previous_launch();
        if (residual != nullptr && finishes) {
            each_vector([&](int step, int, int, long long at) { more[step] = *reinterpret_cast<const Pack*>(residual + at); });
        }
        Standards of_rows;
        if (statistics != nullptr) of_rows.load(statistics, rows, first_row);
        const int x_at = row_warp / 4 * 64 * GROUP_ROW, weight_at = X_TILE + half * NS * 8 * GROUP_ROW;
        for (int i = 0; i < CHAINS; ++i) settle(sums[i]);
#pragma unroll 1
        for (int t = 0; t < TILES; ++t) {
            if (OWN > 1 && t > 0 && t % (TILES / OWN) == 0) {
                join_chains();
                add_segment();
#pragma unroll
                for (int i = 0; i < CHAINS * NS * 4; ++i) sums[i / 4 / NS][i / 4 % NS][i % 4] = 0.f;
                for (int i = 0; i < CHAINS; ++i) settle(sums[i]);
            }
            const T* stage = stages + t % STAGES * STAGE;
            while (!barrier_passed(filled + t % STAGES, t / STAGES % 2)) {}
            const unsigned long long a = describe_tile(stage + x_at), b = describe_tile(stage + weight_at);
            begin_products();
#pragma unroll
            for (int k = 0; k < GROUP_ROW / 16; ++k) multiply_tiles<T>(sums[k % CHAINS], a + k * 2, b + k * 2, true);
            commit_products();
            if constexpr (TILES > STAGES) {
                wait_for_products<1>();
                if (t > 0 && lane == 0) barrier_arrive(read + (t - 1) % STAGES);
            }
        }
        join_chains();
        if constexpr (OWN > 1) {
            add_segment();
#pragma unroll
            for (int i = 0; i < NS * 4; ++i) sum[i / 4][i % 4] = total[i / 4][i % 4];
        }
        if (statistics != nullptr) of_rows.store(standards);
        each_column([&](int i, int column) { lines[column] = make_float2(level[i], slope[i]); });
    }

    if constexpr (SPLITS > 1) {
        await_cluster();  // all blocks of the cluster have begun
        const int finisher = row_warp % FINISHERS * WARP + lane;
        if (warp < COPIER && !finishes) {
            const int rank = row_warp / FINISHERS, from = part - (part > rank);
            const float4* own = received + (from * HALVES + half) * NS * FINISHERS * WARP + finisher;
            const unsigned there = address_in_cluster(own, rank);
#pragma unroll
            for (int n = 0; n < NS; ++n) store_in_cluster(there + n * FINISHERS * WARP * 16, sum[n]);
        }
        sync_cluster();
        if (finishes) {  // in the order of the parts, in every block
#pragma unroll
            for (int n = 0; n < NS; ++n) {
                const float4 own = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
#pragma unroll
                for (int i = 0; i < SPLITS; ++i) {
                    const int from = min(i - (i > part), SPLITS - 2);
                    const float4 other = i == part ? own : received[((from * HALVES + half) * NS + n) * FINISHERS * WARP + finisher];
                    if (i == 0) {
                        sum[n][0] = other.x, sum[n][1] = other.y, sum[n][2] = other.z, sum[n][3] = other.w;
                    } else {
                        sum[n][0] += other.x, sum[n][1] += other.y, sum[n][2] += other.z, sum[n][3] += other.w;
                    }
                }
            }
        }
    } else {
        __syncthreads();  // the standards are stored, and the stages have been read
    }
    if (!finishes) return;

    // Each warp stages its 16 rows where the ring was. All values are computed before the first store, because the compiler does
    // not move later loads before stores.
    T* staged = stages + warp * 16 * PITCH;
    const auto place_of = [&](int n, int upper) {
        return reinterpret_cast<Vec<T, 2>*>(staged + (upper * 8 + lane / 4) * PITCH + n * 8 + pair);
    };
    if (residual != nullptr) {
        each_vector([&](int step, int row, int column, long long) {
            *reinterpret_cast<Pack*>(staged + row * PITCH + column) = more[step];
        });
        __syncwarp();
    }
    float scale[2] = {1.f, 1.f}, shift[2] = {};
    if (weight_sums != nullptr) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            const float2 standard = Standards::of(standards, row_of(upper), epsilon);
            scale[upper] = standard.y, shift[upper] = -standard.x * standard.y;
        }
    }
#pragma unroll
    for (int n = 0; n < NS; ++n) {
        const float4 line = *reinterpret_cast<const float4*>(lines + half * NS * 8 + n * 8 + pair);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float level = i % 2 == 0 ? line.x : line.z, slope = i % 2 == 0 ? line.y : line.w;
            const float value = sum[n][i] * scale[i / 2] + (slope * shift[i / 2] + level);
            sum[n][i] = GELU ? gelu_of<false>(value) : value;
        }
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            if (residual == nullptr) continue;
            const Vec<T, 2> other = *place_of(n, upper);
            sum[n][upper * 2] += to_float(other.at[0]), sum[n][upper * 2 + 1] += to_float(other.at[1]);
        }
    }
#pragma unroll
    for (int i = 0; i < NS * 2; ++i) {
        float(&values)[4] = sum[i / 2];
        const int at = i % 2 * 2;
        const Vec<T, 2> rounded = {from_float<T>(values[at]), from_float<T>(values[at + 1])};
        *place_of(i / 2, i % 2) = rounded;
        values[at] = to_float(rounded.at[0]), values[at + 1] = to_float(rounded.at[1]);
    }
    __syncwarp();
    each_vector([&](int, int row, int column, long long at) {
        *reinterpret_cast<Pack*>(y + at) = *reinterpret_cast<const Pack*>(staged + row * PITCH + column);
    });
    if (left_statistics == nullptr) return;
    if constexpr (NS % 2 == 0) {  // always true where statistics are wanted: a slice is two times eight columns
#pragma unroll
        for (int i = 0; i < NS; ++i) {
            const int upper = i % 2, n = i / 2 * 2, row = first_row + row_of(upper), output = half_output + n * 8;
            const float(&a)[4] = sum[n], (&b)[4] = sum[n + 1];
            const float2 found = slice_statistics(a[upper * 2], a[upper * 2 + 1], b[upper * 2], b[upper * 2 + 1]);
            if (lane % 4 == 0 && row < rows && output < OUTPUTS) {
                reinterpret_cast<float2*>(left_statistics)[static_cast<long long>(output / SLICE) * rows + row] = found;
            }
        }
    }
}
#endif

}  // namespace warpline
