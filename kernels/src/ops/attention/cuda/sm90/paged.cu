// Attention, forward, of rows of any length over the pages that have their keys and values: see
// forward.cuh. A tile has new tokens of one row; it sees those before it in the row and, causally,
// its own.
//
//   a row's pages   [ page 7 ][ page 2 ][ page 9 ][ page 4 ]..
//   its new tokens                  [ tile of 128 ][ of fewer ]
//
// A page has 64 keys; a block of keys is two pages.

constexpr int PAGE = 64;

// A tile as it is listed.
struct Place {
    // Index of its first token in the pass, and the number of tokens.
    int token, queries;
    // The first one's index in its row.
    int own;
    // The row, and so its line in the table of pages.
    int row;
};

struct Paged {
    struct Info {
        u64 tiles, heads, kv_heads, pages, pages_a_row, window;
        // The bits of an f32.
        u64 scale;
    };

    struct Tile : Place {
        int head;

        // Behind the last key that it sees.
        __device__ int end() const { return own + queries; }
    };

    // Listed tiles, of all heads. Those that take longest come first; every other time blocks take
    // them in the opposite order, so that no block has the longest each time.
    struct Tiles {
        const Place* places;
        int heads, count, round = 0;

        __device__ bool next(Tile& tile) {
            int blocks = gridDim.x, block = blockIdx.x;
            int at = round * blocks + (round % 2 ? blocks - 1 - block : block);
            round++;
            if (at >= count) {
                return false;
            }
            static_cast<Place&>(tile) = places[at / heads];
            tile.head = at % heads;
            return true;
        }
    };

    const Info& info;
    const Place* places;
    // The pages of each row.
    const int* table;
    // [tokens, heads, columns]
    unsigned char* out;

    __device__ Tiles tiles() const {
        int heads = info.heads;
        return {places, heads, static_cast<int>(info.tiles) * heads};
    }

    __device__ Range seen(const Tile& tile) const {
        return {max(0, tile.own - static_cast<int>(info.window) + 1) / KEYS, (tile.end() + KEYS - 1) / KEYS};
    }

    __device__ Span keys_of(const Tile& tile, int row) const {
        int own = tile.own + row;
        return {own - static_cast<int>(info.window) + 1, min(own, tile.end() - 1)};
    }

    // Whether each of a consumer's queries sees each key of a block.
    __device__ bool all_seen(const Tile& tile, int query, int key) const {
        return spans(keys_of(tile, query), keys_of(tile, query + 63), key, KEYS);
    }

    struct Drop {
        __device__ void apply(float (&)[KEYS / 8][4], int) const {}
        __device__ float kept() const { return 1.0f; }
    };
    __device__ Drop drop(const Tile&, int) const { return {}; }

    // Behind the tile's queries come those of others, whose results are not kept.
    __device__ void bring_queries(u32 to, const TensorMap& map, const Tile& tile, u32 barrier) const {
        bring<KEPT>(to, map, tile.token, tile.head, 0, barrier);
    }

    // A page of which nothing is seen is one behind the cache's last: zeros.
    __device__ void bring_keys(u32 to, const TensorMap& map, const Tile& tile, int block, int head, u32 barrier) const {
        #pragma unroll
        for (int half = 0; half < KEYS / PAGE; half++) {
            int place = block * (KEYS / PAGE) + half;
            bool there = place * PAGE < tile.end() && place < info.pages_a_row;
            int page = there ? table[tile.row * info.pages_a_row + place] : static_cast<int>(info.pages);
            #pragma unroll
            for (int columns = 0; columns < HEAD_DIM / 64; columns++) {
                u32 part = to + columns * KEYS * ROW_BYTES + half * PAGE * ROW_BYTES;
                tma_load(part, map, columns * 64, 0, head, page, barrier);
            }
        }
    }

    // What a page has behind the last key may be no number, which stays one when it is multiplied
    // by 0. Both consumers clear all of it, so that neither waits for the other.
    __device__ void clear_unseen(u32 values, const Tile& tile, int block, int barrier) const {
        int first = tile.end() - block * KEYS;
        if (first >= KEYS || first % PAGE == 0) {
            return;
        }
        constexpr int CHUNKS = HEAD_DIM / 8;
        int end = (first + PAGE - 1) / PAGE * PAGE * CHUNKS;
        for (int at = first * CHUNKS + threadIdx.x % WARPGROUP; at < end; at += WARPGROUP) {
            int line = at / CHUNKS, chunk = at % CHUNKS;
            shared_store(values + chunk / 8 * KEYS * ROW_BYTES + line * ROW_BYTES + chunk % 8 * 16,
                         make_uint4(0, 0, 0, 0));
        }
        async_proxy_fence();
        named_barrier(barrier, WARPGROUP);
    }

    __device__ void keep(const Tile&, int, float, float) const {}

    // Nothing behind the tile's queries may be written: there are those of others.
    __device__ void write(const float (&sums)[HEAD_DIM / 8][4], float2 factors, u32 place, const TensorMap& map,
                          const Tile& tile, int row, int barrier) const {
        if (tile.queries >= row + 64) {
            write_rows(sums, factors, place, map, tile.token + row, tile.head, 0, barrier);
        } else if (tile.queries > row) {
            stage_rows(sums, factors, place, barrier);
            named_barrier(barrier, WARPGROUP);
            constexpr int CHUNKS = HEAD_DIM / 8;
            int end = (tile.queries - row) * CHUNKS;
            for (int at = threadIdx.x % WARPGROUP; at < end; at += WARPGROUP) {
                int line = at / CHUNKS, chunk = at % CHUNKS;
                u64 to = ((static_cast<u64>(tile.token) + row + line) * info.heads + tile.head) * CHUNKS + chunk;
                reinterpret_cast<uint4*>(out)[to] = shared_load(staged_chunk(place, line, chunk));
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_paged_hopper(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                           const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
                           const void*, const void*, const void*, void* out, const Place* places, const int* table,
                           const __grid_constant__ Paged::Info info) {
    attend(q_map, k_map, v_map, out_map, Paged{info, places, table, static_cast<unsigned char*>(out)});
}
