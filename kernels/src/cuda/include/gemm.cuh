// What GEMMs for Hopper share, besides hopper.cuh: a tile of a cluster of two blocks, and its
// product.
//
// A cluster computes 256 rows of a tile of COLUMNS: each block 128 of them, each of its two
// consumer warpgroups 64. Every 64 of K (32 of f32) are a stage. Each block brings its own rows of
// `a` for itself, and half of `b` for both blocks.
//
// Compiled with: TF32, COLUMNS (128, 192, 256), STAGES, A_MAJOR_M, B_MAJOR_N (1 if the matrix is
// contiguous along M or N), GATED.

constexpr int BLOCK_ROWS = 128;
// Of K in a stage: a row of a tile.
constexpr int DEPTH = TF32 ? 32 : 64;
constexpr int CONSUMERS = 2;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int BLOCKS = 2;
// Rows of tiles that are computed at about the same time, so that they share columns of `b` in the
// L2 cache.
constexpr int GROUP = 8;

constexpr int A_BYTES = BLOCK_ROWS * ROW_BYTES;
constexpr int B_BYTES = COLUMNS * ROW_BYTES;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
// Columns of the result that a tile has.
constexpr int OUT_COLUMNS = GATED ? COLUMNS / 2 : COLUMNS;
// 64 rows of a tile, also those of a consumer.
constexpr int BLOCK_BYTES = 64 * ROW_BYTES;

// One thread: brings half of a stage of `b` to both blocks, from these of K and N on. Where GATED,
// the half of block 1 is `gap` columns behind the other.
__device__ __forceinline__ void bring_b(const TensorMap& map, u32 b, u32 rank, int k, int column, int gap, u32 full) {
    if (B_MAJOR_N) {
        constexpr int HALF_DEPTH = DEPTH / 2;
        u32 half = b + rank * HALF_DEPTH * ROW_BYTES;
        for (int block = 0; block < COLUMNS / 64; block++) {
            tma_load_multicast(half + block * BLOCK_BYTES, map, column + block * 64, k + rank * HALF_DEPTH, full);
        }
    } else {
        constexpr int HALF_COLUMNS = COLUMNS / 2;
        int first = column + rank * (GATED ? gap : HALF_COLUMNS);
        tma_load_multicast(b + rank * HALF_COLUMNS * ROW_BYTES, map, k, first, full);
    }
}

using Sums = float[COLUMNS / 8][4];

// A stage: 64 rows of `a` by all columns of `b`.
__device__ __forceinline__ void multiply_stage(Sums& sums, u32 a, u32 b, bool add) {
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < ROW_BYTES / 32; k++) {
        // 32 bytes of a K-major row are a step of K; of 16 bits, so are 16 rows of an MN-major
        // block.
        u64 a_tile = tile_descriptor<64>(a + k * (A_MAJOR_M ? 16 * ROW_BYTES : 32));
        u64 b_tile = tile_descriptor<64>(b + k * (B_MAJOR_N ? 16 * ROW_BYTES : 32));
        Wgmma<COLUMNS>::multiply<A_MAJOR_M, B_MAJOR_N>(sums, a_tile, b_tile, add || k > 0);
    }
    wgmma_commit();
}

