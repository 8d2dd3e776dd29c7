// The weights as a tape: every block reads its own part from beginning to end once per token, and then starts again.
//
// The idea: a tape consists of steps, a step of one tile per warp, a tile of 16 bytes per lane. RING steps are in flight or
// waiting in shared memory at any time, also while blocks wait for each other. With bulk copies (sm_90) one thread of a producer
// warp does all copies. With cp.async (sm_80) each lane copies its own 16 bytes and alone reads them back, so no barrier is
// needed. On Turing a lane loads its bytes into registers in `take`, before it waits for the rows.
// Tried and lost: per-lane copies on sm_90 (they keep addresses in registers that the stages need); a producer warp whose lanes
// each copy into a slot (slower per copy); pauses between copies (memory idles); prefetch into L2 ahead of the copies (gains
// gpt2-xl less than copying sooner); a part of the LM head kept in L2 between tokens.
#pragma once
#include "common.cuh"
#include "persistent/exchange.cuh"
#include "ptx.cuh"

namespace warpline {

using Bits = Vec<unsigned, 4>;

// Most bytes in flight to one block. On an H200, 32 kB cost gpt2-xl 4 % and gpt2 2 %; no limit costs gpt2 in float32 8 %.
constexpr int IN_FLIGHT = 48 << 10;

// Like barrier_passed, but it never waits: mbarrier.test_wait.
__device__ __forceinline__ bool has_passed(unsigned long long* barrier, unsigned parity) {
    unsigned passed = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#endif
    return passed != 0;
}

// Most steps that one `take` moves to registers.
constexpr int MOST_TAKEN = 8;

// Marks registers as undefined, so that the compiler does not preserve their old values.
template <int N>
__device__ __forceinline__ void forget(Bits (&held)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) asm("" : "=r"(held[i].at[j]));
    }
}

// A block's part of the tape, in steps: it begins at `begin`; a token uses `length` steps except `left_out` ones from `from` on.
struct TapeRange {
    int begin, length, from, left_out;

    __device__ __forceinline__ int steps() const { return length - left_out; }
    // Position on the tape of the i-th step of a token.
    __device__ __forceinline__ int at(int i) const { return begin + i + (i < from ? 0 : left_out); }
};

// The ring buffer in shared memory, and two mbarriers for each of its slots.
template <int WARPS, int RING>
struct TapeRing {
    Bits slot[RING][WARPS * WARP];
    unsigned long long full[RING], empty[RING];
};

template <int WARPS, int RING>
class Tape {
    static constexpr int STEP = WARPS * WARP;  // in Bits
    using Ring = TapeRing<WARPS, RING>;
    const Bits* source;  // this lane's part of the tape's step 0
    const TapeRange range;
    Ring& ring;
    int ahead = 0, slot = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void copy_next(int into) {
        copy_async(&ring.slot[into][thread_index()], source + static_cast<long long>(range.at(ahead)) * STEP, true);
        end_copy_group();
        ahead = ahead + 1 == range.steps() ? 0 : ahead + 1;
    }

   public:
    // Requires: all threads of the block call it, and a barrier of the block follows.
    static __device__ __forceinline__ void prepare(Ring& ring) {
        if constexpr (HAS_BULK_COPIES) {
            if (thread_index() == 0) {
                for (int i = 0; i < RING; ++i) {
                    barrier_init(ring.full + i, 1);
                    barrier_init(ring.empty + i, WARPS);
                }
                barriers_are_ready();
            }
        }
    }

    // The loop of the producer thread: copies all steps `times` times, and ends early when the block has finished.
    // A step of 5 kB may take 300 cycles, or memory idles (at 320, gpt2-xl took 960 us per token instead of 891). So the barriers
    // of the next slot are tested while this one is filled, and the asm hides the address of `all`, which the compiler would
    // recompute each time. Copies in flight to a multiprocessor delay the exchange words, so at most IN_FLIGHT bytes are
    // outstanding.
    static __device__ __forceinline__ void feed(const Bits* tape, const TapeRange& range, int times, Ring& all, WatchdogTimer& timer) {
        constexpr int MOST = IN_FLIGHT / static_cast<int>(STEP * sizeof(Bits)), WINDOW = MOST < RING ? MOST : RING;  // steps
        static_assert(WINDOW > 0);
        Ring* ring = &all;
        asm volatile("" : "+l"(ring));
        const int steps = range.steps();
        const Bits *const begin = tape + static_cast<long long>(range.begin) * STEP, *from = begin;
        int step = 0, into = 0, before = RING - WINDOW;  // the next step, its slot, and the slot of the step WINDOW before it
        unsigned free = 1, landed = 1;                   // in the first round every slot is empty
        bool ready = true;
        for (int left = steps * times; left > 0; --left) {
            bool ended = false;
            while (!ready && !ended) {
                ended = timer.poll();
                ready = barrier_passed(ring->empty + into, free) && barrier_passed(ring->full + before, landed);
            }
            if (ended) break;
            const Bits* source = from;
            const int slot = into;
            from += STEP;
            if (++step == steps) {
                step = 0;
                from = begin;
            }
            if (step == range.from) from += static_cast<long long>(range.left_out) * STEP;
            if (++into == RING) {
                into = 0;
                free ^= 1;
            }
            if (++before == RING) {
                before = 0;
                landed ^= 1;
            }
            ready = has_passed(ring->empty + into, free) & has_passed(ring->full + before, landed);
            copy_bulk(ring->slot[slot], source, STEP * sizeof(Bits), ring->full + slot);
        }
        for (int i = 0; i < RING && times > 0; ++i) {  // copies in flight must not outlive the block
            while (!barrier_passed(ring->full + i, i < into ? free ^ 1 : free)) continue;
        }
    }

    __device__ __forceinline__ Tape(const Bits* tape, const TapeRange& range, Ring& ring) : source(tape + thread_index()), range(range), ring(ring) {
        if constexpr (HAS_ASYNC_COPIES && !HAS_BULK_COPIES) {
            for (int i = 0; i < RING; ++i) copy_next(i);
        }
    }

    // Moves the next `count` steps, at most N, to registers; the other registers are undefined. The slots are refilled.
    template <int N>
    __device__ __forceinline__ void take(Bits (&held)[N], int count) {
        static_assert(N < RING || !HAS_ASYNC_COPIES);
        forget(held);
        count = min(count, N);
        const int thread = thread_index(), lane = thread % WARP;
        // Each lane waits for, and later releases, the slot of one step.
        const int later = slot + lane < RING ? slot + lane : slot + lane - RING;
        if constexpr (HAS_BULK_COPIES) {
            const unsigned its_parity = slot + lane < RING ? parity : parity ^ 1;
            if (lane < count) {
                while (!barrier_passed(ring.full + later, its_parity)) continue;
            }
            __syncwarp();
        } else if constexpr (HAS_ASYNC_COPIES) {
            wait_for_copies<(RING > N ? RING - N : 0)>();
        }
        if (HAS_ASYNC_COPIES && slot + N <= RING) {
            const Bits* from = &ring.slot[slot][thread];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (i < count) held[i] = from[i * STEP];
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (i >= count) continue;
                if constexpr (HAS_ASYNC_COPIES) {
                    held[i] = ring.slot[slot + i < RING ? slot + i : slot + i - RING][thread];
                } else {
                    held[i] = load_streaming(source + static_cast<long long>(range.at(ahead + i < range.steps() ? ahead + i : ahead + i - range.steps())) * STEP);
                }
            }
        }
        if constexpr (HAS_BULK_COPIES) {
            __syncwarp();
            if (lane < count) barrier_arrive(ring.empty + later);
        } else if constexpr (HAS_ASYNC_COPIES) {
            for (int i = 0; i < count; ++i) copy_next(slot + i < RING ? slot + i : slot + i - RING);
        } else {
            ahead = ahead + count < range.steps() ? ahead + count : ahead + count - range.steps();
        }
        if (slot + count >= RING) parity ^= 1;
        slot = slot + count < RING ? slot + count : slot + count - RING;
    }

    // Copies in flight must not outlive the block.
    __device__ __forceinline__ void stop() { wait_for_copies<0>(); }
};

}  // namespace warpline
