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
    using Place::DEPTH, Place::PER, Place::TEAM, Place::BIASES, Place::PITCH, Place::HEAD_WORDS;
    using Place::QKV_AT, Place::ATTENTION_AT, Place::MIDDLE_AT, Place::FC_AT, Place::END_AT, Place::TURN;
    using typename Place::T, typename Place::TileOf, typename Place::Attention, typename Place::Desk, typename Place::Ring, typename Place::TapeOf;
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

    // A row belongs to a team of warps, and of a row every lane of the team has some pairs of neighbours.
    static constexpr int TEAMS = WARPS / TEAM, STRIDE = TEAM * WARP, PAIRS = WIDTH / 2, EACH = ceil_div(PAIRS, STRIDE);
    using RowGather = Gather<PAIRS, STRIDE>;

    // The residual rows as the stage before posted them: this team's first.
    __device__ __forceinline__ RowGather ask_for_rows(const Word* from) const {
        const int thread = thread_index();
        return RowGather(from + min(thread / STRIDE, ROWS - 1) * WIDTH, thread % STRIDE);
    }

    // LayerNorm of the rows into desk.h, which also get their place in desk.x. load(row, lane, v) has a lane's pairs.
    template <typename Load>
    __device__ __forceinline__ void normalise(const T* gamma, const T* beta, Load load) {
        const int team = thread_index() / STRIDE, lane = thread_index() % STRIDE;
        Vec<T, 2> scale[EACH], shift[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (lane + i * STRIDE >= PAIRS) continue;
            scale[i] = load_pair(gamma, lane + i * STRIDE);
            shift[i] = load_pair(beta, lane + i * STRIDE);
        }
#pragma unroll
        for (int first = 0; first < ROWS; first += TEAMS) {
            const int row = first + team;
            float v[EACH][2], sum = 0.f, squares = 0.f;
            if (row < ROWS && team < TEAMS) {
                load(row, lane, v);
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    if (lane + i * STRIDE >= PAIRS) continue;
                    sum += v[i][0] + v[i][1];
                    squares += v[i][0] * v[i][0] + v[i][1] * v[i][1];
                    *reinterpret_cast<Vec<float, 2>*>(desk.x + row * WIDTH + 2 * (lane + i * STRIDE)) = {v[i][0], v[i][1]};
                }
            }
            const auto add = [](float p, float q) { return p + q; };
            sum = warp_reduce(sum, add);
            squares = warp_reduce(squares, add);
            if constexpr (TEAM > 1) {
                if (thread_index() % WARP == 0) {
                    desk.sums[thread_index() / WARP] = sum;
                    desk.squares[thread_index() / WARP] = squares;
                }
                sync_threads<THREADS>();
                sum = sum_of<TEAM>(desk.sums + min(team, TEAMS - 1) * TEAM);
                squares = sum_of<TEAM>(desk.squares + min(team, TEAMS - 1) * TEAM);
                if (first + TEAMS < ROWS) sync_threads<THREADS>();
            }
            if (row >= ROWS || team >= TEAMS) continue;
            const float mean = sum * (1.f / WIDTH);
            const float inverse = rsqrt_approx(fmaxf(squares * (1.f / WIDTH) - mean * mean, 0.f) + a.epsilon);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (lane + i * STRIDE >= PAIRS) continue;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    v[i][j] = (v[i][j] - mean) * inverse * to_float(scale[i].at[j]) + to_float(shift[i].at[j]);
                }
                *reinterpret_cast<Vec<T, 2>*>(desk.h + row * PITCH + 2 * (lane + i * STRIDE)) = {from_float<T>(v[i][0]), from_float<T>(v[i][1])};
            }
        }
        sync_threads<THREADS>();
    }

    __device__ __forceinline__ void normalise(const T* gamma, const T* beta, const Word* from, unsigned its_tag, RowGather& asked) {
        normalise(gamma, beta, [&](int row, int lane, auto& v) {
            const auto take = [&](int i, int, const Pair& pair) {
                v[i][0] = __uint_as_float(pair.payload(0));
                v[i][1] = __uint_as_float(pair.payload(1));
            };
            if (row < TEAMS) asked.finish(its_tag, desk.dog, take);
            else RowGather(from + row * WIDTH, lane).finish(its_tag, desk.dog, take);
        });
    }

    __device__ __forceinline__ const T* vectors(int which) const { return a.vectors + (static_cast<long long>(layer) * (9 * WIDTH + INNER) + which); }

    // A stage's outputs, with bias, PER to a thread: f(output, row, values).
    template <Stage STAGE, int BIAS_AT, typename P, typename F>
    __device__ __forceinline__ void outputs(F f) {
        P::template each<PER>(desk.plan.units[STAGE], desk.partial, [&](int output, int row, float (&value)[PER]) {
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
            Attention::run(desk.attention, a.k + place(), a.v + place(), part, factor, posted, WIDTH / PER, tag, desk.dog);
            const int thread = thread_index();
            if (thread < DEPTH / PER) {
                float value[PER];
                const unsigned weight = __float_as_uint(Attention::template merge<PER>(desk.attention, thread * PER, value));
                Word* target = words() + ATTENTION_AT + ((part.row * HEADS + part.head) * M::SPLITS + part.split) * HEAD_WORDS;
                post(target + thread, packed(value), tag);
                if (thread < 2) post(target + DEPTH / PER + thread, weight, tag);
            }
        }
        if (parts > 1) change_part(0);  // for the next layer
    }

    __device__ __forceinline__ void change_part(int i) {
        sync_threads<THREADS>();  // nobody needs the last one any more
        if (thread_index() == 0) set_part(i);
        sync_threads<THREADS>();
        if (i > 0) begin_attention();
    }

    // The heads' outputs into desk.h, parts of a context merged in order.
    __device__ __forceinline__ void gather_attention() {
        constexpr int PAIRS = WIDTH / (2 * PER), AT_ONCE = ROWS > 2 ? 1 : 2;  // sixteen bytes of words each
        const int thread = thread_index();
        for (int first = thread - thread % WARP; first < ROWS * PAIRS; first += THREADS) {  // whole warps
            const int i = min(first + thread % WARP, ROWS * PAIRS - 1), row = i / PAIRS, column = i % PAIRS * (2 * PER), head = column / DEPTH;
            const Word* from = words() + ATTENTION_AT + (row * HEADS + head) * M::SPLITS * HEAD_WORDS;
            const int at = column % DEPTH / PER;
            Vec<unsigned, 2> result;
            if (splits == 1) {
                Pair pair;
                pair.load(from + at);
                await(pair, from + at, tag, desk.dog);
                result = {pair.payload(0), pair.payload(1)};
            } else {
                float heaviest = LOWEST, total = 0.f, sum[2 * PER] = {};
#pragma unroll 1
                for (int split = 0; split < splits; split += AT_ONCE) {
                    Pair part[AT_ONCE], weights[AT_ONCE];
#pragma unroll
                    for (int s = 0; s < AT_ONCE; ++s) {
                        if (split + s >= splits) continue;
                        part[s].load(from + (split + s) * HEAD_WORDS + at);
                        weights[s].load(from + (split + s) * HEAD_WORDS + DEPTH / PER);
                    }
#pragma unroll
                    for (int s = 0; s < AT_ONCE; ++s) {
                        if (split + s >= splits) continue;
                        await(part[s], from + (split + s) * HEAD_WORDS + at, tag, desk.dog);
                        await(weights[s], from + (split + s) * HEAD_WORDS + DEPTH / PER, tag, desk.dog);
                        const float weight = __uint_as_float(weights[s].payload(0)), before = heaviest;
                        heaviest = fmaxf(heaviest, weight);
                        const float rescale = exp2_approx(before - heaviest), share = exp2_approx(weight - heaviest);
                        total = total * rescale + share;
                        const Vec<unsigned, 2> bits = {part[s].payload(0), part[s].payload(1)};
                        const auto& value = reinterpret_cast<const Vec<T, 2 * PER>&>(bits);
#pragma unroll
                        for (int j = 0; j < 2 * PER; ++j) sum[j] = sum[j] * rescale + share * to_float(value.at[j]);
                    }
                }
                const float inverse = rcp_approx(total);
                Vec<T, 2 * PER> value;
#pragma unroll
                for (int j = 0; j < 2 * PER; ++j) value.at[j] = from_float<T>(sum[j] * inverse);
                result = reinterpret_cast<const Vec<unsigned, 2>&>(value);
            }
            *reinterpret_cast<Vec<unsigned, 2>*>(desk.h + row * PITCH + column) = result;
        }
        sync_threads<THREADS>();
    }

    static constexpr int HIDDEN_PAIRS = INNER / (2 * PER);
    using HiddenGather = Gather<ROWS * HIDDEN_PAIRS, THREADS>;

    __device__ __forceinline__ void gather_hidden(HiddenGather& asked) {
        asked.finish(tag, desk.dog, [&](int, int at, const Pair& pair) {
            const Vec<unsigned, 2> bits = {pair.payload(0), pair.payload(1)};
            *reinterpret_cast<Vec<unsigned, 2>*>(desk.h + at / HIDDEN_PAIRS * PITCH + at % HIDDEN_PAIRS * (2 * PER)) = bits;
        });
        sync_threads<THREADS>();
    }

    // Token and position embedding of a row, as far as a lane of its team has it.
    template <typename V>
    __device__ __forceinline__ void embed(int row, int lane, V& v) {
        const auto* token = reinterpret_cast<const Vec<T, 2>*>(a.wte + static_cast<long long>(desk.rows[row].token) * WIDTH);
        const auto* place = reinterpret_cast<const Vec<T, 2>*>(a.wpe + static_cast<long long>(max(desk.rows[row].length - 1, 0)) * WIDTH);
#pragma unroll
        for (int i = 0; i < ceil_div(PAIRS, STRIDE); ++i) {
            if (lane + i * STRIDE >= PAIRS) continue;
            const Vec<T, 2> t = token[lane + i * STRIDE], p = place[lane + i * STRIDE];
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
                RowGather rows = ask_for_rows(words_before() + END_AT);
                begin_attention();
                qkv.begin(tape, desk.plan.units[QKV]);
                normalise(gamma, beta, words_before() + END_AT, tag - 1, rows);
            } else {
                begin_attention();
                qkv.begin(tape, desk.plan.units[QKV]);
                normalise(gamma, beta, [&](int row, int lane, auto& v) { embed(row, lane, v); });
            }
            stamp();
            qkv.finish(tape, desk.h, PITCH, desk.partial);
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
            out.finish(tape, desk.h, PITCH, desk.partial);
            post_residual<OUT, M::QKV_UNITS * TILE_OUTPUTS, decltype(out)>(MIDDLE_AT);
            stamp();
        }
        {
            ProductOf<WIDTH, M::FC_UNITS> fc;
            RowGather rows = ask_for_rows(words() + MIDDLE_AT);
            fc.begin(tape, desk.plan.units[FC]);
            normalise(vectors(6 * WIDTH), vectors(7 * WIDTH), words() + MIDDLE_AT, tag, rows);
            stamp();
            fc.finish(tape, desk.h, PITCH, desk.partial);
            outputs<FC, (M::QKV_UNITS + M::OUT_UNITS) * TILE_OUTPUTS, decltype(fc)>([&](int output, int row, float (&value)[PER]) {
#pragma unroll
                for (int j = 0; j < PER; ++j) value[j] = gelu_of<false>(value[j]);
                post(words() + FC_AT + (row * INNER + output) / PER, packed(value), tag);
            });
            stamp();
        }
        {
            ProductOf<INNER, M::PROJ_UNITS> proj;
            HiddenGather hidden(words() + FC_AT, thread_index());
            proj.begin(tape, desk.plan.units[PROJ]);
            gather_hidden(hidden);
            stamp();
            proj.finish(tape, desk.h, PITCH, desk.partial);
            post_residual<PROJ, (M::QKV_UNITS + M::OUT_UNITS + M::FC_UNITS) * TILE_OUTPUTS, decltype(proj)>(END_AT);
            stamp();
        }
    }
};

}  // namespace warpline
