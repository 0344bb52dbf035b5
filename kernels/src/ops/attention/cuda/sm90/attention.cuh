// What the attention kernels for Hopper share.
//
// A block keeps a tile of 128 rows, 64 for each of its two consumer warpgroups, and a warp of the
// producer brings the tiles of the other side one after the other through a ring of stages. Blocks
// stay, and take one tile after the other.
//
//   forward    keeps Q       brings K, V     S = Q K^T       P = exp(S - max)                                 O += P V
//   backward   keeps K, V    brings Q, dO    S^T = K Q^T     P^T = exp(..), dS^T = P^T (V dO^T - delta)       dV += P^T dO, dK += dS^T Q, dQ += dS K
//
// Scores and their gradients stay in registers: as sums of one product they lie just as the left
// side of the next one does.
//
// Compiled with: HALF, HEAD_DIM (64, 128), MASK, DROPOUT (0, 1).

// Which keys a query sees: all; those up to its own; those of a row of its own length; those of its
// document up to its own.
enum { EVERY, UP_TO_OWN, LENGTHS, DOCUMENTS };
constexpr bool CAUSAL = MASK == UP_TO_OWN || MASK == DOCUMENTS;

constexpr int CONSUMERS = 2;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
// Rows of the tile that a block keeps.
constexpr int KEPT = 64 * CONSUMERS;

struct Info {
    u64 batch, heads, kv_heads, queries, keys;
    // Keys that a query sees at the most; added to a place it stays below 2^31.
    u64 window;
    // The bits of an f32.
    u64 scale;
    DropoutInfo dropout;
};

template <class Info>
__device__ __forceinline__ float scale_of(const Info& info) {
    return __uint_as_float(static_cast<u32>(info.scale));
}

// What is known of a tile of 64 tokens of a row of documents: see documents.cu.
struct DocumentTile {
    // Of each token, the first key that it sees.
    int first[64];
    // The first key that any of these or of later tokens sees; the first one that all of these may
    // see.
    int earliest, latest;
    // Behind the last tile that sees any of the 128 keys from this tile on, where it is the first
    // half of a tile of keys.
    int end;
    int unused;
};

__device__ __forceinline__ const DocumentTile& document_tile(const void* tiles, int row, int tokens, int tile) {
    return static_cast<const DocumentTile*>(tiles)[row * ((tokens + 63) / 64) + tile];
}

// Keys of a padded row: one at the least, and no more than there are.
__device__ __forceinline__ int length_of(const void* lengths, int row, u64 keys) {
    return min(max(__ldg(static_cast<const int*>(lengths) + row), 1), static_cast<int>(keys));
}

// Blocks from `begin` to `end`.
struct Range {
    int begin, end;
};

// The blocks of `SIZE` keys that some of `rows` queries from `query` on see.
template <int SIZE>
__device__ __forceinline__ Range seen_keys(const Info& info, int query, int rows) {
    int keys = info.keys, queries = info.queries;
    if (!CAUSAL) {
        return {0, (keys + SIZE - 1) / SIZE};
    }
    int own = query + keys - queries, last = min(keys, own + rows);
    int first = max(0, own - static_cast<int>(info.window) + 1);
    return {first / SIZE, (last + SIZE - 1) / SIZE};
}

// The blocks of `SIZE` queries that see some of `rows` keys from `key` on.
template <int SIZE>
__device__ __forceinline__ Range seeing_queries(const Info& info, int key, int rows) {
    int keys = info.keys, queries = info.queries;
    if (!CAUSAL) {
        return {0, (queries + SIZE - 1) / SIZE};
    }
    int offset = keys - queries, first = max(0, key - offset);
    int end = min(queries, key + rows - 1 + static_cast<int>(info.window) - offset);
    return {first / SIZE, (end + SIZE - 1) / SIZE};
}

// From the first to the last one.
struct Span {
    int first, last;
};

// The keys that a query sees.
__device__ __forceinline__ Span keys_of(const Info& info, int query) {
    int keys = info.keys, own = query + keys - static_cast<int>(info.queries);
    if (!CAUSAL) {
        return {0, keys - 1};
    }
    return {own - static_cast<int>(info.window) + 1, min(own, keys - 1)};
}

// The queries that see a key. What is behind the last query counts as well: nothing of it is added
// up.
__device__ __forceinline__ Span queries_of(const Info& info, int key) {
    int own = key - static_cast<int>(info.keys) + static_cast<int>(info.queries);
    if (!CAUSAL) {
        return {0, static_cast<int>(info.queries)};
    }
    return {own, min(own + static_cast<int>(info.window) - 1, static_cast<int>(info.queries))};
}

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
__device__ __forceinline__ void sums_by_columns(float (&d)[HEAD_DIM / 8][4], const u32 (&a)[K / 16][4], u32 b, bool add) {
    #pragma unroll
    for (int k = 0; k < K / 16; k++) {
        u64 right = tile_descriptor<K>(b, k * 16 * ROW_BYTES);
        Wgmma<HEAD_DIM>::template multiply<1>(d, a[k], right, add || k > 0);
    }
}

// Which of a thread's sums of a row of `N` columns are among the first `count` columns behind its
// own first one: a bit each. Two of each eight columns are its own.
template <int N>
__device__ __forceinline__ u32 among_first(int count) {
    static_assert(N <= 128, "bits");
    count = min(max(count, 0), N);
    return static_cast<u32>((1ull << (count / 8 * 2 + min(count % 8, 2))) - 1);
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

// Whether a tile needs no mask: the spans of its first and of its last row both have all its
// columns.
__device__ __forceinline__ bool spans(Span of_first, Span of_last, int column, int columns) {
    return of_first.first <= column && of_last.first <= column && of_first.last >= column + columns - 1 &&
           of_last.last >= column + columns - 1;
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
__device__ __forceinline__ void stage_rows(const float (&sums)[HEAD_DIM / 8][4], float2 factors, u32 place, int barrier) {
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
