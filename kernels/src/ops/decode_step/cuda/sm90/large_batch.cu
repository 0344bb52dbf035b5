// A decode step of 33 to 128 rows: blocks of threads on 128 multiprocessors, all resident, in
// clusters of two.
//
// The rows are cut in two halves, and the rows of every weight in 64 slices. A block multiplies one
// half by one slice, all columns of them, so that no sums of different blocks meet.
//
//                 slices of the weight's rows
//               +-----+-----+-----+-----+- ..
//      half 0   | cluster 0 | cluster 2 |
//      half 1   | cluster 1 | cluster 3 |
//               +-----+-----+-----+-----+- ..
//
// Both blocks of a cluster have the same half, and so the same input: each brings every other group
// of its columns, to both.
//
//   block    two warpgroups: the even and the odd groups of 64 columns, by wgmma; their sums meet
//                in shared memory
//            one warp: brings weights, keys and values by TMA through a ring, in the order of their
//                use; never waits for results
//            one warp: waits for what other blocks publish, and brings the inputs of products
//                through another ring
//            two warps: 1 / rms of the rows
//
//               qkv           attention         output        gate, up         down
//   x --------------> q, k, v ----------> o ------------> x' ----------> h ------------> x
//
// A block publishes what it has computed by a flag of its own: x and x' (INPUT), q, k and v (QKV),
// o (ATTENDED), h (GATED). A flag is a number that grows from layer to layer, and on over steps: it
// is never reset. There is one of each buffer. Before a block overwrites its part of one, all that
// read the part before have said so by what they published behind it:
//
//   x, x' and squares,
//     by the output projection    ATTENDED of all blocks: behind their products of x
//     by the down projection      GATED of the half: behind its products of x'
//   q, k and v                    ATTENDED of all blocks, of the layer before
//   parts of heads that are cut   the same
//   o                             QKV of all blocks, of the layer before: behind products of o
//   h                             INPUT of the half, of the layer before: behind products of h
//
// The residual stream stays in registers, in f32. It is published multiplied by the next norm's
// gamma; 1 / rms is applied to the sums, from squares that each slice publishes with it.
constexpr int CLUSTER = 2, BLOCKS = 128, SLICES = 64, TOKENS = BATCH / 2;
// Which of the kernels for 64, 96 and 128 rows this is: each has words and numbers of its own.
constexpr int SIZE = BATCH / 32 - 2;
static_assert(SIZE >= 0 && SIZE < 3 && BATCH % 32 == 0, "rows");
constexpr int WARPS = 8, TEAMS = WARPS / TEAM_WARPS, CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + WARPGROUP;
// Stages of weights, keys and values; of inputs: two groups of 64 columns, one from each block of
// the cluster.
constexpr int STAGE = 16384, GROUP_BYTES = TOKENS * 128, INPUT_STAGE = 2 * GROUP_BYTES;
static_assert(TOKENS % 8 == 0 && TOKENS <= 64 && GROUP <= 8 && GROUP % 2 == 0 && HEAD_DIM % 64 == 0, "rows, heads");

// A block's slice of a weight [N, K].
template <int N, int K>
struct Product {
    static constexpr int OWN = N / SLICES, GROUPS = K / 64;
    // Groups of 64 columns that a stage holds.
    static constexpr int PER_STAGE = STAGE / (OWN * 128), STAGES = GROUPS / PER_STAGE;
    static_assert(N % (SLICES * 16) == 0 && K % 128 == 0 && PER_STAGE % 2 == 0 && GROUPS % PER_STAGE == 0, "sizes");
};
using Qkv = Product<QKV_ROWS, D_MODEL>;
using Out = Product<D_MODEL, HEADS_WIDTH>;
using GateOrUp = Product<D_FF, D_MODEL>;
using Down = Product<D_MODEL, D_FF>;
static_assert(Out::OWN == 16 && Down::OWN == 16, "a thread has two rows of two columns of the residual stream");

// Of what blocks publish: the inputs of products.
enum { X_MAP, O_MAP, H_MAP };
enum { INPUT, QKV, ATTENDED, GATED, FLAGS };
struct Step {
    const TensorMap *maps, *inputs;
    const Layer* layers;
    const u16 *embedding, *final_norm;
    const float *cos, *sin;                            // [positions, HEAD_DIM / 2]
    State* state;
    u32* scratch;
    const int *ids, *positions;                        // [rows]
    const int* pages;                                  // [rows, pages_a_row]
    u16* hidden;                                       // [rows, D_MODEL]
    int rows, pages_a_row, vocabulary, last_position;
};

// Named barriers: 1 of the consumers, 2 of these and the warps that keep factors, 3 and 4 of a
// team.
constexpr int FACTORS_BARRIER = 2;

// What blocks publish, in words of four bytes: [BATCH, ..] of bf16, but for squares of f32, parts
// of heads and flags.
constexpr int X = 0;
constexpr int O = X + BATCH * D_MODEL / 2;
constexpr int H = O + BATCH * HEADS_WIDTH / 2;
constexpr int Q = H + BATCH * D_FF / 2;
constexpr int SQUARES = Q + BATCH * QKV_ROWS / 2;       // [SLICES, BATCH]
// [BLOCKS, PIECE] of a number and the layer's number.
constexpr int PIECES = SQUARES + BATCH * SLICES;
constexpr int PIECE = GROUP * (HEAD_DIM + 2);
constexpr int FLAG_WORDS = PIECES + BLOCKS * PIECE * 2;  // [FLAGS, 2, SLICES]

// Shared memory.
constexpr int EXCHANGED = (2 * GateOrUp::OWN > Qkv::OWN ? 2 * GateOrUp::OWN : Qkv::OWN) * 64 * 4;
constexpr int HEADS_PUT_TOGETHER = WARPS * GROUP * HEAD_DIM * 4;
constexpr int EXCHANGE_BYTES = EXCHANGED > HEADS_PUT_TOGETHER ? EXCHANGED : HEADS_PUT_TOGETHER;
constexpr int OTHERS = EXCHANGE_BYTES + 3 * 64 * 4 + TEAMS * (GROUP + 2) * HEAD_DIM * 2 + WARPS * GROUP * 8 +
    (2 * BATCH + 1) * 4 + 1024;
constexpr int INPUT_STAGES = (TOKENS > 48 ? 81920 : 65536) / INPUT_STAGE;
constexpr int STAGES = (SHARED_BYTES - OTHERS - INPUT_STAGES * INPUT_STAGE) / STAGE;
constexpr int AT_INPUT = STAGES * STAGE;
constexpr int AT_EXCHANGE = AT_INPUT + INPUT_STAGES * INPUT_STAGE;
constexpr int AT_PARTS = AT_EXCHANGE;
constexpr int AT_FACTORS = AT_EXCHANGE + EXCHANGE_BYTES;
constexpr int AT_SQUARES = AT_FACTORS + 64 * 4;
constexpr int AT_QUERIES = AT_SQUARES + 2 * 64 * 4;
constexpr int AT_NEW = AT_QUERIES + TEAMS * GROUP * HEAD_DIM * 2;
constexpr int AT_PEAKS = AT_NEW + TEAMS * 2 * HEAD_DIM * 2;
constexpr int AT_BARRIERS = (AT_PEAKS + WARPS * GROUP * 8 + 7) / 8 * 8;
constexpr int AT_INPUT_BARRIERS = AT_BARRIERS + 16 * STAGES;
constexpr int AT_READY = AT_INPUT_BARRIERS + 16 * INPUT_STAGES;
constexpr int AT_POSITIONS = AT_READY + 16;
constexpr int AT_BEFORE = AT_POSITIONS + BATCH * 4;
constexpr int AT_CUTS = AT_BEFORE + (BATCH + 1) * 4;
constexpr int AT_WALK = AT_CUTS + (BLOCKS + 1) * 4;
constexpr int SHARED = AT_WALK + sizeof(int) * 3;
static_assert(SHARED <= AT_WATCH && STAGES >= 4, "shared memory");
// With fewer than 64 rows, wgmma also reads what follows and computes sums that are not used.
static_assert(EXCHANGE_BYTES >= (64 - TOKENS) * 128, "rows behind the last stage of inputs");
using Weights = RingOf<STAGE, STAGES, AT_BARRIERS>;
using Inputs = RingOf<INPUT_STAGE, INPUT_STAGES, AT_INPUT_BARRIERS - AT_INPUT>;  // from AT_INPUT on

#include "paged_attention.cuh"

__device__ __forceinline__ void publish(u32* at, u32 v, u32 number) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(static_cast<u64>(number) << 32 | v) : "memory");
}
__device__ __forceinline__ uint2 ask_pair(const u32* at) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return make_uint2(static_cast<u32>(v), static_cast<u32>(v >> 32));
}
// Whether a flag has come so far; numbers may go round.
__device__ __forceinline__ bool reached(u32 flag, u32 number) { return static_cast<int>(flag - number) >= 0; }

__device__ __forceinline__ u32 block_base() { return shared_address(memory); }
// A block's position: the blocks of a cluster have the same half, and two adjacent slices.
__device__ __forceinline__ u32 of_cluster() { return blockIdx.x % CLUSTER; }
__device__ __forceinline__ u32 own_half() { return blockIdx.x / CLUSTER % 2; }
__device__ __forceinline__ u32 own_slice() { return blockIdx.x / CLUSTER / 2 * CLUSTER + of_cluster(); }
// The number before a step's first; each step has NUMBERS.
__device__ __forceinline__ u32 epoch_of(const Step& step) {
    return reinterpret_cast<volatile State*>(step.state)->large_batch[SIZE];
}
constexpr u32 NUMBERS = 2 * N_LAYERS + 1;

// ---- the warp that brings weights, keys and values

struct Bringer {
    Weights ring;
    u32 filled = 0;
    bool over = false;                                 // a stage was waited for too long

    // Whether a stage is free. Behind one that was not, none is opened: its barrier would be asked
    // for another phase.
    __device__ __forceinline__ bool open(u32 bytes) {
        if (filled < STAGES) filled++;
        else over = over || !Watch::wait(ring.empty(), ring.parity ^ 1);
        if (!over) barrier_expect(ring.full(), bytes);
        return !over;
    }
    template <class S>
    __device__ __forceinline__ void stage(const TensorMap* map, int s, int row) {
        if (open(S::PER_STAGE * S::OWN * 128)) load_groups(ring.stage(), map, s * S::PER_STAGE, row, ring.full());
        ring.advance();
    }
    template <class S>
    __device__ __forceinline__ void weight(const TensorMap* map, u32 slice) {
        #pragma unroll 1
        for (int s = 0; s < S::STAGES; s++) stage<S>(map, s, slice * S::OWN);
    }
};

__device__ __forceinline__ void bring(const Step& step) {
    Bringer b{block_base()};
    const u32 slice = own_slice();
    // Keys and values of the tokens before were not written by TMA.
    asm volatile("fence.acq_rel.gpu;\nfence.proxy.async.global;" ::: "memory");
    #pragma unroll 1
    for (int l = 0; l < N_LAYERS; l++) {
        if (Watch::dead()) return;
        const TensorMap* maps = step.maps + l * MAPS;
        b.weight<Qkv>(maps + QKV_MAP, slice);
        Pages page(step, kept_walk());
        for (; page.there(); page.advance()) {
            #pragma unroll
            for (int m = 0; m < 2; m++) {
                if (b.open(page.bytes())) page.load(maps + m, b.ring.stage(), b.ring.full());
                b.ring.advance();
            }
        }
        b.weight<Out>(maps + OUT_MAP, slice);
        #pragma unroll 1
        for (int s = 0; s < GateOrUp::STAGES; s++) {
            b.stage<GateOrUp>(maps + UP_MAP, s, slice * GateOrUp::OWN);
            b.stage<GateOrUp>(maps + UP_MAP, s, D_FF + slice * GateOrUp::OWN);
        }
        b.weight<Down>(maps + DOWN_MAP, slice);
    }
}

// ---- the warp that waits for what blocks publish, and brings the inputs of products

struct Scout {
    const Step& step;
    Inputs ring;
    u32 base, half, rank, lane;

    // Until all slices of a half have published `what` of a layer.
    __device__ __forceinline__ void wait(int what, u32 of_half, u32 number) const {
        const u32* at = step.scratch + FLAG_WORDS + (what * 2 + of_half) * SLICES + 2 * lane;
        bool over = false;
        #pragma unroll 1
        for (int i = 0; !__all_sync(~0u, over); i++) {
            uint2 flags;
            asm volatile(
                "ld.acquire.gpu.global.v2.b32 {%0,%1}, [%2];" : "=r"(flags.x), "=r"(flags.y) : "l"(at) : "memory");
            over = reached(flags.x, number) && reached(flags.y, number) || i % 32 == 31 && Watch::late();
        }
        __syncwarp();
    }
    // Lets the block's warps read it: INPUT or QKV.
    __device__ __forceinline__ void tell(int what) const {
        if (lane == 0) barrier_arrive(base + AT_READY + 8 * what);
    }
    template <int GROUPS>
    __device__ __forceinline__ void load(const TensorMap* map) {
        static_assert(GROUPS % 2 == 0, "groups");
        if (lane == 0) asm volatile("fence.proxy.async.global;" ::: "memory");
        #pragma unroll 1
        for (int group = rank; group < GROUPS; group += 2) {
            if (lane == 0) {
                if (!Watch::wait(ring.empty(), ring.parity ^ 1)) return;
                barrier_expect(ring.full(), INPUT_STAGE);
                asm volatile(
                    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                    " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(ring.stage() + rank * GROUP_BYTES),
                    "l"(map), "r"(0), "r"(half * TOKENS), "r"(group), "r"(ring.full()),
                    "h"(static_cast<unsigned short>(3))
                    : "memory");
            }
            ring.advance();
        }
    }
};

__device__ __forceinline__ void scout(const Step& step) {
    const u32 epoch = epoch_of(step), base = block_base(), half = own_half();
    Scout s{step, {base + AT_INPUT}, base, half, of_cluster(), threadIdx.x % 32};
    #pragma unroll 1
    for (int l = 0; l < N_LAYERS; l++) {
        if (Watch::dead()) return;
        const u32 number = epoch + 2 * l + 1;
        s.wait(INPUT, half, number);
        s.tell(INPUT);
        s.load<Qkv::GROUPS>(step.inputs + X_MAP);
        s.wait(QKV, 0, number), s.wait(QKV, 1, number);
        s.tell(QKV);
        s.wait(ATTENDED, 0, number), s.wait(ATTENDED, 1, number);
        s.load<Out::GROUPS>(step.inputs + O_MAP);
        s.wait(INPUT, half, number + 1);
        s.tell(INPUT);
        s.load<GateOrUp::GROUPS>(step.inputs + X_MAP);
        s.wait(GATED, half, number);
        s.load<Down::GROUPS>(step.inputs + H_MAP);
    }
    s.wait(INPUT, half, epoch + NUMBERS);
    s.tell(INPUT);
}

// ---- two warps that keep 1 / rms of the block's rows ready in shared memory, a row each thread

__device__ __forceinline__ void keep_factors(const Step& step) {
    const u32 base = block_base(), half = own_half(), row = threadIdx.x % 64;
    const bool there = row < TOKENS && half * TOKENS + row < step.rows;
    const u32* squares = step.scratch + SQUARES + half * TOKENS + min(row, static_cast<u32>(TOKENS - 1));
    #pragma unroll 1
    for (int i = 0; i <= 2 * N_LAYERS; i++) {
        Watch::wait(base + AT_READY + 8 * INPUT, i % 2);
        float sum = 0;
        #pragma unroll
        for (int first = 0; first < SLICES; first += 32) {
            u32 v[32];
            #pragma unroll
            for (int k = 0; k < 32; k++) {
                asm volatile(
                    "ld.relaxed.gpu.global.b32 %0, [%1];"
                    : "=r"(v[k])
                    : "l"(squares + (first + k) * BATCH)
                    : "memory");
            }
            #pragma unroll
            for (int k = 0; k < 32; k++) sum += __uint_as_float(v[k]);
        }
        reinterpret_cast<float*>(memory + AT_FACTORS)[row] = there ? rsqrtf(sum / D_MODEL + EPSILON) : 0;
        named_barrier(FACTORS_BARRIER, CONSUMERS + 64);
    }
}

// ---- consumers

struct Consumer {
    const Step& step;
    Weights ring;
    Inputs inputs;
    u32 base, half, slice, thread, warp, lane;
    u32 nil;
    u32 at_input, at_weight;                           // where in a tile of [16, 64] a lane reads
    u32 ready;                                         // parity of queries, keys and values
    float residual[4];                                 // of rows `row(0)` and `row(1)`: two columns

    // The warpgroup, and which rows of its half a thread has of products.
    __device__ __forceinline__ u32 group() const { return warp / 4; }
    __device__ __forceinline__ u32 row(int i) const { return warp % 4 * 16 + lane / 4 + 8 * i; }
    __device__ __forceinline__ u32 of_batch(u32 row) const { return half * TOKENS + row; }
    __device__ __forceinline__ bool there(u32 row) const { return row < TOKENS && of_batch(row) < step.rows; }
    // The first of two columns that a thread has of `blocks` of eight, shared out between the
    // warpgroups.
    __device__ __forceinline__ u32 column(int blocks, int i) const {
        return (group() * (blocks / 2) + i) * 8 + lane % 4 * 2;
    }

    // What the compiler knows of the thread's place: conditions on it are made anew behind this.
    __device__ __forceinline__ void forget() { asm volatile("" : "+r"(thread), "+r"(warp), "+r"(lane)); }
    __device__ __forceinline__ void await_ready() {
        Watch::wait(base + AT_READY + 8 * QKV, ready);
        ready ^= 1;
    }
    // To both blocks.
    __device__ __forceinline__ void release_input(u32 empty) const {
        if (thread % 128 < CLUSTER && !inputs.lost) barrier_arrive(empty, thread % 128);
    }
    __device__ __forceinline__ void release_weight(u32 empty) const {
        if (lane == 0 && !ring.lost) barrier_arrive(empty);
    }

    // The block's rows by its slice of PARTS weights, whose stages come in turns: sums of the
    // warpgroup's groups of columns.
    template <class S, int PARTS>
    __device__ __forceinline__ void multiply(float (&sums)[PARTS][S::OWN / 8][4]) {
        u32 tiles[PARTS], held[PARTS] = {}, held_before[PARTS], input_before = 0;
        #pragma unroll 1
        for (int k = 0; k < S::GROUPS; k += 2) {
            if (k % S::PER_STAGE == 0) {
                #pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    held_before[p] = held[p];
                    ring.await();
                    tiles[p] = ring.stage() + group() * (S::OWN * 128), held[p] = ring.empty();
                    ring.advance();
                }
            }
            inputs.await();
            const u32 input = inputs.stage() + group() * GROUP_BYTES, weight = k % S::PER_STAGE * (S::OWN * 128);
            wgmma_fence();
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                #pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    Wgmma<S::OWN>::template multiply<0, 0>(
                        sums[p], tile_descriptor<64>(input + i * 32), tile_descriptor<64>(tiles[p] + weight + i * 32),
                        k > 0 || i > 0);
                }
            }
            wgmma_commit();
            if (k > 0) {
                wgmma_wait<1>();
                release_input(input_before);
                if (k % S::PER_STAGE == 0) {
                    #pragma unroll
                    for (int p = 0; p < PARTS; p++) release_weight(held_before[p]);
                }
            }
            input_before = inputs.empty();
            inputs.advance();
        }
        wgmma_wait<0>();
        release_input(input_before);
        #pragma unroll
        for (int p = 0; p < PARTS; p++) release_weight(held[p]);
    }
    // Adds up what both warpgroups have: of the blocks of eight columns each one keeps a half.
    // Behind it factors are there, where it is asked for.
    template <bool NORMED, int PARTS, int N>
    __device__ __forceinline__ void join(const float (&sums)[PARTS][N][4], float (&own)[PARTS][N / 2][4]) const {
        auto at = [&](u32 of, int p, int i) {
            return reinterpret_cast<float4*>(memory + AT_EXCHANGE) + ((of * PARTS + p) * (N / 2) + i) * 128 +
                thread % 128;
        };
        #pragma unroll
        for (int p = 0; p < PARTS; p++) {
            #pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const float(&low)[4] = sums[p][i], (&high)[4] = sums[p][N / 2 + i];
                *at(group(), p, i) =
                    group() ? make_float4(low[0], low[1], low[2], low[3])
                            : make_float4(high[0], high[1], high[2], high[3]);
                #pragma unroll
                for (int j = 0; j < 4; j++) own[p][i][j] = group() ? high[j] : low[j];
            }
        }
        if (NORMED) named_barrier(FACTORS_BARRIER, CONSUMERS + 64);
        else consumers_sync();
        #pragma unroll
        for (int p = 0; p < PARTS; p++) {
            #pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const float4 v = *at(1 - group(), p, i);
                own[p][i][0] += v.x, own[p][i][1] += v.y, own[p][i][2] += v.z, own[p][i][3] += v.w;
            }
        }
    }

    // What all threads have written, others may read.
    __device__ __forceinline__ void publish_all(int what, u32 number) const {
        consumers_sync();
        if (thread == 0) {
            u32* at = step.scratch + FLAG_WORDS + (what * 2 + half) * SLICES + slice;
            asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(number) : "memory");
        }
    }
    // A thread's columns of a gamma; before a product, since it takes as long as from the L2 cache.
    __device__ __forceinline__ u32 of_gamma(const u16* gamma) const {
        u32 g;
        asm volatile("ld.global.b32 %0, [%1];" : "=r"(g) : "l"(gamma + slice * 16 + column(2, 0)));
        return g;
    }
    // The residual stream, for the product behind the norm with these columns of gamma.
    __device__ __forceinline__ void publish_residual(u32 g, u32 number) const {
        const u32 at = slice * 16 + column(2, 0);
        float* squares = reinterpret_cast<float*>(memory + AT_SQUARES);
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const float a = residual[2 * i], b = residual[2 * i + 1];
            if (there(row(i))) step.scratch[X + (of_batch(row(i)) * D_MODEL + at) / 2] = pack(a * low(g), b * high(g));
            float square = fmaf(a, a, b * b);
            square += __shfl_xor_sync(~0u, square, 1);
            square += __shfl_xor_sync(~0u, square, 2);
            if (lane % 4 == 0) squares[group() * 64 + row(i)] = square;
        }
        consumers_sync();
        if (thread < 64 && there(thread)) {
            step.scratch[SQUARES + slice * BATCH + of_batch(thread)] =
                __float_as_uint(squares[thread] + squares[64 + thread]);
        }
        publish_all(INPUT, number);
    }
    __device__ __forceinline__ float factor(u32 row) const {
        return reinterpret_cast<const float*>(memory + AT_FACTORS)[row];
    }

    // A thread's numbers of a slice, `value(block of eight columns, number, 1 / rms)`, to rows of
    // `width`: four lanes have two columns each of a row's block, and write a block each.
    template <class S, class F>
    __device__ __forceinline__ void write(u32* to, u32 width, F value) const {
        constexpr int BLOCKS_OF_8 = S::OWN / 16;
        static_assert(BLOCKS_OF_8 <= 4, "blocks");
        const u32 q = lane % 4;
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const float f = factor(row(r));
            u32 pairs[4] = {}, block[4];
            #pragma unroll
            for (int i = 0; i < BLOCKS_OF_8; i++) pairs[i] = pack(value(i, 2 * r, f), value(i, 2 * r + 1, f));
            // Lane q gives lane p its pair of block p, and gets that of block q.
            block[0] = block[1] = block[2] = block[3] = 0;
            #pragma unroll
            for (u32 turn = 0; turn < 4; turn++) {
                const u32 other = q ^ turn;
                const u32 given = other == 0 ? pairs[0] : other == 1 ? pairs[1] : other == 2 ? pairs[2] : pairs[3];
                const u32 got = __shfl_xor_sync(~0u, given, turn);
                #pragma unroll
                for (u32 i = 0; i < 4; i++) block[i] = other == i ? got : block[i];
            }
            if (q < BLOCKS_OF_8 && there(row(r))) {
                u32* at = to + (of_batch(row(r)) * width + (group() * BLOCKS_OF_8 + q) * 8) / 2;
                *reinterpret_cast<uint4*>(at) = make_uint4(block[0], block[1], block[2], block[3]);
            }
        }
    }

    __device__ __forceinline__ void queries_keys_values(u32 number) {
        float sums[1][Qkv::OWN / 8][4], own[1][Qkv::OWN / 16][4];
        multiply<Qkv, 1>(sums);
        join<true>(sums, own);
        u32* to = step.scratch + Q + slice * Qkv::OWN / 2;
        write<Qkv>(to, QKV_ROWS, [&](int i, int j, float f) { return own[0][i][j] * f; });
        publish_all(QKV, number);
    }
    __device__ __forceinline__ void gate_up(u32 number) {
        float sums[2][GateOrUp::OWN / 8][4], own[2][GateOrUp::OWN / 16][4];
        multiply<GateOrUp, 2>(sums);
        join<true>(sums, own);
        u32* to = step.scratch + H + slice * GateOrUp::OWN / 2;
        write<GateOrUp>(to, D_FF, [&](int i, int j, float f) { return gated(own[0][i][j] * f, own[1][i][j] * f); });
        publish_all(GATED, number);
    }
    // A product that is added to the residual stream.
    template <class S>
    __device__ __forceinline__ void add(const u16* gamma, u32 number) {
        const u32 g = of_gamma(gamma);
        float sums[1][2][4], own[1][1][4];
        multiply<S, 1>(sums);
        join<false>(sums, own);
        // What was computed behind a wait that was too long is no number.
        const float lost = inputs.lost | ring.lost ? __int_as_float(0x7fc00000) : 0;
        #pragma unroll
        for (int j = 0; j < 4; j++) residual[j] += own[0][0][j] + lost;
        publish_residual(g, number);
    }
    // Where the residual stream begins.
    __device__ __forceinline__ void embed(const u16* gamma, u32 number) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 v = 0;
            if (there(row(i))) {
                const u64 id = min(max(step.ids[of_batch(row(i))], 0), step.vocabulary - 1);
                v = *reinterpret_cast<const u32*>(step.embedding + id * D_MODEL + slice * 16 + column(2, 0));
            }
            residual[2 * i] = low(v), residual[2 * i + 1] = high(v);
        }
        publish_residual(of_gamma(gamma), number);
    }
};

__device__ __forceinline__ void attention(Consumer& c, const Layer& layer, u32 number) {
    const Step& step = c.step;
    c.await_ready();
    auto value = [&](u32 at) { return ask(step.scratch + Q + at / 2); };
    attend_in_turns(c, step, layer, kept_walk(), value, [&](const Segment& s, Part part, u32 head, u32 pair) {
        u32* piece = step.scratch + PIECES + head * (HEAD_DIM + 2) * 2;
        if (s.first > 0) {
            u32* to = piece + blockIdx.x * PIECE * 2;
            publish(to + 4 * pair, __float_as_uint(part.out.x), number);
            publish(to + 4 * pair + 2, __float_as_uint(part.out.y), number);
            if (pair == 0) {
                publish(to + 2 * HEAD_DIM, __float_as_uint(part.peak), number);
                publish(to + 2 * HEAD_DIM + 2, __float_as_uint(part.sum), number);
            }
            return;
        }
        each_other(s, [&](int block) {
            const u32* from = piece + block * PIECE * 2;
            uint2 v[4];
            poll([&] {
                v[0] = ask_pair(from + 4 * pair), v[1] = ask_pair(from + 4 * pair + 2);
                v[2] = ask_pair(from + 2 * HEAD_DIM), v[3] = ask_pair(from + 2 * HEAD_DIM + 2);
                return v[0].y == number && v[1].y == number && v[2].y == number && v[3].y == number;
            });
            part.add(
                __uint_as_float(v[2].x), __uint_as_float(v[3].x),
                make_float2(__uint_as_float(v[0].x), __uint_as_float(v[1].x)));
        });
        const u32 to = s.row * HEADS_WIDTH + (s.head * GROUP + head) * HEAD_DIM + 2 * pair;
        step.scratch[O + to / 2] = pack(part.out.x / part.sum, part.out.y / part.sum);
    });
    c.publish_all(ATTENDED, number);
}

__device__ __forceinline__ void consume(const Step& step) {
    const u32 epoch = epoch_of(step), base = block_base(), slice = own_slice();
    Consumer c{step, {base}, {base + AT_INPUT}, base, own_half(), slice,
        threadIdx.x, threadIdx.x / 32, threadIdx.x % 32};
    c.nil = static_cast<u32>(step.rows) >> 31;
    c.at_input = swizzled(c.lane & 15, c.lane >> 4);
    c.at_weight = swizzled((c.lane & 7) + (c.lane >> 4) * 8, c.lane >> 3 & 1);
    c.ready = 0;
    c.embed(step.layers->attention_norm, epoch + 1);
    #pragma unroll 1
    for (int l = 0; l < N_LAYERS; l++) {
        // Conditions on these are made anew in each layer: kept, they would be more than there are
        // predicates.
        c.forget();
        const Layer& layer = step.layers[l];
        const u32 number = epoch + 2 * l + 1;
        c.queries_keys_values(number);
        attention(c, layer, number);
        c.forget();
        c.add<Out>(layer.feed_forward_norm, number + 1);
        c.forget();
        c.gate_up(number);
        c.add<Down>(l == N_LAYERS - 1 ? step.final_norm : step.layers[l + 1].attention_norm, number + 2);
    }
    // A row's last norm.
    named_barrier(FACTORS_BARRIER, CONSUMERS + 64);
    if (c.there(slice)) {
        const u32 row = c.of_batch(slice);
        const float f = Watch::dead() ? __int_as_float(0x7fc00000) : c.factor(slice);
        for (u32 i = c.thread; i < D_MODEL / 8; i += CONSUMERS) {
            const uint4 v = ask(step.scratch + X + row * (D_MODEL / 2) + 4 * i);
            const u32 w[4] = {v.x, v.y, v.z, v.w};
            u32 r[4];
            #pragma unroll
            for (int j = 0; j < 4; j++) r[j] = pack(low(w[j]) * f, high(w[j]) * f);
            *reinterpret_cast<uint4*>(step.hidden + row * D_MODEL + 8 * i) = make_uint4(r[0], r[1], r[2], r[3]);
        }
    }
}

__device__ __forceinline__ void begin(const Step& step) {
    if (threadIdx.x == 0) {
        Watch::begin();
        for (int i = 0; i < 2; i++) barrier_init(block_base() + AT_READY + 8 * i, 1);
        for (int s = 0; s < INPUT_STAGES; s++) {
            barrier_init(block_base() + AT_INPUT_BARRIERS + 16 * s, 1);
            // Two warpgroups of each block of the cluster.
            barrier_init(block_base() + AT_INPUT_BARRIERS + 16 * s + 8, 2 * CLUSTER);
        }
        Weights{block_base()}.init(WARPS);
    }
    if (threadIdx.x < 32) share_out(step, threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1) decode_step_large_batch(
    const Layer* layers, const TensorMap* maps, const TensorMap* inputs, const u16* embedding, const u16* final_norm,
    const float* cos, const float* sin, State* state, u32* scratch, const int* ids, const int* positions,
    const int* pages, u16* hidden, const __grid_constant__ Numbers numbers
) {
    const Step step{maps, inputs, layers, embedding, final_norm, cos, sin, state, scratch, ids, positions, pages,
        hidden,
        static_cast<int>(numbers.rows), static_cast<int>(numbers.pages_a_row), static_cast<int>(numbers.vocabulary),
        static_cast<int>(numbers.last_position)};
    if (failed(state, step.hidden, step.rows)) return;
    begin(step);
    cluster_sync();
    if (threadIdx.x < CONSUMERS) {
        registers_raise<232>();
        consume(step);
        if (Watch::dead()) reinterpret_cast<volatile State*>(state)->error = 1;
    } else {
        registers_lower<40>();
        if (threadIdx.x == CONSUMERS) {
            bring(step);
        } else if (threadIdx.x / 32 == WARPS + 1) {
            scout(step);
        } else if (threadIdx.x / 32 > WARPS + 1) {
            keep_factors(step);
        }
    }
    // The other block of the cluster may still write here.
    cluster_sync();
    if (blockIdx.x == 0 && threadIdx.x == 0) state->large_batch[SIZE] += NUMBERS;
}
