// How the blocks of one launch hand values to each other without a barrier: every word carries its own readiness.
//
// A word is 32 bits of payload and a 32-bit tag, written and read in one piece. Whoever needs it reads it until the tag is
// the one expected, so an exchange costs one trip to L2 and back and orders nothing but itself: no fence, no counter, no
// second read. A word is written once per turn and its tag is the turn's number; two sets of words take turns, and no
// block can be two turns ahead of another, because every block contributes to every turn.
// A grid barrier costs 0.93 us on an H200 and the read behind it about as much again; this replaces both.
// Tried and lost: asking once more while the first answer is under way, so that it is seen sooner (5 % of a token); asking
// again only for words that were missing (3 %).
#pragma once
#include "common.cuh"
#include "ptx.cuh"

namespace warpline {

// threadIdx.x, asked for anew each time: what follows from it is then not kept in registers from one stage to all others.
__device__ __forceinline__ int thread_index() {
    int index;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(index));
    return index;
}

using Word = unsigned long long;  // tag in the upper half

// Values of a storage type in one word.
template <typename T>
constexpr int PER_WORD = 4 / sizeof(T);

// The weights that pass through L2 between two turns would push the words out of it, and the next turn would wait for
// memory.
__device__ __forceinline__ void post(Word* at, unsigned payload, unsigned tag) {
    const Word word = static_cast<Word>(tag) << 32 | payload;
#if __CUDA_ARCH__ >= 800
    asm volatile("st.relaxed.gpu.global.L2::cache_hint.u64 [%0], %1, %2;" ::"l"(at), "l"(word), "l"(evict_last_policy()) : "memory");
#else
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
#endif
}

// Two words that are both needed.
struct Pair {
    Word at[2];

    __device__ __forceinline__ void load(const Word* from) {
#if __CUDA_ARCH__ >= 800
        asm volatile("ld.relaxed.gpu.global.L2::cache_hint.v2.u64 {%0, %1}, [%2], %3;"
                     : "=l"(at[0]), "=l"(at[1])
                     : "l"(from), "l"(evict_last_policy())
                     : "memory");
#else
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(at[0]), "=l"(at[1]) : "l"(from) : "memory");
#endif
    }
    __device__ __forceinline__ bool carries(unsigned tag) const {
        return static_cast<unsigned>(at[0] >> 32) == tag && static_cast<unsigned>(at[1] >> 32) == tag;
    }
    __device__ __forceinline__ unsigned payload(int i) const { return static_cast<unsigned>(at[i]); }
};

__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ unsigned cycles() {
    unsigned now;
    asm volatile("mov.u32 %0, %clock;" : "=r"(now));
    return now;
}
__device__ __forceinline__ void wait_cycles(unsigned begun, unsigned pause) {
    while (cycles() - begun < pause) continue;
}

// Ends waits that lead nowhere. A thread that computes nothing looks at it now and then: when the block has not come to
// another turn for `patience` nanoseconds, every wait returns whatever is there, the launch ends with the current token,
// and `fault` tells the host.
struct Watchdog {
    volatile unsigned turn;
    volatile bool timed_out, finished;

    __device__ __forceinline__ void prepare() {
        turn = 0;
        timed_out = finished = false;
    }
};

class WatchdogTimer {
    Watchdog& watchdog;
    int* fault;
    const unsigned long long patience;
    unsigned long long since = nanoseconds();
    unsigned turn = 0;

   public:
    __device__ __forceinline__ WatchdogTimer(Watchdog& watchdog, int* fault, unsigned long long patience)
        : watchdog(watchdog), fault(fault), patience(patience) {}

    // Whether the block is done.
    __device__ __forceinline__ bool poll() {
        const unsigned long long now = nanoseconds();
        if (watchdog.turn != turn) {
            turn = watchdog.turn;
            since = now;
        } else if (now - since > patience && !watchdog.timed_out) {
            watchdog.timed_out = true;
            *fault = 1;
        }
        return watchdog.finished;
    }
};

// Reads again until all words carry the tag, all of them each time, so that what was there late costs one more trip and not
// one for each. A whole warp calls it and goes on together: lanes that left one by one would each do what follows on their
// own. `from(i)` says where a lane's pair i is; a lane without one of its own reads another's. Only the first `needed` count.
template <int N, typename From>
__device__ __forceinline__ void await(Pair (&pair)[N], From from, unsigned tag, const Watchdog& watchdog, int needed = N) {
    while (true) {
        bool there = true;
#pragma unroll
        for (int i = 0; i < N; ++i) there &= i >= needed || pair[i].carries(tag);
        if (__all_sync(0xffffffffu, there) || watchdog.timed_out) return;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i < needed) pair[i].load(from(i));
        }
    }
}

// EACH pairs to a lane, at `from(i)`; whole warps have it.
template <int EACH, int AT_ONCE, typename From>
class Gather {
    static constexpr int FIRST = EACH < AT_ONCE ? EACH : AT_ONCE;
    const From from;
    Pair pair[FIRST];

   public:
    __device__ __forceinline__ explicit Gather(From from) : from(from) {}

    // To be called before `finish`, and not before an answer can be there: who asks too early asks again, and all those
    // questions are in the way of the answers. So it waits until `pause` cycles have passed since `begun`.
    __device__ __forceinline__ void ask(unsigned begun, unsigned pause) {
        wait_cycles(begun, pause);
        ask();
    }
    __device__ __forceinline__ void ask() {
#pragma unroll
        for (int i = 0; i < FIRST; ++i) pair[i].load(from(i));
    }

    // f(i, pair), for each pair when it is there.
    template <typename F>
    __device__ __forceinline__ void finish(unsigned tag, const Watchdog& watchdog, F f) {
#pragma unroll
        for (int first = 0; first < EACH; first += FIRST) {
            const auto place = [&](int i) { return from(min(first + i, EACH - 1)); };
            if (first > 0) {
#pragma unroll
                for (int i = 0; i < FIRST; ++i) pair[i].load(place(i));
            }
            await(pair, place, tag, watchdog);
#pragma unroll
            for (int i = 0; i < FIRST; ++i) {
                if (first + i < EACH) f(first + i, pair[i]);
            }
        }
    }
};

template <int EACH, int AT_ONCE, typename From>
__device__ __forceinline__ Gather<EACH, AT_ONCE, From> gather(From from) {
    return Gather<EACH, AT_ONCE, From>(from);
}

}  // namespace warpline
