// Common parts of the stages of the persistent decode kernel: exchange of rows, LayerNorm, outputs of a stage.
#pragma once
#include "persistent/layout.cuh"

namespace warpline {

enum Stage { QKV, OUT, FC, PROJ, HEAD };

template <typename M>
class Stages : protected Layout<M> {
   protected:
    using Memory = Layout<M>;
    using Memory::ROWS, Memory::WARPS, Memory::THREADS, Memory::WIDTH, Memory::INNER, Memory::PER, Memory::BIASES, Memory::SLAB, Memory::PITCH, Memory::TURN;
    using typename Memory::T, typename Memory::BlockShared, typename Memory::Ring, typename Memory::TapeOf;

    const typename M::Arguments& a;
    BlockShared& shared;
    TapeOf tape;
    unsigned tag;
    int splits, layer, stamped = 0;  // splits: parts of the longest context that different blocks compute

    __device__ __forceinline__ Stages(const typename M::Arguments& arguments, BlockShared& shared, Ring& ring)
        : a(arguments),
          shared(shared),
          tape(arguments.tape, shared.plan.range(M::SCREENED), ring),
          tag(arguments.tag) {}

    // The words of this turn, and those of the turn before.
    __device__ __forceinline__ Word* words() const { return a.words + (M::OBSERVED ? layer : tag % 2) * TURN; }
    __device__ __forceinline__ const Word* words_before() const {
        return a.words + (M::OBSERVED ? layer - 1 : (tag - 1) % 2) * TURN;
    }

    __device__ __forceinline__ void stamp() {
        if constexpr (M::STAMPS) {
            if (thread_index() == 0) a.stamps[static_cast<long long>(blockIdx.x) * M::STAMPS + stamped % M::STAMPS] = clock64();
            ++stamped;
        }
    }

    static __device__ __forceinline__ unsigned packed(const float (&value)[PER]) {
        if constexpr (PER == 2) return pack_pair<T>(value[0], value[1]);
        else return __float_as_uint(value[0]);
    }

    // Two neighbours of a vector that every block reads for every token; evict_last keeps it in L2.
    static __device__ __forceinline__ Vec<T, 2> load_pair(const T* vector, int index) {
        const auto* at = reinterpret_cast<const unsigned*>(vector) + index * (2 / PER);
        Vec<unsigned, 2 / PER> bits;
#pragma unroll
        for (int i = 0; i < 2 / PER; ++i) bits.at[i] = load_evict_last(at + i);
        return reinterpret_cast<const Vec<T, 2>&>(bits);
    }

    // A warp owns SLAB columns of every row, and each lane some pairs of them. column_of(i) is the lane's i-th pair, -1 for none.
    static constexpr int EACH = ceil_div(SLAB / 2, WARP), AT_ONCE = ROWS > 2 ? 8 : 4;
    static __device__ __forceinline__ int column_of(int i) {
        const int within = 2 * (thread_index() % WARP + i * WARP), column = thread_index() / WARP * SLAB + within;
        return (SLAB / 2 % WARP == 0 || within < SLAB) && (WARPS * SLAB == WIDTH || column < WIDTH) ? column : -1;
    }

    // Gathers the residual rows that the stage before posted.
    static __device__ __forceinline__ auto rows_at(const Word* from) {
        return gather<ROWS * EACH, AT_ONCE>([from](int i) { return from + i / EACH * WIDTH + max(column_of(i % EACH), 0); });
    }

    // --- LayerNorm ---
    // In a layer LayerNorm is applied after the product: W (gamma (x - mean) / deviation + beta) + bias equals
    // (W gamma x - mean slope) / deviation + level, with slope = W gamma and level = W beta + bias per output. So a warp
    // multiplies its columns of x as soon as they arrive, and the warps' parts of mean and deviation are added together with the
    // sums of the product. The input of the product is gamma x times a power of two near the last 1 / deviation, so that it has
    // the size of a normalised row; a power of two changes no bit of the result.

    // With few rows the sums stay in registers until the products are done; with more rows there are not enough registers.
    static constexpr bool LATE = ROWS <= 2;

    // Stores this lane's pairs, which load(v) returns, in shared.h (scaled) and shared.x; `sums` receives the lane's sums of the
    // rows and of their squares.
    template <typename Load>
    __device__ __forceinline__ void scale_rows(const T* gamma, int which, float (&sums)[2 * ROWS], Load load) {
        Vec<T, 2> scale[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) scale[i] = load_pair(gamma, max(column_of(i), 0) / 2);
        float v[ROWS * EACH][2];
        load(v);
#pragma unroll
        for (int i = 0; i < ROWS * EACH; ++i) {
            const int column = column_of(i % EACH), row = i / EACH;
            if (column < 0) continue;
            const float row_scale = shared.row_scale[which][row];
            Vec<T, 2> result;
#pragma unroll
            for (int j = 0; j < 2; ++j) result.at[j] = from_float<T>(v[i][j] * to_float(scale[i % EACH].at[j]) * row_scale);
            *reinterpret_cast<Vec<T, 2>*>(shared.h + row * PITCH + column) = result;
        }
        __syncwarp();
#pragma unroll
        for (int row = 0; row < 2 * ROWS; ++row) sums[row] = 0.f;
#pragma unroll
        for (int i = 0; i < ROWS * EACH; ++i) {
            const int column = column_of(i % EACH), row = i / EACH;
            if (column < 0) continue;
            sums[row] += v[i][0] + v[i][1];
            sums[ROWS + row] += v[i][0] * v[i][0] + v[i][1] * v[i][1];
            *reinterpret_cast<Vec<float, 2>*>(shared.x + row * WIDTH + column) = {v[i][0], v[i][1]};
        }
        if constexpr (!LATE) store_sums(sums);
    }
    template <typename Rows>
    __device__ __forceinline__ void scale_rows(const T* gamma, int which, float (&sums)[2 * ROWS], unsigned its_tag, Rows& asked) {
        scale_rows(gamma, which, sums, [&](auto& v) { take_rows(v, its_tag, asked); });
    }
    template <typename V, typename Rows>
    __device__ __forceinline__ void take_rows(V& v, unsigned its_tag, Rows& asked) {
        asked.finish(its_tag, shared.watchdog, [&](int i, const Pair& pair) {
            v[i][0] = __uint_as_float(pair.payload(0));
            v[i][1] = __uint_as_float(pair.payload(1));
        });
    }

    // Adds up the lanes' sums and stores this warp's.
    __device__ __forceinline__ void store_sums(float (&sums)[2 * ROWS]) {
        constexpr int SHARE = WARP / (2 * ROWS);  // lanes that end with the same sum
        const int lane = thread_index() % WARP;
        const float sum = scatter_sums(sums);
        if (lane % SHARE == 0) shared.sums[lane / SHARE][thread_index() / WARP] = sum;
    }
    __device__ __forceinline__ void store_late_sums(float (&sums)[2 * ROWS]) {
        if constexpr (LATE) store_sums(sums);
    }
    __device__ __forceinline__ float inverse_deviation(float mean, float square) const {
        return rsqrt_approx(fmaxf(square - mean * mean, 0.f) + a.epsilon);
    }

    // Slope, level and (for codes) scale of PER outputs. A thread loads its first ones long before it needs them.
    static constexpr int LINE = M::CODED ? 3 : 2;
    struct NormTerms {
        float at[LINE * PER];
    };
    template <Stage STAGE>
    __device__ __forceinline__ NormTerms norm_terms(int output) const {
        const long long at = static_cast<long long>(layer) * (3 * WIDTH + INNER) + (STAGE == FC ? 3 * WIDTH : 0);
        const auto* from = reinterpret_cast<const unsigned*>(a.norm_terms) + LINE * (at + shared.plan.first[STAGE] * TILE_OUTPUTS + output);
        NormTerms found;
#pragma unroll
        for (int i = 0; i < LINE * PER; ++i) found.at[i] = __uint_as_float(load_evict_last(from + i));
        return found;
    }
    template <Stage STAGE>
    __device__ __forceinline__ NormTerms first_norm_terms() const {
        const int output = thread_index() / ROWS * PER;
        return output < shared.plan.units[STAGE] * TILE_OUTPUTS ? norm_terms<STAGE>(output) : NormTerms{};
    }

    // Applies LayerNorm to a stage's sums of products; returns 1 / deviation. Requires: all warps have stored their sums.
    __device__ __forceinline__ float normalise_output(int which, int row, const NormTerms& terms, float (&value)[PER]) {
        const float mean = mean_of(row), inverse = inverse_deviation(mean, mean_of(ROWS + row));
        const float back = __uint_as_float(0x7f000000u - __float_as_uint(shared.row_scale[which][row]));  // 1 / row_scale
#pragma unroll
        for (int j = 0; j < PER; ++j) {
            const float* its = terms.at + LINE * j;
            if (M::CODED) value[j] *= its[LINE - 1];
            value[j] = (value[j] * back - mean * its[0]) * inverse + its[1];
        }
        return inverse;
    }
    __device__ __forceinline__ float mean_of(int sums) const { return sum_of<WARPS>(shared.sums[sums]) * (1.f / WIDTH); }

    // Sets the factor of the row before the layer's other LayerNorm.
    __device__ __forceinline__ void set_row_scale(int which, int row, float inverse) {
        shared.row_scale[1 - which][row] = __uint_as_float(__float_as_uint(inverse) & 0x7f800000u);
    }
    __device__ __forceinline__ void set_row_scales(int which) {
        const int row = thread_index();
        if (row < ROWS) set_row_scale(which, row, inverse_deviation(mean_of(row), mean_of(ROWS + row)));
    }

    // Outputs of a stage that begins with a LayerNorm, PER per thread: f(output, row, values).
    template <Stage STAGE, typename P, typename F>
    __device__ __forceinline__ void normal_outputs(int which, const NormTerms& first, F f) {
        P::template each<PER>(shared.plan.units[STAGE], partial<STAGE>(), [&](int output, int row, float (&value)[PER]) {
            const float inverse = normalise_output(which, row, output == thread_index() / ROWS * PER ? first : norm_terms<STAGE>(output), value);
            f(shared.plan.first[STAGE] * TILE_OUTPUTS + output, row, value);
            if (output == 0) set_row_scale(which, row, inverse);
        });
    }

    // Before the LM head every warp needs all columns, so LayerNorm is applied first, into shared.h.
    template <typename Rows>
    __device__ __forceinline__ void normalise(const T* gamma, const T* beta, unsigned its_tag, Rows& asked) {
        Vec<T, 2> scale[EACH], shift[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            scale[i] = load_pair(gamma, max(column_of(i), 0) / 2);
            shift[i] = load_pair(beta, max(column_of(i), 0) / 2);
        }
        float v[ROWS * EACH][2], sums[2 * ROWS] = {};  // of each row, then of the squares of each row
        take_rows(v, its_tag, asked);
#pragma unroll
        for (int i = 0; i < ROWS * EACH; ++i) {
            if (column_of(i % EACH) < 0) continue;
            sums[i / EACH] += v[i][0] + v[i][1];
            sums[ROWS + i / EACH] += v[i][0] * v[i][0] + v[i][1] * v[i][1];
        }
        store_sums(sums);
        sync_threads<THREADS>();
        const int lane = thread_index() % WARP;
        const float total = sum_of<WARPS>(shared.sums[lane % (2 * ROWS)]);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const float mean = __shfl_sync(0xffffffffu, total, row) * (1.f / WIDTH);
            const float square = __shfl_sync(0xffffffffu, total, ROWS + row) * (1.f / WIDTH);
            const float inverse = inverse_deviation(mean, square);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int column = column_of(i);
                if (column < 0) continue;
                Vec<T, 2> result;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    result.at[j] = from_float<T>((v[row * EACH + i][j] - mean) * inverse * to_float(scale[i].at[j]) + to_float(shift[i].at[j]));
                }
                *reinterpret_cast<Vec<T, 2>*>(shared.h + row * PITCH + column) = result;
            }
        }
        __syncwarp();
    }

    // A vector of a layer, such as M::LN_1_WEIGHT. The vectors of ln_f are stored as those of layer LAYERS.
    __device__ __forceinline__ const T* vector(int of_layer, int which) const {
        return a.vectors + (static_cast<long long>(of_layer) * (M::VECTORS * WIDTH) + which * WIDTH);
    }

    // The buffer for the warps' sums of a stage; stages alternate between two.
    template <Stage STAGE>
    __device__ __forceinline__ float* partial() const { return STAGE % 2 ? shared.other_partial : shared.partial; }

    // Adds bias and residual to a stage's outputs and posts them.
    template <Stage STAGE, int BIAS_AT, typename P>
    __device__ __forceinline__ void post_residual(int at) {
        P::template each<PER>(shared.plan.units[STAGE], partial<STAGE>(), [&](int own, int row, float (&value)[PER]) {
            const int output = shared.plan.first[STAGE] * TILE_OUTPUTS + own;
#pragma unroll
            for (int j = 0; j < PER; ++j) {
                const int known = layer * BIASES + BIAS_AT + own + j;
                if (M::CODED) value[j] *= shared.scale[M::CODED ? known : 0];
                value[j] += to_float(shared.bias[known]);
                post(words() + at + row * WIDTH + output + j, __float_as_uint(value[j] + shared.x[row * WIDTH + output + j]), tag);
            }
        });
    }
};

}  // namespace warpline
