// The memory of the persistent decode kernel: what a block keeps in shared memory, and the exchange words in global memory.
#pragma once
#include "ops/matvec.cuh"
#include "persistent/attention.cuh"
#include "persistent/exchange.cuh"
#include "persistent/product.cuh"
#include "screen.cuh"

namespace warpline {

// The work of one block per token. The host fills in one plan per block.
struct BlockPlan {
    int tape, layers, head, codes;  // start of the tape, in steps; steps of all layers, of the LM head, of its codes
    // First unit and number of units of QKV, out-projection, FC and projection (TILE_OUTPUTS outputs each) and of the LM head
    // (CODE_OUTPUTS each).
    int first[5], units[5];

    // The steps of the tape that a token uses: those of the LM head or those of its codes are left out.
    __device__ __forceinline__ TapeRange range(bool screened) const {
        return {tape, layers + head + codes, layers + (screened ? 0 : head), screened ? head : codes};
    }
};

// M names the type T, the extents and the Arguments; the host generates it. Arguments that need an explanation:
//   vectors     vectors of each layer, in the order of M::LN_1_WEIGHT and so on; behind the last layer those of ln_f
//   norm_terms  slope and level (see stages.cuh) of each layer's QKV and FC outputs, and their scale where weights are codes
//               (CODED)
//   scales      of each layer's outputs of the out-projection and of the projection, where weights are codes
//   lanes       the slot of each of the `batch` rows; the fields of a sequence, `tokens` included, are indexed by slot
//   head        [vocab, width]: the LM head, for logits that the codes do not decide (head.cuh)
//   k, v        [layer, slot, head, position, depth], slots of `capacity` positions, `layer_stride` elements per layer
//   logits      [row, LOGITS_PITCH]: written with LOGITS, instead of choosing a token or (FILTERS) in addition
//   patience    longest time without progress, in nanoseconds
//   count       most tokens of the launch; tag: tag of the first turn
template <typename M>
struct Layout {
    using T = typename M::T;
    static constexpr int ROWS = M::ROWS, WARPS = M::WARPS, THREADS = WARPS * WARP, WIDTH = M::WIDTH, INNER = M::INNER;
    static constexpr int HEADS = M::HEADS, DEPTH = WIDTH / HEADS, PER = PER_WORD<T>;
    using TileOf = TileSums<T, ROWS>;
    using Attention = PartAttention<T, DEPTH, WARPS>;

    // --- shared memory ---

    static constexpr int BIASES = (M::OUT_UNITS + M::PROJ_UNITS) * TILE_OUTPUTS;  // per layer
    static constexpr int SLAB = SLAB_OF<T, WIDTH, WARPS, M::CODED>, INNER_SLAB = SLAB_OF<T, INNER, WARPS, M::CODED>;
    static constexpr int most(int a, int b) { return a > b ? a : b; }
    static constexpr int PITCH = ceil_div(WARPS * most(SLAB, INNER_SLAB), 64) * 64 + 32;  // neighbouring rows on different banks
    static constexpr int SUMS = TILE_OUTPUTS * ROWS * WARPS;  // per unit

    // Filters: outputs of the LM head that this block owns, their words in a bit mask, and the digits of a top-k search.
    static constexpr int SCORES = M::HEAD_UNITS * CODE_OUTPUTS, SEEN = ceil_div(SCORES, 32), DIGITS = ROWS > 2 ? 8 : 32;

    // Whether one block attends to all parts of a context in turn, which is so where there are too few blocks to give each part
    // its own. Without INVARIANT such a context has a single part.
    static constexpr bool WHOLE_CONTEXTS = M::INVARIANT && 2 * ROWS * HEADS > M::BLOCKS;
    // Whether the parts of a context may be computed by different blocks and merged from exchange words.
    static constexpr bool MERGES = !WHOLE_CONTEXTS && M::PARTS > 1 && (M::INVARIANT || 2 * ROWS * HEADS <= M::BLOCKS);

    // The screened LM head: pitch of a row's upper or lower bytes (neighbours on different banks), and tape steps per unit.
    static constexpr int BYTES_PITCH = ceil_div(WIDTH, 128) * 128 + 32, CODE_STEPS = ceil_div(WIDTH, CODE_INPUTS) + 1;

    // Partial sums of warps that share a unit of the LM head. They may reuse the memory of attention, which has ended by then.
    static constexpr int HANDOVER_EACH = M::SCREENED ? (M::CODE_PARTS > 1 ? 4 * ceil_div(ROWS, 4) : 0) : (M::HEAD_PARTS > 1 ? TileOf::SUMS : 0);
    static constexpr int HANDOVER = THREADS * HANDOVER_EACH;
    static constexpr bool BORROWS = HANDOVER * 4 <= static_cast<int>(sizeof(typename Attention::Shared));

    struct Row {
        int slot;                       // of the cache and of the records
        int length, token;              // length so far, and the newest token
        int known, limit, min_length;   // lengths: given tokens; where it ends; shortest at which it may end
        int banned, key;                // token that must not come next; key of the noise of the next position
        float inverse_temperature;      // 1 / temperature; 0 for greedy
        float top_p, log_min_p, penalty;  // penalty: of repetition
        float presence, frequency;      // subtracted from the logit of a token of the text: once, and per occurrence
        int top_k;
        float largest;                  // largest score
        // Distances below the largest score: the first that is excluded, the first that top-k excludes, and the candidate's.
        unsigned cutoff, top_k_cutoff, distance;
        unsigned prefix;                // of the k-th distance: its digits found so far,
        int shift, wanted;              // the bits that follow them, and how many scores are still to be counted
        bool stops_at_eos, active, not_finite;  // EOS ends it; it goes on; a score is NaN or infinite
        bool searched, drawn;           // the top-k search goes on; the token is chosen
        bool biased;                    // the slot's row of `bias` is added to the logits
    };

    struct alignas(16) BlockShared {
        T h[ROWS * PITCH];      // input of products: each warp writes and reads its own columns, except for the LM head
        float x[ROWS * WIDTH];  // residual rows
        alignas(16) float partial[most(M::QKV_UNITS, M::FC_UNITS) * SUMS];       // stages alternate between two buffers,
        alignas(16) float other_partial[most(M::OUT_UNITS, M::PROJ_UNITS) * SUMS];  // so one writes while the last is read
        alignas(16) float sums[2 * ROWS][WARPS];  // of the rows' columns, then of their squares
        float row_scale[2][ROWS];                      // factor of each row before QKV and before FC
        typename Attention::Shared attention;
        int handover[BORROWS ? 1 : HANDOVER];
        alignas(16) T bias[M::LAYERS * BIASES];
        float scale[M::CODED ? M::LAYERS * BIASES : 1];  // of the same outputs
        BlockPlan plan;
        unsigned long long best[ROWS][WARPS];  // best candidate that each warp knows
        alignas(16) signed char bytes[M::SCREENED ? 2 * ROWS * BYTES_PITCH : 1];
        alignas(16) float squares[ROWS][WARPS];  // of the rows' columns
        ScreenedRow screened[ROWS];
        unsigned upper_bound[M::SCREENED ? ROWS * SCORES : 1];  // upper 32 bits of the best candidate possible per output
        unsigned short possible[M::SCREENED ? SCORES : 1];  // outputs that can be the best of a row,
        int found;                                          // and their number
        float scores[M::FILTERS ? ROWS * SCORES : 1];
        unsigned seen[M::FILTERS ? ROWS * SEEN : 1];
        int counts[M::FILTERS ? ROWS * DIGITS : 1];
        Row rows[ROWS];
        bool goes_on;
        int splits, parts;  // parts of the longest context; parts that this block attends to
        Part part;          // the current part, and the offset of its slot and head within a layer of the cache
        long long place;
        Watchdog watchdog;
    };
    static constexpr int STEP_BYTES = THREADS * sizeof(Bits) + 16;  // and two mbarriers
    static constexpr int FITS = (M::SHARED_BYTES - static_cast<int>(sizeof(BlockShared))) / STEP_BYTES;
    static constexpr int RING = HAS_ASYNC_COPIES ? (FITS < 64 ? FITS : 64) : 1;
    using Ring = TapeRing<WARPS, RING>;
    using TapeOf = Tape<WARPS, RING>;
    template <int INPUTS, int UNITS>
    using ProductOf = Product<T, INPUTS, ROWS, WARPS, UNITS, RING, M::CODED>;
    static constexpr int RING_BYTES = HAS_ASYNC_COPIES ? ceil_div(sizeof(Ring), 16) * 16 : 0;
    static_assert(FITS > MOST_TAKEN || !HAS_ASYNC_COPIES, "too little shared memory");
    static_assert(sizeof(BlockShared) <= M::SHARED_BYTES, "too little shared memory");

    // --- exchange words of a turn ---

    static constexpr int HEAD_WORDS = DEPTH / PER + 2;  // the part's output, its log weight twice
    static constexpr int QKV_AT = 0, ATTENTION_AT = QKV_AT + ROWS * 3 * WIDTH / PER;
    static constexpr int MIDDLE_AT = ATTENTION_AT + ROWS * HEADS * M::PARTS * HEAD_WORDS, FC_AT = MIDDLE_AT + ROWS * WIDTH;
    static constexpr int END_AT = FC_AT + ROWS * INNER / PER, TURN = END_AT + ROWS * WIDTH;
    static constexpr int CANDIDATE = M::FILTERS ? 4 : 2;
    static constexpr int CANDIDATES_AT = (M::OBSERVED ? M::LAYERS : 2) * TURN;  // turns that are kept, then [2][block][row][CANDIDATE]
    static constexpr int SUMS_AT = CANDIDATES_AT + 2 * M::BLOCKS * ROWS * CANDIDATE;  // [block][row][2]
    static constexpr int DIGITS_AT = SUMS_AT + M::BLOCKS * ROWS * 2;                  // [2][block][row][digit]
    static constexpr int WORDS = M::FILTERS ? DIGITS_AT + 2 * M::BLOCKS * ROWS * DIGITS : SUMS_AT;
};

}  // namespace warpline
