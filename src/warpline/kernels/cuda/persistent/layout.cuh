// What the persistent decode kernel keeps where: a block's shared in shared memory, and the words of a turn in global memory.
#pragma once
#include "ops/matvec.cuh"
#include "persistent/attention.cuh"
#include "persistent/exchange.cuh"
#include "persistent/product.cuh"
#include "screen.cuh"

namespace warpline {

// What one block does of a token; the host fills it in, one per block.
struct BlockPlan {
    int tape, layers, head, codes;  // where its tape begins, in steps; steps of all layers, of the LM head, and of its codes
    int first[5], units[5];         // of QKV, out-projection, FC, projection: units of TILE_OUTPUTS outputs; of the LM head CODE_OUTPUTS

    // What a token takes of it: the LM head, or the codes.
    __device__ __forceinline__ TapeRange range(bool screened) const {
        return {tape, layers + head + codes, layers + (screened ? 0 : head), screened ? head : codes};
    }
};

// M names the type T, the extents and the Arguments: the host generates it. Where they need a word:
//   vectors   of each layer, in the order of M::LN_1_WEIGHT and its like; then ln_f
//   lines     slope and level (see stages.cuh) of each layer's outputs of QKV and of FC; and the scale, where weights are codes (CODED)
//   scales    of each layer's outputs of the out-projection and of the projection, where weights are codes
//   lanes     the slot of each of the `batch` rows; what is known of a sequence, from its tokens on, stands there
//   head      [vocab, width]: the LM head, for logits that codes do not decide (head.cuh)
//   k, v      [layer, slot, head, position, depth], slots of `capacity` positions, `layer_stride` elements to a layer
//   logits    [row, LOGITS_PITCH], where the launch is to leave them, instead of choosing a token or (FILTERS) as well
//   patience  of a wait, in nanoseconds
//   count     of tokens, at most; tag: of the first turn
template <typename M>
struct Layout {
    using T = typename M::T;
    static constexpr int ROWS = M::ROWS, WARPS = M::WARPS, THREADS = WARPS * WARP, WIDTH = M::WIDTH, INNER = M::INNER;
    static constexpr int HEADS = M::HEADS, DEPTH = WIDTH / HEADS, PER = PER_WORD<T>;
    using TileOf = TileSums<T, ROWS>;
    using Attention = PartAttention<T, DEPTH, WARPS>;

    // --- shared memory ---

    static constexpr int BIASES = (M::OUT_UNITS + M::PROJ_UNITS) * TILE_OUTPUTS;  // of a layer
    static constexpr int SLAB = SLAB_OF<T, WIDTH, WARPS, M::CODED>, INNER_SLAB = SLAB_OF<T, INNER, WARPS, M::CODED>;
    static constexpr int most(int a, int b) { return a > b ? a : b; }
    static constexpr int least(int a, int b) { return a < b ? a : b; }
    static constexpr int PITCH = ceil_div(WARPS * most(SLAB, INNER_SLAB), 64) * 64 + 32;  // neighbouring rows on different banks
    static constexpr int SUMS = TILE_OUTPUTS * ROWS * WARPS;  // of a unit

    // Filters: outputs of the LM head that are this block's, words of a bit for each, and how many digits a search has.
    static constexpr int SCORES = M::HEAD_UNITS * CODE_OUTPUTS, SEEN = ceil_div(SCORES, 32), DIGITS = ROWS > 2 ? 8 : 32;

    // Whether the block that attends to a part of a context attends to all its parts in turn: where there are no blocks for
    // more. If not INVARIANT they have one part then.
    static constexpr bool WHOLE_CONTEXTS = M::INVARIANT && 2 * ROWS * HEADS > M::BLOCKS;
    // Whether blocks may hand each other parts of a context, to be merged.
    static constexpr bool MERGES = !WHOLE_CONTEXTS && M::PARTS > 1 && (M::INVARIANT || 2 * ROWS * HEADS <= M::BLOCKS);

    // The screened LM head: bytes of a row's upper or lower half, neighbours on different banks, and steps of a unit's tape.
    static constexpr int BYTES_PITCH = ceil_div(WIDTH, 128) * 128 + 32, CODE_STEPS = ceil_div(WIDTH, CODE_INPUTS) + 1;

    // What warps that share a unit of the LM head leave for each other; it may lie where attention was, which is over by then.
    static constexpr int HANDOVER_EACH = M::SCREENED ? (M::CODE_PARTS > 1 ? 4 * ceil_div(ROWS, 4) : 0) : (M::HEAD_PARTS > 1 ? TileOf::SUMS : 0);
    static constexpr int HANDOVER = THREADS * HANDOVER_EACH;
    static constexpr bool BORROWS = HANDOVER * 4 <= static_cast<int>(sizeof(typename Attention::Shared));

    struct Row {
        int slot;                       // of the state and of the cache
        int length, token;              // so far, and the last of it
        int known, limit, min_length;   // lengths: up to which tokens are given, at which it ends, before which it may not
        int banned, key;                // the token that must not come next, and the key of its noise
        float inverse_temperature;      // 1 / temperature; 0 for the likeliest token
        float top_p, log_min_p, penalty;  // of repetition
        float presence, frequency;      // by which a token is lowered that the text has got: once, and each time
        int top_k;
        float largest;                  // of its scores
        unsigned cutoff, top_k_cutoff, distance;  // below it: which distance is too far, was so for top-k, and that of the candidate
        unsigned prefix;                // of the search for the k-th: its first digits, the bits behind them,
        int shift, wanted;              // and how many scores it still wants
        bool stops_at_eos, active, not_finite;  // whether the end of text ends it; whether it goes on; whether a score is no number
        bool searched, drawn;           // whether the search goes on; whether it has its token
        bool biased;                    // whether anything is added to its logits
    };

    struct alignas(16) BlockShared {
        T h[ROWS * PITCH];      // what is multiplied: a warp writes and reads its own columns, except for the LM head
        float x[ROWS * WIDTH];  // the residual rows
        alignas(16) float partial[most(M::QKV_UNITS, M::FC_UNITS) * SUMS];       // stages take turns, so that one
        alignas(16) float other_partial[most(M::OUT_UNITS, M::PROJ_UNITS) * SUMS];  // may begin while the last is read
        alignas(16) float sums[2 * ROWS][WARPS];  // of the rows' columns and of their squares
        float row_scale[2][ROWS];                      // what rows are multiplied by, before QKV and before FC
        typename Attention::Shared attention;
        int handover[BORROWS ? 1 : HANDOVER];
        alignas(16) T bias[M::LAYERS * BIASES];
        float scale[M::CODED ? M::LAYERS * BIASES : 1];  // of the same outputs
        BlockPlan plan;
        unsigned long long best[ROWS][WARPS];  // candidates, the best that each warp knows
        alignas(16) signed char bytes[M::SCREENED ? 2 * ROWS * BYTES_PITCH : 1];
        alignas(16) float squares[ROWS][WARPS];  // of the rows' columns
        ScreenedRow screened[ROWS];
        unsigned upper_bound[M::SCREENED ? ROWS * SCORES : 1];  // what each output's candidate may be at most, without the output
        unsigned short possible[M::SCREENED ? SCORES : 1];  // outputs that can be the best of a row,
        int found;                                          // and how many
        float scores[M::FILTERS ? ROWS * SCORES : 1];
        unsigned seen[M::FILTERS ? ROWS * SEEN : 1];
        int counts[M::FILTERS ? ROWS * DIGITS : 1];
        Row rows[ROWS];
        bool goes_on;
        int splits, parts;  // of the longest context; of contexts, for this block to attend to
        Part part;          // the one it is at, and its place in the cache of the first layer
        long long place;
        Watchdog watchdog;
    };
    static constexpr int STEP_BYTES = THREADS * sizeof(Bits) + 16;  // and two barriers
    static constexpr int FITS = (M::SHARED_BYTES - static_cast<int>(sizeof(BlockShared))) / STEP_BYTES;
    static constexpr int RING = HAS_ASYNC_COPIES ? (FITS < 64 ? FITS : 64) : 1;
    using Ring = TapeRing<WARPS, RING>;
    using TapeOf = Tape<WARPS, RING>;
    template <int INPUTS, int UNITS>
    using ProductOf = Product<T, INPUTS, ROWS, WARPS, UNITS, RING, M::CODED>;
    static constexpr int RING_BYTES = HAS_ASYNC_COPIES ? ceil_div(sizeof(Ring), 16) * 16 : 0;
    static_assert(FITS > MOST_TAKEN || !HAS_ASYNC_COPIES, "too little shared memory");
    static_assert(sizeof(BlockShared) <= M::SHARED_BYTES, "too little shared memory");

    // --- the words of a turn ---

    static constexpr int HEAD_WORDS = DEPTH / PER + 2;  // a head's part of the output, and twice its weight
    static constexpr int QKV_AT = 0, ATTENTION_AT = QKV_AT + ROWS * 3 * WIDTH / PER;
    static constexpr int MIDDLE_AT = ATTENTION_AT + ROWS * HEADS * M::PARTS * HEAD_WORDS, FC_AT = MIDDLE_AT + ROWS * WIDTH;
    static constexpr int END_AT = FC_AT + ROWS * INNER / PER, TURN = END_AT + ROWS * WIDTH;
    static constexpr int CANDIDATE = M::FILTERS ? 4 : 2;
    static constexpr int CANDIDATES_AT = (M::OBSERVED ? M::LAYERS : 2) * TURN;  // as many turns as are kept, then [2][block][row][CANDIDATE]
    static constexpr int SUMS_AT = CANDIDATES_AT + 2 * M::BLOCKS * ROWS * CANDIDATE;  // [block][row][2]
    static constexpr int DIGITS_AT = SUMS_AT + M::BLOCKS * ROWS * 2;                  // [2][block][row][digit]
    static constexpr int WORDS = M::FILTERS ? DIGITS_AT + 2 * M::BLOCKS * ROWS * DIGITS : SUMS_AT;
};

}  // namespace warpline
