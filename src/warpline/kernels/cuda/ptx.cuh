// Instructions without a name in C++, as inline PTX.
#pragma once
#include "common.cuh"

namespace warpline {

// --- launches that overlap ---
// A launch may begin before the preceding one of the stream has ended, where the host allows it and defines WARPLINE_OVERLAPPING.
// Otherwise both functions do nothing.

// The next launch may begin as soon as all blocks of this one have called it or exited.
__device__ __forceinline__ void allow_next_launch() {
#ifdef WARPLINE_OVERLAPPING
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits for all preceding launches: after it their writes are visible, and what they read may be overwritten.
__device__ __forceinline__ void await_previous_launch() {
#ifdef WARPLINE_OVERLAPPING
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// --- approximate functions ---

// sm_75 and newer; relative error about 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^x, relative error about 2^-22; it overflows to infinity and flushes to 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1/sqrt(x), relative error about 2^-22.
__device__ __forceinline__ float rsqrt_approx(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1/x, relative error about 2^-23; 0 for infinity.
__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// --- tensor cores ---
// Fragments are named as in m16n8k16: a[4] is 16 x 16, b[2] is 16 x 8, c[4] is 16 x 8 in float. With g = lane / 4 and
// t = lane % 4, c holds rows g and g + 8, columns 2t and 2t + 1.

// Four 8 x 8 matrices of 16-bit elements; lane 8i + j gives the address of row j of matrix i.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))));
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))));
}

template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // Turing multiplies 16 x 8 by 8 x 8: the same fragments in two halves
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                            unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// The product of half the depth: a[2] is 16 x 8, b is 8 x 8.
template <typename T>
__device__ __forceinline__ void multiply_add_short(float (&c)[4], unsigned a0, unsigned a1, unsigned b);

template <>
__device__ __forceinline__ void multiply_add_short<__half>(float (&c)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ void multiply_add_short<__nv_bfloat16>(float (&c)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}
#endif

// Two neighbours of a fragment, rounded.
template <typename T>
__device__ __forceinline__ unsigned pack_pair(float low, float high) {
    const Vec<T, 2> pair = {from_float<T>(low), from_float<T>(high)};
    return *reinterpret_cast<const unsigned*>(&pair);
}

// --- clusters ---
// Blocks that run at the same time on neighbouring SMs and can read each other's shared memory.

__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Reads block `rank`'s counterpart of `own`.
__device__ __forceinline__ float load_from_cluster(const float* own, int rank) {
    float value = 0.f;
#if __CUDA_ARCH__ >= 900
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(own));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address));
#endif
    return value;
}

// --- loads ---

// 16 bytes that are read once, by lanes that do not cover whole cache lines: not kept in L1, and L2 fetches the neighbouring
// bytes.
__device__ __forceinline__ Vec<unsigned, 4> load_streaming(const Vec<unsigned, 4>* at) {
#if __CUDA_ARCH__ >= 800
    Vec<unsigned, 4> v;
    asm("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.at[0]), "=r"(v.at[1]), "=r"(v.at[2]), "=r"(v.at[3])
        : "l"(at));
    return v;
#else
    return *at;
#endif
}

// Prefetches a line into L2.
__device__ __forceinline__ void prefetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// A cache policy that keeps lines in L2 while a stream larger than L2 passes through it.
__device__ __forceinline__ unsigned long long evict_last_policy() {
    unsigned long long policy = 0;
#if __CUDA_ARCH__ >= 800
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

// Loads four bytes that L2 should keep.
__device__ __forceinline__ unsigned load_evict_last(const unsigned* at) {
#if __CUDA_ARCH__ >= 800
    unsigned v;
    asm("ld.global.nc.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(v) : "l"(at), "l"(evict_last_policy()));
    return v;
#else
    return __ldg(at);
#endif
}

// --- asynchronous copies from global to shared memory ---

constexpr bool HAS_ASYNC_COPIES = __CUDA_ARCH__ >= 800;

// 16 bytes; zeros if not `inside`, and then `source` is not read. An ordinary copy on GPUs without cp.async.
__device__ __forceinline__ void copy_async(void* target, const void* source, bool inside) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(target))),
                 "l"(source), "r"(inside ? 16 : 0));
#else
    *static_cast<uint4*>(target) = inside ? __ldcg(static_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
#endif
}

// Ends a group of copies; wait_for_copies<N> returns when at most the newest N groups are in flight.
__device__ __forceinline__ void end_copy_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;");
#endif
}

template <int GROUPS>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}

// --- bulk copies, and the mbarriers in shared memory that count their bytes (sm_90) ---

constexpr bool HAS_BULK_COPIES = __CUDA_ARCH__ >= 900;

__device__ __forceinline__ unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// An mbarrier; its phase ends after `arrivals` arrivals and all announced bytes.
__device__ __forceinline__ void barrier_init(unsigned long long* barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}

// Makes initialised mbarriers visible to the copy unit.
__device__ __forceinline__ void barriers_are_ready() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(unsigned long long* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Whether the phase of this parity is over; may wait for a short time.
__device__ __forceinline__ bool barrier_passed(unsigned long long* barrier, unsigned parity) {
    unsigned passed = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#endif
    return passed != 0;
}

// Arrives at the mbarrier and starts a copy of `bytes` from global to shared memory, which the mbarrier counts. L2 evicts the
// bytes first: they are read once.
__device__ __forceinline__ void copy_bulk(void* target, const void* source, int bytes, unsigned long long* barrier) {
#if __CUDA_ARCH__ >= 900
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                     shared_address(target)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
#endif
}

}  // namespace warpline
