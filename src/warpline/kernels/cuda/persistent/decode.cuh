// Many tokens in one launch: embedding, all layers, LM head and the choice of the token, in blocks that stay.
//
// The idea: streaming the weights is the only thing that must take time, so it never stops (tape.cuh), and everything else
// is a chain of short steps whose latency is what counts. Each layer is five stages, each ends with every block posting
// what it computed and begins with every block gathering what it needs (exchange.cuh):
//   LayerNorm, QKV -> attention of a head (or a part of its context) -> out-projection and residual
//   -> LayerNorm, FC, GELU -> projection and residual
// Every output is summed by one block in one order, so a run repeats to the bit. What a stage can do before its inputs
// are there it does before it waits: weights into registers, LayerNorm's parameters, keys and values of the past.
// The residual row is float32 throughout; what is multiplied is rounded to the storage type.
// Traffic per token: every weight once, keys and values of the context once, and for each of the five exchanges of a layer
// a row to every block, through L2.
#pragma once
#include "ops/gelu.cuh"
#include "ops/matvec.cuh"
#include "ops/sample.cuh"
#include "persistent/attention.cuh"
#include "persistent/exchange.cuh"
#include "persistent/tape.cuh"

namespace warpline {

// What one block does of a token; the host fills it in, one per block.
struct BlockPlan {
    int tape, steps;  // where its tape begins and how long it is, in steps
    int first[5], units[5];  // of QKV, out-projection, FC, projection, LM head: units of TILE_OUTPUTS outputs
};

// M names the type T, the extents and the Arguments: the host generates it. Where they need a word:
//   vectors   LayerNorms and biases, layer by layer in the order of the checkpoint, then the last LayerNorm
//   k, v      [layer, row, head, slot, depth], `cache_rows` rows of `capacity` slots
//   logits    [row, vocab], where the launch is to leave them instead of choosing a token
//   patience  of a wait, in nanoseconds
//   count     of tokens, at most; tag: of the first turn
template <typename M>
class Decode {
    using T = typename M::T;
    static constexpr int ROWS = M::ROWS, WARPS = M::WARPS, THREADS = WARPS * WARP, WIDTH = M::WIDTH, INNER = M::INNER;
    static constexpr int HEADS = M::HEADS, DEPTH = WIDTH / HEADS, PER = PER_WORD<T>;
    static constexpr int TEAM = WARPS >= power_of_two_from(ROWS) ? WARPS / power_of_two_from(ROWS) : 1;  // warps to a row
    enum Stage { QKV, OUT, FC, PROJ, HEAD };
    using TileOf = TileSums<T, ROWS>;
    using Attention = PartAttention<T, DEPTH, WARPS>;

    // --- shared memory ---

    static constexpr int BIASES = (M::QKV_UNITS + M::OUT_UNITS + M::FC_UNITS + M::PROJ_UNITS) * TILE_OUTPUTS;
    static constexpr int LARGEST = WIDTH > INNER ? WIDTH : INNER;
    static constexpr int PADDED = ceil_div(LARGEST, WARPS * TileOf::INPUTS) * WARPS * TileOf::INPUTS;
    static constexpr int PITCH = ceil_div(PADDED, 64) * 64 + 32;  // neighbouring rows on different banks
    static constexpr int most(int a, int b) { return a > b ? a : b; }
    static constexpr int MOST_UNITS = most(most(M::QKV_UNITS, M::OUT_UNITS), most(M::FC_UNITS, M::PROJ_UNITS));

    struct Row {
        int length, token;              // so far, and the last of it
        int known, limit, least;        // lengths: up to which tokens are given, at which it ends, before which it may not
        int banned, key;                // the token that must not come next, and the key of its noise
        float coolness;                 // 1 / temperature; 0 for the likeliest token
        bool stops, active;             // whether the end of text ends it; whether it goes on
    };

    struct alignas(16) Desk {
        T h[ROWS * PITCH];      // what is multiplied
        float x[ROWS * WIDTH];  // the residual rows
        alignas(16) float partial[MOST_UNITS * TILE_OUTPUTS * ROWS * WARPS];
        typename Attention::Shared attention;
        T bias[M::LAYERS * BIASES];
        alignas(16) float sums[WARPS], squares[WARPS];
        BlockPlan plan;
        unsigned long long best[ROWS];
        Row rows[ROWS];
        bool goes_on;
        int splits, parts;  // of a context; of contexts, for this block to attend to
        Part part;          // the first of them
        Watchdog dog;
    };
    static constexpr int STEP_BYTES = THREADS * sizeof(Bits) + 16;  // and two barriers
    static constexpr int FITS = (M::SHARED_BYTES - static_cast<int>(sizeof(Desk))) / STEP_BYTES;
    static constexpr int RING = HAS_ASYNC_COPIES ? (FITS < 64 ? FITS : 64) : 1;
    using Ring = TapeRing<WARPS, RING>;
    using TapeOf = Tape<WARPS, RING, M::PACE>;
    static constexpr int RING_BYTES = HAS_ASYNC_COPIES ? ceil_div(sizeof(Ring), 16) * 16 : 0;
    static_assert(FITS > 8 || !HAS_ASYNC_COPIES, "too little shared memory");
    static_assert(sizeof(Desk) <= M::SHARED_BYTES, "too little shared memory");

    template <int INPUTS, int UNITS>
    using ProductOf = Product<T, INPUTS, ROWS, WARPS, UNITS>;

    // --- the words of a turn ---

    static constexpr int HEAD_WORDS = DEPTH / PER + 2;  // a head's part of the output, and twice its weight
    static constexpr int QKV_AT = 0, ATTENTION_AT = QKV_AT + ROWS * 3 * WIDTH / PER;
    static constexpr int MIDDLE_AT = ATTENTION_AT + ROWS * HEADS * M::SPLITS * HEAD_WORDS, FC_AT = MIDDLE_AT + ROWS * WIDTH;
    static constexpr int END_AT = FC_AT + ROWS * INNER / PER, TURN = END_AT + ROWS * WIDTH;
    static constexpr int CANDIDATES_AT = 2 * TURN;  // two turns, then [2][block][row][2]

   public:
    static constexpr int WORDS = CANDIDATES_AT + 2 * M::BLOCKS * ROWS * 2;

   private:
    const typename M::Arguments& a;
    Desk& desk;
    TapeOf tape;
    unsigned tag;
    Word* words;  // of this turn
    int splits, layer, stamped = 0;
    bool wrote = false;  // into the cache, in this token

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

    // LayerNorm of the rows into desk.h, which also get their place in desk.x. load(i, row, column) has two neighbours.
    template <typename Load>
    __device__ __forceinline__ void normalise(const T* gamma, const T* beta, Load load) {
        constexpr int TEAMS = WARPS / TEAM, STRIDE = TEAM * WARP, PAIRS = WIDTH / 2, EACH = ceil_div(PAIRS, STRIDE);
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

    // The residual rows that the stage before posted at `from`.
    __device__ __forceinline__ void normalise_posted(const T* gamma, const T* beta, const Word* from, unsigned its_tag) {
        normalise(gamma, beta, [&](int row, int lane, auto& v) {
            gather<WIDTH / 2, TEAM * WARP>(from + row * WIDTH, lane, its_tag, desk.dog, [&](int i, int, const Pair& pair) {
                v[i][0] = __uint_as_float(pair.payload(0));
                v[i][1] = __uint_as_float(pair.payload(1));
            });
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
                post(words + at + row * WIDTH + output + j, __float_as_uint(value[j] + desk.x[row * WIDTH + output + j]), tag);
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

    // Where the part's keys are in the cache, and its values.
    __device__ __forceinline__ long long place_of(const Part& part) const {
        return ((static_cast<long long>(layer) * a.cache_rows + part.row) * HEADS + part.head) * a.capacity * DEPTH;
    }

    // Starts what can be done before the query is there.
    __device__ __forceinline__ void begin_attention() {
        if (desk.parts == 0) return;
        const long long place = place_of(desk.part);
        Attention::begin(desk.attention, a.k + place, a.v + place, desk.part);
    }

    __device__ __forceinline__ void attention() {
        for (int i = 0; i < desk.parts; ++i) {
            const Part part = i == 0 ? desk.part : part_of(blockIdx.x + i * M::BLOCKS);
            const long long place = place_of(part);
            if (i > 0) {
                sync_threads<THREADS>();
                Attention::begin(desk.attention, a.k + place, a.v + place, part);
            }
            const float factor = a.scale * LOG2_E * (a.scale_by_layer ? rcp_approx(layer + 1.f) : 1.f);
            const Word* posted = words + QKV_AT + (part.row * 3 * WIDTH + part.head * DEPTH) / PER;
            wrote |= Attention::run(desk.attention, a.k + place, a.v + place, part, factor, posted, WIDTH / PER, tag, desk.dog);
            const int thread = thread_index();
            if (thread < DEPTH / PER) {
                float value[PER];
                const unsigned weight = __float_as_uint(Attention::template merge<PER>(desk.attention, thread * PER, value));
                Word* target = words + ATTENTION_AT + ((part.row * HEADS + part.head) * M::SPLITS + part.split) * HEAD_WORDS;
                post(target + thread, packed(value), tag);
                if (thread < 2) post(target + DEPTH / PER + thread, weight, tag);
            }
        }
    }

    // The heads' outputs into desk.h, parts of a context merged in order.
    __device__ __forceinline__ void gather_attention() {
        constexpr int PAIRS = WIDTH / (2 * PER), AT_ONCE = 2;
        const int thread = thread_index();
        for (int first = thread - thread % WARP; first < ROWS * PAIRS; first += THREADS) {  // whole warps
            const int i = min(first + thread % WARP, ROWS * PAIRS - 1), row = i / PAIRS, column = i % PAIRS * (2 * PER), head = column / DEPTH;
            const Word* from = words + ATTENTION_AT + (row * HEADS + head) * M::SPLITS * HEAD_WORDS;
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

    __device__ __forceinline__ void gather_hidden() {
        constexpr int PAIRS = INNER / (2 * PER);
        gather<ROWS * PAIRS, THREADS>(words + FC_AT, thread_index(), tag, desk.dog, [&](int, int at, const Pair& pair) {
            const Vec<unsigned, 2> bits = {pair.payload(0), pair.payload(1)};
            *reinterpret_cast<Vec<unsigned, 2>*>(desk.h + at / PAIRS * PITCH + at % PAIRS * (2 * PER)) = bits;
        });
        sync_threads<THREADS>();
    }

    // Everything behind LayerNorm 1 of a layer, up to the posting of its residual rows.
    template <typename First>
    __device__ __forceinline__ void run_layer(First first_rows) {
        {
            begin_attention();
            ProductOf<WIDTH, M::QKV_UNITS> qkv;
            qkv.begin(tape, desk.plan.units[QKV]);
            first_rows();
            stamp();
            qkv.finish(tape, desk.h, PITCH, desk.partial);
            outputs<QKV, 0, decltype(qkv)>([&](int output, int row, float (&value)[PER]) {
                post(words + QKV_AT + (row * 3 * WIDTH + output) / PER, packed(value), tag);
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
            fc.begin(tape, desk.plan.units[FC]);
            normalise_posted(vectors(6 * WIDTH), vectors(7 * WIDTH), words + MIDDLE_AT, tag);
            stamp();
            fc.finish(tape, desk.h, PITCH, desk.partial);
            outputs<FC, (M::QKV_UNITS + M::OUT_UNITS) * TILE_OUTPUTS, decltype(fc)>([&](int output, int row, float (&value)[PER]) {
#pragma unroll
                for (int j = 0; j < PER; ++j) value[j] = gelu_of<false>(value[j]);
                post(words + FC_AT + (row * INNER + output) / PER, packed(value), tag);
            });
            stamp();
        }
        {
            ProductOf<INNER, M::PROJ_UNITS> proj;
            proj.begin(tape, desk.plan.units[PROJ]);
            gather_hidden();
            stamp();
            proj.finish(tape, desk.h, PITCH, desk.partial);
            post_residual<PROJ, (M::QKV_UNITS + M::OUT_UNITS + M::FC_UNITS) * TILE_OUTPUTS, decltype(proj)>(END_AT);
            stamp();
        }
    }

    // The LM head: whole units to a warp. f(output, row, sum, which of the lane's results).
    template <typename F>
    __device__ __forceinline__ void head(F f) {
        constexpr int TILES = ceil_div(WIDTH, TileOf::INPUTS), AT_ONCE = TILES < 8 ? TILES : 8;
        const int warp = thread_index() / WARP;
        const T* x = TileOf::lane_of(thread_index(), desk.h, PITCH);
        for (int unit = warp; unit - warp < desk.plan.units[HEAD]; unit += WARPS) {
            TileOf sums;
            for (int tile = 0; tile < TILES; tile += AT_ONCE) {
                Bits held[AT_ONCE];
                tape.take(held, TILES - tile);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    if (TILES % AT_ONCE == 0 || tile + i < TILES) sums.add(held[i], TileOf::load(x + (tile + i) * TileOf::INPUTS, PITCH));
                }
            }
            float result[TileOf::RESULTS];
            sums.finish(result);
            TileOf::results(thread_index(), [&](int i, int relative, int row) {
                const int output = (desk.plan.first[HEAD] + unit) * TILE_OUTPUTS + relative;
                if (unit < desk.plan.units[HEAD] && output < M::VOCAB) f(output, row, result[i], i);
            });
        }
    }

    // All blocks learn each row's best candidate.
    __device__ __forceinline__ void agree(int turn) {
        Word* candidates = a.words + CANDIDATES_AT + turn % 2 * (M::BLOCKS * ROWS * 2);
        sync_threads<THREADS>();
        if (thread_index() < ROWS) {
            const unsigned long long best = desk.best[thread_index()];
            Word* own = candidates + (blockIdx.x * ROWS + thread_index()) * 2;
            post(own, static_cast<unsigned>(best), tag);
            post(own + 1, static_cast<unsigned>(best >> 32), tag);
        }
        sync_threads<THREADS>();
        // Candidates of a row are ROWS apart, and so are the threads that get them.
        static_assert(WARP % ROWS == 0);
        unsigned long long best = 0;
        const int thread = thread_index();
        gather<M::BLOCKS * ROWS, THREADS>(candidates, thread, tag, desk.dog, [&](int, int, const Pair& pair) {
            best = max(best, static_cast<unsigned long long>(pair.payload(1)) << 32 | pair.payload(0));
        });
#pragma unroll
        for (int other = WARP / 2; other >= ROWS; other /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, other));
        if (thread % WARP < ROWS) atomicMax(desk.best + thread % ROWS, best);
        sync_threads<THREADS>();
    }

    // What stays as it is for the whole launch.
    __device__ __forceinline__ void look_up_rows() {
        const int row = thread_index();
        if (row < ROWS) {
            Row& r = desk.rows[row];
            r = {};
            if (row < a.batch) {
                r.length = static_cast<int>(a.length[row]);
                r.token = static_cast<int>(a.tokens[row * a.capacity + r.length - 1]);
                r.known = static_cast<int>(a.known[row]);
                r.limit = static_cast<int>(a.limit[row]);
                r.least = static_cast<int>(a.min_length[row]);
                r.stops = a.stops_at_eos[row];
                r.active = !a.done[row];
                r.coolness = a.temperature[row] > 0.f ? 1.f / a.temperature[row] : 0.f;
            }
        }
        sync_threads<THREADS>();
    }

    // What follows from the rows' lengths; every block comes to the same.
    __device__ __forceinline__ void prepare_token() {
        const int thread = thread_index();
        if (thread < ROWS) {
            Row& r = desk.rows[thread];
            r.banned = r.stops && r.length < r.least ? a.eos : -1;
            r.key = r.coolness > 0.f ? a.noise[thread * a.capacity + min(r.length, a.capacity - 1)] : 0;
            desk.best[thread] = 0;
        }
        if (thread == WARP) {
            int longest = 1;
            bool active = false;
            for (int i = 0; i < ROWS; ++i) {
                longest = max(longest, desk.rows[i].length);
                active |= desk.rows[i].active;
            }
            if (a.window > 0) longest = min(longest, a.window);
            desk.goes_on = active && !desk.dog.dead;
            desk.splits = splits = min(max(1, M::BLOCKS / (ROWS * HEADS)), min(M::SPLITS, ceil_div(longest, M::SPAN)));
            desk.parts = ceil_div(max(0, ROWS * HEADS * splits - static_cast<int>(blockIdx.x)), M::BLOCKS);
            if (desk.parts > 0) desk.part = part_of(blockIdx.x);
        }
        sync_threads<THREADS>();
        splits = desk.splits;
    }

    // The tokens that were agreed on; block 0 tells the host.
    __device__ __forceinline__ void append() {
        const int row = thread_index();
        if (row < ROWS && desk.rows[row].active) {
            Row& r = desk.rows[row];
            const unsigned long long best = desk.best[row];
            r.token = min(static_cast<unsigned>(output_of(best)), static_cast<unsigned>(M::VOCAB - 1));
            if (r.length < r.known) r.token = static_cast<int>(a.tokens[row * a.capacity + r.length]);
            r.length += 1;
            r.active = !(r.token == a.eos && r.stops) && r.length < r.limit;
            if (blockIdx.x == 0) {
                a.tokens[row * a.capacity + r.length - 1] = r.token;
                a.length[row] = r.length;
                if (!r.active) a.done[row] = true;
                if (!isfinite(value_of(best))) a.broken[row] = true;
            }
        }
        sync_threads<THREADS>();
    }

   public:
    __device__ __forceinline__ Decode(const typename M::Arguments& arguments, Desk& desk, Ring& ring)
        : a(arguments),
          desk(desk),
          tape(arguments.tape + static_cast<long long>(desk.plan.tape) * THREADS, desk.plan.steps, ring),
          tag(arguments.tag) {}

    __device__ __forceinline__ void run() {
        constexpr int UNITS[4] = {M::QKV_UNITS, M::OUT_UNITS, M::FC_UNITS, M::PROJ_UNITS};
        constexpr int AT[4] = {2 * WIDTH, 5 * WIDTH, 8 * WIDTH, 8 * WIDTH + INNER}, OUTPUTS[4] = {3 * WIDTH, WIDTH, INNER, WIDTH};
        for (layer = 0; layer < M::LAYERS; ++layer) {
            int base = layer * BIASES;
#pragma unroll
            for (int stage = 0; stage < 4; ++stage) {
                for (int i = thread_index(); i < desk.plan.units[stage] * TILE_OUTPUTS; i += THREADS) {
                    const int output = desk.plan.first[stage] * TILE_OUTPUTS + i;
                    desk.bias[base + i] = output < OUTPUTS[stage] ? vectors(AT[stage])[output] : from_float<T>(0.f);
                }
                base += UNITS[stage] * TILE_OUTPUTS;
            }
        }
        look_up_rows();
        for (int token = 0; token < a.count; ++token) {
            prepare_token();
            if (!desk.goes_on) break;
            one_token(token);
        }
        if (thread_index() == 0) desk.dog.stopped = true;
        tape.stop();
    }

   private:
    __device__ __forceinline__ void one_token(int token) {
        const Word* before = nullptr;  // where the layer before posted its rows
        for (layer = 0; layer < M::LAYERS; ++layer, ++tag) {
            words = a.words + tag % 2 * TURN;
            if (thread_index() == 0) desk.dog.turn = tag;
            run_layer([&] {
                const T *gamma = vectors(0), *beta = vectors(WIDTH);
                if (layer > 0) {
                    normalise_posted(gamma, beta, before, tag - 1);
                } else {
                    normalise(gamma, beta, [&](int row, int lane, auto& v) { embed(row, lane, v); });
                }
            });
            before = words + END_AT;
        }
        layer = M::LAYERS;
        normalise_posted(vectors(0), vectors(WIDTH), before, tag - 1);
        stamp();
        if (wrote) __threadfence();  // in the cache before the next token, and while there is time
        wrote = false;
        if constexpr (M::LOGITS) {
            head([&](int output, int row, float value, int) {
                if (row < a.batch) a.logits[static_cast<long long>(row) * M::VOCAB + output] = value;
            });
        } else {
            unsigned long long mine[TileOf::RESULTS] = {};
            head([&](int output, int row, float value, int i) {
                const Row& r = desk.rows[row];
                if (output == r.banned) return;
                if (r.coolness > 0.f) value = value * r.coolness + gumbel_noise(r.key, output);
                mine[i] = max(mine[i], candidate(value, output));
            });
            TileOf::results(thread_index(), [&](int i, int, int row) { atomicMax(desk.best + row, mine[i]); });
            stamp();
            agree(token);
            ++tag;
            append();
        }
        stamp();
    }

    // Token and position embedding of a row, as far as a lane of its team has it.
    template <typename V>
    __device__ __forceinline__ void embed(int row, int lane, V& v) {
        constexpr int STRIDE = TEAM * WARP, PAIRS = WIDTH / 2;
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

   public:
    static __device__ __forceinline__ void launch(const typename M::Arguments& arguments) {
        unsigned char* memory = dynamic_shared<unsigned char>();
        Ring& ring = *reinterpret_cast<Ring*>(memory);
        Desk& desk = *reinterpret_cast<Desk*>(memory + RING_BYTES);
        for (int i = thread_index(); i < ROWS * PITCH; i += THREADS) desk.h[i] = from_float<T>(0.f);
        if (thread_index() == 0) {
            desk.dog.prepare();
            desk.plan = arguments.plans[blockIdx.x];
        }
        TapeOf::prepare(ring);
        __syncthreads();
        if (thread_index() < THREADS) {
            Decode(arguments, desk, ring).run();
        } else if (thread_index() == THREADS) {
            Watch watch(desk.dog, arguments.fault, arguments.patience);
            const BlockPlan& plan = desk.plan;
            const int rounds = ceil_div(plan.units[HEAD], WARPS), tiles = ceil_div(WIDTH, TileOf::INPUTS);
            TapeOf::feed(arguments.tape + static_cast<long long>(plan.tape) * THREADS, plan.steps, rounds * tiles,
                         HAS_BULK_COPIES ? arguments.count : 0, ring, watch);
            while (!watch.look()) __nanosleep(200);
        }
    }
};

}  // namespace warpline
