// Matrix product with epilogue: y = act(x weight^T + bias) + residual, x [rows, INPUTS], weight [OUTPUTS, INPUTS].
//
// The idea: a block owns a tile of y. Tiles of x and weight stream through a ring of STAGES in shared memory while the warps
// multiply: half precision on tensor cores (ldmatrix and mma), float without, both accumulating in float. Fragments are loaded
// one slice ahead of the products, across the barrier too. The first weights are in flight before the preceding launch ends.
// Few rows: tiles are small, and WARPS_K warps share one, each with some slices of the inputs; with many inputs as well, the
// SPLITS blocks of a cluster share it (split-K). Sums are added in a fixed order.
// Epilogue: bias and GELU in registers; the tile then goes through shared memory, so that stores are whole vectors, and the
// residual is added there.
// Memory traffic: x once per column of tiles and weight once per row of tiles, mostly from L2; y once.
#pragma once
#include "ops/gelu.cuh"
#include "tile.cuh"

namespace warpline {

// An M x N tile on tensor cores: each warp owns M / WARPS_M x N / WARPS_N. The inputs are processed in slices: `load` loads the
// fragments of one slice, `multiply` uses them.
template <typename T, int M, int N, int K, int WARPS_M, int WARPS_N>
struct ProductTile {
    static constexpr int SLICE = 16, MS = M / WARPS_M / 16, NS = N / WARPS_N / 8, LANE = PITCH<T, K>;
    static_assert(MS * WARPS_M * 16 == M && NS * WARPS_N * 8 == N && NS % 2 == 0 && K % SLICE == 0);
    struct Fragments {
        unsigned a[MS][4], b[NS / 2][4];
    };
    float sum[MS][NS][4] = {};
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % (WARPS_M * WARPS_N);
    const int row0 = warp / WARPS_N * (MS * 16), column0 = warp % WARPS_N * (NS * 8);

    // Loads fragments from a [M, K] and b [N, K].
    __device__ __forceinline__ void load(Fragments& f, const T* a, const T* b, int k) const {
        const T* rows = a + (row0 + lane % 16) * LANE + lane / 16 * 8 + k;
        const T* columns = b + (column0 + lane / 16 * 8 + lane % 8) * LANE + lane / 8 % 2 * 8 + k;
#pragma unroll
        for (int m = 0; m < MS; ++m) load_matrices(f.a[m], rows + m * 16 * LANE);
#pragma unroll
        for (int n = 0; n < NS / 2; ++n) load_matrices(f.b[n], columns + n * 16 * LANE);
    }

    __device__ __forceinline__ void multiply(const Fragments& f) {
#pragma unroll
        for (int m = 0; m < MS; ++m) {
#pragma unroll
            for (int n = 0; n < NS; ++n) multiply_add<T>(sum[m][n], f.a[m], f.b[n / 2][n % 2 * 2], f.b[n / 2][n % 2 * 2 + 1]);
        }
    }

    // Calls f(i, sum) for the COUNT sums of this thread.
    static constexpr int COUNT = MS * NS * 4;
    template <typename F>
    __device__ __forceinline__ void each_sum(F f) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) f(i, sum[i / 4 / NS][i / 4 % NS][i % 4]);
    }

    // Stores f(sum, p) of every sum in `out`, rows `pitch` apart, with p = prepare(column).
    template <typename P, typename F>
    __device__ __forceinline__ void store(T* out, int pitch, P prepare, F f) const {
#pragma unroll
        for (int n = 0; n < NS; ++n) {
            const int column = column0 + n * 8 + lane % 4 * 2;
            const float p[2] = {prepare(column), prepare(column + 1)};
#pragma unroll
            for (int i = 0; i < MS * 2; ++i) {
                const float* pair = sum[i / 2][n] + i % 2 * 2;
                *reinterpret_cast<unsigned*>(out + (row0 + i * 8 + lane / 4) * pitch + column) =
                    pack_pair<T>(f(pair[0], p[0]), f(pair[1], p[1]));
            }
        }
    }
};

// The same without tensor cores: a team of 256 threads as 16 x 16, each with every sixteenth row and column.
template <int M, int N, int K, int WARPS_M, int WARPS_N>
struct ProductTile<float, M, N, K, WARPS_M, WARPS_N> {
    static constexpr int SLICE = 4, MS = M / 16, NS = N / 16, LANE = PITCH<float, K>;
    static_assert(WARPS_M * WARPS_N == 8 && M % 16 == 0 && N % 16 == 0);
    using Four = Vec<float, 4>;
    struct Fragments {
        Four a[MS], b[NS];
    };
    float sum[MS][NS] = {};
    const int row0 = threadIdx.x % 256 / 16, column0 = threadIdx.x % 16;

    __device__ __forceinline__ void load(Fragments& f, const float* a, const float* b, int k) const {
#pragma unroll
        for (int m = 0; m < MS; ++m) f.a[m] = *reinterpret_cast<const Four*>(a + (row0 + m * 16) * LANE + k);
#pragma unroll
        for (int n = 0; n < NS; ++n) f.b[n] = *reinterpret_cast<const Four*>(b + (column0 + n * 16) * LANE + k);
    }

    __device__ __forceinline__ void multiply(const Fragments& f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int m = 0; m < MS; ++m) {
#pragma unroll
                for (int n = 0; n < NS; ++n) sum[m][n] = fmaf(f.a[m].at[i], f.b[n].at[i], sum[m][n]);
            }
        }
    }

    static constexpr int COUNT = MS * NS;
    template <typename F>
    __device__ __forceinline__ void each_sum(F f) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) f(i, sum[i / NS][i % NS]);
    }

    template <typename P, typename F>
    __device__ __forceinline__ void store(float* out, int pitch, P prepare, F f) const {
#pragma unroll
        for (int n = 0; n < NS; ++n) {
            const float p = prepare(column0 + n * 16);
#pragma unroll
            for (int m = 0; m < MS; ++m) out[(row0 + m * 16) * pitch + column0 + n * 16] = f(sum[m][n], p);
        }
    }
};

// `bias` and `residual` may be null.
template <typename T, int OUTPUTS, int INPUTS, bool GELU, int M, int N, int K, int WARPS_M, int WARPS_N, int WARPS_K, int SPLITS, int STAGES>
__device__ __forceinline__ void matmul(const T* x, const T* weight, const T* bias, const T* residual, T* y, int rows) {
    constexpr int TEAM = WARPS_M * WARPS_N * WARP, THREADS = TEAM * WARPS_K, WIDTH = vector_width<T>(INPUTS);
    constexpr int ALL_STEPS = ceil_div(INPUTS, K), STEPS = ceil_div(ALL_STEPS, SPLITS), ACROSS = ceil_div(OUTPUTS, N), STAGE = (M + N) * PITCH<T, K>;
    using MoverX = TileMover<T, M, K, WIDTH, THREADS>;
    using MoverW = TileMover<T, N, K, WIDTH, THREADS>;
    constexpr int AHEAD = MoverX::ASYNC ? STAGES - 1 : 1;  // tiles in flight

    T* ring = dynamic_shared<T>();
    const int block = static_cast<int>(blockIdx.x) / SPLITS, part = static_cast<int>(blockIdx.x) % SPLITS;
    const int first_row = block / ACROSS * M, first_output = block % ACROSS * N, first_input = part * (STEPS * K);
    MoverX move_x(x + static_cast<long long>(first_row) * INPUTS, INPUTS);
    MoverW move_w(weight + static_cast<long long>(first_output) * INPUTS, INPUTS);
    const auto fetch_x = [&](int step) {
        const int k = first_input + step * K;
        move_x.fetch(ring + step % STAGES * STAGE, k, rows - first_row, INPUTS - k);
    };
    const auto fetch_w = [&](int step) {
        const int k = first_input + step * K;
        move_w.fetch(ring + step % STAGES * STAGE + M * PITCH<T, K>, k, OUTPUTS - first_output, INPUTS - k);
    };
    const auto deposit = [&](int step) {
        T* stage = ring + step % STAGES * STAGE;
        move_x.deposit(stage);
        move_w.deposit(stage + M * PITCH<T, K>);
    };

    if constexpr (MoverX::ASYNC) {
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) {
            if (step < STEPS) fetch_w(step);
        }
    }
    await_previous_launch();
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) {
        if (step < STEPS) {
            if constexpr (!MoverX::ASYNC) fetch_w(step);
            fetch_x(step);
            deposit(step);
        }
        end_copy_group();
    }
    using Tile = ProductTile<T, M, N, K, WARPS_M, WARPS_N>;
    constexpr int SLICES = K / Tile::SLICE / WARPS_K;  // per step and warp group that shares a tile
    const int first_slice = static_cast<int>(threadIdx.x) / TEAM * SLICES;
    Tile tile;
    typename Tile::Fragments fragments[2];  // of the current slice and of the next
    wait_for_copies<AHEAD - 1>();
    __syncthreads();
    tile.load(fragments[0], ring, ring + M * PITCH<T, K>, first_slice * Tile::SLICE);
    static_assert(SLICES % 2 == 0);
    for (int step = 0; step < STEPS; ++step) {
        const T* stage = ring + step % STAGES * STAGE;
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            if (slice == 0) {
                // All threads have passed a barrier since this stage was last read.
                if (step + AHEAD < STEPS) {
                    fetch_x(step + AHEAD);
                    fetch_w(step + AHEAD);
                }
                end_copy_group();
            }
            if (slice == SLICES - 1) {
                if (step + AHEAD < STEPS) deposit(step + AHEAD);
                wait_for_copies<AHEAD - 1>();
                __syncthreads();  // the next step's tiles are there, and this step's have been read
                stage = ring + (step + 1) % STAGES * STAGE;
            }
            tile.load(fragments[(slice + 1) % 2], stage, stage + M * PITCH<T, K>, (first_slice + (slice + 1) % SLICES) * Tile::SLICE);
            tile.multiply(fragments[slice % 2]);
        }
    }

    __syncthreads();
    if constexpr (WARPS_K > 1) {
        float* sums = dynamic_shared<float>() + threadIdx.x;
        tile.each_sum([&](int i, float& sum) { sums[i * THREADS] = sum; });
        __syncthreads();
        if (threadIdx.x < TEAM) {
            tile.each_sum([&](int i, float& sum) {
#pragma unroll
                for (int other = 1; other < WARPS_K; ++other) sum += sums[i * THREADS + other * TEAM];
            });
        }
        __syncthreads();
    }
    if constexpr (SPLITS > 1) {
        float* sums = dynamic_shared<float>() + threadIdx.x;
        if (threadIdx.x < TEAM) tile.each_sum([&](int i, float& sum) { sums[i * TEAM] = sum; });
        sync_cluster();
        if (part == 0 && threadIdx.x < TEAM) {
#pragma unroll
            for (int other = 1; other < SPLITS; ++other) {
                tile.each_sum([&](int i, float& sum) { sum += load_from_cluster(sums + i * TEAM, other); });
            }
        }
        sync_cluster();  // shared memory must live until then
        if (part > 0) return;
    }
    const auto bias_of = [&](int column) {
        const int output = first_output + column;
        return bias != nullptr && output < OUTPUTS ? to_float(bias[output]) : 0.f;
    };
    if (WARPS_K == 1 || threadIdx.x < TEAM) {
        tile.store(ring, PITCH<T, N>, bias_of, [](float v, float b) { return GELU ? gelu_of<false>(v + b) : v + b; });
    }
    __syncthreads();
    constexpr int OUT_WIDTH = vector_width<T>(OUTPUTS);
    using Pack = Vec<T, OUT_WIDTH>;
#pragma unroll
    for (int step = 0; step < ceil_div(M * N / OUT_WIDTH, THREADS); ++step) {
        const int i = step * THREADS + threadIdx.x;
        if (M * N / OUT_WIDTH % THREADS != 0 && i >= M * N / OUT_WIDTH) break;
        const int row = i / (N / OUT_WIDTH), column = i % (N / OUT_WIDTH) * OUT_WIDTH;
        if (first_row + row >= rows || first_output + column >= OUTPUTS) continue;
        const long long at = static_cast<long long>(first_row + row) * OUTPUTS + first_output + column;
        Pack pack = *reinterpret_cast<const Pack*>(ring + row * PITCH<T, N> + column);
        if (residual != nullptr) {
            const Pack more = *reinterpret_cast<const Pack*>(residual + at);
#pragma unroll
            for (int j = 0; j < OUT_WIDTH; ++j) pack.at[j] = from_float<T>(to_float(pack.at[j]) + to_float(more.at[j]));
        }
        *reinterpret_cast<Pack*>(y + at) = pack;
    }
}

}  // namespace warpline
