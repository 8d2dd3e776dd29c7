// Matrix times a few vectors, with LayerNorm before and an epilogue: y = act(norm(x) weight^T + bias) + residual.
//
// The idea: with ROWS of 1 to 8 the product is a read of the weights. A warp multiplies a few weight rows with all rows of x at
// once, 16 bytes of weights per lane and load. The first loads are in flight before the preceding launch has written x, so they
// hide the launch and the LayerNorm, which every block computes itself. SHARERS warps share an output where there are few outputs
// and many inputs. Sums are added in a fixed order.
// Tensor cores: used from two rows on in half precision. The order of the inputs does not matter to a product, so the 16 bytes of
// a lane are fragments as they are. Weights may have another type W than the arithmetic (T): int8 codes with a scale per output.
// A load then has twice as many, and each must be converted, so one row uses tensor cores too.
// Memory traffic: the weights once; x, bias, scales and LayerNorm's parameters come from the caches.
// Tried and lost: eight rows in ordinary arithmetic, 68 % of a copy's bandwidth: converting and multiplying took longer than
// reading.
#pragma once
#include "codes.cuh"
#include "ops/gelu.cuh"
#include "ops/layernorm.cuh"
#include "ptx.cuh"

namespace warpline {

__device__ constexpr int power_of_two_from(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}

// Sums of VALUES per lane over a warp: lane i ends with the sum of value i / (32 / VALUES). VALUES is a power of 2. Each step of
// the butterfly hands over half of the values, which takes about VALUES shuffles in all instead of five per value.
template <int VALUES>
__device__ __forceinline__ float scatter_sums(float (&value)[VALUES]) {
    const int lane = threadIdx.x % WARP;
    int left = VALUES;
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) {
        if (left > 1) {
            left /= 2;
            const bool upper = lane & other;
#pragma unroll
            for (int i = 0; i < VALUES / 2; ++i) {
                if (i >= left) break;
                const float given = upper ? value[i] : value[i + left];
                value[i] = (upper ? value[i + left] : value[i]) + __shfl_xor_sync(0xffffffffu, given, other);
            }
        } else {
            value[0] += __shfl_xor_sync(0xffffffffu, value[0], other);
        }
    }
    return value[0];
}

// The work of one warp on OUTPUTS_EACH outputs in ordinary arithmetic: a part of the inputs, in steps of one vector per lane.
// `load` loads the weights of the first steps, `finish` does the rest and returns the sums, `results` says to which output they
// belong.
template <typename T, typename W, int OUTPUTS, int INPUTS, int ROWS, int SHARERS, int OUTPUTS_EACH, int UNROLL>
struct WarpDots {
    static constexpr int WIDTH = vector_width<W>(INPUTS), VECTORS = INPUTS / WIDTH;
    static constexpr int X_WIDTH = vector_width<T>(WIDTH), X_VECTORS = WIDTH / X_WIDTH;
    static constexpr int STEPS = ceil_div(VECTORS, WARP * SHARERS), BATCH = UNROLL < STEPS ? UNROLL : STEPS;
    static constexpr int ROWS_UP = power_of_two_from(ROWS), VALUES = power_of_two_from(OUTPUTS_EACH) * ROWS_UP;
    static constexpr int RESULTS = 1;
    static_assert(VALUES <= WARP);
    using Pack = Vec<W, WIDTH>;
    using XPack = Vec<T, X_WIDTH>;
    Pack held[OUTPUTS_EACH][BATCH];

    static __device__ __forceinline__ int vector_of(int step) {
        return step * (WARP * SHARERS) + threadIdx.x / WARP % SHARERS * WARP + threadIdx.x % WARP;
    }

    // A lane beyond the last vector gets zeros.
    __device__ __forceinline__ void load(const W* weight, int first_output, int step0) {
#pragma unroll
        for (int o = 0; o < OUTPUTS_EACH; ++o) {
            const long long row = min(first_output + o, OUTPUTS - 1);
#pragma unroll
            for (int step = 0; step < BATCH; ++step) {
                const int at = vector_of(step0 + step);
                held[o][step] = {};
                if (at < VECTORS) held[o][step] = reinterpret_cast<const Pack*>(weight + row * INPUTS)[at];
            }
        }
    }

    // x has ROWS rows, `pitch` apart, in shared or cached memory.
    __device__ __forceinline__ void finish(const W* weight, const T* x, int pitch, int first_output, float (&result)[1]) {
        float sum[VALUES] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step += BATCH) {
            WarpDots next;
            if (step + BATCH < STEPS) next.load(weight, first_output, step + BATCH);
            multiply(x, pitch, step, sum);
            if (step + BATCH < STEPS) *this = next;
        }
        result[0] = scatter_sums(sum);
    }

    // Calls f(i, output, row) for every valid result i; `output` is relative to the warp's first.
    template <typename F>
    static __device__ __forceinline__ void results(F f) {
        const int value = threadIdx.x % WARP / (WARP / VALUES), output = value / ROWS_UP, row = value % ROWS_UP;
        if (threadIdx.x % (WARP / VALUES) == 0 && row < ROWS && output < OUTPUTS_EACH) f(0, output, row);
    }

   private:
    __device__ __forceinline__ void multiply(const T* x, int pitch, int step0, float (&sum)[VALUES]) const {
#pragma unroll
        for (int step = 0; step < BATCH; ++step) {
            const int at = vector_of(step0 + step);
            if (at >= VECTORS) break;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int part = 0; part < X_VECTORS; ++part) {
                    const XPack pack = reinterpret_cast<const XPack*>(x + r * pitch)[at * X_VECTORS + part];
#pragma unroll
                    for (int o = 0; o < OUTPUTS_EACH; ++o) {
                        float& s = sum[o * ROWS_UP + r];
#pragma unroll
                        for (int i = 0; i < X_WIDTH; ++i) {  // to_float also converts codes
                            s = fmaf(to_float(pack.at[i]), to_float(held[o][step].at[part * X_WIDTH + i]), s);
                        }
                    }
                }
            }
        }
    }
};

// Sixteen outputs on tensor cores, or eight where sixteen leave too few warps. Sixteen are the left operand (16 x 16), with the
// rows of x as the right one (16 x 8); eight are the right operand, with the rows of x as half of the left one. Lane 4g + t has
// chunk t of every four: of weight rows g and g + 8, and of row g of x.
template <typename T, typename W, int OUTPUTS, int INPUTS, int ROWS, int SHARERS, int TILE, int UNROLL>
struct WarpTiles {
    using Pairs = Vec<unsigned, 4>;  // 16 bytes
    using Weights = WeightPairs<T, W>;
    static constexpr int WIDTH = 2 * Weights::COUNT, VECTORS = INPUTS / WIDTH, X_VECTORS = Weights::COUNT / 4;
    static constexpr int STEPS = ceil_div(VECTORS, 4 * SHARERS), BATCH = UNROLL < STEPS ? UNROLL : STEPS;
    static constexpr int HALVES = TILE / 8, RESULTS = 2 * HALVES;
    static_assert(sizeof(T) == 2 && INPUTS % WIDTH == 0 && ROWS <= 8);
    Pairs held[HALVES][BATCH];

    static __device__ __forceinline__ int vector_of(int step) {
        return step * (4 * SHARERS) + threadIdx.x / WARP % SHARERS * 4 + threadIdx.x % 4;
    }

    __device__ __forceinline__ void load(const W* weight, int first_output, int step0) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const long long row = min(first_output + half * 8 + static_cast<int>(threadIdx.x) % WARP / 4, OUTPUTS - 1);
#pragma unroll
            for (int step = 0; step < BATCH; ++step) {
                const int at = vector_of(step0 + step);
                held[half][step] = {};
                if (at < VECTORS) held[half][step] = load_streaming(reinterpret_cast<const Pairs*>(weight + row * INPUTS) + at);
            }
        }
    }

    __device__ __forceinline__ void finish(const W* weight, const T* x, int pitch, int first_output, float (&result)[RESULTS]) {
        const int row = threadIdx.x % WARP / 4;
        float sum[4] = {};
#pragma unroll
        for (int step0 = 0; step0 < STEPS; step0 += BATCH) {
            WarpTiles next;
            if (step0 + BATCH < STEPS) next.load(weight, first_output, step0 + BATCH);
#pragma unroll
            for (int step = 0; step < BATCH; ++step) {
                const int at = vector_of(step0 + step);
                unsigned b[Weights::COUNT] = {};
                if (row < ROWS && at < VECTORS) {
#pragma unroll
                    for (int part = 0; part < X_VECTORS; ++part) {
                        const Pairs chunk = reinterpret_cast<const Pairs*>(x + row * pitch)[at * X_VECTORS + part];
#pragma unroll
                        for (int i = 0; i < 4; ++i) b[4 * part + i] = chunk.at[i];
                    }
                }
                const Weights upper(held[0][step]), lower(held[HALVES - 1][step]);
#pragma unroll
                for (int i = 0; i < Weights::COUNT; i += 2) {
                    if constexpr (HALVES == 2) {
                        const unsigned a[4] = {upper.at[i], lower.at[i], upper.at[i + 1], lower.at[i + 1]};
                        multiply_add<T>(sum, a, b[i], b[i + 1]);
                    } else {
                        const unsigned a[4] = {b[i], 0, b[i + 1], 0};
                        multiply_add<T>(sum, a, upper.at[i], upper.at[i + 1]);
                    }
                }
            }
            if (step0 + BATCH < STEPS) *this = next;
        }
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) result[i] = sum[i];
    }

    template <typename F>
    static __device__ __forceinline__ void results(F f) {
        const int outer = static_cast<int>(threadIdx.x) % WARP / 4, inner = threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) {
            const int row = HALVES == 2 ? inner + i % 2 : outer;
            if (row < ROWS) f(i, HALVES == 2 ? outer + i / 2 * 8 : inner + i, row);
        }
    }
};

template <typename T, typename W, int OUTPUTS, int INPUTS, int ROWS, int SHARERS, int UNROLL>
struct WarpDots<T, W, OUTPUTS, INPUTS, ROWS, SHARERS, 16, UNROLL>
    : WarpTiles<T, W, OUTPUTS, INPUTS, ROWS, SHARERS, 16, UNROLL> {};

template <typename T, typename W, int OUTPUTS, int INPUTS, int ROWS, int SHARERS, int UNROLL>
struct WarpDots<T, W, OUTPUTS, INPUTS, ROWS, SHARERS, 8, UNROLL>
    : WarpTiles<T, W, OUTPUTS, INPUTS, ROWS, SHARERS, 8, UNROLL> {};

// Pitch of rows of INPUTS elements in shared memory: neighbours on different banks.
template <typename T, int INPUTS>
constexpr int ROW_PITCH = ceil_div(INPUTS, 64) * 64 + 32;

// LayerNorm of ROWS rows into shared memory by all warps; returns the rows' address. It waits for the launch that wrote x.
// Requires: all threads call it. Only its latency matters, so everything is loaded at once.
template <typename T, int INPUTS, int ROWS, int WARPS>
__device__ __forceinline__ const T* normalised_rows(const T* x, const T* gamma, const T* beta, float epsilon) {
    constexpr int TEAM = WARPS / power_of_two_from(ROWS) > 0 ? WARPS / power_of_two_from(ROWS) : 1;  // warps per row
    __shared__ float scratch[WARPS];
    T* rows = dynamic_shared<T>();
    using Slice = RowSlice<T, INPUTS, TEAM>;
    Slice weight, bias;
    weight.load(gamma);
    bias.load(beta);
    await_previous_launch();
#pragma unroll
    for (int first = 0; first < ROWS; first += WARPS / TEAM) {
        const int row = first + threadIdx.x / (TEAM * WARP);
        Slice slice;
        slice.load(x + min(row, ROWS - 1) * INPUTS);
        standardise(slice, epsilon, scratch);
#pragma unroll
        for (int i = 0; i < Slice::STEPS * Slice::WIDTH; ++i) slice.value[i] = slice.value[i] * weight.value[i] + bias.value[i];
        if (row < ROWS) slice.store(rows + row * ROW_PITCH<T, INPUTS>);
    }
    __syncthreads();
    return rows;
}

// `gamma`, `beta`, `scale`, `bias` and `residual` may be null.
template <typename T, typename W, int OUTPUTS, int INPUTS, int ROWS, bool GELU, int WARPS, int SHARERS, int OUTPUTS_EACH, int UNROLL>
__device__ __forceinline__ void matvec(const T* x, const T* gamma, const T* beta, const W* weight, const float* scale,
                                       const T* bias, const T* residual, T* y, float epsilon) {
    using Dots = WarpDots<T, W, OUTPUTS, INPUTS, ROWS, SHARERS, OUTPUTS_EACH, UNROLL>;
    const int warp = threadIdx.x / WARP;
    const int first = (static_cast<int>(blockIdx.x) * (WARPS / SHARERS) + warp / SHARERS) * OUTPUTS_EACH;
    Dots dots;
    dots.load(weight, first, 0);
    float added[Dots::RESULTS] = {};
    if (bias != nullptr) {
        Dots::results([&](int i, int relative, int) { added[i] = to_float(bias[min(first + relative, OUTPUTS - 1)]); });
    }
    float scales[Dots::RESULTS];
    if (scale != nullptr) {
        Dots::results([&](int i, int relative, int) { scales[i] = scale[min(first + relative, OUTPUTS - 1)]; });
    }
    const bool norm = gamma != nullptr;
    if (norm) x = normalised_rows<T, INPUTS, ROWS, WARPS>(x, gamma, beta, epsilon);
    else await_previous_launch();
    float result[Dots::RESULTS], kept[Dots::RESULTS] = {};
    if (residual != nullptr) {
        Dots::results([&](int i, int relative, int row) {
            kept[i] = to_float(residual[row * OUTPUTS + min(first + relative, OUTPUTS - 1)]);
        });
    }
    dots.finish(weight, x, norm ? ROW_PITCH<T, INPUTS> : INPUTS, first, result);
    if constexpr (SHARERS > 1) {
        __shared__ float shares[WARPS][Dots::RESULTS][WARP];
#pragma unroll
        for (int i = 0; i < Dots::RESULTS; ++i) shares[warp][i][threadIdx.x % WARP] = result[i];
        __syncthreads();
        if (warp % SHARERS != 0) return;
#pragma unroll
        for (int i = 0; i < Dots::RESULTS; ++i) {
#pragma unroll
            for (int other = 1; other < SHARERS; ++other) result[i] += shares[warp + other][i][threadIdx.x % WARP];
        }
    }
    Dots::results([&](int i, int relative, int row) {
        const int output = first + relative;
        if (output >= OUTPUTS) return;
        float v = (scale != nullptr ? result[i] * scales[i] : result[i]) + added[i];
        if (GELU) v = gelu_of<false>(v);
        y[row * OUTPUTS + output] = from_float<T>(v + kept[i]);
    });
}

// A score and its output as one integer: the larger score wins, and of equal scores the earlier output. 0 loses to all others.
__device__ __forceinline__ unsigned long long with_output(unsigned ordered, int output) {
    return static_cast<unsigned long long>(ordered) << 32 | ~static_cast<unsigned>(output);
}
__device__ __forceinline__ unsigned long long candidate(float value, int output) {
    const unsigned bits = __float_as_uint(value);
    return with_output(bits & 0x80000000u ? ~bits : bits | 0x80000000u, output);
}

__device__ __forceinline__ float value_of(unsigned long long candidate) {
    const unsigned ordered = candidate >> 32;
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

__device__ __forceinline__ int output_of(unsigned long long candidate) { return ~static_cast<unsigned>(candidate); }

// The likeliest next token and its logit: the output with the largest sum, of equals the first. Each warp takes REPEAT groups of
// outputs, each block reduces to its best per row, and the block that finishes last writes the result.
template <typename T, typename W, int OUTPUTS, int INPUTS, int ROWS, int WARPS, int OUTPUTS_EACH, int UNROLL, int REPEAT>
__device__ __forceinline__ void head_argmax(const T* x, const T* gamma, const T* beta, const W* weight, const float* scale,
                                            long long* token, float* logit, long long* best, int* finished, float epsilon) {
    using Dots = WarpDots<T, W, OUTPUTS, INPUTS, ROWS, 1, OUTPUTS_EACH, UNROLL>;
    const int warp = threadIdx.x / WARP;
    // All warps walk through the weights together, so that neighbouring memory is read at the same time.
    const int stride = gridDim.x * (WARPS * OUTPUTS_EACH);
    int first = (static_cast<int>(blockIdx.x) * WARPS + warp) * OUTPUTS_EACH;
    Dots dots;
    dots.load(weight, first, 0);
    __shared__ unsigned long long met[ROWS];
    if (threadIdx.x < ROWS) met[threadIdx.x] = 0;
    x = normalised_rows<T, INPUTS, ROWS, WARPS>(x, gamma, beta, epsilon);
    unsigned long long mine[Dots::RESULTS] = {};
    for (int repeat = 0; repeat < REPEAT; ++repeat, first += stride) {
        Dots next;
        if (repeat + 1 < REPEAT) next.load(weight, first + stride, 0);
        float result[Dots::RESULTS], scales[Dots::RESULTS];
        if (scale != nullptr) {
            Dots::results([&](int i, int relative, int) { scales[i] = scale[min(first + relative, OUTPUTS - 1)]; });
        }
        dots.finish(weight, x, ROW_PITCH<T, INPUTS>, first, result);
        Dots::results([&](int i, int relative, int) {
            if (scale != nullptr) result[i] *= scales[i];
            if (first + relative < OUTPUTS) mine[i] = max(mine[i], candidate(result[i], first + relative));
        });
        dots = next;
    }
    Dots::results([&](int i, int, int row) { atomicMax(met + row, mine[i]); });
    __syncthreads();
    unsigned long long* best_of = reinterpret_cast<unsigned long long*>(best) + threadIdx.x;
    if (threadIdx.x < ROWS) atomicMax(best_of, met[threadIdx.x]);
    if (!finishes_last(finished, gridDim.x) || threadIdx.x >= ROWS) return;
    const unsigned long long winner = __ldcg(best_of);
    token[threadIdx.x] = output_of(winner);
    logit[threadIdx.x] = value_of(winner);
    *best_of = 0;  // for the next launch
}

}  // namespace warpline
