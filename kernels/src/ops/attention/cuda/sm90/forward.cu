// Attention, forward, of rows of one length: see forward.cuh.

struct Batch {
    // A tile of one head of one row of the batch.
    struct Tile {
        int batch, head, first;
        // Of a padded row: its keys.
        int length;
        // Of documents: the first key that any query sees, and the first one that all may see.
        int earliest, latest;

        __device__ __forceinline__ void look_up(const Info& info, const void* rows) {
            if (MASK == LENGTHS) {
                length = length_of(rows, batch, info.keys);
            } else if (MASK == DOCUMENTS) {
                int queries = info.queries, tile = first / 64;
                const DocumentTile* known = &document_tile(rows, batch, queries, tile);
                earliest = known->earliest, latest = known->latest;
                if ((tile + 1) * 64 < queries) {
                    latest = max(latest, known[1].latest);
                }
            }
        }
    };

    // The tiles of `rows` rows of all heads. Under a causal mask some take long and some are short,
    // so a block takes them in pairs, the longest and the shortest of a head, then one in the
    // middle, and all pairs take as long. Where there are too few pairs for all blocks, tiles are
    // taken one by one. They are found without divisions, which take as long as some of a tile's
    // products.
    struct Tiles {
        const Info& info;
        const void* rows;
        int across, heads, pairs, batches;
        // The next pair, and the gap between two of a block.
        int place, head, batch, place_step, head_step, batch_step;
        // Where the other tile of a pair begins, or -1.
        int other = -1;

        __device__ Tiles(const Info& of, const void* known) : info(of), rows(known) {
            across = (static_cast<int>(info.queries) + KEPT - 1) / KEPT;
            heads = static_cast<int>(info.heads), batches = static_cast<int>(info.batch);
            pairs = (across + 1) / 2;
            if (pairs * heads * batches < gridDim.x) {
                pairs = across;
            }
            int block = blockIdx.x, blocks = gridDim.x;
            place = block % pairs, head = block / pairs % heads, batch = block / pairs / heads;
            place_step = blocks % pairs, head_step = blocks / pairs % heads, batch_step = blocks / pairs / heads;
        }

        __device__ bool next(Tile& tile) {
            bool more = step(tile);
            if (more) {
                tile.look_up(info, rows);
            }
            return more;
        }

        __device__ bool step(Tile& tile) {
            if (other >= 0) {
                tile.first = other;
                other = -1;
                return true;
            }
            if (batch >= batches) {
                return false;
            }
            int mirrored = across - 1 - place;
            tile.batch = batch, tile.head = head, tile.first = place * KEPT;
            if (pairs < across && mirrored != place) {
                other = mirrored * KEPT;
            }
            place += place_step, head += head_step, batch += batch_step;
            if (place >= pairs) {
                place -= pairs, head++;
            }
            if (head >= heads) {
                head -= heads, batch++;
            }
            return true;
        }
    };

    const Info& info;
    // Of padded rows their lengths, of documents what is known of their tiles.
    const void* rows;
    float* log_sum_exp;

    __device__ Tiles tiles() const { return Tiles(info, rows); }

    __device__ Range seen(const Tile& tile) const {
        if (MASK == LENGTHS) {
            return {0, (tile.length + KEYS - 1) / KEYS};
        }
        Range range = seen_keys<KEYS>(info, tile.first, KEPT);
        if (MASK == DOCUMENTS) {
            range.begin = tile.earliest / KEYS;
        }
        return range;
    }

    __device__ Span keys_of(const Tile& tile, int row) const {
        if (MASK == LENGTHS) {
            return {0, tile.length - 1};
        }
        int query = tile.first + row;
        Span span = ::keys_of(info, query);
        if (MASK == DOCUMENTS) {
            query = min(query, static_cast<int>(info.queries) - 1);
            span.first = document_tile(rows, tile.batch, info.queries, query / 64).first[query % 64];
        }
        return span;
    }

    // Whether each of a consumer's queries sees each key of a block.
    __device__ bool all_seen(const Tile& tile, int query, int key) const {
        if (MASK == DOCUMENTS) {
            return key >= tile.latest && key + KEYS - 1 <= tile.first + query;
        }
        return spans(keys_of(tile, query), keys_of(tile, query + 63), key, KEYS);
    }

    // Drops probabilities of a thread's two rows.
    struct Drop {
        const Info& info;
        u32 numbers[2];

        __device__ __forceinline__ void apply(float (&scores)[KEYS / 8][4], int block) const {
            u32 threshold = info.dropout.limit();
            int pair = block * (KEYS / 2) + threadIdx.x % 4;
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 row = random_row(info.dropout, numbers[half], block * KEYS);
                #pragma unroll
                for (int i = 0; i < KEYS / 8; i++) {
                    RandomPair random = random_pair(info.dropout, row, pair + i * 4);
                    scores[i][2 * half] = random.even < threshold ? 0.0f : scores[i][2 * half];
                    scores[i][2 * half + 1] = random.odd < threshold ? 0.0f : scores[i][2 * half + 1];
                }
            }
        }

        // What the others are multiplied by, in the end.
        __device__ __forceinline__ float kept() const { return DROPOUT ? info.dropout.factor() : 1.0f; }
    };

    __device__ Drop drop(const Tile& tile, int query) const {
        int line = tile.first + query + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
        u32 row =
            (static_cast<u32>(tile.batch) * static_cast<u32>(info.heads) + tile.head) * static_cast<u32>(info.queries) +
            line;
        return {info, {row, row + 8}};
    }

    __device__ void bring_queries(u32 to, const TensorMap& map, const Tile& tile, u32 barrier) const {
        bring<KEPT>(to, map, tile.first, tile.head, tile.batch, barrier);
    }

    __device__ void bring_keys(u32 to, const TensorMap& map, const Tile& tile, int block, int head, u32 barrier) const {
        bring<KEYS>(to, map, block * KEYS, head, tile.batch, barrier);
    }

    // Behind the last key are zeros.
    __device__ void clear_unseen(u32, const Tile&, int, int) const {}

    __device__ void keep(const Tile& tile, int row, float maximum, float sum) const {
        row += tile.first;
        if (row < info.queries) {
            u64 place = (static_cast<u64>(tile.batch) * info.heads + tile.head) * info.queries + row;
            log_sum_exp[place] = maximum + __logf(sum);
        }
    }

    __device__ void write(const float (&out)[HEAD_DIM / 8][4], float2 factors, u32 place, const TensorMap& map,
                          const Tile& tile, int row, int barrier) const {
        write_rows(out, factors, place, map, tile.first + row, tile.head, tile.batch, barrier);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_forward_hopper(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                             const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
                             const void*, const void*, const void*, void*, float* log_sum_exp, const void* rows,
                             const __grid_constant__ Info info) {
    attend(q_map, k_map, v_map, out_map, Batch{info, rows, log_sum_exp});
}
