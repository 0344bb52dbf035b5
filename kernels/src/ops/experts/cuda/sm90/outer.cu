// The gradient of experts' matrices on Hopper: of each expert `a^T b` over its places, of 16 bits.
//
//                         b: places x N
//                           |           |
//   a: M x places           +-----------+ first place of the expert        out: f32 [experts, M, N]
//   +----------------+      |           | 64 places are a stage
//   | 256 of M       |      |  COLUMNS  | ..
//   +----------------+      +-----------+ next expert: there `a` has zeros
//
// Blocks stay: a cluster takes every so manyth tile of 256 of M by COLUMNS, over all places of an
// expert, so that each is added up in one order.
//
// Compiled with: HALF, COLUMNS (128, 192, 256), STAGES, A_MAJOR_M (1), B_MAJOR_N (1), GATED (0), ADDS
// (1: to what `out` has).

struct Info {
    u64 m, n, n_experts;
};

struct Tile {
    int expert, row, column;
    // Places of the expert's rows.
    int first, end;

    __device__ __forceinline__ int stages() const { return (end - first + DEPTH - 1) / DEPTH; }
};

struct Schedule {
    const u32* starts;
    int rows, columns, tiles, tile;
    // The next tile's expert and its places: loaded a tile ahead.
    int expert;
    u32 first, end;

    __device__ Schedule(const Info& info, const u32* of_experts) : starts(of_experts) {
        constexpr int ROWS = BLOCKS * BLOCK_ROWS;
        rows = (static_cast<int>(info.m) + ROWS - 1) / ROWS;
        columns = (static_cast<int>(info.n) + COLUMNS - 1) / COLUMNS;
        tiles = static_cast<int>(info.n_experts) * rows * columns;
        tile = blockIdx.x / BLOCKS;
        load();
    }

    __device__ __forceinline__ void load() {
        if (tile < tiles) {
            expert = tile / (rows * columns);
            first = __ldg(starts + expert);
            end = __ldg(starts + expert + 1);
        }
    }

    __device__ __forceinline__ bool next(Tile& it) {
        if (tile >= tiles) {
            return false;
        }
        int own = tile - expert * rows * columns;
        it.expert = expert;
        it.row = (own % rows * BLOCKS + static_cast<int>(cluster_rank())) * BLOCK_ROWS;
        it.column = own / rows * COLUMNS;
        it.first = static_cast<int>(first), it.end = static_cast<int>(end);
        tile += gridDim.x / BLOCKS;
        load();
        return true;
    }
};

// One thread: brings the stages.
__device__ void produce(const TensorMap& a_map, const TensorMap& b_map, const u32* starts, const Info& info,
                        const Shared& shared) {
    int rank = static_cast<int>(cluster_rank());
    Schedule schedule(info, starts);
    Ring<STAGES> at;
    for (Tile tile; schedule.next(tile);) {
        for (int place = tile.first; place < tile.end; place += DEPTH) {
            barrier_wait(shared.empty(at.stage), at.parity ^ 1);
            u32 full = shared.full(at.stage);
            barrier_expect(full, STAGE_BYTES);
            for (int block = 0; block < CONSUMERS; block++) {
                tma_load(shared.a(at.stage) + block * BLOCK_BYTES, a_map, tile.row + block * 64, place, full);
            }
            bring_b(b_map, shared.b(at.stage), rank, place, tile.column, 0, full);
            at.advance();
        }
    }
}

__device__ __forceinline__ void put(float* to, float x, float y) {
    if (ADDS) {
        // Atomic adds without waiting. Each element is added to once per launch.
        asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
    } else {
        asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
    }
}

// Straight from the registers: threads write 32 bytes in a row.
__device__ __forceinline__ void store(const Sums& sums, float* out, const Info& info, const Tile& tile, int consumer) {
    int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32;
    out += tile.expert * info.m * info.n;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = tile.row + consumer * 64 + warp * 16 + half * 8 + lane / 4;
        if (row >= info.m) {
            continue;
        }
        #pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            int column = tile.column + i * 8 + lane % 4 * 2;
            if (column < info.n) {
                float x = sums[i][2 * half], y = sums[i][2 * half + 1];
                put(out + row * info.n + column, x, y);
            }
        }
    }
}

// A warpgroup: of its 64 columns of `a` those rows become zeros that are another expert's.
__device__ __forceinline__ void clear_rows(u32 a, int rows, int barrier) {
    for (int chunk = threadIdx.x % WARPGROUP + rows * 8; chunk < DEPTH * 8; chunk += WARPGROUP) {
        shared_store(a + chunk * 16, make_uint4(0, 0, 0, 0));
    }
    async_proxy_fence();
    named_barrier(barrier, WARPGROUP);
}

__device__ void consume(const u32* starts, float* out, const Info& info, const Shared& shared, int consumer) {
    Schedule schedule(info, starts);
    Ring<STAGES> at;
    Tile tile, next;
    for (bool more = schedule.next(tile); more; tile = next) {
        Sums sums;
        if (int stages = tile.stages()) {
            auto clear = [&](u32 a) {
                if (int rows = (tile.end - tile.first) % DEPTH) {
                    clear_rows(a, rows, 1 + consumer);
                }
            };
            multiply_stages(sums, shared, at, stages, consumer * BLOCK_BYTES, [&] { more = schedule.next(next); },
                            clear);
        } else {
            more = schedule.next(next);
            #pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++) {
                #pragma unroll
                for (int value = 0; value < 4; value++) {
                    sums[i][value] = 0.0f;
                }
            }
        }
        store(sums, out, info, tile, consumer);
    }
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_outer_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                         const void*, const void*, float* out, const u32* starts,
                         const __grid_constant__ Info info) {
    Shared shared{shared_base()};
    in_roles(
        shared, [&] { produce(a_map, b_map, starts, info, shared); },
        [&](int consumer) { consume(starts, out, info, shared, consumer); }
    );
}
