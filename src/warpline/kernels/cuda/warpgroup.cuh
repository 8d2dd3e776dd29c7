// Products of a warp group (wgmma, sm_90): four neighbouring warps multiply together and read operands from shared memory, so
// that no instruction loads them into registers.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

namespace warpline {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HAS_WARPGROUPS = true;
#else
constexpr bool HAS_WARPGROUPS = false;
#endif

// A tile has rows of 64 16-bit elements and is aligned to eight rows. Chunk c of row r is stored at c ^ r % 8 (a swizzle), so
// that neither eight neighbouring rows nor the chunks of one row have bank conflicts.
constexpr int GROUP_ROW = 64, GROUP_TILE_BYTES = 8 * 128;

__device__ __forceinline__ int group_place(int row, int chunk) { return row * GROUP_ROW + (chunk ^ row % 8) * 8; }

// Like TileMover, for such a tile.
template <typename T, int ROWS, int THREADS>
struct GroupTileMover {
    static constexpr bool ASYNC = true;
    static constexpr int STRIDE = THREADS / 8, STEPS = ceil_div(ROWS, STRIDE);
    static_assert(STRIDE % 8 == 0);
    const int row, chunk;
    const T* mine;
    const long long stride;

    __device__ __forceinline__ GroupTileMover(const T* source, long long row_stride)
        : row(threadIdx.x / 8), chunk(threadIdx.x % 8), mine(source + row * row_stride + chunk * 8), stride(STRIDE * row_stride) {}

    __device__ __forceinline__ void fetch(T* tile, long long offset, int rows, int) {
        const T* at = mine + offset;
        T* target = tile + group_place(row, chunk);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (ROWS % STRIDE != 0 && row + step * STRIDE >= ROWS) break;
            copy_async(target + step * STRIDE * GROUP_ROW, at + step * stride, row + step * STRIDE < rows);
        }
    }
    __device__ __forceinline__ void deposit(T*) const {}
};

// Start of tiles in the block's dynamic shared memory. Requires: 1,024 bytes more than the tiles.
template <typename T>
__device__ __forceinline__ T* group_memory() {
    const unsigned beyond = shared_address(dynamic_shared<T>()) % GROUP_TILE_BYTES;
    return dynamic_shared<T>() + (beyond > 0 ? (GROUP_TILE_BYTES - beyond) / sizeof(T) : 0);
}

// Makes finished copies visible to wgmma after the next barrier of the block.
__device__ __forceinline__ void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The wgmma descriptor of a tile.
__device__ __forceinline__ unsigned long long describe_tile(const void* tile) {
    constexpr unsigned long long EIGHT_ROWS = GROUP_TILE_BYTES / 16, SWIZZLED = 1ull << 62;
    return (shared_address(tile) & 0x3ffffu) >> 4 | EIGHT_ROWS << 16 | EIGHT_ROWS << 32 | SWIZZLED;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Sums c[NS][4], as in m16n8k16: a warp's 16 rows and NS times 8 columns. Operand numbers must be literals.
#define WARPLINE_SUM(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define WARPLINE_SUMS_2(c) WARPLINE_SUM(c, 0), WARPLINE_SUM(c, 1)
#define WARPLINE_SUMS_3(c) WARPLINE_SUMS_2(c), WARPLINE_SUM(c, 2)
#define WARPLINE_SUMS_4(c) WARPLINE_SUMS_3(c), WARPLINE_SUM(c, 3)
#define WARPLINE_SUMS_6(c) WARPLINE_SUMS_4(c), WARPLINE_SUM(c, 4), WARPLINE_SUM(c, 5)
#define WARPLINE_SUMS_8(c) WARPLINE_SUMS_6(c), WARPLINE_SUM(c, 6), WARPLINE_SUM(c, 7)
#define WARPLINE_SUMS_12(c) \
    WARPLINE_SUMS_8(c), WARPLINE_SUM(c, 8), WARPLINE_SUM(c, 9), WARPLINE_SUM(c, 10), WARPLINE_SUM(c, 11)
#define WARPLINE_SUMS_16(c) \
    WARPLINE_SUMS_12(c), WARPLINE_SUM(c, 12), WARPLINE_SUM(c, 13), WARPLINE_SUM(c, 14), WARPLINE_SUM(c, 15)
#define WARPLINE_SUMS_18(c) WARPLINE_SUMS_16(c), WARPLINE_SUM(c, 16), WARPLINE_SUM(c, 17)
#define WARPLINE_SUMS_24(c)                                                                                        \
    WARPLINE_SUMS_18(c), WARPLINE_SUM(c, 18), WARPLINE_SUM(c, 19), WARPLINE_SUM(c, 20), WARPLINE_SUM(c, 21), \
        WARPLINE_SUM(c, 22), WARPLINE_SUM(c, 23)
#define WARPLINE_NAMES_2 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WARPLINE_NAMES_3 WARPLINE_NAMES_2 ", %8, %9, %10, %11"
#define WARPLINE_NAMES_4 WARPLINE_NAMES_3 ", %12, %13, %14, %15"
#define WARPLINE_NAMES_6 WARPLINE_NAMES_4 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WARPLINE_NAMES_8 WARPLINE_NAMES_6 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WARPLINE_NAMES_12 WARPLINE_NAMES_8 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WARPLINE_NAMES_16 WARPLINE_NAMES_12 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WARPLINE_NAMES_18 WARPLINE_NAMES_16 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WARPLINE_NAMES_24 \
    WARPLINE_NAMES_18 ", %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
template <typename T, int NS>
__device__ __forceinline__ void multiply_tiles(float (&c)[NS][4], unsigned long long a, unsigned long long b, bool adds);
template <typename T>
__device__ __forceinline__ void multiply_rows(float (&c)[8][4], const unsigned (&a)[4], unsigned long long b);
// c (+)= a b^T, where a is 64 x 16 and b 8 NS x 16, both in tiles.
#define WARPLINE_MULTIPLY_TILES(TYPE, NAME, NS, N, A, B, ADDS)                                                                \
    template <>                                                                                                               \
    __device__ __forceinline__ void multiply_tiles<TYPE, NS>(float(&c)[NS][4], unsigned long long a, unsigned long long b,    \
                                                             bool adds) {                                                     \
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " ADDS ", 0;\n\twgmma.mma_async.sync.aligned.m64n" N "k16.f32." NAME \
                     "." NAME " {" WARPLINE_NAMES_##NS "}, " A ", " B ", p, 1, 1, 0, 0;\n\t}"                                 \
                     : WARPLINE_SUMS_##NS(c)                                                                                  \
                     : "l"(a), "l"(b), "r"(static_cast<int>(adds)));                                                          \
    }
// c += a b, where a is 64 x 16 in registers and b 16 x 64 in a tile.
#define WARPLINE_MULTIPLY_ROWS(TYPE, NAME)                                                                                    \
    template <>                                                                                                               \
    __device__ __forceinline__ void multiply_rows<TYPE>(float(&c)[8][4], const unsigned (&a)[4], unsigned long long b) {      \
        asm volatile("{\n\t.reg .pred p;\n\tsetp.eq.b32 p, 0, 0;\n\twgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME     \
                     " {" WARPLINE_NAMES_8 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n\t}"                                   \
                     : WARPLINE_SUMS_8(c)                                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                   \
    }
#define WARPLINE_GROUP_PRODUCTS(TYPE, NAME)                                  \
    WARPLINE_MULTIPLY_TILES(TYPE, NAME, 2, "16", "%8", "%9", "%10")          \
    WARPLINE_MULTIPLY_TILES(TYPE, NAME, 3, "24", "%12", "%13", "%14")        \
    WARPLINE_MULTIPLY_TILES(TYPE, NAME, 4, "32", "%16", "%17", "%18")        \
    WARPLINE_MULTIPLY_TILES(TYPE, NAME, 6, "48", "%24", "%25", "%26")        \
    WARPLINE_MULTIPLY_TILES(TYPE, NAME, 8, "64", "%32", "%33", "%34")        \
    WARPLINE_MULTIPLY_TILES(TYPE, NAME, 12, "96", "%48", "%49", "%50")       \
    WARPLINE_MULTIPLY_TILES(TYPE, NAME, 16, "128", "%64", "%65", "%66")      \
    WARPLINE_MULTIPLY_TILES(TYPE, NAME, 18, "144", "%72", "%73", "%74")      \
    WARPLINE_MULTIPLY_TILES(TYPE, NAME, 24, "192", "%96", "%97", "%98")      \
    WARPLINE_MULTIPLY_ROWS(TYPE, NAME)
WARPLINE_GROUP_PRODUCTS(__half, "f16")
WARPLINE_GROUP_PRODUCTS(__nv_bfloat16, "bf16")

// Orders earlier register accesses before the products that read or add to these registers.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products; wait_for_products<N> returns when at most the newest N groups are in flight.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// Waits for all products.
__device__ __forceinline__ void end_products() {
    commit_products();
    wait_for_products<0>();
}

// The compiler does not know that products are asynchronous: accesses to these registers do not move past this.
template <int NS>
__device__ __forceinline__ void settle(float (&c)[NS][4]) {
#pragma unroll
    for (int n = 0; n < NS; ++n) asm volatile("" : WARPLINE_SUM(c, n)::"memory");
}
__device__ __forceinline__ void settle(unsigned (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}
#endif

}  // namespace warpline
