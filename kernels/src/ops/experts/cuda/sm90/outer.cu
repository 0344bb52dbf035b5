// The gradient of experts' matrices on Hopper: of each expert `a^T b` over its rows, of 16 bits.
//
//                        b: places x N
//                  expert 0 +-----------+
//                           |           |
//                  expert 1 +-----------+
//                           |           |
//   a: rows in any order    +-----------+
//   M  | | | | | | | |        64 places are a stage           out: f32 [experts, M, N]
//      slots 7 9 ..                                                or [experts, N, M] if TRANSPOSED
//
// Blocks stay: a cluster takes every so manyth tile of 256 of M by COLUMNS, over all rows of an
// expert, so that each is added up in one order. Behind the expert's last row `a` has zeros.
//
// Compiled with: HALF, COLUMNS (128, 192, 256), STAGES, A_MAJOR_M (1), B_MAJOR_N (1), GATED (0),
// TRANSPOSED, ADDS (1: to what `out` has).

struct Info {
    u64 m, n, n_experts;
    // Slots of a row of `a`, whose number is a slot's over this.
    u64 share;
    // Distance of the rows of `a`.
    u64 stride;
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

// Four warps: bring the stages. Eight threads copy 64 of M of a place.
__device__ void produce(const TensorMap& b_map, const Half* a, const Order& order, const Info& info,
                        const Shared& shared) {
    constexpr int EACH = DEPTH / 16;
    int thread = threadIdx.x, chunk = thread % 8, own = thread / 8;
    u32 offset = own * ROW_BYTES + ((chunk ^ own % 8) << 4), share = static_cast<u32>(info.share);
    Schedule schedule(info, order.starts);
    Ring<STAGES> at;
    Tile tile, next;
    u32 slots[EACH];
    auto find = [&](const Tile& of, int step) {
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            int place = of.first + step * DEPTH + own + 16 * i;
            slots[i] = place < of.end ? __ldg(order.slots + place) : ~0u;
        }
    };
    bool more = schedule.next(tile);
    if (more) {
        find(tile, 0);
    }
    for (; more; tile = next) {
        more = schedule.next(next);
        int stages = tile.stages(), column = tile.row + chunk * 8;
        if (stages == 0 && more) {
            find(next, 0);
        }
        for (int step = 0; step < stages; step++) {
            barrier_wait(shared.empty(at.stage), at.parity ^ 1);
            u32 full = shared.full(at.stage);
            if (thread == 0) {
                barrier_expect(full, B_BYTES);
                bring_b(b_map, shared.b(at.stage), cluster_rank(), tile.first + step * DEPTH, tile.column, 0, full);
            }
            u32 to = shared.a(at.stage) + offset;
            #pragma unroll
            for (int i = 0; i < EACH; i++) {
                bool there = slots[i] != ~0u;
                const Half* row = a + (there ? slots[i] / share : 0) * info.stride;
                #pragma unroll
                for (int block = 0; block < CONSUMERS; block++) {
                    bool reads = there && column + block * 64 < info.m;
                    copy_async_if(true, to + block * BLOCK_BYTES + i * 16 * ROW_BYTES,
                                  row + (reads ? column + block * 64 : 0), !reads);
                }
            }
            copies_arrive(full);
            // Those of the next stage come while this one does.
            if (step + 1 < stages) {
                find(tile, step + 1);
            } else if (more) {
                find(next, 0);
            }
            at.advance();
        }
    }
}

__device__ __forceinline__ void put(float* to, float x) {
    if (ADDS) {
        // Atomic adds without waiting. Each element is added to once per launch.
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
    } else {
        *to = x;
    }
}

__device__ __forceinline__ void put(float* to, float x, float y) {
    if (ADDS) {
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
                if (TRANSPOSED) {
                    put(out + column * info.m + row, x);
                    put(out + (column + 1) * info.m + row, y);
                } else {
                    put(out + row * info.n + column, x, y);
                }
            }
        }
    }
}

__device__ void consume(const Order& order, float* out, const Info& info, const Shared& shared, int consumer) {
    Schedule schedule(info, order.starts);
    Ring<STAGES> at;
    Tile tile, next;
    for (bool more = schedule.next(tile); more; tile = next) {
        Sums sums;
        if (int stages = tile.stages()) {
            multiply_stages(sums, shared, at, stages, consumer * BLOCK_BYTES, [&] { more = schedule.next(next); },
                            [] {});
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
    grouped_outer_hopper(const __grid_constant__ TensorMap b_map, const void*, const Half* a, float* out,
                         const u32* slots, const u32* starts, const __grid_constant__ Info info) {
    Order order{slots, starts, nullptr};
    Shared shared{shared_base()};
    in_roles(
        shared, [&] { produce(b_map, a, order, info, shared); },
        [&](int consumer) { consume(order, out, info, shared, consumer); }
    );
}
