// Attention, forward (Dao, 2023): a block keeps a tile of 128 queries, 32 for each of four warps,
// and iterates over keys and values, the last ones first.
//
//   copies      V(i)                        K(i - 1)
//   products           S = Q K(i)^T                    softmax, O = O * correction + P V(i)
//               ^ K(i) has arrived          ^ V(i) has arrived
//
// Two blocks share a multiprocessor, so one multiplies while the other waits or computes its
// softmax.
//
// Compiled with: KEYS (keys of a block, 64 or 128), and what attention.cuh says.

constexpr int WARPS = 4, THREADS = 32 * WARPS, QUERIES = 128;
// Blocks of 16 rows of a warp.
constexpr int ROW_BLOCKS = QUERIES / WARPS / 16;
constexpr int Q_BYTES = QUERIES * HEAD_DIM * 2, KV_BYTES = KEYS * HEAD_DIM * 2;
// Queries of narrow heads stay in registers.
constexpr bool KEEPS = HEAD_DIM == 64;

struct Launch {
    Info info;
    Strides q, k, v, out;
};

using Scores = float[KEYS / 8][4];

// A tile of one head of one row of the batch.
struct Tile {
    int batch, head, first;

    // Under a causal mask the last queries take longest: they are first.
    __device__ __forceinline__ Tile(const Info& info) {
        int heads = info.heads, all = heads * static_cast<int>(info.batch), place = blockIdx.x % all;
        int across = (static_cast<int>(info.queries) + QUERIES - 1) / QUERIES;
        batch = place / heads, head = place % heads;
        first = (across - 1 - static_cast<int>(blockIdx.x) / all) * QUERIES;
    }
};

// Which keys a tile sees.
struct Seen {
    const Info& info;
    const Tile& tile;
    const void* rows;
    // Of a padded row its keys; of documents the first key that all queries may see.
    int length = 0, latest = 0;
    Range range;

    __device__ __forceinline__ Seen(const Info& of, const Tile& in, const void* known)
        : info(of), tile(in), rows(known) {
        range = seen_keys<KEYS>(info, tile.first, QUERIES);
        if (MASK == LENGTHS) {
            length = length_of(rows, tile.batch, info.keys);
            range = {0, (length + KEYS - 1) / KEYS};
        } else if (MASK == DOCUMENTS) {
            int queries = info.queries, at = tile.first / 64;
            const DocumentTile* known_of = &document_tile(rows, tile.batch, queries, at);
            range.begin = known_of->earliest / KEYS;
            latest = known_of->latest;
            if ((at + 1) * 64 < queries) {
                latest = max(latest, known_of[1].latest);
            }
        }
    }

    __device__ __forceinline__ Span keys_of(int row) const {
        if (MASK == LENGTHS) {
            return {0, length - 1};
        }
        int query = tile.first + row;
        Span span = ::keys_of(info, query);
        if (MASK == DOCUMENTS) {
            query = min(query, static_cast<int>(info.queries) - 1);
            span.first = document_tile(rows, tile.batch, info.queries, query / 64).first[query % 64];
        }
        return span;
    }

    // Whether each of a warp's queries from `row` on sees each key of a block.
    __device__ __forceinline__ bool all(int row, int key) const {
        if (MASK == DOCUMENTS) {
            return key >= latest && key + KEYS - 1 <= tile.first + row;
        }
        return spans(keys_of(row), keys_of(row + QUERIES / WARPS - 1), key, KEYS);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_forward_ampere(const unsigned short* q, const unsigned short* k, const unsigned short* v,
                             unsigned short* out, float* log_sum_exp, const void* rows,
                             const __grid_constant__ Launch launch) {
    extern __shared__ __align__(128) unsigned char memory[];
    const Info& info = launch.info;
    u32 q_tile = shared_address(memory), k_tile = q_tile + Q_BYTES, v_tile = k_tile + KV_BYTES;
    Tile tile(info);
    Seen seen(info, tile, rows);
    Lane lane;
    int queries = info.queries, keys = info.keys,
        kv_head = tile.head / (static_cast<int>(info.heads) / static_cast<int>(info.kv_heads));
    q += launch.q.of(tile.batch, tile.head), k += launch.k.of(tile.batch, kv_head),
        v += launch.v.of(tile.batch, kv_head);
    out += launch.out.of(tile.batch, tile.head);
    auto copy_keys = [&](u32 to, const unsigned short* from, u64 stride, int block) {
        copy_rows<KEYS, THREADS>(to, from + block * KEYS * stride, stride, keys - block * KEYS);
    };
    copy_rows<QUERIES, THREADS>(q_tile, q + tile.first * launch.q.row, launch.q.row, queries - tile.first);
    copy_keys(k_tile, k, launch.k.row, seen.range.end - 1);
    copies_commit();
    int own = threadIdx.x / 32 * (QUERIES / WARPS), in_block = threadIdx.x % 32 / 4;
    float scale_log2 = scale_of(info) * LOG2_E;
    float sums[ROW_BLOCKS][HEAD_DIM / 8][4], maximum[ROW_BLOCKS][2], total[ROW_BLOCKS][2];
    [[maybe_unused]] u32 kept[KEEPS ? ROW_BLOCKS : 1][KEEPS ? HEAD_DIM / 16 : 1][4];
    #pragma unroll
    for (int i = 0; i < ROW_BLOCKS; i++) {
        clear(sums[i]);
        maximum[i][0] = maximum[i][1] = -INFINITE, total[i][0] = total[i][1] = 0.0f;
    }
    #pragma unroll 1
    for (int block = seen.range.end - 1; block >= seen.range.begin; block--) {
        // The keys have arrived, and all warps have read the previous values.
        copies_wait<0>();
        __syncthreads();
        copy_keys(v_tile, v, launch.v.row, block);
        copies_commit();
        if (KEEPS && block == seen.range.end - 1) {
            #pragma unroll
            for (int i = 0; i < ROW_BLOCKS; i++) {
                #pragma unroll
                for (int step = 0; step < HEAD_DIM / 16; step++) {
                    lane.left<QUERIES>(kept[KEEPS ? i : 0][KEEPS ? step : 0], q_tile, own + i * 16, step);
                }
            }
        }
        float scores[ROW_BLOCKS][KEYS / 8][4];
        #pragma unroll
        for (int i = 0; i < ROW_BLOCKS; i++) {
            clear(scores[i]);
        }
        #pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++) {
            u32 a[ROW_BLOCKS][4];
            #pragma unroll
            for (int i = 0; i < ROW_BLOCKS && !KEEPS; i++) {
                lane.left<QUERIES>(a[i], q_tile, own + i * 16, step);
            }
            #pragma unroll
            for (int j = 0; j < KEYS / 16; j++) {
                u32 b[4];
                lane.right<KEYS>(b, k_tile, j * 16, step);
                #pragma unroll
                for (int i = 0; i < ROW_BLOCKS; i++) {
                    const u32(&left)[4] = KEEPS ? kept[KEEPS ? i : 0][KEEPS ? step : 0] : a[i];
                    multiply(scores[i][2 * j], left, b[0], b[1]);
                    multiply(scores[i][2 * j + 1], left, b[2], b[3]);
                }
            }
        }
        // The values have arrived, and all warps have read the keys.
        copies_wait<0>();
        __syncthreads();
        if (block > seen.range.begin) {
            copy_keys(k_tile, k, launch.k.row, block - 1);
        }
        copies_commit();
        if (!seen.all(own, block * KEYS)) {
            #pragma unroll
            for (int i = 0; i < ROW_BLOCKS * 2; i++) {
                mask_row<KEYS>(scores[i / 2], i % 2, -INFINITE, block * KEYS, seen.keys_of(own + i * 8 + in_block));
            }
        }
        #pragma unroll
        for (int i = 0; i < ROW_BLOCKS; i++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                float most = maximum[i][half];
                #pragma unroll
                for (int j = 0; j < KEYS / 8; j++) {
                    most = fmaxf(most, fmaxf(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
                }
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                // A row that has seen nothing yet.
                float base = most == -INFINITE ? 0.0f : most * scale_log2;
                float correction = power_of_2(maximum[i][half] * scale_log2 - base), added = 0.0f;
                maximum[i][half] = most;
                #pragma unroll
                for (int j = 0; j < KEYS / 8; j++) {
                    #pragma unroll
                    for (int value = 2 * half; value < 2 * half + 2; value++) {
                        scores[i][j][value] = power_of_2(fmaf(scores[i][j][value], scale_log2, -base));
                        added += scores[i][j][value];
                    }
                }
                total[i][half] = total[i][half] * correction + added;
                #pragma unroll
                for (int j = 0; j < HEAD_DIM / 8; j++) {
                    sums[i][j][2 * half] *= correction, sums[i][j][2 * half + 1] *= correction;
                }
                if (DROPOUT) {
                    u32 row = (static_cast<u32>(tile.batch) * static_cast<u32>(info.heads) + tile.head) *
                                  static_cast<u32>(queries) +
                              tile.first + own + i * 16 + half * 8 + in_block;
                    u32 number = random_row(info.dropout, row, block * KEYS), threshold = info.dropout.limit();
                    #pragma unroll
                    for (int j = 0; j < KEYS / 8; j++) {
                        RandomPair random =
                            random_pair(info.dropout, number, block * (KEYS / 2) + j * 4 + threadIdx.x % 4);
                        scores[i][j][2 * half] = random.even < threshold ? 0.0f : scores[i][j][2 * half];
                        scores[i][j][2 * half + 1] = random.odd < threshold ? 0.0f : scores[i][j][2 * half + 1];
                    }
                }
            }
        }
        #pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            u32 a[ROW_BLOCKS][4];
            #pragma unroll
            for (int i = 0; i < ROW_BLOCKS; i++) {
                pack_sums(a[i], scores[i][2 * step], scores[i][2 * step + 1]);
            }
            #pragma unroll
            for (int j = 0; j < HEAD_DIM / 16; j++) {
                u32 b[4];
                lane.right_transposed<KEYS>(b, v_tile, step * 16, j);
                #pragma unroll
                for (int i = 0; i < ROW_BLOCKS; i++) {
                    multiply(sums[i][2 * j], a[i], b[0], b[1]);
                    multiply(sums[i][2 * j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }
    float of_kept = DROPOUT ? info.dropout.factor() : 1.0f;
    #pragma unroll
    for (int i = 0; i < ROW_BLOCKS; i++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = total[i][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            int query = tile.first + own + i * 16 + half * 8 + in_block;
            bool there = query < queries;
            if (there && threadIdx.x % 4 == 0) {
                u64 place = (static_cast<u64>(tile.batch) * info.heads + tile.head) * info.queries + query;
                log_sum_exp[place] = maximum[i][half] * scale_of(info) + __logf(sum);
            }
            write_row(there, out + query * launch.out.row, sums[i], half, __fdividef(of_kept, sum));
        }
    }
}
