// Attention, forward, of rows of one length: see forward.cuh.

struct Batch {
    // A tile of one head of one row of the batch.
    struct Tile {
        int batch, head, first;
    };

    // The tiles of `rows` rows of all heads. Under a causal mask some take long and some are short, so a block takes them in pairs, the
    // longest and the shortest of a head, then one in the middle, and all pairs take as long. Where there are too few pairs for
    // all blocks, tiles are taken one by one. They are found without divisions, which take as long as some of a tile's products.
    struct Tiles {
        int across, heads, pairs, batches;
        // The next pair, and what lies between two of a block.
        int place, head, batch, place_step, head_step, batch_step;
        // Where the other tile of a pair begins, or -1.
        int other = -1;

        __device__ Tiles(u64 rows, u64 of_heads, u64 of_batch) {
            across = (static_cast<int>(rows) + KEPT - 1) / KEPT;
            heads = static_cast<int>(of_heads), batches = static_cast<int>(of_batch);
            pairs = (across + 1) / 2;
            if (pairs * heads * batches < gridDim.x) {
                pairs = across;
            }
            int block = blockIdx.x, blocks = gridDim.x;
            place = block % pairs, head = block / pairs % heads, batch = block / pairs / heads;
            place_step = blocks % pairs, head_step = blocks / pairs % heads, batch_step = blocks / pairs / heads;
        }

        __device__ bool next(Tile& tile) {
            if (other >= 0) {
                tile.first = other;
                other = -1;
                return true;
            }
            if (batch >= batches) {
                return false;
            }
            int mirrored = across - 1 - place;
            tile = {batch, head, place * KEPT};
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
    float* log_sum_exp;

    __device__ Tiles tiles() const { return Tiles(info.queries, info.heads, info.batch); }

    __device__ Range seen(const Tile& tile) const { return seen_keys<KEYS>(info, tile.first, KEPT); }

    __device__ Span keys_of(const Tile& tile, int row) const { return ::keys_of(info, tile.first + row); }

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
                             const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map, const void*,
                             const void*, const void*, void*, float* log_sum_exp, const __grid_constant__ Info info) {
    attend(q_map, k_map, v_map, out_map, Batch{info, log_sum_exp});
}
