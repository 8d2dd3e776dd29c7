// Copies of matrix tiles by hardware, from a descriptor that the host has made (sm_90).
#pragma once
#include "ptx.cuh"

namespace warpline {

// The driver's CUtensorMap: the matrix, and the tile's rows and columns. Chunks of a tile are swizzled as in warpgroup.cuh;
// elements beyond the matrix are 0.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// Prefetches the descriptor.
__device__ __forceinline__ void fetch_description(const TensorMap& map) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// Arrives at the mbarrier and announces the bytes that it must wait for.
__device__ __forceinline__ void barrier_expect(unsigned long long* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}

// Starts a copy of `bytes`, a multiple of 16; the mbarrier counts them.
__device__ __forceinline__ void copy_block(void* target, const void* source, int bytes, unsigned long long* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#endif
}

// Starts a copy of the tile at (row, column); the mbarrier counts its bytes.
__device__ __forceinline__ void copy_tile(void* target, const TensorMap& map, int column, int row,
                                          unsigned long long* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(target)),
                 "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
#endif
}

}  // namespace warpline
