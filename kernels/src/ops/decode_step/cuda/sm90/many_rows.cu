// A decode step of up to 32 rows: blocks of threads on 128 multiprocessors, all resident, in
// clusters of two.
//
// A cluster owns some output rows of every matrix, and each of its blocks half of their columns.
// One thread (the producer) streams these, and the keys and values that the block attends to, by
// TMA through a ring in shared memory, in the order of their use, and never waits for results. The
// warps (the consumers) poll for their block's half of the input, multiply on tensor cores, and add
// up: within the block by shared memory, within the cluster by writing into the owner's. What the
// owner of a row then has, it publishes for all.
//
// Between the products are words of two bf16:
//
//                   qkv          attention        output        gate, up         down
//   input    x ------------> q, k, v --------> o --------> x' ---------> h ----------> x
//   cluster  1/64 of rows        .            1/64         1/64          1/64
//   block    half of columns     pages        half         half          half
//
//   weight [rows, columns]       block 0   block 1
//                              +---------+---------+
//   cluster's rows, 16 a tile  | warps   | warps   |   sums of both meet at the owner of a row:
//                              |         |         |   block 0 owns the upper half, block 1 the
//                              |         |         |   lower
//                              +---------+---------+
//
// INT8 weights come through the same ring: 128 columns are a line of 128 bytes, as 64 are in bf16.
// A lane's word of a tile has four adjacent columns, which become two registers of `mma`:
//
//   columns of 16    0  1  2  3   4  5  6  7   ..  15      four bytes a lane
//   k of `mma`       0  1  8  9   2  3  10 11  ..          so the input is stored in this order
//
// Sums are multiplied by a row's scale where they are complete. A block's scales are read a layer
// ahead, into one of two sets in shared memory: read where they are needed, each took the time of
// an access to memory, four times a layer.
//
// A norm's gamma is multiplied into the input, and its 1 / rms into the sums: so a norm costs no
// exchange of its own. Pages of all kv heads of all rows are shared out so that blocks take equally
// long; where a head's pages are several blocks', the first of these puts it together.
constexpr int CLUSTER = 2, BLOCKS = 128, CLUSTERS = BLOCKS / CLUSTER;
constexpr int WARPS = 8, TEAMS = WARPS / TEAM_WARPS, CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + WARPGROUP;
constexpr int M_TILES = (BATCH + 15) / 16, ROWS = 16 * M_TILES;
constexpr int STAGE = 16384;
// Stages on their way at once: more would make what few rows exchange wait behind them.
constexpr int IN_FLIGHT = (BATCH <= 8 ? 2 : 3) * (INT8 ? 2 : 1);
// Groups of 64 columns in a line of 128 bytes.
constexpr int GROUPS_A_LINE = INT8 ? 2 : 1;

// A cluster's rows of a weight [N, K], and a block's columns.
template <int N, int K>
struct Product {
    static constexpr int OWN = N / BLOCKS, ALL = N / CLUSTERS, COLUMNS = K / CLUSTER;
    // Tiles of 16 rows, and warps that share the columns of one.
    static constexpr int TILES = ALL / 16, PARTS = TILES >= WARPS ? 1 : WARPS / TILES;
    // 64 columns are a group, of which a stage holds some.
    static constexpr int PER_STAGE = STAGE / (ALL * 128), GROUPS = COLUMNS / 64;
    static constexpr int STAGES = (GROUPS + PER_STAGE - 1) / PER_STAGE;
    static constexpr int STAGE_BYTES = PER_STAGE / GROUPS_A_LINE * ALL * 128;
    static constexpr int PITCH = ALL + 8;              // of sums
    static_assert(
        N % (BLOCKS * 8) == 0 && K % (CLUSTER * 256) == 0 && GROUPS % PER_STAGE == 0 && GROUPS % PARTS == 0 &&
            PER_STAGE % GROUPS_A_LINE == 0,
        "sizes");
};
using Qkv = Product<QKV_ROWS, D_MODEL>;
using Out = Product<D_MODEL, HEADS_WIDTH>;
using Half = Product<D_FF, D_MODEL>;                     // gate, or up
using Down = Product<D_MODEL, D_FF>;
// Warps that share a tile of gate or up.
constexpr int UP_PARTS = WARPS / (2 * Half::TILES), SQUARES = D_MODEL / 256;
static_assert(
    Qkv::TILES <= WARPS && Out::TILES <= WARPS && 2 * Half::TILES <= WARPS && Half::GROUPS % UP_PARTS == 0, "tiles");
static_assert(GROUP <= 8 && GROUP % 2 == 0 && HEAD_DIM % 64 == 0 && BATCH % 8 == 0, "heads");

// The scales of a block's rows of a layer, in this order.
struct OwnScales {
    static constexpr int QKV = 0, OUT = QKV + Qkv::OWN, GATE = OUT + Out::OWN, UP = GATE + Half::OWN;
    static constexpr int DOWN = UP + Half::OWN, ALL = DOWN + Down::OWN;
    static constexpr int SET_BYTES = INT8 ? ALL * 4 : 0;
};
static_assert(OwnScales::ALL <= CONSUMERS, "a thread reads a scale");

__device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

struct Step {
    const TensorMap* maps;
    const Layer* layers;
    const Weight* embedding;
    const u16* final_norm;
    const float *cos, *sin;                            // [positions, HEAD_DIM / 2]
    State* state;
    u32* scratch;
    const int *ids, *positions;                        // [rows]
    const int* pages;                                  // [rows, pages_a_row]
    u16* hidden;                                       // [rows, D_MODEL]
    int rows, pages_a_row, vocabulary, last_position;
    const Scales* scales;                              // of each block

    __device__ __forceinline__ int id(int row) const { return min(max(ids[row], 0), vocabulary - 1); }
    // A pair of columns of a row's embedding.
    __device__ __forceinline__ u32 embedded(int row, int pair) const {
        const u64 at = static_cast<u64>(id(row)) * (D_MODEL / 2) + pair;
        if (!INT8) return reinterpret_cast<const u32*>(embedding)[at];
        const u32 bytes = reinterpret_cast<const u16*>(embedding)[at];
        const float scale = scales->embedding[id(row)];
        return pack(static_cast<signed char>(bytes) * scale, static_cast<signed char>(bytes >> 8) * scale);
    }
    // Four of them.
    __device__ __forceinline__ uint4 four_embedded(int row, int pair) const {
        if (INT8) {
            return make_uint4(
                embedded(row, pair), embedded(row, pair + 1), embedded(row, pair + 2), embedded(row, pair + 3));
        }
        return *reinterpret_cast<const uint4*>(
            reinterpret_cast<const u32*>(embedding) + static_cast<u64>(id(row)) * (D_MODEL / 2) + pair);
    }
};

// Words of two bf16 that blocks exchange, of one layer; there are three of these sets, in turns. A
// word that is not there yet is EMPTY, which no conversion gives.
constexpr u32 EMPTY = 0xffffffffu;
constexpr int X = 0, Y = X + BATCH * D_MODEL / 2, O = Y + BATCH * D_MODEL / 2, H = O + BATCH * HEADS_WIDTH / 2;
constexpr int Q = H + BATCH * D_FF / 2, PIECES = Q + BATCH * QKV_ROWS / 2, PIECE = GROUP * (HEAD_DIM + 2);
constexpr int SET = (PIECES + BLOCKS * PIECE + 511) / 512 * 512;

// Shared memory.
constexpr int INPUT = ROWS * max_of(max_of(Qkv::COLUMNS, Out::COLUMNS), Down::COLUMNS) * 2;
constexpr int SUMS = max_of(
    max_of(
        Qkv::PARTS * BATCH * Qkv::PITCH,
        max_of(Out::PARTS * BATCH * Out::PITCH, Down::PARTS * BATCH * Down::PITCH)) * 4,
    WARPS * GROUP * HEAD_DIM * 4);
constexpr int SLOTS_0 = BATCH * max_of(CLUSTER * Qkv::OWN, CLUSTER * UP_PARTS * 2 * Half::OWN) * 4;
constexpr int SLOTS_1 = CLUSTER * BATCH * Out::OWN * 4;
constexpr int OTHERS = INPUT + SUMS + SLOTS_0 + SLOTS_1 + SQUARES * BATCH * 4 + TEAMS * (GROUP + 2) * HEAD_DIM * 2 +
    WARPS * GROUP * 8 + (2 * BATCH + 1) * 4 + 2 * OwnScales::SET_BYTES + 1024;
constexpr int STAGES = (SHARED_BYTES - OTHERS) / STAGE;
constexpr int AT_INPUT = STAGES * STAGE;
constexpr int AT_SUMS = AT_INPUT + INPUT;
constexpr int AT_PARTS = AT_SUMS;
constexpr int AT_SLOTS_0 = AT_SUMS + SUMS;
constexpr int AT_SLOTS_1 = AT_SLOTS_0 + SLOTS_0;
constexpr int AT_SQUARES = AT_SLOTS_1 + SLOTS_1;
constexpr int AT_QUERIES = AT_SQUARES + SQUARES * BATCH * 4;
constexpr int AT_NEW = AT_QUERIES + TEAMS * GROUP * HEAD_DIM * 2;
constexpr int AT_PEAKS = AT_NEW + TEAMS * 2 * HEAD_DIM * 2;
constexpr int AT_BARRIERS = (AT_PEAKS + WARPS * GROUP * 8 + 7) / 8 * 8, AT_POSITIONS = AT_BARRIERS + 16 * (STAGES + 1);
constexpr int AT_BEFORE = AT_POSITIONS + BATCH * 4, AT_CUTS = AT_BEFORE + (BATCH + 1) * 4;
constexpr int AT_WAITED = AT_CUTS + (BLOCKS + 1) * 4, AT_WALK = AT_WAITED + WARPS * 16;
constexpr int AT_SCALES = (AT_WALK + 16 + 7) / 8 * 8, SHARED = AT_SCALES + 2 * OwnScales::SET_BYTES;
static_assert(SHARED <= AT_WATCH && STAGES >= 4, "shared memory");
using StageRing = RingOf<STAGE, STAGES, AT_BARRIERS>;

#include "paged_attention.cuh"

__device__ __forceinline__ bool there(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }
__device__ __forceinline__ bool there(uint2 v) { return v.x != EMPTY && v.y != EMPTY; }
__device__ __forceinline__ void publish(u32* at, u32 v) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
__device__ __forceinline__ void publish(u32* at, float a, float b) {
    asm volatile(
        "st.relaxed.gpu.global.v2.b32 [%0], {%1,%2};" ::"l"(at), "r"(__float_as_uint(a)), "r"(__float_as_uint(b))
        : "memory");
}
__device__ __forceinline__ u32 remote(u32 at, u32 rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(rank));
    return r;
}
__device__ __forceinline__ void send(u32 at, float a, u32 barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at),
        "r"(__float_as_uint(a)), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void send(u32 at, float a, float b, u32 barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(at),
        "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void send(u32 at, float4 v, u32 barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(at),
        "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)),
        "r"(barrier)
        : "memory");
}
// 16 bytes, once they are there; by all lanes of a warp that are to have some.
__device__ __forceinline__ uint4 receive(const u32* at) {
    uint4 v = ask(at);
    poll([&] {
        const bool ready = there(v);
        if (!ready) v = ask(at);
        return ready;
    });
    __syncwarp();
    return v;
}

// ---- producer

struct Producer {
    StageRing ring, arriving = ring;
    u32 filled = 0;
    bool over = false;                                 // a stage was waited for too long

    // Whether a stage is free. Behind one that was not, none is opened: its barrier would be asked
    // for another phase.
    __device__ __forceinline__ bool open(u32 bytes) {
        if (filled >= STAGES) over = over || !Watch::wait(ring.empty(), ring.parity ^ 1);
        if (filled >= IN_FLIGHT) {
            arriving.await();
            arriving.advance();
        }
        if (filled < STAGES) filled++;
        over = over || arriving.lost;
        if (!over) barrier_expect(ring.full(), bytes);
        return !over;
    }
    template <class S>
    __device__ __forceinline__ void weight(const TensorMap* map, u32 cluster, u32 rank) {
        #pragma unroll 1
        for (int s = 0; s < S::STAGES; s++) {
            const int line = (rank * S::GROUPS + s * S::PER_STAGE) / GROUPS_A_LINE;
            if (open(S::STAGE_BYTES)) load_groups(ring.stage(), map, line, cluster * S::ALL, ring.full());
            ring.advance();
        }
    }
};

__device__ __forceinline__ void produce(const Step& step, StageRing ring, u32 cluster, u32 rank) {
    Producer p{ring};
    // Keys and values of the tokens before were not written by TMA.
    asm volatile("fence.acq_rel.gpu;\nfence.proxy.async.global;" ::: "memory");
    #pragma unroll 1
    for (int l = 0; l < N_LAYERS; l++) {
        if (Watch::dead()) return;
        const TensorMap* maps = step.maps + l * MAPS;
        if (l + 1 < N_LAYERS) {
            for (int m = 0; m < MAPS; m++) asm volatile("prefetch.tensormap [%0];" ::"l"(maps + MAPS + m) : "memory");
        }
        p.weight<Qkv>(maps + QKV_MAP, cluster, rank);
        Pages page(step, kept_walk());
        for (; page.there(); page.advance()) {
            #pragma unroll
            for (int m = 0; m < 2; m++) {
                if (p.open(page.bytes())) page.load(maps + m, p.ring.stage(), p.ring.full());
                p.ring.advance();
            }
        }
        p.weight<Out>(maps + OUT_MAP, cluster, rank);
        #pragma unroll 1
        for (int s = 0; s < Half::STAGES; s++) {
            const int line = (rank * Half::GROUPS + s * Half::PER_STAGE) / GROUPS_A_LINE;
            #pragma unroll
            for (int part = 0; part < 2; part++) {
                if (p.open(Half::STAGE_BYTES)) {
                    load_groups(
                        p.ring.stage(), maps + UP_MAP, line, part * D_FF + cluster * Half::ALL, p.ring.full());
                }
                p.ring.advance();
            }
        }
        p.weight<Down>(maps + DOWN_MAP, cluster, rank);
    }
}

// ---- consumers

struct Consumer {
    const Step& step;
    StageRing ring;
    u32 cluster, rank, warp, lane, thread;
    u32 base;
    u32 nil;
    float2 residual;
    // Of a lane's columns of each row, before a norm.
    static constexpr int NORM_ACROSS = D_MODEL / CLUSTER / 256, NORM_APART = WARPS / NORM_ACROSS;
    static constexpr int NORM_TURNS = (BATCH + NORM_APART - 1) / NORM_APART;
    float squares[NORM_TURNS];
    u32 at_input, at_weight;                           // where in a tile of [16, 64] a lane reads

    // What follows from these is computed again: kept, it would fit neither registers nor
    // predicates.
    __device__ __forceinline__ void forget() {
        asm volatile("" : "+r"(thread), "+r"(warp), "+r"(lane));
        const u32 block = opaque_block();
        cluster = block / CLUSTER, rank = block % CLUSTER;
    }
    __device__ __forceinline__ u32 slots_barrier(int b) const { return base + AT_BARRIERS + 16 * STAGES + 8 * b; }

    // A thread's scale of a layer.
    __device__ __forceinline__ float read_scale(int layer) const {
        using Own = OwnScales;
        const Scales& all = step.scales[layer];
        const int i = thread;
        const float* const* of = i < Own::OUT ? &all.qkv
            : i < Own::GATE ? &all.out
            : i < Own::DOWN ? &all.up : &all.down;
        const int row = i < Own::OUT ? cluster * Qkv::ALL + rank * Qkv::OWN + i
            : i < Own::GATE ? cluster * Out::ALL + rank * Out::OWN + i - Own::OUT
            : i < Own::UP ? cluster * Half::ALL + rank * Half::OWN + i - Own::GATE
            : i < Own::DOWN ? D_FF + cluster * Half::ALL + rank * Half::OWN + i - Own::UP
            : cluster * Down::ALL + rank * Down::OWN + i - Own::DOWN;
        float scale;
        asm volatile("ld.global.f32 %0, [%1];" : "=f"(scale) : "l"(*of + row));
        return scale;
    }
    __device__ __forceinline__ float* scales_of_layer(int layer) const {
        return reinterpret_cast<float*>(memory + AT_SCALES) + layer % 2 * OwnScales::ALL;
    }
    // The scales of two adjacent rows.
    __device__ __forceinline__ float2 own_scales(int layer, int at) const {
        return INT8 ? *reinterpret_cast<const float2*>(scales_of_layer(layer) + at) : make_float2(1, 1);
    }

    // The columns of this block, of all rows, of one of a layer's four inputs: into shared memory.
    // With a norm: times gamma, and the squares go to the cluster.
    template <int COLUMNS, int WIDTH, bool NORMED>
    __device__ __forceinline__ void load(const u32* from, int input, const u16* gamma, bool embedded) {
        // A lane has eight columns at a time: warps are distributed over columns first, then over
        // rows.
        constexpr int ACROSS = COLUMNS / 256;
        constexpr int SIDE_BY_SIDE = ACROSS % 3 ? ACROSS : ACROSS / 3;
        constexpr int EACH = ACROSS / SIDE_BY_SIDE;
        constexpr int APART = WARPS / SIDE_BY_SIDE;
        // Of as many rows at once as registers hold.
        constexpr int TURNS = (BATCH + APART - 1) / APART, ALL = TURNS * EACH;
        constexpr int N = ALL <= 12 ? TURNS : ALL <= 24 ? TURNS / 2 : TURNS / 4;
        static_assert(
            COLUMNS % 256 == 0 && WARPS % SIDE_BY_SIDE == 0 && (!NORMED || EACH == 1 && N == TURNS) && TURNS % N == 0,
            "columns");
        const u32 column = warp % SIDE_BY_SIDE * EACH, first = warp / SIDE_BY_SIDE;
        uint4 g;
        if (NORMED) g = *reinterpret_cast<const uint4*>(gamma + rank * COLUMNS + (column * 32 + lane) * 8);
        const u32 chunk = column * 32 + lane, offset = rank * (COLUMNS / 2) + chunk * 4;
        const u32 to = base + AT_INPUT + chunk / 8 * (ROWS * 128);
        Patience patience;
        patience.begin(base + AT_WAITED, warp, input);
        if (!NORMED || !embedded) patience.hold();
        #pragma unroll 1
        for (int turn = 0; turn < TURNS; turn += N) {
            const u32 begin = first + turn * APART;
            const u32* at = from + begin * (WIDTH / 2) + offset;
            uint4 v[N][EACH];
            #pragma unroll
            for (int i = 0; i < N; i++) {
                const u32 row = begin + i * APART;
                #pragma unroll
                for (int j = 0; j < EACH; j++) {
                    v[i][j] = make_uint4(0, 0, 0, 0);
                    if (row >= step.rows) continue;
                    if (NORMED && embedded) {
                        v[i][j] = step.four_embedded(row, offset);
                    } else {
                        v[i][j] = ask(at + i * (APART * WIDTH / 2) + j * 128);
                    }
                }
            }
            if (!NORMED || !embedded) poll([&] {
                bool all = true;
                #pragma unroll
                for (int i = 0; i < N; i++) {
                    #pragma unroll
                    for (int j = 0; j < EACH; j++) {
                        if (!there(v[i][j])) all = false, v[i][j] = ask(at + i * (APART * WIDTH / 2) + j * 128);
                    }
                }
                return all;
            });
            __syncwarp();
            if (turn == 0 && (!NORMED || !embedded)) patience.end(lane);
            #pragma unroll
            for (int i = 0; i < N; i++) {
                const u32 row = begin + i * APART;
                if (row >= step.rows) break;
                if (NORMED) {
                    const u32 gs[4] = {g.x, g.y, g.z, g.w};
                    u32 ws[4] = {v[i][0].x, v[i][0].y, v[i][0].z, v[i][0].w};
                    float square = 0;
                    #pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const float a = low(ws[k]), b = high(ws[k]);
                        square = fmaf(a, a, fmaf(b, b, square));
                        ws[k] = pack(a * low(gs[k]), b * high(gs[k]));
                    }
                    v[i][0] = make_uint4(ws[0], ws[1], ws[2], ws[3]);
                    squares[i] = square;
                }
                #pragma unroll
                for (int j = 0; j < EACH; j++) keep_input(to + j * 4 * (ROWS * 128), row, chunk % 8, v[i][j]);
            }
        }
        consumers_sync();
    }
    // Eight columns of a row of the input, which are a chunk; for INT8 those of two chunks are put
    // into the order of the weight's words.
    static __device__ __forceinline__ void keep_input(u32 to, u32 row, u32 chunk, uint4 v) {
        if (!INT8) {
            keep(to + swizzled(row, chunk), v);
            return;
        }
        const u32 even = chunk & ~1u, at = chunk % 2 * 8;
        asm volatile(
            "st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to + swizzled(row, even) + at), "r"(v.x), "r"(v.z) : "memory");
        asm volatile(
            "st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to + swizzled(row, even + 1) + at), "r"(v.y), "r"(v.w) : "memory");
    }
    // Of a group in a stage, a tile of 16 rows: the address of its lines, with the first chunk that
    // is the group's, which swizzling leaves apart.
    template <class S>
    static __device__ __forceinline__ u32 tile_of(u32 stage, int group, u32 tile) {
        return stage + group / GROUPS_A_LINE * (S::ALL * 128) + tile * 2048 + group % GROUPS_A_LINE * 64;
    }
    // 64 columns of the input from `input` on, by a tile of 16 rows of the weight at `tile`. Two
    // chains of products, which `join` adds.
    static constexpr int CHAINS = M_TILES == 1 ? 2 : 1;
    using Sums = float[CHAINS][M_TILES][2][4];
    __device__ __forceinline__ u32 product(Sums& c, u32 input, u32 tile) {
        // All loads come first: a product would wait for each.
        if (INT8) return product_of_bytes(c, input, tile);
        Four a[4][M_TILES], b[4];
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            b[k] = matrices(tile + (at_weight ^ 32 * k));
            #pragma unroll
            for (int m = 0; m < M_TILES; m++) a[k][m] = matrices(input + (at_input ^ 32 * k) + m * 2048);
        }
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            #pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                multiply(c[k % CHAINS][m][0], a[k][m], b[k].v[0], b[k].v[1]);
                multiply(c[k % CHAINS][m][1], a[k][m], b[k].v[2], b[k].v[3]);
            }
        }
        return b[3].v[3];
    }
    __device__ __forceinline__ u32 product_of_bytes(Sums& c, u32 input, u32 tile) {
        Four a[4][M_TILES], b[2];
        const u32 lines = tile & ~64u, chunks = at_weight ^ (tile & 64);
        #pragma unroll
        for (int k = 0; k < 2; k++) b[k] = matrices(lines + (chunks ^ 32 * k));
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            #pragma unroll
            for (int m = 0; m < M_TILES; m++) a[k][m] = matrices(input + (at_input ^ 32 * k) + m * 2048);
        }
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 four = b[k / 2].v[2 * half + k % 2];
                const u32 b0 = from_bytes(four, 0x4140), b1 = from_bytes(four, 0x4342);
                #pragma unroll
                for (int m = 0; m < M_TILES; m++) multiply(c[k % CHAINS][m][half], a[k][m], b0, b1);
            }
        }
        return b[1].v[3];
    }
    static __device__ __forceinline__ void join(Sums& c) {
        #pragma unroll
        for (int i = 0; i < 8 * (CHAINS - 1); i++) c[0][0][i / 4][i % 4] += c[CHAINS - 1][0][i / 4][i % 4];
    }
    // To all blocks of the cluster.
    __device__ __forceinline__ void send_squares() {
        #pragma unroll
        for (int o = 16; o; o >>= 1) {
            #pragma unroll
            for (int i = 0; i < NORM_TURNS; i++) squares[i] += __shfl_xor_sync(~0u, squares[i], o);
        }
        const u32 column = warp % NORM_ACROSS, first = warp / NORM_ACROSS;
        const u32 own = base + AT_SQUARES + ((rank * NORM_ACROSS + column) * BATCH + first) * 4;
        const u32 to = remote(own, lane % CLUSTER), barrier = remote(slots_barrier(0), lane % CLUSTER);
        #pragma unroll
        for (int i = 0; i < NORM_TURNS; i++) {
            if (lane < CLUSTER && first + i * NORM_APART < step.rows) {
                send(to + i * NORM_APART * 4, squares[i], barrier);
            }
        }
    }
    // Products of this block's columns, summed over its warps, to the blocks of the cluster that
    // own the rows.
    template <class S, bool NORMED>
    __device__ __forceinline__ void products(int buffer, u32 slots) {
        Sums c = {};
        const u32 tile = warp % S::TILES, part = warp / S::TILES;
        constexpr int EACH = S::GROUPS / S::PARTS;
        const int from = part * EACH, to = part < S::PARTS ? from + EACH : 0;
        #pragma unroll 1
        for (int s = 0; s < S::STAGES; s++) {
            ring.await();
            u32 last = 0;
            const int begin = s * S::PER_STAGE;
            #pragma unroll 1
            for (int k = max(from, begin); k < min(to, begin + S::PER_STAGE); k++)
                last = product(c, base + AT_INPUT + k * (ROWS * 128), tile_of<S>(ring.stage(), k - begin, tile));
            __syncwarp();
            ring.release(lane, last, nil);
        }
        join(c);
        if (NORMED) send_squares();
        const u32 g = lane / 4, q = lane % 4;
        float* sums = reinterpret_cast<float*>(memory + AT_SUMS);
        #pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 row = 16 * m + g + 8 * (i & 1), n = tile * 16 + (i >> 1) * 8 + 2 * q;
                const float* v = &c[0][m][i >> 1][2 * (i & 1)];
                if (row < step.rows) {
                    *reinterpret_cast<float2*>(sums + (part * BATCH + row) * S::PITCH + n) = make_float2(v[0], v[1]);
                }
            }
        }
        consumers_sync();
        constexpr int QUADS = S::ALL / 4;
        #pragma unroll 1
        for (u32 i = thread; i < step.rows * QUADS; i += CONSUMERS) {
            const u32 row = i / QUADS, quad = i % QUADS, n = quad * 4;
            float4 v = {0, 0, 0, 0};
            #pragma unroll
            for (int p = 0; p < S::PARTS; p++) {
                const float4 w = *reinterpret_cast<const float4*>(sums + (p * BATCH + row) * S::PITCH + n);
                v.x += w.x, v.y += w.y, v.z += w.z, v.w += w.w;
            }
            const u32 owner = n / S::OWN;
            send(
                remote(slots + ((rank * BATCH + row) * S::OWN + n % S::OWN) * 4, owner), v,
                remote(slots_barrier(buffer), owner));
        }
    }
    // Gate and up: a tile a warp.
    __device__ __forceinline__ void products_up() {
        using S = Half;
        Sums c = {};
        const bool active = warp < 2 * S::TILES * UP_PARTS;
        const u32 tile = warp % S::TILES, mine = warp / S::TILES % 2, part = warp / (2 * S::TILES);
        constexpr int EACH = S::GROUPS / UP_PARTS;
        const int from = part * EACH, to = from + EACH;
        #pragma unroll 1
        for (int s = 0; s < 2 * S::STAGES; s++) {
            ring.await();
            u32 last = 0;
            const int begin = s / 2 * S::PER_STAGE;
            if (active && (s & 1) == mine) {
                #pragma unroll 1
                for (int k = max(from, begin); k < min(to, begin + S::PER_STAGE); k++)
                    last = product(c, base + AT_INPUT + k * (ROWS * 128), tile_of<S>(ring.stage(), k - begin, tile));
            }
            __syncwarp();
            ring.release(lane, last, nil);
        }
        send_squares();
        if (!active) return;
        join(c);
        const u32 g = lane / 4, q = lane % 4;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 n = tile * 16 + half * 8, owner = n / S::OWN, at = n % S::OWN + mine * S::OWN + 2 * q;
            const u32 to = remote(base + AT_SLOTS_0, owner), barrier = remote(slots_barrier(0), owner);
            #pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                #pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32 row = 16 * m + g + 8 * i;
                    const u32 slot = ((rank * UP_PARTS + part) * BATCH + row) * (2 * S::OWN) + at;
                    if (row < step.rows) send(to + slot * 4, c[0][m][half][2 * i], c[0][m][half][2 * i + 1], barrier);
                }
            }
        }
    }
    // Numbers a row that come from the cluster.
    __device__ __forceinline__ void arm(int buffer, u32 numbers) {
        // Not behind a wait that was too long: what was armed before might never be complete.
        if (thread == 0 && !Watch::dead()) barrier_expect(slots_barrier(buffer), step.rows * numbers * 4);
    }
    // Waits for them: the first, or the second time in a layer.
    __device__ __forceinline__ void gather(int buffer, int time) const { Watch::wait(slots_barrier(buffer), time); }
    template <int OWN, int N = CLUSTER>
    __device__ __forceinline__ float2 total(u32 slots, u32 row, u32 n) const {
        float2 s = {0, 0};
        #pragma unroll
        for (int r = 0; r < N; r++) {
            const float2 v = *reinterpret_cast<const float2*>(memory + slots + ((r * BATCH + row) * OWN + n) * 4);
            s.x += v.x, s.y += v.y;
        }
        return s;
    }
    __device__ __forceinline__ float factor(u32 row) const {
        float s = 0;
        #pragma unroll
        for (int r = 0; r < SQUARES; r++) {
            s += *reinterpret_cast<const float*>(memory + AT_SQUARES + (r * BATCH + row) * 4);
        }
        return rsqrtf(s / D_MODEL + EPSILON);
    }
    // To the residual stream.
    __device__ __forceinline__ void add(u32* to, int layer, int scales) {
        constexpr int PAIRS = Out::OWN / 2;
        const u32 row = thread / PAIRS, pair = thread % PAIRS, at = (cluster * Out::ALL + rank * Out::OWN) / 2 + pair;
        if (row >= step.rows) return;
        const float2 s = total<Out::OWN>(AT_SLOTS_1, row, 2 * pair), scale = own_scales(layer, scales + 2 * pair);
        residual.x += s.x * scale.x, residual.y += s.y * scale.y;
        publish(to + row * (D_MODEL / 2) + at, pack(residual.x, residual.y));
    }
};
static_assert(BATCH * Out::OWN / 2 <= CONSUMERS, "residual");

__device__ __forceinline__ void attend(Consumer& c, const Step& step, const Layer& layer, u32* set) {
    auto value = [&](u32 at) { return receive(set + Q + at / 2); };
    attend_in_turns(c, step, layer, kept_walk(), value, [&](const Segment& s, Part part, u32 head, u32 pair) {
        u32* piece = set + PIECES + head * (HEAD_DIM + 2);
        if (s.first > 0) {
            u32* to = piece + blockIdx.x * PIECE;
            publish(to + 2 * pair, part.out.x, part.out.y);
            if (pair == 0) publish(to + HEAD_DIM, part.peak, part.sum);
            return;
        }
        each_other(s, [&](int block) {
            const u32* from = piece + block * PIECE;
            uint2 v = ask_2(from + 2 * pair), p = ask_2(from + HEAD_DIM);
            poll([&] {
                bool ready = true;
                if (!there(v)) ready = false, v = ask_2(from + 2 * pair);
                if (!there(p)) ready = false, p = ask_2(from + HEAD_DIM);
                return ready;
            });
            part.add(
                __uint_as_float(p.x), __uint_as_float(p.y),
                make_float2(__uint_as_float(v.x), __uint_as_float(v.y)));
        });
        publish(
            set + O + s.row * (HEADS_WIDTH / 2) + (s.head * GROUP + head) * PAIRS_OF_HEAD + pair,
            pack(part.out.x / part.sum, part.out.y / part.sum));
    });
}

__device__ __forceinline__ void consume(const Step& step, StageRing ring, u32 cluster, u32 rank) {
    Consumer c{step, ring, cluster, rank, threadIdx.x / 32, threadIdx.x % 32, threadIdx.x, ring.base};
    c.nil = static_cast<u32>(step.rows) >> 31;
    c.at_input = swizzled(c.lane & 15, c.lane >> 4);
    c.at_weight = swizzled((c.lane & 7) + (c.lane >> 4) * 8, c.lane >> 3 & 1);
    {
        constexpr int PAIRS = Out::OWN / 2;
        const u32 row = c.thread / PAIRS, pair = c.thread % PAIRS;
        c.residual = make_float2(0, 0);
        if (row < step.rows) {
            const u32 v = step.embedded(row, (cluster * Out::ALL + rank * Out::OWN) / 2 + pair);
            c.residual = make_float2(low(v), high(v));
        }
    }
    const u32 turn = reinterpret_cast<volatile State*>(step.state)->turns[BATCH / 16];
    if (INT8 && c.thread < OwnScales::ALL) c.scales_of_layer(0)[c.thread] = c.read_scale(0);
    u32* set = step.scratch + turn * SET;
    u32* next = step.scratch + (turn + 1) % 3 * SET;
    u32* before = step.scratch + (turn + 2) % 3 * SET;
    #pragma unroll 1
    for (int l = 0; l < N_LAYERS; l++) {
        c.forget();
        const Layer& layer = step.layers[l];
        float ahead = 0;
        if (INT8 && c.thread < OwnScales::ALL && l + 1 < N_LAYERS) ahead = c.read_scale(l + 1);
        c.arm(0, CLUSTER * Qkv::OWN + SQUARES);
        c.load<Qkv::COLUMNS, D_MODEL, true>(set + X, 0, layer.attention_norm, l == 0);
        c.products<Qkv, true>(0, c.base + AT_SLOTS_0);
        c.gather(0, 0);
        {
            constexpr int PAIRS = Qkv::OWN / 2;
            #pragma unroll 1
            for (u32 i = c.thread; i < step.rows * PAIRS; i += CONSUMERS) {
                const u32 row = i / PAIRS, pair = i % PAIRS;
                const float2 s = c.total<Qkv::OWN>(AT_SLOTS_0, row, 2 * pair);
                const float f = c.factor(row);
                const int at = (cluster * Qkv::ALL + rank * Qkv::OWN) / 2 + pair;
                const float2 scale = c.own_scales(l, OwnScales::QKV + 2 * pair);
                publish(set + Q + row * (QKV_ROWS / 2) + at, pack(s.x * f * scale.x, s.y * f * scale.y));
            }
        }
        c.arm(1, CLUSTER * Out::OWN);
        // Releases the block's EMPTY stores of the layer before, ahead of its further results,
        // which others need before they read these words again. One thread, which would only wait
        // here, does it for all: a barrier separates the stores from this. Readers go to the L2
        // (relaxed, GPU scope) and need no fence.
        if (c.thread == CONSUMERS - 1) asm volatile("fence.acq_rel.gpu;" ::: "memory");
        attend(c, step, layer, set);
        c.forget();
        c.load<Out::COLUMNS, HEADS_WIDTH, false>(set + O, 1, nullptr, false);
        c.products<Out, false>(1, c.base + AT_SLOTS_1);
        c.gather(1, 0);
        c.add(set + Y, l, OwnScales::OUT);
        c.arm(0, CLUSTER * UP_PARTS * 2 * Half::OWN + SQUARES);
        c.load<Half::COLUMNS, D_MODEL, true>(set + Y, 2, layer.feed_forward_norm, false);
        c.products_up();
        c.gather(0, 1);
        {
            constexpr int PAIRS = Half::OWN / 2;
            #pragma unroll 1
            for (u32 i = c.thread; i < step.rows * PAIRS; i += CONSUMERS) {
                const u32 row = i / PAIRS, pair = i % PAIRS;
                auto total = [&](u32 n) { return c.total<2 * Half::OWN, CLUSTER * UP_PARTS>(AT_SLOTS_0, row, n); };
                const float2 gate = total(2 * pair), up = total(Half::OWN + 2 * pair);
                const float f = c.factor(row);
                const int at = (cluster * Half::ALL + rank * Half::OWN) / 2 + pair;
                const float2 of_gate = c.own_scales(l, OwnScales::GATE + 2 * pair);
                const float2 of_up = c.own_scales(l, OwnScales::UP + 2 * pair);
                const float g[2] = {gate.x * f * of_gate.x, gate.y * f * of_gate.y};
                const float u[2] = {up.x * f * of_up.x, up.y * f * of_up.y};
                publish(set + H + row * (D_FF / 2) + at, pack(gated(g[0], u[0]), gated(g[1], u[1])));
            }
        }
        c.arm(1, CLUSTER * Down::OWN);
        c.load<Down::COLUMNS, D_FF, false>(set + H, 3, nullptr, false);
        c.products<Down, false>(1, c.base + AT_SLOTS_1);
        // All blocks have read what the layer before exchanged: it is made empty for the one after
        // the next.
        #pragma unroll 1
        for (u32 i = blockIdx.x * CONSUMERS + c.thread; i < SET / 4; i += BLOCKS * CONSUMERS) {
            asm volatile(
                "st.relaxed.gpu.global.v4.b32 [%0], {%1,%1,%1,%1};" ::"l"(before + 4 * i), "r"(EMPTY) : "memory");
        }
        c.gather(1, 1);
        // What was computed behind a wait that was too long is no number.
        if (l == N_LAYERS - 1 && Watch::dead()) c.residual.x = c.residual.y = __int_as_float(0x7fc00000);
        c.add(next + X, l, OwnScales::DOWN);
        // All have read the set's last scales, of the layer before.
        if (INT8 && c.thread < OwnScales::ALL && l + 1 < N_LAYERS) c.scales_of_layer(l + 1)[c.thread] = ahead;
        u32* const last = set;
        set = next, next = before, before = last;
    }
    // A row's last norm.
    if (blockIdx.x < step.rows && c.warp < D_MODEL / 256) {
        static_assert(D_MODEL / 256 <= WARPS, "width");
        const u32 row = blockIdx.x;
        const u32* at = set + X + row * (D_MODEL / 2) + c.thread * 4;
        const uint4 v = receive(at);
        const u32 w[4] = {v.x, v.y, v.z, v.w};
        float square = 0;
        #pragma unroll
        for (int i = 0; i < 4; i++) square = fmaf(low(w[i]), low(w[i]), fmaf(high(w[i]), high(w[i]), square));
        #pragma unroll
        for (int o = 16; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
        float* squares = reinterpret_cast<float*>(memory + AT_PEAKS);
        if (c.lane == 0) squares[c.warp] = square;
        asm volatile("bar.sync 2, %0;" ::"n"(D_MODEL / 8) : "memory");
        float all = 0;
        for (int i = 0; i < D_MODEL / 256; i++) all += squares[i];
        const float f = Watch::dead() ? __int_as_float(0x7fc00000) : rsqrtf(all / D_MODEL + EPSILON);
        const uint4 g = *reinterpret_cast<const uint4*>(step.final_norm + c.thread * 8);
        const u32 gs[4] = {g.x, g.y, g.z, g.w};
        u32 r[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) r[i] = pack(low(w[i]) * low(gs[i]) * f, high(w[i]) * high(gs[i]) * f);
        *reinterpret_cast<uint4*>(step.hidden + row * D_MODEL + c.thread * 8) = make_uint4(r[0], r[1], r[2], r[3]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1) decode_step_many_rows(
    const Layer* layers, const TensorMap* maps, const Weight* embedding, const u16* final_norm, const float* cos,
    const float* sin, State* state, u32* scratch, const int* ids, const int* positions, const int* pages,
    u16* hidden, const __grid_constant__ Numbers numbers
) {
    const Step step{maps, layers, embedding, final_norm, cos, sin, state, scratch, ids, positions, pages, hidden,
        static_cast<int>(numbers.rows), static_cast<int>(numbers.pages_a_row), static_cast<int>(numbers.vocabulary),
        static_cast<int>(numbers.last_position),
        reinterpret_cast<const Scales*>(numbers.scales)};
    if (failed(state, step.hidden, step.rows)) return;
    const StageRing ring{shared_address(memory)};
    if (threadIdx.x < 4 * WARPS) reinterpret_cast<u32*>(memory + AT_WAITED)[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        Watch::begin();
        for (int b = 0; b < 2; b++) barrier_init(ring.base + AT_BARRIERS + STAGES * 16 + 8 * b, 1);
        ring.init(WARPS);
    }
    if (threadIdx.x < 32) share_out(step, threadIdx.x);
    // Rows past the last one are zeros.
    for (int i = threadIdx.x; i < INPUT / 16; i += THREADS) {
        *reinterpret_cast<uint4*>(memory + AT_INPUT + 16 * i) = make_uint4(0, 0, 0, 0);
    }
    cluster_sync();
    const u32 cluster = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    if (threadIdx.x < CONSUMERS) {
        registers_raise<232>();
        consume(step, ring, cluster, rank);
        if (blockIdx.x == 0 && threadIdx.x == 0) state->turns[BATCH / 16] = (state->turns[BATCH / 16] + N_LAYERS) % 3;
        if (Watch::dead()) reinterpret_cast<volatile State*>(state)->error = 1;
    } else {
        registers_lower<40>();
        if (threadIdx.x == CONSUMERS) produce(step, ring, cluster, rank);
    }
    // The other block of the cluster may still write here.
    cluster_sync();
}
