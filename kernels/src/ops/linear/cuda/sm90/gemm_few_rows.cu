// out = activation(norm(a) * b + bias), or norm(a) * b + bias + residual, as far as these are
// there, for 16-bit matrices on Hopper, of which `a` has so few rows that all time goes into
// reading `b`.
//
//              b  K x N, K contiguous
//            +----------+
//            | block 0  |
//            |----------|
//            | block 1  |
//  a         |----------|
//  M x K     | ..       |
//            +----------+
//
//   producer warp:  wait empty[s] -> TMA into stage s -> full[s] counts the bytes
//   consumers:      wait full[s] -> wgmma -> arrive at empty[s]
//
// A cluster computes TOKENS rows of WEIGHTS columns; each of its SPLIT blocks multiplies a run of
// K. wgmma has the columns of `b` as its 64 rows, so that few rows of `a` are few columns of the
// instruction: as many as TOKENS. Sums go to shared memory, [row][column]; the blocks of the
// cluster share out the tile, and each adds up the sums of all blocks in their order: equal inputs
// give equal bits.
//
// With a cluster of one block, blocks process tile after tile, the producer ahead of the consumers.
// Otherwise each cluster has one tile, and the sums replace the stages.
//
// An RMS norm's gamma is multiplied into each stage of `a` in place; its 1 / rms into the sums,
// once all of a row was read.
//
// Of a gated activation a tile has the columns of a gate, and those of what it gates: `b` has all
// gates first.
//
// INT8: `b` has bytes, with a scale for each of its columns, by which sums are multiplied. A stage
// has twice the depth, in as many bytes of `b`. wgmma takes the weights from registers: a lane
// reads the pairs of bytes that it has of a tile of [64, 16], and turns them into bf16.
//
// Compiled with: HALF, TOKENS (16, 32, 64, 128), WARPGROUPS (1, 2) that multiply 64 columns each,
// SPLIT (1, 2, 4, 8), STAGES, OUT_F32 (1: the result is f32), ACTIVATION (0: none; 1: GELU by tanh;
// 2: ReLU; 3: SiLU), GATED (1, with two warpgroups: the first one has the gates), NORM (1: there is
// an RMS norm), INT8 (1; without a norm, in bf16).

// Columns of `a` in a line of 128 bytes, and of a stage.
constexpr int LINE = 64, DEPTH = INT8 ? 2 * LINE : LINE;
constexpr int WEIGHTS = 64 * WARPGROUPS;
constexpr int CONSUMERS = WARPGROUPS * WARPGROUP;
constexpr int THREADS = CONSUMERS + 32;
constexpr int B_BYTES = WEIGHTS * ROW_BYTES;
constexpr int STAGE_BYTES = B_BYTES + TOKENS * DEPTH * 2;
// Columns of the result that a tile has.
constexpr int COLUMNS = GATED ? WEIGHTS / 2 : WEIGHTS;
// Floats between two rows of sums: the lanes of a warp write to different banks.
constexpr int PITCH = WEIGHTS + 4;
constexpr int SUMS_BYTES = TOKENS * PITCH * 4;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
// Threads that have a row of a stage of `a` together, 16 bytes each, and rows that a thread has a
// part of.
constexpr int SHARERS = ROW_BYTES / 16;
constexpr int SHARES = (TOKENS * SHARERS + CONSUMERS - 1) / CONSUMERS;
constexpr int BARRIERS_AT = SPLIT == 1 ? RING_BYTES + SUMS_BYTES : RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES;

struct Info {
    u64 m, n, k;                                           // n: columns of `b`
    u64 bias;                                              // 0: no bias; 1: of f32; 2: of 16 bits
    u64 adds_residual;
    u64 gamma;                                             // 1: of f32; 2: of 16 bits
    u64 epsilon;                                           // bits of an f32
};
static_assert(!(INT8 && NORM), "a norm is another launch");

struct Buffers {
    void* out;
    const void *bias, *residual, *gamma;                   // of INT8, the last are the scales
};

struct Shared {
    u32 base;

    __device__ u32 b(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ u32 a(int stage) const { return b(stage) + B_BYTES; }
    __device__ u32 sums() const { return base + (SPLIT == 1 ? RING_BYTES : 0); }
    __device__ u32 full(int stage) const { return base + BARRIERS_AT + 8 * stage; }
    __device__ u32 empty(int stage) const { return full(STAGES + stage); }
    // Of each row, the sum of squares of the columns that the block has.
    __device__ u32 squares() const { return full(2 * STAGES); }
};

// A block's tiles, and its run of stages of each: one at the least, of K as the host takes it.
struct Schedule {
    int rows, tiles, stride, tile, begin, end;

    __device__ Schedule(const Info& info, int rank) {
        int stages = (static_cast<int>(info.k) + DEPTH - 1) / DEPTH;
        int columns = static_cast<int>(info.n) / (GATED ? 2 : 1);
        rows = (static_cast<int>(info.m) + TOKENS - 1) / TOKENS;
        tiles = rows * ((columns + COLUMNS - 1) / COLUMNS);
        tile = blockIdx.x / SPLIT;
        stride = gridDim.x / SPLIT;
        begin = stages * rank / SPLIT;
        end = stages * (rank + 1) / SPLIT;
    }

    __device__ bool there() const { return tile < tiles; }
    __device__ void advance() { tile += stride; }
    __device__ int row() const { return tile % rows * TOKENS; }
    __device__ int column() const { return tile / rows * COLUMNS; }
};

// One thread: brings the stages.
__device__ void produce(
    const TensorMap& a_map, const TensorMap& b_map, const Info& info, const Shared& shared, int rank
) {
    Ring<STAGES> at;
    for (Schedule schedule(info, rank); schedule.there(); schedule.advance()) {
        for (int step = schedule.begin; step < schedule.end; step++) {
            barrier_wait(shared.empty(at.stage), at.parity ^ 1);
            u32 full = shared.full(at.stage), b = shared.b(at.stage);
            barrier_expect(full, STAGE_BYTES);
            for (int half = 0; half <= GATED; half++) {
                int column = schedule.column() + half * static_cast<int>(info.n / 2);
                tma_load(b + half * (B_BYTES / 2), b_map, step * LINE, column, full);
            }
            for (int line = 0; line < DEPTH / LINE; line++) {
                tma_load(
                    shared.a(at.stage) + line * (TOKENS * ROW_BYTES), a_map, step * DEPTH + line * LINE,
                    schedule.row(), full);
            }
            at.advance();
        }
    }
}

struct Quad {
    float v[4];
};

// Four numbers of f32 (kind 1) or of 16 bits (2).
__device__ __forceinline__ Quad four_of(const void* numbers, u64 kind, int at) {
    Quad quad = {};
    if (kind == 1) {
        float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(numbers) + at);
        quad = {four.x, four.y, four.z, four.w};
    } else if (kind == 2) {
        uint2 four = *reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(numbers) + at);
        float2 low = unpack(four.x), high = unpack(four.y);
        quad = {low.x, low.y, high.x, high.y};
    }
    return quad;
}

// Four sums of all blocks, in the order of these.
__device__ __forceinline__ Quad total(const Shared& shared, int row, int column) {
    u32 at = shared.sums() + (row * PITCH + column) * 4;
    Quad sum = {};
    #pragma unroll
    for (u32 rank = 0; rank < SPLIT; rank++) {
        float4 four;
        if (SPLIT == 1) {
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "r"(at) : "memory");
        } else {
            asm volatile(
                "{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;\n"
                "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
                : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "r"(at), "r"(rank) : "memory");
        }
        sum.v[0] += four.x, sum.v[1] += four.y, sum.v[2] += four.z, sum.v[3] += four.w;
    }
    return sum;
}

// Four sums, of INT8 multiplied by the scales of their columns of `b`.
__device__ __forceinline__ Quad scaled(Quad sum, const Buffers& buffers, int column) {
    if (INT8) {
        Quad scale = four_of(buffers.gamma, 1, column);
        #pragma unroll
        for (int i = 0; i < 4; i++) sum.v[i] *= scale.v[i];
    }
    return sum;
}

// Two signed bytes as two bf16: 128 + (the lower seven bits), less 128 and the sign's 128.
__device__ __forceinline__ u32 from_bytes(u32 two) {
    const u32 x = __byte_perm(two, 0, 0x4140);
    u32 pair;
    asm("sub.rn.bf16x2 %0, %1, %2;"
        : "=r"(pair)
        : "r"((x & 0x007f007fu) | 0x43004300u), "r"((x & 0x00800080u) | 0x43004300u));
    return pair;
}

// 1 / rms of a row, from all blocks' sums of squares.
__device__ __forceinline__ float inverse_rms(const Info& info, const Shared& shared, int row) {
    float sum = 0.0f;
    #pragma unroll
    for (u32 rank = 0; rank < SPLIT; rank++) {
        float square;
        asm volatile(
            "{ .reg .b32 there; mapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there]; }"
            : "=f"(square) : "r"(shared.squares() + 4 * row), "r"(rank) : "memory");
        sum += square;
    }
    return rsqrtf(sum / static_cast<float>(info.k) + __uint_as_float(static_cast<u32>(info.epsilon)));
}

// The block's share of a tile, from the sums to memory.
__device__ __forceinline__ void write(
    const Buffers& buffers, const Info& info, const Shared& shared, int row, int column, int rank
) {
    int rows = min(TOKENS, static_cast<int>(info.m) - row), columns = static_cast<int>(info.n) / (GATED ? 2 : 1);
    #pragma unroll 2
    for (int i = rank * CONSUMERS + threadIdx.x; i < rows * (COLUMNS / 4); i += SPLIT * CONSUMERS) {
        int in_row = i / (COLUMNS / 4), in_column = i % (COLUMNS / 4) * 4, to_column = column + in_column;
        if (to_column >= columns) {
            continue;
        }
        u64 to = static_cast<u64>(row + in_row) * columns + to_column;
        uint2 residual = make_uint2(0, 0);
        if (info.adds_residual) {
            residual = *reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(buffers.residual) + to);
        }
        Quad sum = scaled(total(shared, in_row, in_column), buffers, to_column);
        Quad bias = four_of(buffers.bias, info.bias, to_column);
        Quad gated = {}, gated_bias = {};
        if (GATED) {
            gated = scaled(total(shared, in_row, in_column + COLUMNS), buffers, to_column + columns);
            gated_bias = four_of(buffers.bias, info.bias, to_column + columns);
        }
        float factor = NORM ? inverse_rms(info, shared, in_row) : 1.0f;
        float2 low = unpack(residual.x), high = unpack(residual.y);
        float more[4] = {low.x, low.y, high.x, high.y};
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            sum.v[j] = activate<ACTIVATION>(fmaf(sum.v[j], factor, bias.v[j]));
            sum.v[j] = GATED ? sum.v[j] * fmaf(gated.v[j], factor, gated_bias.v[j]) : sum.v[j] + more[j];
        }
        if (OUT_F32) {
            *reinterpret_cast<float4*>(static_cast<float*>(buffers.out) + to) =
                make_float4(sum.v[0], sum.v[1], sum.v[2], sum.v[3]);
        } else {
            uint2 four = make_uint2(pack(sum.v[0], sum.v[1]), pack(sum.v[2], sum.v[3]));
            *reinterpret_cast<uint2*>(static_cast<unsigned short*>(buffers.out) + to) = four;
        }
    }
}

// A warpgroup: multiplies the stages of its 64 columns, and leaves the sums.
struct Consumer {
    Ring<STAGES> at;
    float sums[TOKENS / 8][4];
    float squares[SHARES];

    __device__ __forceinline__ void multiply(
        const Shared& shared, const Schedule& schedule, const Buffers& buffers, const Info& info
    ) {
        if (INT8) {
            multiply_bytes(shared, schedule);
            return;
        }
        int before = 0, warpgroup = threadIdx.x / WARPGROUP;
        #pragma unroll
        for (int i = 0; i < SHARES; i++) {
            squares[i] = 0.0f;
        }
        for (int step = schedule.begin; step < schedule.end; step++) {
            Quad gamma[2] = {};
            int column = step * DEPTH + threadIdx.x % SHARERS * 8;
            if (NORM && column < info.k) {
                gamma[0] = four_of(buffers.gamma, info.gamma, column);
                gamma[1] = four_of(buffers.gamma, info.gamma, column + 4);
            }
            barrier_wait(shared.full(at.stage), at.parity);
            if (NORM) {
                weigh(shared.a(at.stage), gamma);
            }
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) {
                u64 b_tile = tile_descriptor<64>(shared.b(at.stage) + warpgroup * 64 * ROW_BYTES + k * 32);
                u64 a_tile = tile_descriptor<64>(shared.a(at.stage) + k * 32);
                Wgmma<TOKENS>::template multiply<0, 0>(sums, b_tile, a_tile, step > schedule.begin || k > 0);
            }
            wgmma_commit();
            if (step > schedule.begin) {
                wgmma_wait<1>();
                release(shared, before);
            }
            before = at.stage;
            at.advance();
        }
        wgmma_wait<0>();
        release(shared, before);
    }

    // The same with INT8: half a stage at a time is in registers, while wgmma works on the other.
    __device__ __forceinline__ void multiply_bytes(const Shared& shared, const Schedule& schedule) {
        constexpr int HALF_STEPS = LINE / 16;
        u32 weights[2][HALF_STEPS][4];
        int before = 0;
        const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, in_line = lane % 4 * 2;
        for (int step = schedule.begin; step < schedule.end; step++) {
            barrier_wait(shared.full(at.stage), at.parity);
            const u32 line = shared.b(at.stage) + row * ROW_BYTES + in_line;
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                // What wgmma still reads are the registers of the other half.
                if (step > schedule.begin) {
                    wgmma_wait<1>();
                    if (half == 1) {
                        release(shared, before);
                    }
                }
                #pragma unroll
                for (int k = 0; k < HALF_STEPS; k++) {
                    const u32 chunk = (half * HALF_STEPS + k) ^ row % 8;
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        // Rows `row` and eight further; columns from 2 (lane % 4) on, and eight
                        // further.
                        unsigned short two;
                        asm volatile(
                            "ld.shared.u16 %0, [%1];"
                            : "=h"(two)
                            : "r"(line + (chunk << 4) + i % 2 * (8 * ROW_BYTES) + i / 2 * 8)
                            : "memory");
                        weights[half][k][i] = from_bytes(two);
                    }
                }
                wgmma_fence();
                #pragma unroll
                for (int k = 0; k < HALF_STEPS; k++) {
                    u64 a_tile = tile_descriptor<64>(shared.a(at.stage) + half * (TOKENS * ROW_BYTES) + k * 32);
                    Wgmma<TOKENS>::template multiply<0>(
                        sums, weights[half][k], a_tile, step > schedule.begin || half > 0 || k > 0);
                }
                wgmma_commit();
            }
            before = at.stage;
            at.advance();
        }
        wgmma_wait<0>();
        release(shared, before);
    }

    // Multiplies gamma into a stage of `a`, and adds up the squares of what was there. A thread has
    // the same eight columns of its rows.
    __device__ __forceinline__ void weigh(u32 a, const Quad (&gamma)[2]) {
        int row = threadIdx.x / SHARERS, chunk = threadIdx.x % SHARERS;
        #pragma unroll
        for (int i = 0; i < SHARES; i++, row += CONSUMERS / SHARERS) {
            if (row >= TOKENS) {
                break;
            }
            u32 place = a + row * ROW_BYTES + ((chunk ^ row % 8) << 4);
            uint4 bytes = shared_load(place);
            u32 pairs[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                float2 x = unpack(pairs[j]);
                squares[i] = fmaf(x.x, x.x, fmaf(x.y, x.y, squares[i]));
                pairs[j] = pack(x.x * gamma[j / 2].v[j % 2 * 2], x.y * gamma[j / 2].v[j % 2 * 2 + 1]);
            }
            shared_store(place, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
        }
        async_proxy_fence();
        named_barrier(1, CONSUMERS);
    }

    __device__ __forceinline__ void release(const Shared& shared, int stage) {
        if (threadIdx.x % WARPGROUP == 0) {
            barrier_arrive(shared.empty(stage));
        }
    }

    // Lane l has columns l / 4 and l / 4 + 8 of its warp's 16, of rows 2 (l % 4) and the next of
    // each eight.
    __device__ __forceinline__ void leave(const Shared& shared) {
        if (NORM) {
            leave_squares(shared);
        }
        u32 lane = threadIdx.x % 32, to = shared.sums() + (lane % 4 * 2 * PITCH + threadIdx.x / 32 * 16 + lane / 4) * 4;
        #pragma unroll
        for (int i = 0; i < TOKENS / 8; i++) {
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 place = to + ((i * 8 + j % 2) * PITCH + j / 2 * 8) * 4;
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(place), "f"(sums[i][j]) : "memory");
            }
        }
    }

    __device__ __forceinline__ void leave_squares(const Shared& shared) {
        #pragma unroll
        for (int i = 0; i < SHARES; i++) {
            #pragma unroll
            for (int other = 1; other < SHARERS; other <<= 1) {
                squares[i] += __shfl_xor_sync(~0u, squares[i], other);
            }
            int row = threadIdx.x / SHARERS + i * (CONSUMERS / SHARERS);
            if (threadIdx.x % SHARERS == 0 && row < TOKENS) {
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared.squares() + 4 * row), "f"(squares[i]) : "memory");
            }
        }
    }
};

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, 1)
    gemm_few_rows_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                         const void*, const void*, void* out, const void* bias, const void* residual,
                         const void* gamma, const __grid_constant__ Info info) {
    Shared shared{shared_base()};
    Buffers buffers{out, bias, residual, gamma};
    int rank = static_cast<int>(cluster_rank());
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared.full(stage), 1);
            barrier_init(shared.empty(stage), WARPGROUPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    Consumer consumer;
    Schedule schedule(info, rank);
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) {
            produce(a_map, b_map, info, shared, rank);
        }
    } else if (SPLIT == 1) {
        for (; schedule.there(); schedule.advance()) {
            consumer.multiply(shared, schedule, buffers, info);
            // The sums before are read.
            named_barrier(1, CONSUMERS);
            consumer.leave(shared);
            named_barrier(1, CONSUMERS);
            write(buffers, info, shared, schedule.row(), schedule.column(), 0);
        }
    } else {
        consumer.multiply(shared, schedule, buffers, info);
        // Nobody needs the stages any more.
        named_barrier(1, CONSUMERS);
        consumer.leave(shared);
    }
    if (SPLIT > 1) {
        cluster_sync();
        if (threadIdx.x < CONSUMERS) {
            write(buffers, info, shared, schedule.row(), schedule.column(), rank);
        }
        // Other blocks may still read this one's sums.
        cluster_sync();
    }
}
