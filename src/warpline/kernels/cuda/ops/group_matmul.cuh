// Product of some rows with what comes before and after it: y = act(standardised(x) weight^T + bias) + residual.
//
// The idea: with a hundred rows a product is neither a read of the weights nor work for the tensor cores: it is waiting.
// So nothing is waited for twice. A block owns 64 rows and N outputs, and all it needs is on its way at once: weights set
// out before the launch ahead has ended, x as soon as it has, and four warps multiply 64 rows at a time (wgmma) as x's tiles
// arrive. A LayerNorm costs no launch: its weight and bias are part of the product's already, the product is taken of x as
// it is, and the sums are corrected for mean and variance of its rows in the end. Who wrote x has left these, slice by slice.
// Where there are many inputs or few outputs, the SPLITS blocks of a cluster share them: each sends its sums to the one that
// finishes those rows, once all have begun, and they meet when all have sent. Sums are added in a fixed order.
// Traffic: x once for every N outputs, from L2; weight once for every 64 rows; y once.
#pragma once
#include "cluster.cuh"
#include "ops/gelu.cuh"
#include "statistics.cuh"
#include "tile.cuh"
#include "warpgroup.cuh"

namespace warpline {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// f(Number<0>) to f(Number<COUNT - 1>).
template <int N>
struct Number {
    static constexpr int value = N;
};
template <int COUNT, int FIRST = 0, typename F>
__device__ __forceinline__ void count_to(F f) {
    if constexpr (FIRST < COUNT) {
        f(Number<FIRST>());
        count_to<COUNT, FIRST + 1>(f);
    }
}

// `statistics` of x and `weight_sums`, of every output's weights, are null where there is no LayerNorm; `residual` and, for
// whoever standardises y, `left_statistics` where nobody needs them.
template <typename T, int OUTPUTS, int INPUTS, bool GELU, int N, int SPLITS, typename B>
__device__ __forceinline__ void group_matmul(const T* x, const float* statistics, const T* weight, const float* weight_sums,
                                             const B* bias, const T* residual, T* y, float* left_statistics, int rows,
                                             float epsilon) {
    constexpr int M = 64, THREADS = 256, PART = INPUTS / SPLITS, TILES = PART / GROUP_ROW, ACROSS = ceil_div(OUTPUTS, N);
    constexpr int X_TILE = M * GROUP_ROW, W_TILE = N * GROUP_ROW, PHASES = TILES < 4 ? TILES : 4;
    static_assert(TILES * GROUP_ROW * SPLITS == INPUTS && OUTPUTS % SLICE == 0 && N % SLICE == 0);
    T* x_tiles = group_memory<T>();
    T* w_tiles = x_tiles + TILES * X_TILE;
    // From each block of the cluster the sums of the rows that this one finishes.
    constexpr int OWN_ROWS = M / SPLITS, SUM_PITCH = N + 8;
    float* sums = reinterpret_cast<float*>(w_tiles + TILES * W_TILE);
    using Standards = RowStandards<INPUTS>;
    __shared__ typename Standards::Shared standards;

    const int block = static_cast<int>(blockIdx.x) / SPLITS, part = static_cast<int>(blockIdx.x) % SPLITS;
    const int first_row = block / ACROSS * M, first_output = block % ACROSS * N, first_input = part * PART;
    if constexpr (SPLITS > 1) arrive_at_cluster();
    GroupTileMover<T, N, THREADS> move_w(weight + static_cast<long long>(first_output) * INPUTS + first_input, INPUTS);
    GroupTileMover<T, M, THREADS> move_x(x + static_cast<long long>(first_row) * INPUTS + first_input, INPUTS);
#pragma unroll
    for (int t = 0; t < TILES; ++t) move_w.fetch(w_tiles + t * W_TILE, t * GROUP_ROW, OUTPUTS - first_output, GROUP_ROW);

    // The vectors of y that this thread finishes.
    constexpr int VECTORS = OWN_ROWS * N / 8, STEPS = ceil_div(VECTORS, THREADS);
    const auto each_vector = [&](auto f) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int i = step * THREADS + static_cast<int>(threadIdx.x), row = i / (N / 8), column = i % (N / 8) * 8;
            const int at_row = first_row + part * OWN_ROWS + row, output = first_output + column;
            if ((VECTORS % THREADS == 0 || i < VECTORS) && at_row < rows && output < OUTPUTS) {
                f(step, row, column, at_row, output);
            }
        }
    };
    using Pack = Vec<T, 8>;
    Eight biases[STEPS] = {}, corrections[STEPS] = {};
    each_vector([&](int step, int, int, int, int output) {
        biases[step] = load_eight(bias + output);
        if (weight_sums != nullptr) corrections[step] = load_eight(weight_sums + output);
    });
    await_previous_launch();
    Standards of_rows;
    if (statistics != nullptr) of_rows.load(statistics, rows, first_row);
#pragma unroll
    for (int phase = 0; phase < PHASES; ++phase) {
#pragma unroll
        for (int t = TILES * phase / PHASES; t < TILES * (phase + 1) / PHASES; ++t) {
            move_x.fetch(x_tiles + t * X_TILE, t * GROUP_ROW, rows - first_row, GROUP_ROW);
        }
        end_copy_group();
    }
    Pack more[STEPS] = {};
    if (residual != nullptr) {
        each_vector([&](int step, int, int, int at_row, int output) {
            more[step] = *reinterpret_cast<const Pack*>(residual + static_cast<long long>(at_row) * OUTPUTS + output);
        });
    }

    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / WARP, 0), lane = static_cast<int>(threadIdx.x) % WARP;
    float sum[N / 8][4] = {};
    count_to<PHASES>([&](auto phase) {
        constexpr int PHASE = decltype(phase)::value, FIRST = TILES * PHASE / PHASES, LAST = TILES * (PHASE + 1) / PHASES;
        wait_for_copies<PHASES - 1 - PHASE>();
        show_copies();
        __syncthreads();
        if (warp < 4) {
            settle(sum);
            begin_products();
#pragma unroll
            for (int t = FIRST; t < LAST; ++t) {
                const unsigned long long a = describe_tile(x_tiles + t * X_TILE), b = describe_tile(w_tiles + t * W_TILE);
#pragma unroll
                for (int k = 0; k < GROUP_ROW / 16; ++k) multiply_tiles<T>(sum, a + k * 2, b + k * 2, true);
            }
            end_products();
            settle(sum);
        }
    });

    if (statistics != nullptr) of_rows.store(standards);
    if constexpr (SPLITS > 1) await_cluster();  // everybody has begun
    if (warp < 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp * 16 + half * 8 + lane / 4;
            float* target = sums + (part * OWN_ROWS + row % OWN_ROWS) * SUM_PITCH + lane % 4 * 2;
            const unsigned there = SPLITS > 1 ? address_in_cluster(target, row / OWN_ROWS) : shared_address(target);
#pragma unroll
            for (int n = 0; n < N / 8; ++n) store_in_cluster(there + n * 32, sum[n][half * 2], sum[n][half * 2 + 1]);
        }
    }
    if constexpr (SPLITS > 1) {
        sync_cluster();
    } else {
        __syncthreads();
    }
    each_vector([&](int step, int row, int column, int at_row, int output) {
        Eight v = load_eight(sums + row * SUM_PITCH + column);
#pragma unroll
        for (int other = 1; other < SPLITS; ++other) {
            const Eight w = load_eight(sums + (other * OWN_ROWS + row) * SUM_PITCH + column);
#pragma unroll
            for (int j = 0; j < 8; ++j) v.at[j] += w.at[j];
        }
        if (weight_sums != nullptr) {
            const float2 of_row = Standards::of(standards, row, epsilon);
#pragma unroll
            for (int j = 0; j < 8; ++j) v.at[j] = (v.at[j] - of_row.x * corrections[step].at[j]) * of_row.y;
        }
        Pack pack;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float biased = v.at[j] + biases[step].at[j];
            pack.at[j] = from_float<T>((GELU ? gelu_of<false>(biased) : biased) + to_float(more[step].at[j]));
        }
        *reinterpret_cast<Pack*>(y + static_cast<long long>(at_row) * OUTPUTS + output) = pack;
        if (left_statistics != nullptr) leave_statistics(pack, left_statistics, rows, at_row, output);
    });
}
#endif

}  // namespace warpline
