// Blocks of a cluster that send each other what they have (sm_90). Whoever reads instead: load_from_cluster of ptx.cuh.
#pragma once
#include "ptx.cuh"

namespace warpline {

// sync_cluster in two halves: what comes between them need not wait.
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Both halves, by threads that need not be together.
__device__ __forceinline__ void meet_cluster() { asm volatile("barrier.cluster.arrive;\n\tbarrier.cluster.wait;" ::: "memory"); }

// Where block `rank` of the cluster has what this one has at `own`.
__device__ __forceinline__ unsigned address_in_cluster(const void* own, int rank) {
    unsigned address = shared_address(own);
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    return address;
}

// They are there when everybody has met again.
__device__ __forceinline__ void store_in_cluster(unsigned address, const float (&v)[4]) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}

// --- messages: stores into the shared memory of a block of the cluster, whose bytes a barrier there counts ---
// They are there when `barrier_passed` says so.

// Nanoseconds after which a message that nobody waits for has come, with a wide margin: it takes less than one microsecond.
constexpr unsigned long long LAST_MESSAGES = 20'000;

// To be done by one thread for each phase of the barrier, which has one arrival, sooner or later than the bytes come.
__device__ __forceinline__ void expect_bytes(unsigned long long* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}

// Both addresses are of `address_in_cluster`, of the same block.
__device__ __forceinline__ void send(unsigned to, unsigned barrier, unsigned value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(value), "r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ void send(unsigned to, unsigned barrier, const float (&v)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v[0]),
                 "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
                 : "memory");
#endif
}

}  // namespace warpline
