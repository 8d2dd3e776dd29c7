// Blocks of a cluster that send each other what they have (sm_90). Whoever reads instead: load_from_cluster of ptx.cuh.
#pragma once
#include "ptx.cuh"

namespace warpline {

// sync_cluster in two halves: what comes between them need not wait.
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

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

}  // namespace warpline
