// A grouped product on Hopper, of 16 bits: each row times the matrix of its expert.
//
//   a: rows of places                  b: matrices of all experts        out: rows of places or slots
//   +---------------+                  +----------+ expert 0             +----------+ slot 7
//   |               | 64, 64: block 0  |          |                      +----------+ slot 9
//   |               | 64, 64: block 1  +----------+                      +----------+ ..
//   +---------------+                  | COLUMNS  | expert 1
//   |  next expert  |                  +----------+
//
// Blocks stay: a cluster takes every so manyth tile, up to 256 rows of one expert by COLUMNS. Of
// the last rows of an expert, up to 128, each block takes 64, and consumers without rows skip
// products: what is multiplied in vain is below 64 rows of an expert, 32 on average. Results are
// stored row by row, as a box of TMA would have rows of the next expert.
//
//   out = (a b + bias) weight                              ACTIVATION 0
//   inner = a b + bias, out = activation(inner)            otherwise: `inner` is written if SAVES
//
// Compiled with: HALF, COLUMNS (128, 192, 256), STAGES, A_MAJOR_M (0), B_MAJOR_N (1: matrices have K
// rows), ACTIVATION (by its number), GATED (1: half of a tile's columns are gates, loaded by block
// 0, half are what they gate; with an activation), SAVES, BIASED, WEIGHTED.

struct Info {
    // n: columns of `out`.
    u64 n, k;
    // Rows of the matrix of an expert, and rows of tiles that there may be.
    u64 n_experts, b_rows, most_tiles;
    // Whether the result goes to slots, and not to places.
    u64 to_slots;
    // Whether what is gated has a limit, as bits of f32.
    u64 limited, limit;
};

struct Buffers {
    Half* out;
    Half* inner;
    // Of all rows of `b`.
    const float* bias;
    // Of places.
    const float* weights;
    // Slot of each place.
    const u32* slots;
    // Of each run of 256 rows, all of one expert: that expert, the run's first place, and the expert's
    // first place and the end of its places; behind the last run, the number of experts.
    const uint4* tiles;
};

// A block's part of a tile: so many rows from a place on, 0 or below if there are none, and first
// column.
struct Tile {
    int expert, first, rows, column;
};

struct Schedule {
    const Info& info;
    const uint4* tiles;
    // The next tile, and what is known of its run of rows: loaded a tile ahead.
    int tile;
    uint4 of_run;

    __device__ Schedule(const Info& of, const uint4* runs) : info(of), tiles(runs) {
        tile = blockIdx.x / BLOCKS;
        load();
    }

    __device__ __forceinline__ int columns() const {
        return (static_cast<int>(info.n) + OUT_COLUMNS - 1) / OUT_COLUMNS;
    }

    __device__ __forceinline__ void load() {
        int run = tile / columns();
        of_run = make_uint4(~0u, 0, 0, 0);
        if (run < info.most_tiles) {
            of_run = __ldg(tiles + run);
        }
    }

    __device__ __forceinline__ bool next(Tile& it) {
        constexpr int ROWS = BLOCKS * BLOCK_ROWS;
        if (of_run.x >= info.n_experts) {
            return false;
        }
        it.expert = static_cast<int>(of_run.x);
        int start = static_cast<int>(of_run.z), end = static_cast<int>(of_run.w);
        int rows = (end - start + ROWS - 1) / ROWS;
        // The number of the tile among those of its expert.
        int across = columns();
        int own = tile % across + (static_cast<int>(of_run.y) - start) / ROWS * across;
        int group = own / (GROUP * across), in_group = own % (GROUP * across);
        int height = min(GROUP, rows - group * GROUP);
        int first = start + (group * GROUP + in_group % height) * ROWS;
        it.column = in_group / height * OUT_COLUMNS;
        int left = end - first, each = left > BLOCK_ROWS ? BLOCK_ROWS : 64;
        int rank = static_cast<int>(cluster_rank());
        it.first = first + rank * each;
        it.rows = min(left - rank * each, each);
        tile += gridDim.x / BLOCKS;
        load();
        return true;
    }
};

// One thread: brings the stages, those of `a` as boxes of 64 rows, of which the last may have rows of
// the next expert.
__device__ void produce(const TensorMap& a_map, const TensorMap& b_map, const Buffers& buffers, const Info& info,
                        const Shared& shared) {
    int stages = (static_cast<int>(info.k) + DEPTH - 1) / DEPTH, rank = static_cast<int>(cluster_rank());
    Schedule schedule(info, buffers.tiles);
    Ring<STAGES> at;
    for (Tile tile; schedule.next(tile);) {
        int boxes = (max(tile.rows, 0) + 63) / 64;
        int b_row = tile.expert * static_cast<int>(info.b_rows);
        for (int step = 0; step < stages; step++) {
            int k = step * DEPTH;
            // Both blocks' consumers are done with what was there.
            barrier_wait(shared.empty(at.stage), at.parity ^ 1);
            u32 full = shared.full(at.stage), b = shared.b(at.stage);
            barrier_expect(full, B_BYTES + boxes * BLOCK_BYTES);
            for (int box = 0; box < boxes; box++) {
                tma_load(shared.a(at.stage) + box * BLOCK_BYTES, a_map, k, tile.first + box * 64, full);
            }
            // Behind K `a` has zeros, whatever `b` has.
            if (B_MAJOR_N) {
                bring_b(b_map, b, rank, b_row + k, tile.column, 0, full);
            } else {
                bring_b(b_map, b, rank, k, b_row + tile.column, static_cast<int>(info.n), full);
            }
            at.advance();
        }
    }
}

// A warp's rows of a result: lane l knows where that of row l % 16 goes, and how many there are.
struct WarpRows {
    u32 place, slot;
    float weight;
    int count;
};

// Where two runs of eight columns are in the warp's buffer, from run `run` on of 64 columns.
__device__ __forceinline__ u32 staged(u32 buffer, int run) {
    int lane = threadIdx.x % 32;
    return buffer + lane % 16 * ROW_BYTES + ((run + lane / 16 ^ lane % 8) << 4);
}

__device__ __forceinline__ void stage_runs(u32 buffer, int run, const float (&first)[4], const float (&second)[4]) {
    u32 matrices[4] = {pack(first[0], first[1]), pack(first[2], first[3]), pack(second[0], second[1]),
                       pack(second[2], second[3])};
    matrices_store(staged(buffer, run), matrices);
}

// 64 columns from the warp's buffer to rows of so many columns, up to column `end`.
__device__ __forceinline__ void store_rows(u32 buffer, Half* out, u32 row, int count, u64 columns, int column,
                                           int end) {
    int lane = threadIdx.x % 32, chunk = lane % 8;
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        int own = i * 4 + lane / 8;
        uint4 values = shared_load(buffer + own * ROW_BYTES + ((chunk ^ own % 8) << 4));
        u32 to = __shfl_sync(~0u, row, own);
        if (own < count && column + chunk * 8 < end) {
            memory_store(out + to * columns + column + chunk * 8, values);
        }
    }
    __syncwarp();
}

// Adds an expert's bias to the sums of columns from `column` on, whose runs begin at `first`.
template <int RUNS>
__device__ __forceinline__ void add_bias(Sums& sums, int first, const float* bias, int column, int end) {
    column += threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < RUNS; i++) {
        if (column + i * 8 < end) {
            float2 own = __ldg(reinterpret_cast<const float2*>(bias + column + i * 8));
            sums[first + i][0] += own.x;
            sums[first + i][1] += own.y;
            sums[first + i][2] += own.x;
            sums[first + i][3] += own.y;
        }
    }
}

// A tile's rows of this warp, from its sums to memory.
__device__ __forceinline__ void store(Sums& sums, const Buffers& buffers, const Info& info, const Tile& tile,
                                      const WarpRows& rows, u32 buffer) {
    constexpr int RUNS = OUT_COLUMNS / 8;
    int n = static_cast<int>(info.n);
    if (BIASED) {
        const float* bias = buffers.bias + static_cast<u64>(tile.expert) * info.b_rows;
        add_bias<RUNS>(sums, 0, bias, tile.column, n);
        if (GATED) {
            add_bias<RUNS>(sums, RUNS, bias + n, tile.column, n);
        }
    }
    u32 row = info.to_slots ? rows.slot : rows.place;
#if ACTIVATION
    [[maybe_unused]] float limit = __uint_as_float(static_cast<u32>(info.limit));
    #pragma unroll
    for (int piece = 0; piece < RUNS / 8; piece++) {
        int column = tile.column + piece * 64;
        if (SAVES) {
            #pragma unroll
            for (int half = 0; half < (GATED ? 2 : 1); half++) {
                #pragma unroll
                for (int run = 0; run < 8; run += 2) {
                    int i = half * RUNS + piece * 8 + run;
                    stage_runs(buffer, run, sums[i], sums[i + 1]);
                }
                int first = half * n;
                store_rows(buffer, buffers.inner, rows.slot, rows.count, info.b_rows, first + column, first + n);
            }
        }
        #pragma unroll
        for (int run = 0; run < 8; run += 2) {
            float values[2][4];
            // What is saved is in the buffer yet: to compute from that takes fewer registers.
            [[maybe_unused]] u32 saved[4];
            if (SAVES && !GATED) {
                matrices_load(saved, staged(buffer, run));
            }
            #pragma unroll
            for (int side = 0; side < 2; side++) {
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    int i = piece * 8 + run + side;
                    // Rounded as they are saved: a limit decides by that.
                    u32 pair = SAVES && !GATED ? saved[2 * side + half] : pack(sums[i][2 * half], sums[i][2 * half + 1]);
                    float2 x = unpack(pair), up = make_float2(1.0f, 1.0f);
                    if (GATED) {
                        up = unpack(pack(sums[RUNS + i][2 * half], sums[RUNS + i][2 * half + 1]));
                        if (info.limited) {
                            x = make_float2(fminf(x.x, limit), fminf(x.y, limit));
                            up.x = fminf(fmaxf(up.x, -limit), limit) + 1.0f;
                            up.y = fminf(fmaxf(up.y, -limit), limit) + 1.0f;
                        }
                    }
                    values[side][2 * half] = activate<ACTIVATION>(x.x) * up.x;
                    values[side][2 * half + 1] = activate<ACTIVATION>(x.y) * up.y;
                }
            }
            stage_runs(buffer, run, values[0], values[1]);
        }
        store_rows(buffer, buffers.out, row, rows.count, n, column, n);
    }
#else
    float weights[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        weights[half] = WEIGHTED ? __shfl_sync(~0u, rows.weight, threadIdx.x % 32 / 4 + 8 * half) : 1.0f;
    }
    #pragma unroll
    for (int piece = 0; piece < RUNS / 8; piece++) {
        #pragma unroll
        for (int run = 0; run < 8; run += 2) {
            int i = piece * 8 + run;
            if (WEIGHTED) {
                #pragma unroll
                for (int value = 0; value < 8; value++) {
                    sums[i + value / 4][value % 4] *= weights[value % 4 / 2];
                }
            }
            stage_runs(buffer, run, sums[i], sums[i + 1]);
        }
        store_rows(buffer, buffers.out, row, rows.count, n, tile.column + piece * 64, n);
    }
#endif
}

// A warpgroup: multiplies the stages and writes the result.
__device__ void consume(const Buffers& buffers, const Info& info, const Shared& shared, int consumer) {
    int warp = threadIdx.x / 32 % WARPS, stages = (static_cast<int>(info.k) + DEPTH - 1) / DEPTH;
    u32 buffer = shared.buffer(consumer * WARPS + warp);
    Schedule schedule(info, buffers.tiles);
    Ring<STAGES> at;
    Tile tile, next;
    for (bool more = schedule.next(tile); more; tile = next) {
        int left = tile.rows - consumer * 64;
        if (left <= 0) {
            more = schedule.next(next);
            skip_stages(shared, at, stages, 1 + consumer);
            continue;
        }
        WarpRows rows{0, 0, 1.0f, left - warp * 16};
        int lane = threadIdx.x % 16;
        auto find = [&] {
            more = schedule.next(next);
            rows.place = tile.first + consumer * 64 + warp * 16 + lane;
            if (lane < rows.count) {
                rows.slot = __ldg(buffers.slots + rows.place);
                rows.weight = WEIGHTED ? __ldg(buffers.weights + rows.place) : 1.0f;
            }
        };
        Sums sums;
        multiply_stages(sums, shared, at, stages, consumer * BLOCK_BYTES, find, [](u32) {});
        store(sums, buffers, info, tile, rows, buffer);
    }
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_product_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                           const void*, const void*, Half* out, Half* inner, const float* bias, const float* weights,
                           const u32* slots, const uint4* tiles, const __grid_constant__ Info info) {
    Buffers buffers{out, inner, bias, weights, slots, tiles};
    Shared shared{shared_base()};
    in_roles(
        shared, [&] { produce(a_map, b_map, buffers, info, shared); },
        [&](int consumer) { consume(buffers, info, shared, consumer); }
    );
}
