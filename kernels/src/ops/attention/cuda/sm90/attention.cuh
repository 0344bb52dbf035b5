// What the attention kernels for Hopper share.
//
// A block keeps a tile of 128 rows, 64 for each of its two consumer warpgroups, and a warp of the
// producer brings the tiles of the other side one after the other through a ring of stages. Blocks
// stay, and take one tile after the other.
//
//   forward    keeps Q       brings K, V     S = Q K^T     P = exp(S - max)
//              O += P V
//   backward   keeps K, V    brings Q, dO    S^T = K Q^T   P^T = exp(..)
//              dS^T = P^T (V dO^T - delta), dV += P^T dO, dK += dS^T Q, dQ += dS K
//
// Scores and their gradients stay in registers: as sums of one product they lie just as the left
// side of the next one does.
//
// Compiled with: HALF, HEAD_DIM (64, 128), MASK, DROPOUT (0, 1).

constexpr int CONSUMERS = 2;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
// Rows of the tile that a block keeps.
constexpr int KEPT = 64 * CONSUMERS;

// Brings `ROWS` rows of a head, in blocks of 64 columns.
template <int ROWS>
__device__ __forceinline__ void bring(u32 to, const TensorMap& map, int row, int head, int batch, u32 barrier) {
    #pragma unroll
    for (int block = 0; block < HEAD_DIM / 64; block++) {
        tma_load(to + block * ROWS * ROW_BYTES, map, block * 64, row, head, batch, barrier);
    }
}

// d = a b^T over the columns of a head: 64 rows of a tile of `A_ROWS` by all N rows of `b`.
template <int A_ROWS, int N>
__device__ __forceinline__ void rows_by_rows(float (&d)[N / 8][4], u32 a, u32 b) {
    #pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        u64 left = tile_descriptor<A_ROWS>(a, k / 4 * A_ROWS * ROW_BYTES + k % 4 * 32);
        u64 right = tile_descriptor<N>(b, k / 4 * N * ROW_BYTES + k % 4 * 32);
        Wgmma<N>::template multiply<0, 0>(d, left, right, k > 0);
    }
}

// d += a b: `a` in registers, K columns of it, by K rows of a tile.
template <int K>
__device__ __forceinline__ void sums_by_columns(float (&d)[HEAD_DIM / 8][4], const u32 (&a)[K / 16][4], u32 b,
                                                bool add) {
    #pragma unroll
    for (int k = 0; k < K / 16; k++) {
        u64 right = tile_descriptor<K>(b, k * 16 * ROW_BYTES);
        Wgmma<HEAD_DIM>::template multiply<1>(d, a[k], right, add || k > 0);
    }
}

// Puts `instead` in the place of a tile's sums in columns outside a span, which is that of
// `span_of(row)` less `column`: rows are counted in the warpgroup's tile.
template <int N, class SpanOf>
__device__ __forceinline__ void mask_sums(float (&sums)[N / 8][4], float instead, int column, SpanOf span_of) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        Span span = span_of(warp * 16 + half * 8 + lane / 4);
        int own = column + lane % 4 * 2;
        u32 seen = among_first<N>(span.last + 1 - own) & ~among_first<N>(span.first - own);
        #pragma unroll
        for (int i = 0; i < N / 4; i++) {
            if (!(seen >> i & 1)) {
                sums[i / 2][2 * half + i % 2] = instead;
            }
        }
    }
}

// Sums as the left side of a product.
template <int N>
__device__ __forceinline__ void pack_sums(u32 (&packed)[N / 16][4], const float (&sums)[N / 8][4]) {
    #pragma unroll
    for (int i = 0; i < N / 16; i++) {
        packed[i][0] = pack(sums[2 * i][0], sums[2 * i][1]);
        packed[i][1] = pack(sums[2 * i][2], sums[2 * i][3]);
        packed[i][2] = pack(sums[2 * i + 1][0], sums[2 * i + 1][1]);
        packed[i][3] = pack(sums[2 * i + 1][2], sums[2 * i + 1][3]);
    }
}

// Where 16 bytes of a row lie that was put into `place`.
__device__ __forceinline__ u32 staged_chunk(u32 place, int line, int chunk) {
    return place + chunk / 8 * 64 * ROW_BYTES + line * ROW_BYTES + ((chunk % 8 ^ line % 8) << 4);
}

// Puts a warpgroup's 64 rows of a head into `place` in shared memory, each multiplied by a factor.
__device__ __forceinline__ void stage_rows(const float (&sums)[HEAD_DIM / 8][4], float2 factors, u32 place,
                                           int barrier) {
    int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    if (thread == 0) {
        tma_store_wait_read();
    }
    named_barrier(barrier, WARPGROUP);
    int line = warp * 16 + lane % 16;
    #pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i += 2) {
        int chunk = i + lane / 16;
        u32 matrices[4];
        #pragma unroll
        for (int side = 0; side < 2; side++) {
            matrices[2 * side] = pack(sums[i + side][0] * factors.x, sums[i + side][1] * factors.x);
            matrices[2 * side + 1] = pack(sums[i + side][2] * factors.y, sums[i + side][3] * factors.y);
        }
        matrices_store(staged_chunk(place, line, chunk), matrices);
    }
}

// Writes them, by way of `place`.
__device__ __forceinline__ void write_rows(const float (&sums)[HEAD_DIM / 8][4], float2 factors, u32 place,
                                           const TensorMap& map, int row, int head, int batch, int barrier) {
    stage_rows(sums, factors, place, barrier);
    async_proxy_fence();
    named_barrier(barrier, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
        #pragma unroll
        for (int block = 0; block < HEAD_DIM / 64; block++) {
            tma_store(map, place + block * 64 * ROW_BYTES, block * 64, row, head, batch);
        }
        tma_store_commit();
    }
}

// Arrivals of all consumers' warps.
constexpr int RELEASES = CONSUMERS * WARPGROUP / 32 * WARP_ARRIVALS;
