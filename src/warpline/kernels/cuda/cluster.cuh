// Blocks of a cluster that send values to each other (sm_90). For reading another block's values: load_from_cluster of ptx.cuh.
#pragma once
#include "ptx.cuh"

namespace warpline {

// The two halves of sync_cluster; work between them overlaps with the wait.
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Address in block `rank` of the cluster that corresponds to `own` in this block.
__device__ __forceinline__ unsigned address_in_cluster(const void* own, int rank) {
    unsigned address = shared_address(own);
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    return address;
}

// Contract: the values are visible after the next barrier of the cluster.
__device__ __forceinline__ void store_in_cluster(unsigned address, const float (&v)[4]) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}

}  // namespace warpline
