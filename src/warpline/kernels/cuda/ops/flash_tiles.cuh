// Products of FlashAttention in half precision: warp by warp (mma), or four warps together (wgmma) where the GPU can. In both a
// warp has MS times 16 rows in the registers of m16n8k16, so the weights are already where the next product takes its left
// operand.
#pragma once
#include "tile.cuh"
#include "warpgroup.cuh"

namespace warpline {

// The weights of keys 16n to 16n + 15 as a left operand.
template <typename T, int NS>
__device__ __forceinline__ void pack_rows(unsigned (&f)[4], const float (&weight)[NS][4], int n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float* pair = weight[2 * n + i / 2] + i % 2 * 2;
        f[i] = pack_pair<T>(pair[0], pair[1]);
    }
}

// ldmatrix and mma. A warp with 16 queries keeps their fragments; with more they do not fit beside the output and are loaded
// again for every tile of keys.
template <typename T, int DEPTH, int MS, int KEYS>
struct WarpTiles {
    static constexpr int D = ceil_div(DEPTH, 16) * 16, ROW = PITCH<T, D>, NS = KEYS / 8;
    static constexpr bool KEEPS = MS == 1;
    template <int ROWS, int THREADS>
    using Mover = TileMover<T, ROWS, D, vector_width<T>(DEPTH), THREADS>;

    const int lane = threadIdx.x % WARP;
    const T* queries;
    unsigned fq[MS][KEEPS ? D / 16 : 1][4];

    static __device__ __forceinline__ T* memory() { return dynamic_shared<T>(); }
    static __device__ __forceinline__ int place(int row, int chunk) { return row * ROW + chunk * CHUNK<T>; }
    static __device__ __forceinline__ void show() {}

    // Loads the queries of this warp. Requires: the block's `tile` is complete.
    __device__ __forceinline__ WarpTiles(const T* tile, int warp) : queries(tile + warp * (MS * 16) * ROW) {
        if constexpr (KEEPS) {
#pragma unroll
            for (int d = 0; d < D / 16; ++d) load_query(fq[0][d], 0, d);
        }
    }
    __device__ __forceinline__ void load_query(unsigned (&f)[4], int m, int d) const {
        load_matrices(f, queries + (m * 16 + lane % 16) * ROW + d * 16 + lane / 16 * 8);
    }

    __device__ __forceinline__ void score(float (&sum)[MS][NS][4], const T* keys) {
#pragma unroll
        for (int i = 0; i < MS * NS * 4; ++i) sum[i / 4 / NS][i / 4 % NS][i % 4] = 0.f;
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            if constexpr (!KEEPS) {
#pragma unroll
                for (int m = 0; m < MS; ++m) load_query(fq[m][0], m, d);
            }
#pragma unroll
            for (int n = 0; n < NS / 2; ++n) {
                unsigned fk[4];
                load_matrices(fk, keys + (n * 16 + lane / 16 * 8 + lane % 8) * ROW + d * 16 + lane / 8 % 2 * 8);
#pragma unroll
                for (int m = 0; m < MS; ++m) {
                    multiply_add<T>(sum[m][2 * n], fq[m][KEEPS ? d : 0], fk[0], fk[1]);
                    multiply_add<T>(sum[m][2 * n + 1], fq[m][KEEPS ? d : 0], fk[2], fk[3]);
                }
            }
        }
    }

    __device__ __forceinline__ void add_values(float (&out)[MS][D / 8][4], const float (&weight)[MS][NS][4], const T* values) {
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            unsigned fp[MS][4];
#pragma unroll
            for (int m = 0; m < MS; ++m) pack_rows<T>(fp[m], weight[m], n);
#pragma unroll
            for (int d = 0; d < D / 16; ++d) {
                unsigned fv[4];
                load_matrices_transposed(fv, values + (n * 16 + lane % 16) * ROW + d * 16 + lane / 16 * 8);
#pragma unroll
                for (int m = 0; m < MS; ++m) {
                    multiply_add<T>(out[m][2 * d], fp[m], fv[0], fv[1]);
                    multiply_add<T>(out[m][2 * d + 1], fp[m], fv[2], fv[3]);
                }
            }
        }
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// wgmma: heads of 64, four warps with 16 queries each. Queries, keys and values stay in shared memory.
template <typename T, int KEYS>
struct GroupTiles {
    static constexpr int D = GROUP_ROW, ROW = GROUP_ROW, NS = KEYS / 8;
    static_assert(KEYS % 64 == 0);
    template <int ROWS, int THREADS>
    using Mover = GroupTileMover<T, ROWS, THREADS>;

    const unsigned long long queries;

    // The launch has these 1,024 bytes to spare: it counts 16 bytes more per row.
    static __device__ __forceinline__ T* memory() { return group_memory<T>(); }
    static __device__ __forceinline__ int place(int row, int chunk) { return group_place(row, chunk); }
    static __device__ __forceinline__ void show() { show_copies(); }

    __device__ __forceinline__ GroupTiles(const T* tile, int warp) : queries(describe_tile(tile + warp / 4 * (64 * ROW))) {}

    __device__ __forceinline__ void score(float (&sum)[1][NS][4], const T* keys) {
        const unsigned long long k = describe_tile(keys);
        begin_products();
#pragma unroll
        for (int part = 0; part < KEYS / 64; ++part) {
#pragma unroll
            for (int d = 0; d < D / 16; ++d) multiply_tiles<T>(of(sum[0], part), queries + d * 2, k + part * (64 * 8) + d * 2, d > 0);
        }
        end_products();
#pragma unroll
        for (int part = 0; part < KEYS / 64; ++part) settle(of(sum[0], part));
    }

    __device__ __forceinline__ void add_values(float (&out)[1][D / 8][4], const float (&weight)[1][NS][4], const T* values) {
        const unsigned long long v = describe_tile(values);
        unsigned fp[KEYS / 16][4];
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            pack_rows<T>(fp[n], weight[0], n);
            settle(fp[n]);
        }
        settle(out[0]);
        begin_products();
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) multiply_rows<T>(out[0], fp[n], v + n * (16 * 8));
        end_products();
        settle(out[0]);
    }

   private:
    static __device__ __forceinline__ float (&of(float (&sum)[NS][4], int part))[8][4] {
        return *reinterpret_cast<float(*)[8][4]>(&sum[part * 8]);
    }
};
#endif

// The type to use: wgmma if GROUPS.
template <bool GROUPS, typename T, int DEPTH, int MS, int KEYS>
struct FlashTiles {
    using Type = WarpTiles<T, DEPTH, MS, KEYS>;
};
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <typename T, int DEPTH, int MS, int KEYS>
struct FlashTiles<true, T, DEPTH, MS, KEYS> {
    using Type = GroupTiles<T, KEYS>;
};
#endif

}  // namespace warpline
