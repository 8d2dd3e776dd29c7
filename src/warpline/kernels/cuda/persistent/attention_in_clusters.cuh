// The attention half of a layer where a cluster of blocks has a head: QKV, attention, out-projection (sm_90).
//
// Blocks of a cluster write into each other's shared memory, which takes a third of a trip through L2 and does not wait for the
// weights on their way. Block r of a cluster computes the r-th part of the query, key and value of its head and sends it to all,
// attends to a part of the context and sends what came out to all, and multiplies the head with its part of the out-projection.
// Of every output there is then a sum for each head. These go through L2, the only exchange of the half, in which block r of
// every cluster, of those without a head too, adds up its part of the outputs, and sends it to its cluster. Everybody
// contributes to every layer, so a message never finds the last one of its kind unread.
// Everything is added in one order: tiles, warps or blocks by rank, heads.
// Traffic through L2: the row once for each head, written once and read by a block of each cluster.
#pragma once
#include "cluster.cuh"
#include "persistent/parts.cuh"

namespace warpline {

template <typename M>
class AttentionInClusters : protected Parts<M> {
   protected:
    using Place = Layout<M>;
    using Base = Parts<M>;
    using Place::ROWS, Place::WARPS, Place::THREADS, Place::WIDTH, Place::HEADS, Place::DEPTH, Place::PER, Place::PITCH, Place::BIASES;
    using Place::QKV_AT, Place::ATTENTION_AT, Place::HEAD_WORDS, Place::MIDDLE_AT, Place::SUMS_OF_HEADS_AT;
    using Place::CONTEXT_SPLITS, Place::SHARE, Place::GROUPS;
    using typename Place::T, typename Place::TileOf, typename Place::Attention, typename Base::Lines;
    using Base::a, Base::desk, Base::tape, Base::tag, Base::layer;
    using Base::words, Base::stamp, Base::packed, Base::vectors, Base::scale_rows, Base::leave_late;
    static constexpr int SIZE = M::CLUSTER, OWN = DEPTH / SIZE;  // blocks; of query, key and value, what a block computes
    enum Message { NEWEST, HEAD_PARTS, MIDDLE };
    unsigned parity = 0;  // of the phase of all barriers: each has one in every layer
    using Base::Base;

    static __device__ __forceinline__ int rank() { return blockIdx.x % SIZE; }
    static __device__ __forceinline__ int head() { return blockIdx.x / SIZE; }
    static __device__ __forceinline__ bool has_head() { return head() < HEADS; }

    // A barrier takes one arrival a phase, and a second one is a fault of the launch. The phase before is over, unless the
    // watchdog has ended a wait for it, here or in another block. From then on barriers are left alone: two phases later the
    // parity would be right again, and the phase the old one.
    __device__ __forceinline__ void expect(Message which, int bytes) {
        if (thread_index() != 0 || desk.dog.dead) return;
        while (!barrier_passed(desk.inbox.arrived + which, parity ^ 1)) {
            if (desk.dog.dead) return;
        }
        expect_bytes(desk.inbox.arrived + which, bytes);
    }
    template <typename V>
    __device__ __forceinline__ void send_to(int peer, Message which, const void* at, const V& value) {
        send(address_in_cluster(at, peer), address_in_cluster(desk.inbox.arrived + which, peer), value);
    }
    __device__ __forceinline__ void await_messages(Message which) {
        while (!barrier_passed(desk.inbox.arrived + which, parity) && !desk.dog.dead) continue;
    }

    // --- the query, and the newest key and value ---

    static constexpr int WORDS_OF_OWN = 3 * OWN / PER;  // of a row
    static __device__ __forceinline__ int own_output(int i) { return i % (WORDS_OF_OWN * ROWS) / ROWS * PER; }

    // Every word is worked out once for each block that it is sent to.
    template <typename Product>
    __device__ __forceinline__ void send_newest(const Lines& first) {
        expect(NEWEST, ROWS * 3 * DEPTH * sizeof(T));
        for (int i = thread_index(); i < WORDS_OF_OWN * ROWS * SIZE; i += THREADS) {
            const int output = own_output(i), row = i % ROWS, peer = i / (WORDS_OF_OWN * ROWS);
            float value[PER];
            Product::sums_of(this->template partial<QKV>(), output, row, value);
            this->normalise_output(0, row, i == thread_index() ? first : this->template lines<QKV>(output), value);
            const int which = output / OWN, column = rank() * OWN + output % OWN;
            send_to(peer, NEWEST, desk.inbox.newest[row][which] + column, packed(value));
            if (M::OBSERVED && peer == 0) post(words() + QKV_AT + (row * 3 * WIDTH + which * WIDTH + head() * DEPTH + column) / PER, packed(value), tag);
        }
    }

    // --- attention ---

    __device__ __forceinline__ void send_part(const Part& part) {
        constexpr int CHUNKS = DEPTH / 4;
        for (int i = thread_index(); i < CHUNKS * SIZE; i += THREADS) {
            const int column = i % CHUNKS * 4, peer = i / CHUNKS;
            float value[4];
            const auto weight = Attention::template merge<4>(desk.attention, part, column, value);
            send_to(peer, HEAD_PARTS, desk.inbox.heads[part.row][part.split] + column, value);
            if (column < 8) send_to(peer, HEAD_PARTS, desk.inbox.weights[part.row][part.split] + column / 4, __float_as_uint(column ? weight.sum : weight.largest));
        }
    }

    // The head of all rows into desk.merged.
    __device__ __forceinline__ void merge_parts() {
        for (int i = thread_index(); i < ROWS * DEPTH; i += THREADS) {
            const int row = i / DEPTH, column = i % DEPTH;
            float heaviest = LOWEST, total = 0.f, sum = 0.f;
#pragma unroll
            for (int split = 0; split < CONTEXT_SPLITS; ++split) heaviest = fmaxf(heaviest, desk.inbox.weights[row][split][0]);
#pragma unroll
            for (int split = 0; split < CONTEXT_SPLITS; ++split) {
                const float share = exp2_approx(desk.inbox.weights[row][split][0] - heaviest);
                total = fmaf(share, desk.inbox.weights[row][split][1], total);
                sum = fmaf(share, desk.inbox.heads[row][split][column], sum);
            }
            desk.merged[row * Place::MERGED_PITCH + column] = from_float<T>(sum * rcp_approx(total));
        }
        sync_threads<THREADS>();
        if constexpr (M::OBSERVED) {
            for (int i = thread_index(); rank() == 0 && i < ROWS * DEPTH / PER; i += THREADS) {
                const int row = i / (DEPTH / PER), at = i % (DEPTH / PER);
                post(words() + ATTENTION_AT + (row * HEADS + head()) * M::PARTS * HEAD_WORDS + at,
                     *reinterpret_cast<const unsigned*>(desk.merged + row * Place::MERGED_PITCH + at * PER), tag);
            }
        }
    }

    // --- out-projection: whole units to a warp, and no sums of warps ---

    static constexpr int TILES = ceil_div(DEPTH, TileOf::INPUTS), UNITS = SHARE / TILE_OUTPUTS, TURNS = ceil_div(UNITS, WARPS);
    static constexpr int AT_ONCE_TURNS = TURNS * TILES <= MOST_TAKEN ? TURNS : MOST_TAKEN / TILES;
    using Held = Bits[AT_ONCE_TURNS * TILES];

    __device__ __forceinline__ void take_out(Held& held, int turn) { tape.take(held, min(AT_ONCE_TURNS, TURNS - turn) * TILES); }
    __device__ __forceinline__ void post_sums_of_head(Held& held) {
        const T* x = TileOf::lane_of(thread_index(), desk.merged, Place::MERGED_PITCH);
        typename TileOf::Rows rows[TILES];
#pragma unroll
        for (int i = 0; i < TILES; ++i) rows[i] = TileOf::load(x + i * TileOf::INPUTS, Place::MERGED_PITCH);
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn += AT_ONCE_TURNS) {
            if (turn > 0) take_out(held, turn);
#pragma unroll
            for (int i = 0; i < AT_ONCE_TURNS; ++i) {
                const int unit = (turn + i) * WARPS + thread_index() / WARP;
                if (unit >= UNITS) continue;
                TileOf sums;
#pragma unroll
                for (int j = 0; j < TILES; ++j) sums.add(held[i * TILES + j], rows[j]);
                float result[TileOf::RESULTS];
                sums.finish(result);
                TileOf::results(thread_index(), [&](int which, int output, int row) {
                    const int column = rank() * SHARE + unit * TILE_OUTPUTS + output;
                    post(words() + SUMS_OF_HEADS_AT + (head() * ROWS + row) * WIDTH + column, __float_as_uint(result[which]), tag);
                });
            }
        }
    }

    // --- the rows behind it ---

    __device__ __forceinline__ float* middle_row(int row) const { return reinterpret_cast<float*>(desk.h + row * PITCH + Place::MIDDLE_COLUMN); }

    // This block's part of them, from the sums of all heads, to all blocks of the cluster.
    __device__ __forceinline__ void send_middle(unsigned begun) {
        constexpr int PAIRS = ROWS * SHARE / 2, AT_A_TIME = PAIRS < THREADS ? PAIRS : THREADS, OF_GROUP = ceil_div(HEADS, GROUPS);
        expect(MIDDLE, ROWS * WIDTH * sizeof(float));
        this->set_units(0);
        constexpr int CHUNKS = ROWS * SHARE / 4;
        struct Spot {
            int row, own, column, peer;
        };
        const auto spot = [](int i) {
            const int own = i % (SHARE / 4) * 4;
            return Spot{i % CHUNKS / (SHARE / 4), own, rank() * SHARE + own, i / CHUNKS};
        };
        float before[4];  // bias and residual, of the first that this thread sends
        look_up_before(spot(min(thread_index(), CHUNKS * SIZE - 1)), before);
        const int group = thread_index() / AT_A_TIME;
#pragma unroll 1
        for (int first = 0; first < PAIRS; first += AT_A_TIME) {
            const int pair = min(first + thread_index() % AT_A_TIME, PAIRS - 1), row = pair / (SHARE / 2), column = pair % (SHARE / 2) * 2;
            const Word* from = words() + SUMS_OF_HEADS_AT + row * WIDTH + rank() * SHARE + column;
            auto heads = gather<OF_GROUP, 6>([&](int i) { return from + min(group * OF_GROUP + i, HEADS - 1) * (ROWS * WIDTH); });
            heads.ask(begun, has_head() ? M::PAUSE_SUMS : M::PAUSE_IDLE);
            float sum[2] = {};
            heads.finish(tag, desk.dog, [&](int i, const Pair& words) {
                if (group * OF_GROUP + i >= HEADS) return;
#pragma unroll
                for (int j = 0; j < 2; ++j) sum[j] += __uint_as_float(words.payload(j));
            });
            if (group < GROUPS) *reinterpret_cast<Vec<float, 2>*>(desk.groups[group] + row * SHARE + column) = {sum[0], sum[1]};
        }
        sync_threads<THREADS>();
        for (int i = thread_index(); i < CHUNKS * SIZE; i += THREADS) {
            const Spot at = spot(i);
            if (i != thread_index()) look_up_before(at, before);
            float value[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) value[j] = before[j];
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const auto its = *reinterpret_cast<const Vec<float, 4>*>(desk.groups[group] + at.row * SHARE + at.own);
#pragma unroll
                for (int j = 0; j < 4; ++j) value[j] += its.at[j];
            }
            send_to(at.peer, MIDDLE, middle_row(at.row) + at.column, value);
            if (M::OBSERVED && i < CHUNKS && head() == 0) {
#pragma unroll
                for (int j = 0; j < 4; ++j) post(words() + MIDDLE_AT + at.row * WIDTH + at.column + j, __float_as_uint(value[j]), tag);
            }
        }
    }
    template <typename Spot>
    __device__ __forceinline__ void look_up_before(const Spot& at, float (&before)[4]) const {
        const auto residual = *reinterpret_cast<const Vec<float, 4>*>(desk.x + at.row * WIDTH + at.column);
        const auto bias = *reinterpret_cast<const Vec<T, 4>*>(desk.bias + layer * BIASES + at.own);
#pragma unroll
        for (int j = 0; j < 4; ++j) before[j] = to_float(bias.at[j]) + residual.at[j];
    }

    // From the rows of the layer to the sums of heads behind its attention.
    __device__ __forceinline__ void run_attention() {
        typename Place::template ProductOf<WIDTH, M::QKV_UNITS> qkv;
        const unsigned begun = cycles();
        this->begin_attention();
        float sums[2 * ROWS];
        if (!has_head()) {
            this->scale_first_rows(begun, sums);
            leave_late(sums);
            sync_threads<THREADS>();
            stamp(), stamp(), stamp(), stamp(), stamp();
            return;
        }
        const Lines line = this->template lines<QKV>(own_output(thread_index()));
        qkv.begin(tape, desk.plan.units[QKV]);
        this->scale_first_rows(begun, sums);
        stamp();
        qkv.finish(tape, desk.h, PITCH, this->template partial<QKV>(), [&] { leave_late(sums); });
        this->template send_newest<decltype(qkv)>(line);
        stamp();
        Held held;
        take_out(held, 0);
        expect(HEAD_PARTS, ROWS * CONTEXT_SPLITS * (DEPTH + 2) * sizeof(float));
        this->attend(
            [&](const Part& part, auto& newest, bool all) {
                await_messages(NEWEST);
                Attention::take(newest, all, desk.inbox.newest[part.row][0]);
            },
            [&](const Part& part) { send_part(part); });
        stamp();
        await_messages(HEAD_PARTS);
        merge_parts();
        stamp();
        post_sums_of_head(held);
        stamp();
    }

    // The rows behind attention, times gamma, into desk.h.
    __device__ __forceinline__ void scale_middle_rows(unsigned begun, float (&sums)[2 * ROWS]) {
        send_middle(begun);
        scale_rows(vectors(2 * WIDTH), 1, sums, [&](auto& v) {
            await_messages(MIDDLE);
#pragma unroll
            for (int i = 0; i < ROWS * Base::EACH; ++i) {
                const auto pair = *reinterpret_cast<const Vec<float, 2>*>(middle_row(i / Base::EACH) + max(Base::column_of(i % Base::EACH), 0));
                v[i][0] = pair.at[0];
                v[i][1] = pair.at[1];
            }
        });
        parity ^= 1;
    }
};

}  // namespace warpline
