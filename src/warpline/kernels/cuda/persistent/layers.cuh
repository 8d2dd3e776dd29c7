// One layer of the persistent decode kernel: its five stages, from the rows that the layer before posted to its own.
#pragma once
#include "ops/gelu.cuh"
#include "persistent/layout.cuh"

namespace warpline {

enum Stage { QKV, OUT, FC, PROJ, HEAD };

template <typename M>
class Layers : protected Layout<M> {
   protected:
    using Place = Layout<M>;
    using Place::ROWS, Place::WARPS, Place::THREADS, Place::WIDTH, Place::INNER, Place::HEADS;
    using Place::DEPTH, Place::PER, Place::BIASES, Place::SLAB, Place::INNER_SLAB, Place::PITCH, Place::HEAD_WORDS;
    using Place::QKV_AT, Place::ATTENTION_AT, Place::MIDDLE_AT, Place::FC_AT, Place::END_AT, Place::TURN;
    using typename Place::T, typename Place::TileOf, typename Place::Attention, typename Place::Desk, typename Place::Row, typename Place::Ring, typename Place::TapeOf;
    template <int INPUTS, int UNITS>
    using ProductOf = typename Place::template ProductOf<INPUTS, UNITS>;

    const typename M::Arguments& a;
    Desk& desk;
    TapeOf tape;
    unsigned tag;
    int splits, layer, stamped = 0;

    __device__ __forceinline__ Layers(const typename M::Arguments& arguments, Desk& desk, Ring& ring)
        : a(arguments),
          desk(desk),
          tape(arguments.tape + static_cast<long long>(desk.plan.tape) * THREADS, desk.plan.steps, ring),
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

    // Two neighbours of a vector that every block needs in every token.
    static __device__ __forceinline__ Vec<T, 2> load_pair(const T* vector, int index) {
        const auto* at = reinterpret_cast<const unsigned*>(vector) + index * (2 / PER);
        Vec<unsigned, 2 / PER> bits;
#pragma unroll
        for (int i = 0; i < 2 / PER; ++i) bits.at[i] = load_kept(at + i);
        return reinterpret_cast<const Vec<T, 2>&>(bits);
    }

    // Of every row a warp has SLAB columns, and of those each lane some pairs of neighbours.
    static constexpr int EACH = ceil_div(SLAB / 2, WARP), AT_ONCE = ROWS > 2 ? 8 : 4;
    static __device__ __forceinline__ int column_of(int i) {
        const int within = 2 * (thread_index() % WARP + i * WARP), column = thread_index() / WARP * SLAB + within;
        return (SLAB / 2 % WARP == 0 || within < SLAB) && (WARPS * SLAB == WIDTH || column < WIDTH) ? column : -1;
    }

    // The residual rows as the stage before posted them.
    static __device__ __forceinline__ auto ask_for_rows(const Word* from) {
        return gather<ROWS * EACH, AT_ONCE>([from](int i) { return from + i / EACH * WIDTH + max(column_of(i % EACH), 0); });
    }

    // LayerNorm of the rows into desk.h, which also get their place in desk.x. load(v) has this lane's pairs.
    template <typename Load>
    __device__ __forceinline__ void normalise(const T* gamma, const T* beta, Load load) {
        Vec<T, 2> scale[EACH], shift[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            scale[i] = load_pair(gamma, max(column_of(i), 0) / 2);
            shift[i] = load_pair(beta, max(column_of(i), 0) / 2);
        }
        float v[ROWS * EACH][2], sums[2 * ROWS] = {};  // of each row, then the squares of each row
        load(v);
#pragma unroll
        for (int i = 0; i < ROWS * EACH; ++i) {
            const int column = column_of(i % EACH), row = i / EACH;
            if (column < 0) continue;
            sums[row] += v[i][0] + v[i][1];
            sums[ROWS + row] += v[i][0] * v[i][0] + v[i][1] * v[i][1];
            *reinterpret_cast<Vec<float, 2>*>(desk.x + row * WIDTH + column) = {v[i][0], v[i][1]};
        }
        constexpr int SHARE = WARP / (2 * ROWS);  // lanes that end with the same sum
        const int lane = thread_index() % WARP;
        const float sum = scatter_sums(sums);
        if (lane % SHARE == 0) desk.sums[lane / SHARE][thread_index() / WARP] = sum;
        sync_threads<THREADS>();
        const float total = sum_of<WARPS>(desk.sums[lane % (2 * ROWS)]);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const float mean = __shfl_sync(0xffffffffu, total, row) * (1.f / WIDTH);
            const float square = __shfl_sync(0xffffffffu, total, ROWS + row) * (1.f / WIDTH);
            const float inverse = rsqrt_approx(fmaxf(square - mean * mean, 0.f) + a.epsilon);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int column = column_of(i);
                if (column < 0) continue;
                Vec<T, 2> result;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    result.at[j] = from_float<T>((v[row * EACH + i][j] - mean) * inverse * to_float(scale[i].at[j]) + to_float(shift[i].at[j]));
                }
                *reinterpret_cast<Vec<T, 2>*>(desk.h + row * PITCH + column) = result;
            }
        }
        __syncwarp();
    }

    template <typename Rows>
    __device__ __forceinline__ void normalise(const T* gamma, const T* beta, unsigned its_tag, Rows& asked) {
        normalise(gamma, beta, [&](auto& v) {
            asked.finish(its_tag, desk.dog, [&](int i, const Pair& pair) {
                v[i][0] = __uint_as_float(pair.payload(0));
                v[i][1] = __uint_as_float(pair.payload(1));
            });
        });
    }

    __device__ __forceinline__ const T* vectors(int which) const { return a.vectors + (static_cast<long long>(layer) * (9 * WIDTH + INNER) + which); }

    // Where the sums of a stage meet.
    template <Stage STAGE>
    __device__ __forceinline__ float* partial() const { return STAGE % 2 ? desk.other_partial : desk.partial; }

    // A stage's outputs, with bias, PER to a thread: f(output, row, values).
    template <Stage STAGE, int BIAS_AT, typename P, typename F>
    __device__ __forceinline__ void outputs(F f) {
        P::template each<PER>(desk.plan.units[STAGE], partial<STAGE>(), [&](int output, int row, float (&value)[PER]) {
#pragma unroll
            for (int j = 0; j < PER; ++j) value[j] += to_float(desk.bias[layer * BIASES + BIAS_AT + output + j]);
            f(desk.plan.first[STAGE] * TILE_OUTPUTS + output, row, value);
        });
    }

    template <Stage STAGE, int BIAS_AT, typename P>
    __device__ __forceinline__ void post_residual(int at) {
        outputs<STAGE, BIAS_AT, P>([&](int output, int row, float (&value)[PER]) {
#pragma unroll
            for (int j = 0; j < PER; ++j) {
                post(words() + at + row * WIDTH + output + j, __float_as_uint(value[j] + desk.x[row * WIDTH + output + j]), tag);
            }
        });
    }

    // --- the stages ---

    __device__ __forceinline__ Part part_of(int index) const {
        const int split = index % splits, head = index / splits % HEADS, row = index / (splits * HEADS);
        const int end = desk.rows[row].length, begin = a.window > 0 ? max(0, end - a.window) : 0;
        const int size = ceil_div(end - begin, splits), from = min(end, begin + split * size);
        return {row, head, split, from, min(end, from + size), end};
    }

    // Puts the block's part number `i` on the desk: what it is, and where its keys and values are in the cache of layer 0.
    __device__ __forceinline__ void set_part(int i) {
        const Part part = part_of(blockIdx.x + i * M::BLOCKS);
        desk.part = part;
        desk.place = (static_cast<long long>(part.row) * HEADS + part.head) * a.capacity * DEPTH;
    }

    __device__ __forceinline__ long long place() const {
        return desk.place + static_cast<long long>(layer) * a.cache_rows * (HEADS * DEPTH) * a.capacity;
    }

    // Starts what can be done before the query is there.
    __device__ __forceinline__ void begin_attention() {
        if (desk.parts > 0) Attention::begin(desk.attention, a.k + place(), a.v + place(), desk.part);
    }

    __device__ __forceinline__ void attention() {
        const int parts = desk.parts;
        for (int i = 0; i < parts; ++i) {
            if (i > 0) change_part(i);
            const Part& part = desk.part;
            const Word* posted = words() + QKV_AT + (part.row * 3 * WIDTH + part.head * DEPTH) / PER;
            const float factor = a.scale * LOG2_E * (a.scale_by_layer ? rcp_approx(layer + 1.f) : 1.f);
            const bool keeps = Attention::run(desk.attention, a.k + place(), a.v + place(), part, factor, posted, WIDTH / PER, tag, desk.dog);
            const int thread = thread_index();
            if (thread < DEPTH / PER) {
                float value[PER];
                const unsigned weight = __float_as_uint(Attention::template merge<PER>(desk.attention, thread * PER, value));
                Word* target = words() + ATTENTION_AT + ((part.row * HEADS + part.head) * M::SPLITS + part.split) * HEAD_WORDS;
                post(target + thread, packed(value), tag);
                if (thread < 2) post(target + DEPTH / PER + thread, weight, tag);
            }
            if (keeps) Attention::keep(desk.attention, a.k + place(), a.v + place(), part);
        }
        if (parts > 1) change_part(0);  // for the next layer
    }

    __device__ __forceinline__ void change_part(int i) {
        sync_threads<THREADS>();  // nobody needs the last one any more
        if (thread_index() == 0) set_part(i);
        sync_threads<THREADS>();
        if (i > 0) begin_attention();
    }

    // The heads' outputs, as far as they are this warp's columns, into desk.h.
    __device__ __forceinline__ void gather_attention() {
        constexpr int PAIRS = SLAB / (2 * PER), MINE = ROWS * PAIRS;  // of words, of a row and of all
        constexpr int LANES = MINE < WARP && WARP % MINE == 0 ? MINE : WARP;
        const int lane = thread_index() % WARP, slab = thread_index() / WARP * SLAB;
        // Of a lane's pair i: the row, the column, and where the first part of its head begins.
        struct Spot {
            int row, column;
            bool own;
            const Word* head;
        };
        const auto spot = [&](int i) {
            const int n = lane % LANES + i * LANES, row = min(n, MINE - 1) / PAIRS, at = slab + n % PAIRS * (2 * PER);
            const int column = min(at, WIDTH - 2 * PER);  // a lane without a pair of its own looks at another's
            return Spot{row, column, lane < LANES && n < MINE && at == column, words() + ATTENTION_AT + (row * HEADS + column / DEPTH) * M::SPLITS * HEAD_WORDS};
        };
        const auto leave = [&](const Spot& s, Vec<unsigned, 2> bits) {
            if (s.own) *reinterpret_cast<Vec<unsigned, 2>*>(desk.h + s.row * PITCH + s.column) = bits;
        };
        if (splits == 1) {
            gather<ceil_div(MINE, LANES), 4>([&](int i) {
                const Spot s = spot(i);
                return s.head + s.column % DEPTH / PER;
            }).finish(tag, desk.dog, [&](int i, const Pair& pair) { leave(spot(i), {pair.payload(0), pair.payload(1)}); });
        } else {
#pragma unroll 1
            for (int i = 0; i < ceil_div(MINE, LANES); ++i) leave(spot(i), merged<LANES>(spot(i).head, spot(i).column % DEPTH / PER));
        }
        __syncwarp();
    }

    // A pair of words of a head whose context was attended to in parts; lanes LANES apart share the parts.
    template <int LANES>
    __device__ __forceinline__ Vec<unsigned, 2> merged(const Word* head, int at) {
        constexpr int AT_ONCE = 3;
        float heaviest = LOWEST, total = 0.f, sum[2 * PER] = {};
#pragma unroll 1
        for (int first = thread_index() % WARP / LANES; first - thread_index() % WARP / LANES < splits; first += AT_ONCE * (WARP / LANES)) {
            const auto part = [&](int i) { return min(first + i * (WARP / LANES), splits - 1) * HEAD_WORDS; };
            const auto place = [&](int i) { return head + part(i / 2) + (i % 2 ? DEPTH / PER : at); };
            Pair pair[2 * AT_ONCE];
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; ++i) pair[i].load(place(i));
            await(pair, place, tag, desk.dog);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const float weight = first + i * (WARP / LANES) < splits ? __uint_as_float(pair[2 * i + 1].payload(0)) : LOWEST;
                const Vec<unsigned, 2> bits = {pair[2 * i].payload(0), pair[2 * i].payload(1)};
                add_part(heaviest, total, sum, weight, 1.f, reinterpret_cast<const Vec<T, 2 * PER>&>(bits));
            }
        }
#pragma unroll
        for (int other = LANES; other < WARP; other *= 2) {
            Vec<float, 2 * PER> its;
#pragma unroll
            for (int j = 0; j < 2 * PER; ++j) its.at[j] = __shfl_xor_sync(0xffffffffu, sum[j], other);
            const float weight = __shfl_xor_sync(0xffffffffu, heaviest, other);
            add_part(heaviest, total, sum, weight, __shfl_xor_sync(0xffffffffu, total, other), its);
        }
        const float inverse = rcp_approx(total);
        Vec<T, 2 * PER> value;
#pragma unroll
        for (int j = 0; j < 2 * PER; ++j) value.at[j] = from_float<T>(sum[j] * inverse);
        return reinterpret_cast<const Vec<unsigned, 2>&>(value);
    }

    // What was found in parts that weigh 2^heaviest * total together, and another that weighs 2^weight * amount.
    template <typename V>
    static __device__ __forceinline__ void add_part(float& heaviest, float& total, float (&sum)[2 * PER], float weight, float amount, const V& value) {
        const float before = heaviest;
        heaviest = fmaxf(heaviest, weight);
        const float rescale = exp2_approx(before - heaviest), share = exp2_approx(weight - heaviest);
        total = total * rescale + share * amount;
#pragma unroll
        for (int j = 0; j < 2 * PER; ++j) sum[j] = sum[j] * rescale + share * to_float(value.at[j]);
    }

    // The hidden rows, as far as they are this warp's columns.
    static constexpr int HIDDEN_PAIRS = INNER_SLAB / (2 * PER), HIDDEN_EACH = ceil_div(HIDDEN_PAIRS, WARP);
    static __device__ __forceinline__ int hidden_column(int i) {
        const int within = thread_index() % WARP + i * WARP, column = thread_index() / WARP * INNER_SLAB + within * (2 * PER);
        return (HIDDEN_PAIRS % WARP == 0 || within < HIDDEN_PAIRS) && (WARPS * INNER_SLAB == INNER || column < INNER) ? column : -1;
    }
    __device__ __forceinline__ auto ask_for_hidden() const {
        const Word* from = words() + FC_AT;
        return gather<ROWS * HIDDEN_EACH, AT_ONCE>([from](int i) {
            return from + (i / HIDDEN_EACH * INNER + max(hidden_column(i % HIDDEN_EACH), 0)) / PER;
        });
    }
    template <typename Hidden>
    __device__ __forceinline__ void gather_hidden(Hidden& asked) {
        asked.finish(tag, desk.dog, [&](int i, const Pair& pair) {
            const int column = hidden_column(i % HIDDEN_EACH);
            if (column < 0) return;
            *reinterpret_cast<Vec<unsigned, 2>*>(desk.h + i / HIDDEN_EACH * PITCH + column) = {pair.payload(0), pair.payload(1)};
        });
        __syncwarp();
    }

    // Token and position embedding of the rows, as far as a lane has them.
    template <typename V>
    __device__ __forceinline__ void embed(V& v) {
#pragma unroll
        for (int i = 0; i < ROWS * EACH; ++i) {
            const Row& row = desk.rows[i / EACH];
            const int column = max(column_of(i % EACH), 0);
            const auto t = *reinterpret_cast<const Vec<T, 2>*>(a.wte + static_cast<long long>(row.token) * WIDTH + column);
            const auto p = *reinterpret_cast<const Vec<T, 2>*>(a.wpe + static_cast<long long>(max(row.length - 1, 0)) * WIDTH + column);
            v[i][0] = to_float(t.at[0]) + to_float(p.at[0]);
            v[i][1] = to_float(t.at[1]) + to_float(p.at[1]);
        }
    }

    // A layer. What is asked of other blocks is asked first; the weights come into registers while it comes.
    __device__ __forceinline__ void run_layer() {
        {
            ProductOf<WIDTH, M::QKV_UNITS> qkv;
            const T *gamma = vectors(0), *beta = vectors(WIDTH);
            if (layer > 0) {
                auto rows = ask_for_rows(words_before() + END_AT);
                begin_attention();
                qkv.begin(tape, desk.plan.units[QKV]);
                normalise(gamma, beta, tag - 1, rows);
            } else {
                begin_attention();
                qkv.begin(tape, desk.plan.units[QKV]);
                normalise(gamma, beta, [&](auto& v) { embed(v); });
            }
            stamp();
            qkv.finish(tape, desk.h, PITCH, partial<QKV>());
            outputs<QKV, 0, decltype(qkv)>([&](int output, int row, float (&value)[PER]) {
                post(words() + QKV_AT + (row * 3 * WIDTH + output) / PER, packed(value), tag);
            });
            stamp();
        }
        attention();
        stamp();
        {
            ProductOf<WIDTH, M::OUT_UNITS> out;
            out.begin(tape, desk.plan.units[OUT]);
            gather_attention();
            stamp();
            out.finish(tape, desk.h, PITCH, partial<OUT>());
            post_residual<OUT, M::QKV_UNITS * TILE_OUTPUTS, decltype(out)>(MIDDLE_AT);
            stamp();
        }
        {
            ProductOf<WIDTH, M::FC_UNITS> fc;
            auto rows = ask_for_rows(words() + MIDDLE_AT);
            fc.begin(tape, desk.plan.units[FC]);
            normalise(vectors(6 * WIDTH), vectors(7 * WIDTH), tag, rows);
            stamp();
            fc.finish(tape, desk.h, PITCH, partial<FC>());
            outputs<FC, (M::QKV_UNITS + M::OUT_UNITS) * TILE_OUTPUTS, decltype(fc)>([&](int output, int row, float (&value)[PER]) {
#pragma unroll
                for (int j = 0; j < PER; ++j) value[j] = gelu_of<false>(value[j]);
                post(words() + FC_AT + (row * INNER + output) / PER, packed(value), tag);
            });
            stamp();
        }
        {
            ProductOf<INNER, M::PROJ_UNITS> proj;
            auto hidden = ask_for_hidden();
            proj.begin(tape, desk.plan.units[PROJ]);
            gather_hidden(hidden);
            stamp();
            proj.finish(tape, desk.h, PITCH, partial<PROJ>());
            post_residual<PROJ, (M::QKV_UNITS + M::OUT_UNITS + M::FC_UNITS) * TILE_OUTPUTS, decltype(proj)>(END_AT);
            stamp();
        }
    }
};

}  // namespace warpline
