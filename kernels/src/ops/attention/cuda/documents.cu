// What attention over documents has to know of each row of the batch, computed from the index of
// the first token of each token's document. A block has a row.

constexpr int WARPS = 32;

struct Sizes {
    u64 tokens, window;
};

// What a token sees first. A start that is none counts as the token itself.
__device__ __forceinline__ int first_seen(int start, int token, int window) {
    return max(start < 0 || start > token ? token : start, token - window + 1);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    attention_documents(const int* starts, DocumentTile* rows, const __grid_constant__ Sizes sizes) {
    int tokens = sizes.tokens, window = sizes.window, tiles = (tokens + 63) / 64;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    starts += static_cast<u64>(blockIdx.x) * tokens;
    DocumentTile* row = rows + static_cast<u64>(blockIdx.x) * tiles;
    for (int tile = warp; tile < tiles; tile += WARPS) {
        int least = tokens, most = 0;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            int place = half * 32 + lane, token = tile * 64 + place, seen = 0;
            if (token < tokens) {
                seen = first_seen(starts[token], token, window);
                least = min(least, seen), most = max(most, seen);
            }
            row[tile].first[place] = seen;
        }
        least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
        if (lane == 0) {
            row[tile].earliest = least, row[tile].latest = most;
        }
    }
    __syncthreads();
    // The least of a tile and of all behind it, 32 tiles at a time from the last ones on.
    if (warp == 0) {
        int behind = tokens;
        for (int begin = (tiles - 1) / 32 * 32; begin >= 0; begin -= 32) {
            int tile = begin + lane, least = tile < tiles ? row[tile].earliest : tokens;
            #pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                // A lane with none behind it gets its own.
                least = min(least, __shfl_down_sync(~0u, least, offset));
            }
            least = min(least, behind);
            if (tile < tiles) {
                row[tile].earliest = least;
            }
            behind = __shfl_sync(~0u, least, 0);
        }
    }
    __syncthreads();
    // They grow from tile to tile: those that see a tile of keys end where they pass its last key.
    for (int tile = 2 * threadIdx.x; tile < tiles; tile += 64 * WARPS) {
        int seeing = 0;
        for (int step = 1 << 30; step > 0; step /= 2) {
            if (step <= tiles - seeing && row[seeing + step - 1].earliest < tile * 64 + 128) {
                seeing += step;
            }
        }
        row[tile].end = seeing;
    }
}
