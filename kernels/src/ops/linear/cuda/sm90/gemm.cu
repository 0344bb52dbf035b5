// out = activation(a * b + bias), or dropout(a * b + bias) + residual, as far as these are there,
// or (a * b) * slopes, for 16-bit matrices on Hopper; or out = a * b for f32. If EXTENDED, a * b
// has a second product added: that of a low-rank adapter, a * b + a2 * b2.
//
//                          b  K x N
//                        +----------+
//                        | COLUMNS  |
//       a  M x K         +----------+
//   +---------------+    +----------+
//   | 128, block 0  |    |  block 0 |
//   +---------------+    +----------+
//   | 128, block 1  |    |  block 1 |
//   +---------------+    +----------+
//
//   producer warp:  wait empty[s] -> TMA into stage s -> full[s] counts the bytes
//   consumers:      wait full[s] -> wgmma -> arrive at empty[s] of both blocks
//
// The tile of a cluster of two blocks is that of gemm.cuh.
//
// Blocks stay: a cluster takes whole tiles, `whole_rounds` of them, one after the other. What tiles
// are left, too few for all clusters, are cut along K into as many equal runs as there are clusters
// (stream-K: Osama et al., 2023). Where a tile was cut, the cluster that has its end adds what the
// clusters before it have left in `partial`, in a fixed order, so that equal inputs give equal
// bits. A cluster takes its pieces from the last to the first: it waits only for what clusters of
// lower numbers do first.
//
// f32 matrices lie with K contiguous, 32 of K are a stage. They are multiplied in TF32, which has
// 11 of f32's 24 bits; or, if SPLIT, as three products, one after the other. Each row of `a` and
// `b` has its rounded numbers first, whole stages of them, and then what was rounded off.
//
//   a  | rounded | rest |   *   b  | rounded | rest |
//       =   rest * rounded + rounded * rest + rounded * rounded
//
// Tensor cores cut off bits of what they add up (Ootomo and Yokota, 2022): every PROMOTED stages
// the sums are added to others by f32 units.
//
// The second product of an extended one is more of K: stages of `a2` and `b2`, which have the layout
// of `a` and `b`, follow those of `a` and `b`. What is missing of their last stage TMA fills with
// zeros.
//
//   a  | K | rank |   *   b  | K | rank |
//
// Compiled with: TF32 (1: for f32), SPLIT, HALF, COLUMNS (128, 192, 256), STAGES, A_MAJOR_M,
// B_MAJOR_N (1 if the matrix is contiguous along M or N), OUT_F32 (1: f32 sums, which may be added
// to `out`), ROW_SUMS (1: also the sums of each row of `a`, which is contiguous along M: f32
// results), EXTENDED (1: of 16 bits, with a second product), ACTIVATION (0: none; 1: GELU by tanh;
// 2: ReLU; 3: SiLU), GATED (1: the activation is gated; `b` has all gates first, and is contiguous
// along K), DROPOUT (1: without an activation, 16 bits), SLOPES (matrices of slopes: with an
// activation they are written, too; without one the product is multiplied by each of them. 1, or 2
// side by side for a gated activation; then there are as many products side by side).
//
// For a gated activation, half of a tile's columns are gates, loaded by block 0, and half are what
// they gate, loaded by block 1: both of a pair are in the same thread's sums. For the gradient an
// activation leaves its slopes: for a gate g and its value u, these are u * activation'(g) and
// activation(g).
//
// For the gradient of a weight, `a` is the gradient of outputs, and the sums of its rows are the
// bias's gradient. Two warps next to the producer's compute those over each stage of 64 of K, which
// another launch adds up. The stages of a row of tiles are distributed over its columns.

constexpr int PROMOTED = 4;
// Whether the next tile is found while the first products of one run, as its divisions take long:
// where there are registers for it.
constexpr bool FINDS_AHEAD = ACTIVATION == 0 || GATED || COLUMNS < 256;
// Warps that add up rows of `a`, 64 each.
constexpr int SUMMING_WARPS = ROW_SUMS ? CONSUMERS : 0;
// Where a consumer puts its 64 rows of the result: blocks of 64 columns.
constexpr int OUT_BYTES = OUT_F32 ? 0 : 64 * OUT_COLUMNS * 2;

struct Info {
    // n: columns of the result.
    u64 m, n, k;
    // Tiles that each cluster computes as a whole.
    u64 whole_rounds;
    // 0: no bias; 1: of f32; 2: of 16 bits.
    u64 bias;
    // Whether there is something else at a tile's end: a residual or f32 sums to add to, or slopes
    // to multiply by.
    u64 adds;
    DropoutInfo dropout;
    // The inner dimension of the second product.
    u64 rank;
};

struct Buffers {
    float* out;
    const void* bias;
    // The sums of rows of `a` over each stage: [K / DEPTH, M].
    float* row_sums;
    // Partial results of split tiles, and flags that they are complete.
    float* partial;
    u32* ready;
};

// A run of stages of a tile.
struct Work {
    int row, column;
    int begin, end;
    // The first of all stages of the tile, where it is among those that are cut.
    int tile_start;
};

struct Schedule {
    // `first_stages`: those of `a` and `b`.
    int rows, columns, first_stages, stages, clusters, cluster;
    int tiles, round, whole_rounds;
    // Of the tiles that are cut: the first one, and what is left of this cluster's stages.
    int first_cut, begin, end;

    __device__ Schedule(const Info& info) {
        rows = (static_cast<int>(info.m) + BLOCKS * BLOCK_ROWS - 1) / (BLOCKS * BLOCK_ROWS);
        columns = (static_cast<int>(info.n) + OUT_COLUMNS - 1) / OUT_COLUMNS;
        first_stages = (static_cast<int>(info.k) + DEPTH - 1) / DEPTH * (SPLIT ? 3 : 1);
        stages = first_stages + (EXTENDED ? (static_cast<int>(info.rank) + DEPTH - 1) / DEPTH : 0);
        clusters = gridDim.x / BLOCKS;
        cluster = blockIdx.x / BLOCKS;
        tiles = rows * columns;
        round = 0;
        whole_rounds = static_cast<int>(info.whole_rounds);
        first_cut = min(tiles, whole_rounds * clusters);
        begin = cut(cluster);
        end = cut(cluster + 1);
    }

    // Where the stages of a cluster begin.
    __device__ int cut(int of_cluster) const {
        long long all = static_cast<long long>(tiles - first_cut) * stages;
        return static_cast<int>(all * of_cluster / clusters);
    }

    __device__ void place(Work& work, int tile) const {
        int group = tile / (GROUP * columns), in_group = tile % (GROUP * columns);
        int height = min(GROUP, rows - group * GROUP);
        work.row = (group * GROUP + in_group % height) * BLOCKS * BLOCK_ROWS;
        work.column = in_group / height * OUT_COLUMNS;
    }

    __device__ bool next(Work& work) {
        int tile = cluster + round * clusters;
        if (round < whole_rounds && tile < tiles) {
            round++;
            place(work, tile);
            work.begin = 0;
            work.end = stages;
            return true;
        }
        if (begin >= end) {
            return false;
        }
        tile = (end - 1) / stages;
        place(work, first_cut + tile);
        work.tile_start = tile * stages;
        work.end = end - work.tile_start;
        end = max(begin, work.tile_start);
        work.begin = end - work.tile_start;
        return true;
    }
};

// Layout of shared memory.
struct Shared {
    u32 base;

    __device__ u32 a(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ u32 b(int stage) const { return a(stage) + A_BYTES; }
    __device__ u32 out(int consumer) const { return base + STAGES * STAGE_BYTES + consumer * OUT_BYTES; }
    __device__ u32 full(int stage) const { return out(CONSUMERS) + 8 * stage; }
    __device__ u32 empty(int stage) const { return full(STAGES + stage); }
    __device__ u32 residual(int consumer) const { return full(2 * STAGES + consumer); }
    __device__ u32 bias(int consumer) const { return full(2 * STAGES + CONSUMERS) + consumer * COLUMNS * 4; }
};

// The matrices of a product.
struct Operands {
    const TensorMap *a, *b;
};

// One thread: brings the stages, of the second product after those of the first.
__device__ void produce(const Operands& first, const Operands& second, const Info& info, const Shared& shared) {
    u32 rank = cluster_rank();
    Schedule schedule(info);
    Ring<STAGES> at;
    for (Work work; schedule.next(work);) {
        int row = work.row + static_cast<int>(rank) * BLOCK_ROWS;
        for (int step = work.begin; step < work.end; step++) {
            int k = step * DEPTH;
            int a_k = k, b_k = k;
            bool extends = EXTENDED && step >= schedule.first_stages;
            const TensorMap &a_map = extends ? *second.a : *first.a, &b_map = extends ? *second.b : *first.b;
            if (extends) {
                a_k = b_k = k - schedule.first_stages * DEPTH;
            }
            if (SPLIT) {
                int third = schedule.stages / 3, part = step / third;
                k = (step - part * third) * DEPTH;
                a_k = k + (part == 0 ? third * DEPTH : 0), b_k = k + (part == 1 ? third * DEPTH : 0);
            }
            // Both blocks' consumers are done with what was there.
            barrier_wait(shared.empty(at.stage), at.parity ^ 1);
            u32 full = shared.full(at.stage), a = shared.a(at.stage), b = shared.b(at.stage);
            barrier_expect(full, STAGE_BYTES);
            if (A_MAJOR_M) {
                for (int block = 0; block < BLOCK_ROWS / 64; block++) {
                    tma_load(a + block * BLOCK_BYTES, a_map, row + block * 64, a_k, full);
                }
            } else {
                tma_load(a, a_map, a_k, row, full);
            }
            bring_b(b_map, b, rank, b_k, work.column, static_cast<int>(info.n), full);
            at.advance();
        }
    }
}

// Leaves the sums of a tile's first or middle stages to the cluster that has its end.
__device__ __forceinline__ void leave(const Sums& sums, const Buffers& buffers, int slot, int barrier) {
    int thread = threadIdx.x % WARPGROUP;
    float4* partial = reinterpret_cast<float4*>(buffers.partial) + static_cast<u64>(slot) * (COLUMNS / 8) * WARPGROUP;
    #pragma unroll
    for (int i = 0; i < COLUMNS / 8; i++) {
        __stcg(partial + i * WARPGROUP + thread, make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]));
    }
    // A release by one thread is one of what others wrote ahead of a barrier with it, too.
    named_barrier(barrier, WARPGROUP);
    if (thread == 0) {
        asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(buffers.ready + slot) : "memory");
    }
}

// Adds what another cluster has left, and frees its place.
__device__ __forceinline__ void collect(Sums& sums, const Buffers& buffers, int slot, int barrier) {
    int thread = threadIdx.x % WARPGROUP;
    u32* ready = buffers.ready + slot;
    if (thread == 0) {
        u32 there = 0;
        #pragma unroll 1
        for (u32 tries = 0; !there; tries++) {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(ready) : "memory");
            if (tries > 1u << 26) {
                __trap();
            }
        }
    }
    named_barrier(barrier, WARPGROUP);
    const float4* partial =
        reinterpret_cast<const float4*>(buffers.partial) + static_cast<u64>(slot) * (COLUMNS / 8) * WARPGROUP;
    #pragma unroll
    for (int i = 0; i < COLUMNS / 8; i++) {
        float4 more = __ldcg(partial + i * WARPGROUP + thread);
        sums[i][0] += more.x;
        sums[i][1] += more.y;
        sums[i][2] += more.z;
        sums[i][3] += more.w;
    }
    named_barrier(barrier, WARPGROUP);
    if (thread == 0) {
        *ready = 0;
    }
}

#if ROW_SUMS
// A warp: the sums of 64 rows of `a` over this column's stages. Eight lanes read 64 of M, eight
// each, and four such groups every fourth of K. (By products with ones it waited behind `wgmma` for
// each.)
__device__ void sum_rows(const Buffers& buffers, const Info& info, const Shared& shared, int warp) {
    int lane = threadIdx.x % 32, chunk = lane % 8, first_k = lane / 8;
    Schedule schedule(info);
    Ring<STAGES> at;
    for (Work work; schedule.next(work);) {
        int row = work.row + static_cast<int>(cluster_rank()) * BLOCK_ROWS + warp * 64 + chunk * 8;
        int own = work.column / COLUMNS;
        for (int step = work.begin; step < work.end; step++) {
            bool adds = step % schedule.columns == own;
            barrier_wait(shared.full(at.stage), at.parity);
            float sums[8] = {};
            if (adds) {
                u32 place = shared.a(at.stage) + warp * BLOCK_BYTES + first_k * ROW_BYTES;
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint4 rows[8];
                    #pragma unroll
                    for (int i = 0; i < 8; i++) {
                        int k = (half * 8 + i) * 4;
                        rows[i] = shared_load(place + k * ROW_BYTES + ((chunk ^ (k + first_k) % 8) << 4));
                    }
                    #pragma unroll
                    for (int i = 0; i < 8; i++) {
                        float values[8];
                        unpack(values, rows[i]);
                        #pragma unroll
                        for (int of_m = 0; of_m < 8; of_m++) {
                            sums[of_m] += values[of_m];
                        }
                    }
                }
            }
            warp_arrive(shared.empty(at.stage));
            at.advance();
            if (adds) {
                float* to = buffers.row_sums + static_cast<u64>(step) * info.m + row;
                #pragma unroll
                for (int i = 0; i < 8; i++) {
                    sums[i] += __shfl_xor_sync(~0u, sums[i], 8);
                    sums[i] += __shfl_xor_sync(~0u, sums[i], 16);
                    if (first_k == 0 && row + i < info.m) {
                        to[i] = sums[i];
                    }
                }
            }
        }
    }
}
#endif

// The bias of a tile's columns, from memory to shared memory; zeros where there is none.
__device__ __forceinline__ void bring_bias(const Buffers& buffers, const Info& info, u32 place, int column) {
    for (int i = threadIdx.x % WARPGROUP; i < COLUMNS; i += WARPGROUP) {
        float bias = 0.0f;
        if (info.bias && column + i % OUT_COLUMNS < info.n) {
            u64 at = column + i % OUT_COLUMNS + i / OUT_COLUMNS * info.n;
            bias = info.bias == 1 ? static_cast<const float*>(buffers.bias)[at]
                                  : widen(static_cast<const unsigned short*>(buffers.bias)[at]);
        }
        shared_store(place + 4 * i, bias);
    }
}

#if OUT_F32
// Straight from the registers: four threads write 32 bytes of a row.
template <bool ADDS>
__device__ __forceinline__ void store(const Sums& sums, const Buffers& buffers, const Info& info, int row, int column) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = row + warp * 16 + half * 8 + lane / 4;
        if (at >= info.m) {
            continue;
        }
        float* out = buffers.out + static_cast<u64>(at) * info.n;
        #pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            int across = column + i * 8 + lane % 4 * 2;
            if (across < info.n) {
                float x = sums[i][2 * half], y = sums[i][2 * half + 1];
                if (ADDS) {
                    // Atomic adds without waiting. Each element is added to once per launch.
                    asm volatile(
                        "red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(out + across), "f"(x), "f"(y)
                        : "memory");
                } else {
                    *reinterpret_cast<float2*>(out + across) = make_float2(x, y);
                }
            }
        }
    }
}
#else
// A thread's sums of two runs of eight columns of the tile, from run `i` on, with the bias if
// BIASED.
struct Runs {
    float values[2][4];

    template <bool BIASED>
    static __device__ __forceinline__ Runs of(const Sums& sums, int i, u32 bias_place) {
        Runs runs;
        #pragma unroll
        for (int side = 0; side < 2; side++) {
            float2 bias = make_float2(0.0f, 0.0f);
            if (BIASED) {
                u32 place = bias_place + 4 * ((i + side) * 8 + threadIdx.x % 4 * 2);
                asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(bias.x), "=f"(bias.y) : "r"(place));
            }
            #pragma unroll
            for (int value = 0; value < 4; value++) {
                runs.values[side][value] = sums[i + side][value] + (value % 2 ? bias.y : bias.x);
            }
        }
        return runs;
    }
};

// A thread's two rows of a tile, as dropout has them, and its first column.
struct Drop {
    const DropoutInfo& dropout;
    u32 rows[2];
    int column;

    __device__ __forceinline__ Drop(const DropoutInfo& of, int row, int of_column) : dropout(of), column(of_column) {
        row += threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            rows[half] = random_row(dropout, row + 8 * half, column);
        }
        column += threadIdx.x % 4 * 2;
    }

    // Drops numbers of the runs from run `i` on, and scales the others.
    __device__ __forceinline__ void apply(Runs& runs, int i) const {
        #pragma unroll
        for (int side = 0; side < 2; side++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                RandomPair random = random_pair(dropout, rows[half], (column + (i + side) * 8) / 2);
                float(&values)[4] = runs.values[side];
                values[2 * half] = random.even < dropout.limit() ? 0.0f : values[2 * half] * dropout.factor();
                values[2 * half + 1] = random.odd < dropout.limit() ? 0.0f : values[2 * half + 1] * dropout.factor();
            }
        }
    }
};

// Where a thread's matrices of two runs of eight columns are in a staged result, from run `i` on:
// blocks of 64 columns, in the order that TMA stores.
__device__ __forceinline__ u32 staged(u32 out, int i) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16, chunk = i + lane / 16;
    return out + chunk / 8 * BLOCK_BYTES + row * ROW_BYTES + ((chunk % 8 ^ row % 8) << 4);
}

__device__ __forceinline__ void stage_runs(u32 place, const Runs& runs) {
    u32 matrices[4];
    #pragma unroll
    for (int matrix = 0; matrix < 4; matrix++) {
        matrices[matrix] = pack(runs.values[matrix / 2][matrix % 2 * 2], runs.values[matrix / 2][matrix % 2 * 2 + 1]);
    }
    matrices_store(place, matrices);
}

#if ACTIVATION
// The activation of a tile's sums, to shared memory. If slopes are requested, these are written,
// for a gated activation those of the gates; then the activation replaces the sums, that of the
// gates, next to its product with the gated values.
__device__ __forceinline__ void stage_activation(Sums& sums, u32 out, u32 bias_place) {
    constexpr int OUT_RUNS = OUT_COLUMNS / 8;
    #pragma unroll
    for (int i = 0; i < OUT_RUNS; i += 2) {
        Runs runs = Runs::of<true>(sums, i, bias_place);
        [[maybe_unused]] Runs gated;
        if (GATED) {
            gated = Runs::of<true>(sums, i + OUT_RUNS, bias_place);
        }
        #pragma unroll
        for (int value = 0; value < 8; value++) {
            float &x = runs.values[value / 4][value % 4], slope;
            float y = activate<ACTIVATION>(x, slope);
            float up = GATED ? gated.values[value / 4][value % 4] : 1.0f;
            if (SLOPES) {
                sums[i + value / 4][value % 4] = y;
                if (GATED) {
                    sums[i + OUT_RUNS + value / 4][value % 4] = y * up;
                }
            }
            x = SLOPES ? slope * up : y * up;
        }
        stage_runs(staged(out, i), runs);
    }
}

// Sums from run `first` on, as wide as the result.
__device__ __forceinline__ void stage_sums(const Sums& sums, int first, u32 out) {
    #pragma unroll
    for (int i = 0; i < OUT_COLUMNS / 8; i += 2) {
        stage_runs(staged(out, i), Runs::of<false>(sums, first + i, 0));
    }
}
#else
// Into shared memory, where the residual or slopes may be already. BIASED and ADDS are decided
// ahead of the loop: a branch at each store took three times as long as the stores.
template <bool BIASED, bool ADDS>
__device__ __forceinline__ void stage_out(const Sums& sums, u32 out, u32 bias_place, const Drop& drop) {
    #pragma unroll
    for (int i = 0; i < OUT_COLUMNS / 8; i += 2) {
        u32 place = staged(out, i);
        Runs runs = Runs::of<BIASED>(sums, i, bias_place);
        if (DROPOUT) {
            drop.apply(runs, i);
        }
        if (ADDS) {
            u32 matrices[4];
            matrices_load(matrices, place);
            #pragma unroll
            for (int matrix = 0; matrix < 4; matrix++) {
                float2 other = unpack(matrices[matrix]);
                float &x = runs.values[matrix / 2][matrix % 2 * 2], &y = runs.values[matrix / 2][matrix % 2 * 2 + 1];
                x = SLOPES ? x * other.x : x + other.x;
                y = SLOPES ? y * other.y : y + other.y;
            }
        }
        stage_runs(place, runs);
    }
}

// All of it, with what there is to add or to multiply by.
template <bool BIASED>
__device__ __forceinline__ void stage_all(
    const Sums& sums, const Info& info, u32 out, u32 bias_place, const Drop& drop
) {
    if (info.adds) {
        stage_out<BIASED, true>(sums, out, bias_place, drop);
    } else {
        stage_out<BIASED, false>(sums, out, bias_place, drop);
    }
}
#endif

// What a warpgroup has put into shared memory, to memory.
__device__ __forceinline__ void send(const TensorMap& map, u32 out, int row, int column, int barrier) {
    async_proxy_fence();
    named_barrier(barrier, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
        for (int block = 0; block < OUT_COLUMNS / 64; block++) {
            tma_store(map, out + block * BLOCK_BYTES, column + block * 64, row);
        }
        tma_store_commit();
    }
}
#endif

// A warpgroup: multiplies the stages and writes the result. `residual_map` is what there is to add,
// or the slopes: those to multiply by, or, behind an activation, where these go.
__device__ void consume(const TensorMap* out_map, const TensorMap* residual_map, const Buffers& buffers,
                        const Info& info, const Shared& shared, int consumer) {
    u32 rank = cluster_rank();
    int thread = threadIdx.x % WARPGROUP, barrier = 1 + consumer;
    Schedule schedule(info);
    Ring<STAGES> at;
    [[maybe_unused]] u32 residual_parity = 0;
    u32 a_rows = consumer * 64 * ROW_BYTES, out = shared.out(consumer);
    Work work, next;
    bool more = schedule.next(work);
    auto advance = [&] {
        if (!FINDS_AHEAD) {
            more = schedule.next(next);
        }
        work = next;
    };
    for (; more; advance()) {
        int row = work.row + static_cast<int>(rank) * BLOCK_ROWS + consumer * 64;
        bool has_end = work.end == schedule.stages;
        [[maybe_unused]] auto bring = [&](int column) {
            tma_store_wait_read();
            barrier_expect(shared.residual(consumer), OUT_BYTES);
            for (int block = 0; block < COLUMNS / 64; block++) {
                tma_load(out + block * BLOCK_BYTES, *residual_map, column + block * 64, row, shared.residual(consumer));
            }
        };
        if (!OUT_F32 && info.adds && has_end && thread == 0) {
            // Comes while the stages are multiplied.
            bring(work.column);
            for (int block = 0; SLOPES > 1 && block < COLUMNS / 64; block++) {
                tma_prefetch(*residual_map, work.column + static_cast<int>(info.n) + block * 64, row);
            }
        }
        if (!OUT_F32 && (ACTIVATION || info.bias) && has_end) {
            bring_bias(buffers, info, shared.bias(consumer), work.column);
        }
        Sums sums;
        // No function for both loops: with one that of 16 bits had other registers, and spilled.
#if SPLIT
        if (FINDS_AHEAD) {
            more = schedule.next(next);
        }
        #pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            #pragma unroll
            for (int value = 0; value < 4; value++) {
                sums[i][value] = 0.0f;
            }
        }
        for (int first = work.begin; first < work.end; first += PROMOTED) {
            Sums part;
            int end = min(first + PROMOTED, work.end), before = -1;
            #pragma unroll 1
            for (int step = first; step < end; step++) {
                barrier_wait(shared.full(at.stage), at.parity);
                multiply_stage(part, shared.a(at.stage) + a_rows, shared.b(at.stage), step > first);
                if (step > first) {
                    wgmma_wait<1>();
                    if (thread < BLOCKS) {
                        barrier_arrive(shared.empty(before), thread);
                    }
                }
                before = at.stage;
                at.advance();
            }
            wgmma_wait<0>();
            if (thread < BLOCKS) {
                barrier_arrive(shared.empty(before), thread);
            }
            #pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++) {
                #pragma unroll
                for (int value = 0; value < 4; value++) {
                    sums[i][value] += part[i][value];
                }
            }
        }
#else
        barrier_wait(shared.full(at.stage), at.parity);
        multiply_stage(sums, shared.a(at.stage) + a_rows, shared.b(at.stage), false);
        int before = at.stage;
        at.advance();
        if (FINDS_AHEAD) {
            more = schedule.next(next);
        }
        for (int step = work.begin + 1; step < work.end; step++) {
            barrier_wait(shared.full(at.stage), at.parity);
            multiply_stage(sums, shared.a(at.stage) + a_rows, shared.b(at.stage), true);
            wgmma_wait<1>();
            if (thread < BLOCKS) {
                barrier_arrive(shared.empty(before), thread);
            }
            before = at.stage;
            at.advance();
        }
        wgmma_wait<0>();
        if (thread < BLOCKS) {
            barrier_arrive(shared.empty(before), thread);
        }
#endif
        // Two blocks, and two consumers of each.
        auto slot = [&](int cluster) { return (cluster * BLOCKS + static_cast<int>(rank)) * CONSUMERS + consumer; };
        if (!has_end) {
            leave(sums, buffers, slot(schedule.cluster), barrier);
            continue;
        }
        if (work.begin > 0) {
            for (int cluster = schedule.cluster - 1; schedule.cut(cluster + 1) > work.tile_start; cluster--) {
                if (schedule.cut(cluster) < schedule.cut(cluster + 1)) {
                    collect(sums, buffers, slot(cluster), barrier);
                }
            }
        }
#if OUT_F32
        if (info.adds) {
            store<true>(sums, buffers, info, row, work.column);
        } else {
            store<false>(sums, buffers, info, row, work.column);
        }
#else
        // What was staged before is read.
        auto reuse = [&] {
            if (thread == 0) {
                tma_store_wait_read();
            }
            named_barrier(barrier, WARPGROUP);
        };
#if ACTIVATION
        reuse();
        stage_activation(sums, out, shared.bias(consumer));
        #pragma unroll
        for (int half = 0; half < SLOPES; half++) {
            send(*residual_map, out, row, work.column + half * static_cast<int>(info.n), barrier);
            reuse();
            // Behind the slopes of gates come those of what they gate, and the result.
            stage_sums(sums, half < SLOPES - 1 || !GATED ? 0 : OUT_COLUMNS / 8, out);
        }
        send(*out_map, out, row, work.column, barrier);
#else
        auto await_residual = [&] {
            barrier_wait(shared.residual(consumer), residual_parity);
            residual_parity ^= 1;
        };
        Drop drop(info.dropout, row, work.column);
        if (info.adds) {
            await_residual();
            named_barrier(barrier, WARPGROUP);
        } else {
            reuse();
        }
        if (info.bias) {
            stage_all<true>(sums, info, out, shared.bias(consumer), drop);
        } else {
            stage_all<false>(sums, info, out, 0, drop);
        }
        send(*out_map, out, row, work.column, barrier);
        if (SLOPES > 1) {
            int column = work.column + static_cast<int>(info.n);
            if (thread == 0) {
                bring(column);
            }
            await_residual();
            stage_out<false, true>(sums, out, 0, drop);
            send(*out_map, out, row, column, barrier);
        }
#endif
#endif
    }
    if (!OUT_F32 && thread == 0) {
        tma_store_wait();
    }
}

__device__ __forceinline__ void gemm(const Operands& first, const Operands& second, const TensorMap* out_map,
                                     const TensorMap* residual_map, const Buffers& buffers, const Info& info) {
    Shared shared{shared_base()};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared.full(stage), 1);
            barrier_init(shared.empty(stage), BLOCKS * CONSUMERS + SUMMING_WARPS * WARP_ARRIVALS);
        }
        for (int consumer = 0; consumer < CONSUMERS; consumer++) {
            barrier_init(shared.residual(consumer), 1);
        }
        barrier_init_fence();
    }
    cluster_sync();
    int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        registers_lower<ROW_SUMS ? 72 : 40>();
        [[maybe_unused]] int warp = threadIdx.x / 32;
        if (threadIdx.x == 0) {
            produce(first, second, info, shared);
        }
#if ROW_SUMS
        if (warp > 0 && warp <= SUMMING_WARPS) {
            sum_rows(buffers, info, shared, warp - 1);
        }
#endif
    } else {
        registers_raise<ROW_SUMS ? 216 : 232>();
        consume(out_map, residual_map, buffers, info, shared, warpgroup - 1);
    }
    // The other block may still write to this one's memory.
    cluster_sync();
}

#if OUT_F32
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    gemm_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const void*,
                const void*, float* out, float* row_sums, float* partial, u32* ready,
                const __grid_constant__ Info info) {
    gemm({&a_map, &b_map}, {}, nullptr, nullptr, Buffers{out, nullptr, row_sums, partial, ready}, info);
}
#elif EXTENDED
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    gemm_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                const __grid_constant__ TensorMap a2_map, const __grid_constant__ TensorMap b2_map,
                const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap residual_map, const void*,
                const void*, const void*, const void*, void*, const void*, const void* bias, float* partial, u32* ready,
                const __grid_constant__ Info info) {
    Buffers buffers{nullptr, bias, nullptr, partial, ready};
    gemm({&a_map, &b_map}, {&a2_map, &b2_map}, &out_map, &residual_map, buffers, info);
}
#else
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    gemm_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap residual_map, const void*,
                const void*, void*, const void*, const void* bias, float* partial, u32* ready,
                const __grid_constant__ Info info) {
    gemm({&a_map, &b_map}, {}, &out_map, &residual_map, Buffers{nullptr, bias, nullptr, partial, ready}, info);
}
#endif
