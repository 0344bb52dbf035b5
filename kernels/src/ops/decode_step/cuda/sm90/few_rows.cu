// Decode steps of up to four rows, from tokens to logits and the next tokens, greedy or sampled,
// which the next step reads: a block of threads on each multiprocessor, all resident.
//
// A block owns some output rows of every matrix. One warp (the producer) streams these rows, and
// the keys and values that the block attends to, through a ring in shared memory, in the order of
// use, and never waits for results. 16 warps (the consumers) multiply: each takes 64 of every 1,024
// columns, holds its weights in registers before its part of the input arrives, polls for only that
// part, and leaves its sums in shared memory. Finisher warps add these up, hold the residual stream
// of the block's rows, and publish results as words {value, epoch} that readers poll. Epochs keep
// counting over launches, so nothing is ever reset. Before a norm the receiver multiplies by gamma,
// and the product by the norm's factor, so a norm needs no step of its own.
//
//                   qkv          attention        output        gate, up         down
//   input    x ------------> q, k, v --------> o --------> x' ---------> h ----------> x     {bf16, bf16, epoch} words
//   block    rows of it      a kv head of a    rows of it  rows of it    rows of it
//                            row, some blocks
//
// For the head, a warp multiplies all rows of a stage by itself. Blocks only exchange their largest
// logits, and if a step follows, each block finds the next tokens by itself. The steps of a launch
// see the same pages: then a block's part of attention stays its own, and the keys and values that
// it reads are from earlier launches or its own.
//
// INT8 weights become bf16 on their way to registers; a row's sums are multiplied by its scale.
// Requires at least 128 multiprocessors, and heads of 128.
// Data read by all blocks is stored twice, so that not all poll the same lines; with INT8 there is
// little data, and once is faster.
#define COPIES (INT8 ? 1 : 2)
// Stages in flight: more would only delay the exchanged data behind them. Those of INT8 are half as
// full.
#define IN_FLIGHT (INT8 ? 6 : 2)
// The same for a block that attends to all keys of a row, and so loads more.
#define IN_FLIGHT_MORE 6
// The same for the head, which nothing follows.
#define HEAD_IN_FLIGHT 8
// The same for keys and values, the bottleneck of long sequences.
#define KEYS_IN_FLIGHT 3
// Maximum stop tokens of a row.
#define MOST_ENDS 8
// Eights of rows of gate and up that go to registers early.
#define UP_EARLY (BATCH <= 2 ? 3 : 0)
// Up to so many pages of keys, one block attends for a kv head.
#define ONE_SPLIT 4

constexpr int WARPS = 16, SLICE = 64 * WARPS, LINE = SLICE * sizeof(Weight);
constexpr int FINISHERS = BATCH < 4 ? BATCH : 2, ROWS_EACH = BATCH / FINISHERS;
// Finishers, the producer and idle warps are one warpgroup, since registers are given up by
// warpgroups. Those that multiply are to have all that they need: what goes to local memory in a
// layer comes back as late as weights do.
constexpr int THREADS = 32 * (WARPS + 4), SUMMING = 32 * (WARPS + FINISHERS);
constexpr int STAGE = 16384, STAGES = BATCH == 1 ? 12 : BATCH == 2 ? 11 : 10;
constexpr int SPLITS = 16 / BATCH, HEAD_ROWS = STAGE / LINE;  // rows of a stage of the head
constexpr int SUM_ROWS = 48, SUMS = WARPS * BATCH * SUM_ROWS;
constexpr int INPUTS = BATCH <= 2 ? 3 : 1;                // slices of a warp's input that shared memory holds
constexpr int OUT_T = HEADS_WIDTH / SLICE, DOWN_T = D_FF / SLICE;
static_assert(D_MODEL == SLICE && HEADS_WIDTH % SLICE == 0 && D_FF % SLICE == 0 && GROUP == 2 && HEAD_DIM == 128 && BATCH <= 4, "sizes");

#include "draw_rows.cuh"

struct StepNumbers : Numbers {
    u64 draws, n_lines;                                  // whether rows draw, and lines of counts
    u64 steps, ends_a_row;
};

struct Step {
    const Layer* layers;
    const Weight *embedding, *head;
    const u16* final_norm;
    const float *cos, *sin;                            // [positions, HEAD_DIM / 2]
    State* state;
    u64* scratch;
    const int *ids, *positions;                        // [rows]
    const int* pages;                                  // [rows, pages_a_row]
    u16* hidden;                                       // [rows, D_MODEL]
    float* logits;                                     // [rows, vocabulary]
    int* tokens;                                       // [steps, rows]: what each step predicts
    int *next, *reached, *following;                   // [rows]: the last of these, where the last step's tokens stand, and the positions behind
    const int* ends;                                   // [rows, ends_a_row]: tokens behind which a row keeps its token
    int rows, pages_a_row, vocabulary, last_position, steps, ends_a_row;
    const Scales* scales;                              // of each block
    Draws draws;

    // Rows that are none are the first once more: they write what it writes, and are not told of.
    __device__ __forceinline__ int row(int r) const { return r < rows ? r : 0; }
    // Of the step that is `at` behind the first.
    __device__ __forceinline__ int position(int r, int at) const { return clamped(positions[row(r)] + at, last_position); }
    // The tokens that a step reads lie in shared memory.
    static __device__ __forceinline__ volatile int* ids_read();
    // How many steps of the launch are over.
    static __device__ __forceinline__ volatile int& at();
    __device__ __forceinline__ int id(int r) const { return ids_read()[r]; }
    __device__ __forceinline__ void set_id(int r, int token) const { ids_read()[r] = min(max(token, 0), vocabulary - 1); }
    // Whether the token that a row reads ends its text, by a warp, which has the row's ends in
    // shared memory.
    __device__ __forceinline__ bool ended(int r) const {
        const int lane = threadIdx.x % 32;
        return __any_sync(~0u, lane < ends_a_row && ends_kept()[row(r) * MOST_ENDS + lane] == id(r));
    }
    static __device__ __forceinline__ volatile int* ends_kept();
    // What a row's token is in a step, by one thread of all.
    __device__ __forceinline__ void predict(int at, int row, int token) const {
        tokens[at * rows + row] = token;
        if (at + 1 < steps) return;
        next[row] = token, reached[row] = positions[row] + at, following[row] = positions[row] + steps;
    }
    // A pair of columns of a token's embedding.
    __device__ __forceinline__ u32 embedded(int id, u32 pair) const {
        const u64 at = static_cast<u64>(id) * (D_MODEL / 2) + pair;
        if (!INT8) return reinterpret_cast<const u32*>(embedding)[at];
        const u32 bytes = reinterpret_cast<const u16*>(embedding)[at];
        const float scale = scales->embedding[id];
        return pack(static_cast<signed char>(bytes) * scale, static_cast<signed char>(bytes >> 8) * scale);
    }
};

// Words of the exchange.
constexpr int X = 0, Y = X + COPIES * BATCH * D_MODEL / 2, O = Y + COPIES * BATCH * D_MODEL / 2;
constexpr int H = O + COPIES * BATCH * HEADS_WIDTH / 2, Q = H + COPIES * BATCH * D_FF / 2, PARTS = Q + BATCH * QKV_ROWS;
constexpr int WEIGHTS = PARTS + BATCH * N_HEADS * SPLITS * HEAD_DIM;
constexpr int LARGEST = WEIGHTS + BATCH * N_HEADS * SPLITS, MOST_BLOCKS = MOST_GROUPS / DRAW_WARPS;  // [rows, blocks]: a logit and its token
constexpr int DRAWN = LARGEST + BATCH * 2 * MOST_BLOCKS;   // [rows]: tokens
constexpr int BOARD = DRAWN + BATCH;

// Shared memory, in bytes.
constexpr int AT_SUMS = STAGE * STAGES, AT_PART = AT_SUMS + 2 * SUMS * 4, AT_INPUT = AT_PART + WARPS * GROUP * HEAD_DIM * 4, AT_Q = AT_INPUT + INPUTS * WARPS * BATCH * 128;
constexpr int AT_QUERIES = AT_Q + GROUP * HEAD_DIM * 4, AT_NEW = AT_QUERIES + GROUP * HEAD_DIM * 2, AT_PEAK = AT_NEW + 2 * HEAD_DIM * 2;
constexpr int AT_IDS = AT_PEAK + WARPS * GROUP * 8;
constexpr int AT_ROLES = AT_IDS + 16, AT_STEP = AT_ROLES + 4, AT_SQUARES = AT_IDS + 32, AT_BARRIERS = AT_SQUARES + BATCH * WARPS * 4, AT_RELEASED = AT_BARRIERS + STAGES * 16;
constexpr int AT_RELEASED_OF_HEAD = AT_RELEASED + WARPS * 4, AT_WAITED = AT_RELEASED_OF_HEAD + WARPS * 4, AT_ENDS = AT_WAITED + WARPS * 16, SHARED = AT_ENDS + BATCH * MOST_ENDS * 4;
static_assert(SHARED <= AT_WATCH && AT_INPUT % 128 == 0, "shared memory");
using StageRing = RingOf<STAGE, STAGES, AT_BARRIERS>;
static_assert(sizeof(DrawMemory) <= AT_SUMS, "sampling reuses the memory of stages");

__device__ __forceinline__ volatile int& Step::at() { return *reinterpret_cast<volatile int*>(memory + AT_STEP); }
__device__ __forceinline__ volatile int* Step::ends_kept() { return reinterpret_cast<volatile int*>(memory + AT_ENDS); }
__device__ __forceinline__ volatile int* Step::ids_read() { return reinterpret_cast<volatile int*>(memory + AT_IDS); }

__device__ __forceinline__ float log_2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// For what a barrier of this block guards.
__device__ __forceinline__ float4 shared_floats(u32 at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ uint4 shared_16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
// Two of four signed bytes, by the bytes of `x`, as bf16: 128 + (the lower seven bits), less 128
// and the sign's 128.
__device__ __forceinline__ u32 from_bytes(u32 four, u32 which) {
    const u32 x = __byte_perm(four, 0, which);
    u32 v;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"((x & 0x007f007fu) | 0x43004300u), "r"((x & 0x00800080u) | 0x43004300u));
    return v;
}
// Eight weights of a row, as bf16.
__device__ __forceinline__ uint4 shared_weights(u32 at) {
    if (!INT8) return shared_16(at);
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return {from_bytes(v.x, 0x4140), from_bytes(v.x, 0x4342), from_bytes(v.y, 0x4140), from_bytes(v.y, 0x4342)};
}
// Two words of the exchange, each read at once.
__device__ __forceinline__ void words(const u64* at, u32& v0, u32& e0, u32& v1, u32& e1) {
    u64 a, b;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(at) : "memory");
    v0 = static_cast<u32>(a), e0 = static_cast<u32>(a >> 32), v1 = static_cast<u32>(b), e1 = static_cast<u32>(b >> 32);
}
__device__ __forceinline__ void word(const u64* at, u32& v, u32& e) {
    u64 a;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(a) : "l"(at) : "memory");
    v = static_cast<u32>(a), e = static_cast<u32>(a >> 32);
}
__device__ __forceinline__ u64 both(u32 v, u32 e) { return static_cast<u64>(e) << 32 | v; }
__device__ __forceinline__ void publish(u64* at, u32 v, u32 e) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(both(v, e)) : "memory");
}
__device__ __forceinline__ void publish(u64* at, u32 v0, u32 v1, u32 e) {
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1,%2};" ::"l"(at), "l"(both(v0, e)), "l"(both(v1, e)) : "memory");
}
template <int APART>
__device__ __forceinline__ void copies(u64* at, u32 v, u32 e) {
    #pragma unroll
    for (int c = 0; c < COPIES; c++) publish(at + c * APART, v, e);
}
// Where a block's rows begin. While each kv head is one block's, these blocks own half as many rows
// as others.
struct Cut {
    bool weighted;

    __device__ __forceinline__ int operator()(int n, int block) const {
        const u32 light = weighted ? N_KV_HEADS : 0, blocks = gridDim.x, b = static_cast<u32>(block);
        const u32 from = weighted ? (b < light ? b : 2 * b - light) : b, all = weighted ? 2 * blocks - light : blocks;
        return static_cast<int>(static_cast<u32>(n) * from / all);
    }
};
// A block's rows of the head.
struct HeadRows {
    int first, count;

    __device__ HeadRows(int vocabulary, int block) : first(at(vocabulary, block)), count(at(vocabulary, block + 1) - first) {}
    static __device__ __forceinline__ int at(int vocabulary, int block) {
        return static_cast<int>(static_cast<u64>(vocabulary) * static_cast<u32>(block) / gridDim.x);
    }
    __device__ __forceinline__ int stages() const { return (count + HEAD_ROWS - 1) / HEAD_ROWS; }
};
// ---- which keys a block attends to

struct Share {
    int row, kv_head, split, splits, position, first, last;  // stages of 64 keys
    bool some;

    // Of the step that is `at` behind the first.
    __device__ Share(int block, const Step& step, int at) {
        row = block / (N_KV_HEADS * SPLITS), kv_head = block % N_KV_HEADS, split = block / N_KV_HEADS % SPLITS;
        position = __shfl_sync(~0u, step.position(row, at), 0);
        const int stages = (position + PAGE_TOKENS - 1) / PAGE_TOKENS;
        splits = splits_of(position);
        first = splits == 1 ? 0 : stages * split / SPLITS, last = splits == 1 ? stages : stages * (split + 1) / SPLITS;
        some = row < BATCH && split < splits;
    }
    static __device__ int splits_of(int position) { return position <= ONE_SPLIT * PAGE_TOKENS ? 1 : SPLITS; }
};

// A block's tasks other than its rows.
struct Roles {
    enum { ATTENDS = 1, JOINS = 2 };

    static __device__ __forceinline__ volatile u32& read() { return *reinterpret_cast<volatile u32*>(memory + AT_ROLES); }
    // By one warp, before all others begin.
    static __device__ __forceinline__ void write(const Step& step) {
        const Share share(blockIdx.x, step, 0);
        const int row = blockIdx.x / N_HEADS;
        const bool joins = row < BATCH && Share::splits_of(step.position(row, 0)) > 1;
        read() = (share.some ? ATTENDS : 0) | (joins ? JOINS : 0);
    }
};

// ---- producer

struct Producer {
    StageRing ring;
    Watch watch;
    u32 opened = 0;
    bool leads = threadIdx.x % 32 == 0;

    StageRing arriving = ring;
    bool dead = false;
    u32 limit, flying = 0;                             // stages on their way at the most, and so many

    // Until the counts of stages that warps released, each lane's at `count`, are this large.
    __device__ __forceinline__ void await(u32 count, u32 wanted) const {
        u32 released;
        #pragma unroll 1
        do {
            asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(released) : "r"(ring.base + count) : "memory");
        } while (__any_sync(~0u, static_cast<int>(released - wanted) < 0) && !__any_sync(~0u, watch.late()));
    }
    // A stage that all warps released.
    __device__ __forceinline__ void free() const {
        if (opened >= STAGES) await(AT_RELEASED + threadIdx.x % WARPS * 4, opened - STAGES + 1);
    }
    __device__ __forceinline__ void open(u32 bytes) {
        #pragma unroll 1
        for (; flying >= limit; flying--) {
            watch.wait(arriving.full(), arriving.parity);
            arriving.advance();
        }
        flying++;
        opened++;
        if (leads) barrier_expect(ring.full(), bytes);
    }
    __device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes) {
        bulk_load(to, from, bytes, ring.full());
    }
    // Bytes side by side.
    __device__ __forceinline__ void block(const void* from, u32 bytes) {
        if (dead = dead || watch.dead()) return;
        free();
        fill(from, bytes);
    }
    __device__ __forceinline__ void fill(const void* from, u32 bytes) {
        open(bytes);
        if (leads && bytes) copy(ring.stage(), from, bytes);
        ring.advance();
    }
    __device__ __forceinline__ void lines(const Weight* from, int rows) { block(from, rows * LINE); }
    __device__ __forceinline__ void keys(const u16* from, int count) { block(from, count * HEAD_DIM * 2); }
    // A slice of the columns of rows.
    __device__ __forceinline__ void slices(const Weight* from, int rows, int width) {
        if (dead = dead || watch.dead()) return;
        free();
        open(rows * LINE);
        #pragma unroll 1
        for (int r = 0; r < rows; r++) {
            if (leads) copy(ring.stage() + r * LINE, from + r * width, LINE);
        }
        ring.advance();
    }
};

__device__ __forceinline__ void produce(const Step& step, StageRing ring, Cut part) {
    Producer p{ring};
    const int b = blockIdx.x;
    const int q0 = 2 * part(QKV_ROWS / 2, b), qn = 2 * part(QKV_ROWS / 2, b + 1) - q0;
    const int d0 = 2 * part(D_MODEL / 2, b), dn = 2 * part(D_MODEL / 2, b + 1) - d0;
    const int f0 = 2 * part(D_FF / 2, b), fn = 2 * part(D_FF / 2, b + 1) - f0;
    const Share share(b, step, 0);
    const u32 limit = share.some && share.splits == 1 ? min(IN_FLIGHT_MORE, STAGES) : IN_FLIGHT;
    const HeadRows head(step.vocabulary, b);
    const int* table = step.pages + step.row(share.row) * step.pages_a_row;
    #pragma unroll 1
    for (int at = 0; at < step.steps; at++) {
        // All stages of a step before were released: none is on its way, and its keys and values
        // are there.
        if (at > 0) p.await(AT_RELEASED + threadIdx.x % WARPS * 4, p.opened);
        p.arriving = p.ring, p.flying = 0, p.limit = limit;
        // Keys and values were written by threads, and are copied by the asynchronous proxy, as is
        // what goes where a draw was.
        asm volatile("fence.acq_rel.gpu;\nfence.proxy.async;" ::: "memory");
        const int position = share.position + at;
        Layer layer = step.layers[0];
        for (int l = 0; l < N_LAYERS; l++) {
            const Layer next = step.layers[min(l + 1, N_LAYERS - 1)];
            #pragma unroll 1
            for (int r = 0; r < 32; r += 8) p.lines(layer.qkv + static_cast<u64>(q0 + r) * D_MODEL, max(0, min(8, qn - r)));
            if (share.some) {
                // A few: all keys, then all values. Many: in turns.
                const bool few = share.splits == 1;
                const int stages = share.last - share.first;
                p.limit = max(limit, KEYS_IN_FLIGHT);
                #pragma unroll 1
                for (int k = 0; k < 2 * stages; k++) {
                    const bool values = few ? k >= stages : k & 1;
                    const int s = share.first + (few ? k - (values ? stages : 0) : k / 2);
                    const u64 at = (static_cast<u64>(table[s]) * N_KV_HEADS + share.kv_head) * (PAGE_TOKENS * HEAD_DIM);
                    p.keys((values ? layer.values : layer.keys) + at, min(PAGE_TOKENS, position - s * PAGE_TOKENS));
                }
            }
            p.limit = limit;
            #pragma unroll 1
            for (int t = 0; t < OUT_T; t++) p.slices(layer.out + static_cast<u64>(d0) * HEADS_WIDTH + t * SLICE, dn, HEADS_WIDTH);
            #pragma unroll 1
            for (int r = 0; r < 24; r += 8) {
                p.lines(layer.up + static_cast<u64>(f0 + r) * D_MODEL, max(0, min(8, fn - r)));
                p.lines(layer.up + static_cast<u64>(D_FF + f0 + r) * D_MODEL, max(0, min(8, fn - r)));
            }
            #pragma unroll 1
            for (int t = 0; t < DOWN_T; t++) p.slices(layer.down + static_cast<u64>(d0) * D_FF + t * SLICE, dn, D_FF);
            layer = next;
        }
        static_assert(HEAD_IN_FLIGHT < STAGES, "in flight");
        p.limit = max(limit, HEAD_IN_FLIGHT);
        #pragma unroll 1
        for (int n = 0; n * HEAD_ROWS < head.count; n++) {
            if (p.dead = p.dead || p.watch.dead()) return;
            // In the first round as always; then a stage is one warp's, which counts its stages
            // over all steps.
            const int slot = n % STAGES, of_step = (head.stages() - slot + STAGES - 1) / STAGES;
            if (n < STAGES) p.free();
            else p.await(AT_RELEASED_OF_HEAD + slot * 4, at * of_step + n / STAGES);
            const int r = n * HEAD_ROWS;
            p.fill(step.head + static_cast<u64>(head.first + r) * D_MODEL, min(HEAD_ROWS, head.count - r) * LINE);
        }
    }
}

// ---- consumers

struct Consumer {
    static constexpr u32 HALF_LINE = LINE / WARPS / 2;
    StageRing ring;
    Watch watch;
    const Step& step;
    int warp, lane;
    u32 first;                                         // where a lane's weights lie in a stage: here, and HALF_LINE from here
    u32 staged, operand;                               // offset of a warp's input
    u32 sum;                                           // where a lane leaves its sums
    int half;                                          // of 64 columns, which one a lane takes first
    u32 released = 0;                                  // stages of this warp

    __device__ Consumer(StageRing ring, const Step& step) : ring(ring), step(step) { place(); }
    // Found out again where it is needed, rather than kept in registers.
    __device__ __forceinline__ void place() {
        u32 thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        warp = thread / 32, lane = thread % 32;
        const int g = lane / 4, q = lane % 4, row = min(g / 2, BATCH - 1);
        // Rows of a stage begin in the same bank: every second one takes the other half of its
        // columns first.
        half = g & 1;
        first = g * LINE + warp * (2 * HALF_LINE) + q * (HALF_LINE / 4) + half * HALF_LINE;
        staged = ring.base + AT_INPUT + warp * BATCH * 128 + lane * 4;
        sum = ring.base + AT_SUMS + ((warp * BATCH + q) * SUM_ROWS + g) * 4;
        operand = staged - lane * 4 + row * 128 + half * 64 + q * 16;
    }
    __device__ __forceinline__ u32 nil() const { return static_cast<u32>(step.rows) >> 31; }
    // Weights into registers, eight rows a stage.
    template <int FROM, int TO, int N>
    __device__ __forceinline__ void load(u32 (&a)[N][8]) {
        #pragma unroll
        for (int s = FROM; s < TO; s++) {
            watch.wait(ring.full(), ring.parity);
            const uint4 u = shared_weights(ring.stage() + first), v = shared_weights(ring.stage() + (first ^ HALF_LINE));
            a[s][0] = u.x, a[s][1] = u.y, a[s][2] = u.z, a[s][3] = u.w, a[s][4] = v.x, a[s][5] = v.y, a[s][6] = v.z, a[s][7] = v.w;
            ring.advance();
        }
    }
    // Releases stages once `value`, the last one loaded from them, has arrived: a store does not
    // wait for loads. The producer's next copy to them comes later, since the loads are complete. A
    // count per warp is cheaper than a barrier arrival per stage.
    __device__ __forceinline__ void release(int stages, u32 value) {
        __syncwarp();
        released += stages;
        count(AT_RELEASED, released, value);
    }
    __device__ __forceinline__ void count(u32 at, u32 released, u32 value) const {
        if (lane == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(ring.base + at + warp * 4 + (value & nil())), "r"(released) : "memory");
    }
    // Stages of which others released their own, and the last that this warp read of a step: what
    // it read and wrote is done.
    __device__ __forceinline__ void release_all(int stages) {
        asm volatile("fence.acq_rel.cta;" ::: "memory");
        release(stages, 0);
    }
    template <int FROM, int TO, int N>
    __device__ __forceinline__ void release(const u32 (&a)[N][8]) { release(TO - FROM, a[TO - 1][7]); }
    template <int N>
    __device__ __forceinline__ void load(u32 (&a)[N][8]) { load<0, N>(a); }
    template <int N>
    __device__ __forceinline__ void release(const u32 (&a)[N][8]) { release<0, N>(a); }
    // This warp's columns of the input: each lane asks for a pair of values in each slice of each
    // row.
    template <int T>
    struct Words {
        u32 v[T][BATCH], e[T][BATCH];
        const u64* at;
        Patience patience;
    };
    // From where, and which of a layer's four inputs.
    template <int T>
    __device__ __forceinline__ void expect(Words<T>& w, int from, int input) {
        w.at = step.scratch + (from + static_cast<int>(threadIdx.x));
        w.patience.begin(ring.base + AT_WAITED, warp, input);
    }
    template <int T>
    __device__ __forceinline__ void await(Words<T>& w, u32 epoch) {
        constexpr int WIDTH = T * SLICE / 2;
        w.patience.hold();
        #pragma unroll 1
        for (;;) {
            u32 wrong = 0;
            #pragma unroll
            for (int t = 0; t < T; t++) {
                #pragma unroll
                for (int r = 0; r < BATCH; r++) word(w.at + r * WIDTH + t * 512, w.v[t][r], w.e[t][r]);
            }
            #pragma unroll
            for (int t = 0; t < T; t++) {
                #pragma unroll
                for (int r = 0; r < BATCH; r++) wrong |= w.e[t][r] ^ epoch;
            }
            if (__all_sync(~0u, wrong == 0)) break;
            if (__any_sync(~0u, watch.late())) break;
        }
        w.patience.end(lane);
    }
    // As operands of the product.
    template <int T, class Then>
    __device__ __forceinline__ void give(u32 (&b)[T][8], const u32 (&v)[T][BATCH], Then then) {
        #pragma unroll
        for (int first = 0; first < T; first += INPUTS) {
            __syncwarp();
            #pragma unroll
            for (int t = first; t < T && t < first + INPUTS; t++) {
                #pragma unroll
                for (int r = 0; r < BATCH; r++) {
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(staged + ((t - first) * WARPS * BATCH + r) * 128), "r"(then(r, v[t][r])) : "memory");
                }
            }
            __syncwarp();
            #pragma unroll
            for (int t = first; t < T && t < first + INPUTS; t++) {
                const uint4 u = shared_16(operand + (t - first) * (WARPS * BATCH * 128));
                const uint4 w = shared_16((operand ^ 64) + (t - first) * (WARPS * BATCH * 128));
                b[t][0] = u.x, b[t][1] = u.y, b[t][2] = u.z, b[t][3] = u.w, b[t][4] = w.x, b[t][5] = w.y, b[t][6] = w.z, b[t][7] = w.w;
            }
        }
    }
    // Two chains of products, which a sum ends.
    __device__ __forceinline__ void tile(float (&c)[4], const u32 (&above)[8], const u32 (&below)[8], const u32 (&b)[8]) {
        float d[4] = {0, 0, 0, 0};
        #pragma unroll
        for (int i = 0; i < 4; i++) c[i] = 0;
        #pragma unroll
        for (int i = 0; i < 8; i += 4) {
            multiply(c, above[i], below[i], above[i + 1], below[i + 1], b[i], b[i + 1]);
            multiply(d, above[i + 2], below[i + 2], above[i + 3], below[i + 3], b[i + 2], b[i + 3]);
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) c[i] += d[i];
    }
    // The same with many rows, for which registers do not hold all slices: one after the other.
    template <int T, class Then>
    __device__ __forceinline__ void slices(float (&c)[4], const Words<T>& w, Then then) {
        float d[4][4] = {};
        #pragma unroll
        for (int t = 0; t < T; t++) {
            u32 a[1][8], b[1][8], v[1][BATCH];
            #pragma unroll
            for (int r = 0; r < BATCH; r++) v[0][r] = w.v[t][r];
            load(a);
            give(b, v, then);
            #pragma unroll
            for (int i = 0; i < 4; i++) multiply(d[i], a[0][2 * i], 0, a[0][2 * i + 1], 0, b[0][2 * i], b[0][2 * i + 1]);
            release(a);
        }
        #pragma unroll
        for (int i = 0; i < 2; i++) c[i] = (d[0][i] + d[1][i]) + (d[2][i] + d[3][i]);
    }
    // Eight rows, of several slices.
    template <int T>
    __device__ __forceinline__ void rows(float (&c)[4], const u32 (&a)[T][8], const u32 (&b)[T][8]) {
        float d[4][4] = {};
        #pragma unroll
        for (int t = 0; t < T; t++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) multiply(d[i], a[t][2 * i], 0, a[t][2 * i + 1], 0, b[t][2 * i], b[t][2 * i + 1]);
        }
        #pragma unroll
        for (int i = 0; i < 2; i++) c[i] = (d[0][i] + d[1][i]) + (d[2][i] + d[3][i]);
    }
    float square[BATCH];
    // This warp's part of the sums of squares.
    __device__ __forceinline__ void put_squares(u32 squares) {
        #pragma unroll
        for (int r = 0; r < BATCH; r++) {
            const float s = sum_lanes(square[r]);
            if (lane == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(squares + (r * WARPS + warp) * 4), "f"(s) : "memory");
        }
    }
    // This warp's part of the sums of eight rows.
    __device__ __forceinline__ void put(int buffer, int at, float c0, float c1) {
        const u32 to = sum + (buffer * SUMS + at) * 4;
        const float v = half ? c1 : c0;
        if (lane % 4 < BATCH) asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
    }
};

// Attention of one row's query heads of a kv head over some of its keys. A group of eight lanes
// takes a key at a time.
struct Attention {
    float q[GROUP][16], out[GROUP][16], peak[GROUP], sum[GROUP];

    __device__ __forceinline__ void score(float (&s)[GROUP], uint4 u, uint4 v) const {
        const u32 k[8] = {u.x, u.y, u.z, u.w, v.x, v.y, v.z, v.w};
        float t[GROUP][2];
        #pragma unroll
        for (int h = 0; h < GROUP; h++) t[h][0] = t[h][1] = 0;
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            #pragma unroll
            for (int h = 0; h < GROUP; h++) {
                t[h][0] = fmaf(low(k[i]), q[h][2 * i], t[h][0]);
                t[h][1] = fmaf(high(k[i]), q[h][2 * i + 1], t[h][1]);
            }
        }
        #pragma unroll
        for (int h = 0; h < GROUP; h++) s[h] = t[h][0] + t[h][1];
        #pragma unroll
        for (int o = 1; o < 8; o <<= 1) {
            #pragma unroll
            for (int h = 0; h < GROUP; h++) s[h] += __shfl_xor_sync(~0u, s[h], o);
        }
    }
    // All lanes together; a lane without a key has a score of NOTHING.
    __device__ __forceinline__ void add(const float (&s)[GROUP], uint4 u, uint4 v) {
        bool more = false;
        #pragma unroll
        for (int h = 0; h < GROUP; h++) more = more || s[h] > peak[h];
        if (__any_sync(~0u, more)) {
            #pragma unroll
            for (int h = 0; h < GROUP; h++) {
                // The four keys of a warp have one maximum.
                float most = fmaxf(peak[h], s[h]);
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
                const float correction = exp_2(peak[h] - most);
                peak[h] = most, sum[h] *= correction;
                #pragma unroll
                for (int i = 0; i < 16; i++) out[h][i] *= correction;
            }
        }
        float p[GROUP];
        #pragma unroll
        for (int h = 0; h < GROUP; h++) p[h] = exp_2(s[h] - peak[h]);
        weigh(p, u, v);
    }
    __device__ __forceinline__ void weigh(const float (&p)[GROUP], uint4 u, uint4 v) {
        const u32 k[8] = {u.x, u.y, u.z, u.w, v.x, v.y, v.z, v.w};
        #pragma unroll
        for (int h = 0; h < GROUP; h++) sum[h] += p[h];
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            #pragma unroll
            for (int h = 0; h < GROUP; h++) {
                out[h][2 * i] = fmaf(p[h], low(k[i]), out[h][2 * i]);
                out[h][2 * i + 1] = fmaf(p[h], high(k[i]), out[h][2 * i + 1]);
            }
        }
    }
};

static_assert(ONE_SPLIT * PAGE_TOKENS <= 16 * WARPS, "a warp has sixteen keys");

// Where a block has all keys of a row, and they are few: each warp scores sixteen of them on tensor
// cores, weighs their values by its own maximum, and waits for no other warp; the last one has the
// newest key, too. Lane 4 g + q has the scores of the keys g and g + 8 for head q % 2; of the
// values, a group of eight lanes takes a key at a time. Tells what was read last: the stages are
// not released yet.
__device__ __forceinline__ u32 few_keys(Consumer& c, Attention& a, int stages, int position, u32 new_key) {
    const int warp = c.warp, lane = c.lane, g = lane / 4, q = lane % 4;
    const bool some = warp * 16 < position, last = warp == WARPS - 1;
    StageRing keys = c.ring, values = c.ring;
    keys.skip(some ? warp / 4 : 0);
    values.skip(stages + (some ? warp / 4 : 0));
    u32 read[2] = {0, 0};
    float s[2] = {NOTHING, NOTHING};
    if (some) {
        const u32 apart = q * 16 + (g & 1) * 64;       // columns as in a stage of weights: two for each head
        const u32 queries = c.ring.base + AT_QUERIES + (g / 2 % GROUP) * (HEAD_DIM * 2) + apart;
        const uint4 b[4] = {shared_16(queries), shared_16(queries ^ 64), shared_16(queries + 128), shared_16((queries ^ 64) + 128)};
        c.watch.wait(keys.full(), keys.parity);
        const u32 at = keys.stage() + (warp % 4 * 16 + g) * (HEAD_DIM * 2) + apart;
        float d[2][4] = {};
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 from = (i & 1 ? at ^ 64 : at) + i / 2 * 128;
            const uint4 u = shared_16(from), v = shared_16(from + 8 * HEAD_DIM * 2);
            multiply(d[0], u.x, v.x, u.y, v.y, b[i].x, b[i].y);
            multiply(d[1], u.z, v.z, u.w, v.w, b[i].z, b[i].w);
            read[0] = v.w;
        }
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const float score = g & 1 ? d[0][2 * i + 1] + d[1][2 * i + 1] : d[0][2 * i] + d[1][2 * i];
            s[i] = warp * 16 + 8 * i + g < position ? score : NOTHING;
        }
    }
    float most = fmaxf(s[0], s[1]);
    #pragma unroll
    for (int o = 4; o < 32; o <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    #pragma unroll
    for (int h = 0; h < GROUP; h++) a.peak[h] = __shfl_sync(~0u, most, h);
    if (last) {
        const uint2 k = reinterpret_cast<const uint2*>(memory + AT_NEW)[lane];
        float p[GROUP];
        #pragma unroll
        for (int h = 0; h < GROUP; h++) {
            const float4 v = reinterpret_cast<const float4*>(memory + AT_Q)[h * (HEAD_DIM / 4) + lane];
            const float newest = sum_lanes(low(k.x) * v.x + high(k.x) * v.y + low(k.y) * v.z + high(k.y) * v.w);
            a.peak[h] = fmaxf(a.peak[h], newest);
            p[h] = lane < 8 ? exp_2(newest - a.peak[h]) : 0;
        }
        a.weigh(p, shared_16(new_key + HEAD_DIM * 2), shared_16(new_key + HEAD_DIM * 2 + 128));
    }
    if (some) {
        const float peak = q & 1 ? a.peak[1] : a.peak[0];
        #pragma unroll
        for (int i = 0; i < 2; i++) s[i] = exp_2(s[i] - peak);
        c.watch.wait(values.full(), values.parity);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            // Keys 4 i to 4 i + 3 of the warp.
            const int key = 4 * i + lane / 8;
            const u32 at = values.stage() + (warp % 4 * 16 + key) * (HEAD_DIM * 2) + lane % 8 * 16;
            uint4 u = shared_16(at), v = shared_16(at + 128);
            read[1] = v.w;
            float p[GROUP];
            #pragma unroll
            for (int h = 0; h < GROUP; h++) p[h] = __shfl_sync(~0u, s[i / 2], key % 8 * 4 + h);
            // The value of a key that is none is not to be a NaN.
            if (warp * 16 + key >= position) u = v = uint4{0, 0, 0, 0};
            a.weigh(p, u, v);
        }
    }
    return read[0] ^ read[1];
}

__device__ __forceinline__ void attend(Consumer& c, const Step& step, const Layer& layer, int block, int at, u32 epoch) {
    const Share share(__shfl_sync(~0u, block, 0), step, at);
    const int position = share.position;
    float* shared_q = reinterpret_cast<float*>(memory + AT_Q);
    u32* fresh = reinterpret_cast<u32*>(memory + AT_NEW);
    float2* peaks = reinterpret_cast<float2*>(memory + AT_PEAK);
    float* part = reinterpret_cast<float*>(memory + AT_PART);
    const int warp = c.warp, lane = c.lane;
    const bool newest = share.split == share.splits - 1;
    const u32 page = step.pages[step.row(share.row) * step.pages_a_row + position / PAGE_TOKENS];

    // A warp a head: queries, then the key, then the value of this token.
    if (warp < GROUP + 2 && (warp < GROUP || newest)) {
        const int head = warp < GROUP ? share.kv_head * GROUP + warp : N_HEADS + (warp - GROUP) * N_KV_HEADS + share.kv_head;
        float2 cosine = {0, 0}, sine = {0, 0};
        u32 gamma[2] = {0, 0};
        if (warp <= GROUP) {
            cosine = reinterpret_cast<const float2*>(step.cos + static_cast<u64>(position) * (HEAD_DIM / 2))[lane];
            sine = reinterpret_cast<const float2*>(step.sin + static_cast<u64>(position) * (HEAD_DIM / 2))[lane];
            const u32* weights = reinterpret_cast<const u32*>(warp < GROUP ? layer.query_norm : layer.key_norm);
            gamma[0] = weights[lane], gamma[1] = weights[32 + lane];
        }
        const u64* from = step.scratch + Q + share.row * QKV_ROWS + head * HEAD_DIM + 2 * lane;
        u32 x[4], e[4];
        #pragma unroll 1
        for (;;) {
            words(from, x[0], e[0], x[1], e[1]);
            words(from + 64, x[2], e[2], x[3], e[3]);
            bool ready = e[0] == epoch && e[1] == epoch && e[2] == epoch && e[3] == epoch;
            if (__all_sync(~0u, ready || c.watch.late())) break;
        }
        float v[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) v[i] = __uint_as_float(x[i]);
        if (warp <= GROUP) {
            float factor = rsqrtf(sum_lanes(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) / HEAD_DIM + EPSILON);
            v[0] *= factor * low(gamma[0]), v[1] *= factor * high(gamma[0]);
            v[2] *= factor * low(gamma[1]), v[3] *= factor * high(gamma[1]);
            float a0 = v[0] * cosine.x - v[2] * sine.x, a1 = v[1] * cosine.y - v[3] * sine.y;
            v[2] = v[2] * cosine.x + v[0] * sine.x, v[3] = v[3] * cosine.y + v[1] * sine.y;
            v[0] = a0, v[1] = a1;
        }
        if (warp < GROUP) {
            constexpr float SCALE = 0.08838834764831845f * 1.4426950408889634f;
            u32* packed = reinterpret_cast<u32*>(memory + AT_QUERIES) + warp * (HEAD_DIM / 2);
            packed[lane] = pack(v[0] * SCALE, v[1] * SCALE), packed[32 + lane] = pack(v[2] * SCALE, v[3] * SCALE);
            reinterpret_cast<float2*>(shared_q + warp * HEAD_DIM)[lane] = {v[0] * SCALE, v[1] * SCALE};
            reinterpret_cast<float2*>(shared_q + warp * HEAD_DIM + 64)[lane] = {v[2] * SCALE, v[3] * SCALE};
        } else {
            u32 lo = pack(v[0], v[1]), hi = pack(v[2], v[3]);
            u32* to = fresh + (warp - GROUP) * (HEAD_DIM / 2);
            to[lane] = lo, to[32 + lane] = hi;
        }
    }
    barrier_sync(3, WARPS * 32);
    if (newest && warp >= WARPS - 2) {
        const u64 at = ((static_cast<u64>(page) * N_KV_HEADS + share.kv_head) * PAGE_TOKENS + position % PAGE_TOKENS) * HEAD_DIM;
        const u32* from = fresh + (warp - (WARPS - 2)) * (HEAD_DIM / 2);
        u32* line = reinterpret_cast<u32*>((warp == WARPS - 2 ? layer.keys : layer.values) + at);
        line[lane] = from[lane], line[32 + lane] = from[32 + lane];
    }

    Attention a;
    const int eighth = lane % 8, key = warp * 4 + lane / 8;
    const u32 mine = key * HEAD_DIM * 2 + eighth * 16, new_key = shared_address(fresh) + eighth * 16;
    #pragma unroll
    for (int h = 0; h < GROUP; h++) {
        a.peak[h] = NOTHING, a.sum[h] = 0;
        #pragma unroll
        for (int i = 0; i < 16; i++) a.out[h][i] = 0;
    }
    u32 read = 0;
    if (share.splits == 1) {
        read = few_keys(c, a, share.last, position, new_key);
    } else {
        const u32 queries = shared_address(shared_q) + eighth * 32;
        #pragma unroll
        for (int h = 0; h < GROUP; h++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 v = shared_floats(queries + h * (HEAD_DIM * 4) + (i / 2) * 256 + (i % 2) * 16);
                a.q[h][4 * i] = v.x, a.q[h][4 * i + 1] = v.y, a.q[h][4 * i + 2] = v.z, a.q[h][4 * i + 3] = v.w;
            }
        }
        // The newest key comes first, then those of the cache. A key that is none counts nothing:
        // its probability is 0, once there is a score; and its value is not to be a NaN.
        #pragma unroll 1
        for (int stage = share.first - newest; stage < share.last; stage++) {
            float s[GROUP];
            const bool cached = stage >= share.first, there = cached ? stage * PAGE_TOKENS + key < position : key == PAGE_TOKENS - 1;
            if (!cached && warp != WARPS - 1) continue;
            const bool busy = !cached || stage * PAGE_TOKENS + warp * 4 < position;
            const StageRing keys = c.ring;
            if (cached) {
                c.watch.wait(c.ring.full(), c.ring.parity);
                c.ring.advance();
                c.watch.wait(c.ring.full(), c.ring.parity);
            }
            u32 at = cached ? keys.stage() + mine : new_key;
            uint4 u = shared_16(at), v = shared_16(at + 128);
            at = cached ? c.ring.stage() + mine : at + HEAD_DIM * 2;
            if (busy) a.score(s, u, v);
            u = shared_16(at), v = shared_16(at + 128);
            if (cached) {
                c.ring.advance();
                c.release(2, v.w);
            }
            if (!busy) continue;
            if (!there) {
                #pragma unroll
                for (int h = 0; h < GROUP; h++) s[h] = NOTHING * 2;
                u = v = uint4{0, 0, 0, 0};
            }
            a.add(s, u, v);
        }
    }

    // The four keys of a warp together: half of the lanes go on with a head each, and half of these
    // with half of its values.
    float kept[16];
    #pragma unroll
    for (int h = 0; h < GROUP; h++) {
        a.sum[h] += __shfl_xor_sync(~0u, a.sum[h], 8);
        a.sum[h] += __shfl_xor_sync(~0u, a.sum[h], 16);
    }
    const bool upper = lane & 16, far = lane & 8;
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        const float other = __shfl_xor_sync(~0u, upper ? a.out[0][i] : a.out[1][i], 16);
        kept[i] = (upper ? a.out[1][i] : a.out[0][i]) + other;
    }
    float* to = part + (warp * GROUP + (upper ? 1 : 0)) * HEAD_DIM + (far ? 64 : 0) + eighth * 8;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        const float other = __shfl_xor_sync(~0u, far ? kept[i] : kept[8 + i], 8);
        kept[i] = (far ? kept[8 + i] : kept[i]) + other;
    }
    reinterpret_cast<float4*>(to)[0] = {kept[0], kept[1], kept[2], kept[3]};
    reinterpret_cast<float4*>(to)[1] = {kept[4], kept[5], kept[6], kept[7]};
    if (lane < GROUP) peaks[warp * GROUP + lane] = lane ? float2{a.peak[1], a.sum[1]} : float2{a.peak[0], a.sum[0]};
    barrier_sync(3, WARPS * 32);

    // All warps together: a lane has a pair of values of a quarter of the warps.
    static_assert(WARPS == 16 && GROUP == 2 && COPIES <= 4, "quarters");
    {
        const int h = warp / (WARPS / GROUP), pair = warp % (WARPS / GROUP) * 8 + lane % 8, head = share.kv_head * GROUP + h;
        float2 seen[WARPS / 4], v[WARPS / 4];
        #pragma unroll
        for (int i = 0; i < WARPS / 4; i++) {
            const int w = lane / 8 * (WARPS / 4) + i;
            seen[i] = peaks[w * GROUP + h], v[i] = reinterpret_cast<const float2*>(part + (w * GROUP + h) * HEAD_DIM)[pair];
        }
        float best = fmaxf(fmaxf(seen[0].x, seen[1].x), fmaxf(seen[2].x, seen[3].x));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 8));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 16));
        float total = 0, o0 = 0, o1 = 0;
        #pragma unroll
        for (int i = 0; i < WARPS / 4; i++) {
            const float f = exp_2(seen[i].x - best);
            total = fmaf(f, seen[i].y, total), o0 = fmaf(f, v[i].x, o0), o1 = fmaf(f, v[i].y, o1);
        }
        #pragma unroll
        for (int o = 8; o < 32; o <<= 1) {
            total += __shfl_xor_sync(~0u, total, o), o0 += __shfl_xor_sync(~0u, o0, o), o1 += __shfl_xor_sync(~0u, o1, o);
        }
        const float inverse = total > 0 ? __fdividef(1, total) : 0;
        o0 *= inverse, o1 *= inverse;
        // A copy each of the first lanes.
        if (share.splits == 1) {
            u64* to = step.scratch + O + share.row * (HEADS_WIDTH / 2) + head * (HEAD_DIM / 2) + pair;
            if (lane / 8 < COPIES) publish(to + lane / 8 * (BATCH * HEADS_WIDTH / 2), pack(o0, o1), epoch);
        } else if (lane < 8) {
            const int at = (share.row * N_HEADS + head) * SPLITS + share.split;
            publish(step.scratch + PARTS + at * HEAD_DIM + 2 * pair, __float_as_uint(o0), __float_as_uint(o1), epoch);
            if (pair == 0) publish(step.scratch + WEIGHTS + at, __float_as_uint(total > 0 ? best + log_2(total) : NOTHING), epoch);
        }
    }
    if (share.splits > 1) return;
    // The barrier told that all stages were there.
    c.ring.skip(2 * share.last);
    c.release(2 * share.last, read);
}

// The splits of a head together, by two warps.
__device__ __forceinline__ void combine(Consumer& c, const Step& step, int row, int head, u32 epoch) {
    const int pair = c.warp % 2 * 32 + c.lane, at = (row * N_HEADS + head) * SPLITS;
    u32 v, e;
    #pragma unroll 1
    for (;;) {
        word(step.scratch + WEIGHTS + at + c.lane % SPLITS, v, e);
        if (__all_sync(~0u, e == epoch || c.watch.late())) break;
    }
    const float mine = __uint_as_float(v);
    float best = mine;
    #pragma unroll
    for (int o = SPLITS / 2; o; o >>= 1) best = fmaxf(best, __shfl_xor_sync(~0u, best, o));
    const float f = exp_2(mine - best);
    float total = f;
    #pragma unroll
    for (int o = SPLITS / 2; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
    const float weight = f / total;
    float o0 = 0, o1 = 0;
    #pragma unroll
    for (int half = 0; half < SPLITS; half += 8) {
        constexpr int N = SPLITS < 8 ? SPLITS : 8;
        u32 x[N][2], y[N][2];
        #pragma unroll 1
        for (;;) {
            u32 wrong = 0;
            #pragma unroll
            for (int s = 0; s < N; s++) {
                words(step.scratch + PARTS + (at + half + s) * HEAD_DIM + 2 * pair, x[s][0], y[s][0], x[s][1], y[s][1]);
            }
            #pragma unroll
            for (int s = 0; s < N; s++) wrong |= (y[s][0] ^ epoch) | (y[s][1] ^ epoch);
            if (__all_sync(~0u, wrong == 0 || c.watch.late())) break;
        }
        #pragma unroll
        for (int s = 0; s < N; s++) {
            const float w = __shfl_sync(~0u, weight, half + s);
            o0 = fmaf(__uint_as_float(x[s][0]), w, o0), o1 = fmaf(__uint_as_float(x[s][1]), w, o1);
        }
    }
    copies<BATCH * HEADS_WIDTH / 2>(step.scratch + O + row * (HEADS_WIDTH / 2) + head * (HEAD_DIM / 2) + pair, pack(o0, o1), epoch);
}

// The greedy token of each row; `best` is this thread's candidate. If a step follows, each block
// finds it by itself.
__device__ __forceinline__ void predict_greedy(const Consumer& c, const Step& step, Largest best, int at, u32 epoch) {
    const int warp = c.warp, lane = c.lane, block = opaque_block();
    // Of the warp, of the block, of all: lanes of a row of the batch are four apart.
    best.of_lanes<4, 32>();
    Largest* of_warps = reinterpret_cast<Largest*>(memory + AT_PART);
    if (lane < BATCH) of_warps[lane * WARPS + warp] = best;
    barrier_sync(3, WARPS * 32);
    if (warp >= step.rows) return;
    best = of_warps[warp * WARPS + lane % WARPS];
    best.of_lanes<1, WARPS>();
    u64* words_of = step.scratch + LARGEST + warp * (2 * MOST_BLOCKS);
    if (Watch::dead()) best = {INFINITE, -1};
    if (lane == 0) publish(words_of + 2 * block, __float_as_uint(best.logit), best.token, epoch);
    if (at + 1 < step.steps || block == 0) {
        u32 logit[MOST_BLOCKS / 32], token[MOST_BLOCKS / 32], wrong;
        #pragma unroll 1
        do {
            wrong = 0;
            u32 e[MOST_BLOCKS / 32][2];
            #pragma unroll
            for (int i = 0; i < MOST_BLOCKS / 32; i++) {
                words(words_of + 2 * min(i * 32 + lane, static_cast<int>(gridDim.x) - 1), logit[i], e[i][0], token[i], e[i][1]);
            }
            #pragma unroll
            for (int i = 0; i < MOST_BLOCKS / 32; i++) wrong |= (e[i][0] ^ epoch) | (e[i][1] ^ epoch);
        } while (__any_sync(~0u, wrong != 0) && !__any_sync(~0u, c.watch.late()));
        #pragma unroll
        for (int i = 0; i < MOST_BLOCKS / 32; i++) best.or_else(__uint_as_float(logit[i]), token[i]);
        best.of_lanes<1, 32>();
        int token_of_row = Watch::dead() || best.token == NO_TOKEN ? -1 : best.token;
        if (step.ended(warp)) token_of_row = step.id(warp);
        __syncwarp();
        if (lane == 0) {
            step.set_id(warp, token_of_row);
            for (int r = step.rows; r < BATCH && warp == 0; r++) step.set_id(r, token_of_row);
            if (block == 0) step.predict(at, warp, token_of_row);
        }
    }
}

// The head of this block's rows: all columns of the input lie in shared memory, and `factors` are
// the norm's. Then what the rows predict; where a step follows, all threads that multiply know of
// it.
__device__ __forceinline__ bool project(Consumer& c, const Step& step, const float (&factors)[BATCH], u32 epoch) {
    constexpr u32 HALF_LINE = Consumer::HALF_LINE;
    // What follows from it is found anew in each step: kept, it would not fit the registers.
    const int block = opaque_block();
    const int warp = c.warp, lane = c.lane, g = lane / 4, q = lane % 4, half = c.half;
    const u32 weights = g * LINE + q * (HALF_LINE / 4) + half * HALF_LINE;
    const u32 input = c.ring.base + AT_INPUT + min(g / 2, BATCH - 1) * 128 + half * 64 + q * 16;
    const HeadRows head(step.vocabulary, block);
    float factor = factors[0];
    #pragma unroll
    for (int r = 1; r < BATCH; r++) factor = q == r ? factors[r] : factor;
    Largest best;
    constexpr int EIGHTS = HEAD_ROWS / 8;
    static_assert(EIGHTS <= 2, "rows of a product");
    // As many warps as there are stages in the ring: each waits for one of these only, time after
    // time, and alone releases it.
    static_assert(STAGES <= WARPS, "a warp a stage");
    StageRing ring = c.ring;
    c.ring.skip(head.stages());
    ring.skip(warp);
    u32 of_head = reinterpret_cast<volatile u32*>(memory + AT_RELEASED_OF_HEAD)[warp];
    #pragma unroll 1
    for (int first = warp < STAGES ? warp * HEAD_ROWS : head.count; first < head.count; first += STAGES * HEAD_ROWS) {
        float scales[EIGHTS];
        #pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            const int token = min(head.first + first + e * 8 + g, step.vocabulary - 1);
            scales[e] = INT8 ? factor * step.scales->head[token] : factor;
        }
        c.watch.wait(ring.full(), ring.parity);
        float d[4][4] = {};
        u32 last = 0;
        #pragma unroll 4
        for (int k = 0; k < WARPS; k++) {
            const u32 at = k * (2 * HALF_LINE) + weights;
            uint4 a[2][2] = {};
            #pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
                a[e][0] = shared_weights(ring.stage() + e * (8 * LINE) + at);
                a[e][1] = shared_weights(ring.stage() + e * (8 * LINE) + (at ^ HALF_LINE));
            }
            const uint4 b[2] = {shared_16(input + k * (BATCH * 128)), shared_16((input ^ 64) + k * (BATCH * 128))};
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                multiply(d[2 * i], a[0][i].x, a[1][i].x, a[0][i].y, a[1][i].y, b[i].x, b[i].y);
                multiply(d[2 * i + 1], a[0][i].z, a[1][i].z, a[0][i].w, a[1][i].w, b[i].z, b[i].w);
            }
            last = a[EIGHTS - 1][1].w;
        }
        __syncwarp();
        c.count(AT_RELEASED_OF_HEAD, ++of_head, last);
        ring.skip(STAGES);
        #pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            float sums[2];
            #pragma unroll
            for (int i = 0; i < 2; i++) sums[i] = (d[0][2 * e + i] + d[1][2 * e + i]) + (d[2][2 * e + i] + d[3][2 * e + i]);
            const float logit = (half ? sums[1] : sums[0]) * scales[e];
            const int row = first + e * 8 + g, token = head.first + row;
            if (q < min(step.rows, BATCH) && row < head.count) {
                step.logits[static_cast<u64>(q) * step.vocabulary + token] = logit;
                if (logit != logit) best = {INFINITE, -1};
                best.or_else(logit, token);
            }
        }
    }
    const int at = Step::at();
    const bool follows = at + 1 < step.steps;
    if (DRAWS && step.draws.some) {
        // Nothing of the ring is on its way any more, once all warps are here.
        barrier_sync(3, WARPS * 32);
        const int vocabulary = step.vocabulary;
        auto begin = [=](int block) { return HeadRows::at(vocabulary, block); };
        int token = draw_rows(step.draws, step.logits, vocabulary, step.positions, at, step.rows, begin, {step.scratch + BOARD}, epoch);
        c.release_all(head.stages());
        u64* drawn = step.scratch + DRAWN;
        if (block < step.rows && warp == 0) {
            if (step.ended(block)) token = step.id(block);
            if (lane == 0) {
                step.predict(at, block, token);
                // What was counted comes before it.
                asm volatile("fence.acq_rel.gpu;" ::: "memory");
                publish(drawn + block, token, epoch);
            }
            __syncwarp();
        }
        if (follows && threadIdx.x < BATCH) {
            u32 token, e;
            do {
                word(drawn + step.row(threadIdx.x), token, e);
            } while (e != epoch && !c.watch.late());
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            step.set_id(threadIdx.x, token);
        }
    } else {
        c.release_all(head.stages());
        predict_greedy(c, step, best, at, epoch);
    }
    if (!follows) return false;
    if (threadIdx.x == 0) Step::at() = at + 1;
    barrier_sync(3, WARPS * 32);
    return true;
}

__device__ __forceinline__ void consume(const Step& step, StageRing ring, u32 epoch) {
    Consumer c(ring, step);
    const int b = blockIdx.x;
    const u32 squares = ring.base + AT_SQUARES;
    auto plain = [](int, u32 v) { return v; };
    // Before a norm: times gamma; the squares for its factor.
    auto normed = [&](int r, u32 v, u32 gamma) {
        c.square[r] = low(v) * low(v) + high(v) * high(v);
        return pack(low(v) * low(gamma), high(v) * high(gamma));
    };
    #pragma unroll 1
    for (;; epoch++) {
        u32 gamma = reinterpret_cast<const u32*>(step.layers[0].attention_norm)[threadIdx.x];
        #pragma unroll 1
        for (u32 l = 0; l < N_LAYERS; l++, epoch++) {
            const Layer& layer = step.layers[l];
            // What follows from these is computed again in each layer: kept, it would not fit the
            // registers.
            const int block = opaque_block(), copy = block % COPIES * (BATCH * SLICE / 2);
            c.place();
            {
                u32 a[4][8], in[1][8];
                Consumer::Words<1> w;
                c.load(a);
                if (l > 0) c.expect(w, X + copy, 0);
                c.release(a);
                if (l == 0) {
                    #pragma unroll
                    for (int r = 0; r < BATCH; r++) {
                        w.v[0][r] = step.embedded(step.id(r), threadIdx.x);
                    }
                } else {
                    c.await(w, epoch - 1);
                }
                c.give(in, w.v, [&](int r, u32 v) { return normed(r, v, gamma); });
                float acc[2][4];
                #pragma unroll
                for (int t = 0; t < 2; t++) c.tile(acc[t], a[2 * t], a[2 * t + 1], in[0]);
                c.put_squares(squares);
                #pragma unroll
                for (int t = 0; t < 2; t++) {
                    c.put(0, 16 * t, acc[t][0], acc[t][1]);
                    c.put(0, 16 * t + 8, acc[t][2], acc[t][3]);
                }
                barrier_arrive(1, SUMMING);
            }
            // A word of shared memory costs less than a register that others need.
            const u32 roles = Roles::read();
            if (roles & Roles::ATTENDS) attend(c, step, layer, block, Step::at(), epoch);
            if (roles & Roles::JOINS && c.warp >= WARPS - 2) combine(c, step, block / N_HEADS, block % N_HEADS, epoch);
            c.place();
            // While `out` waits for its input, some of the next weights go to registers.
            u32 up[6][8];
            {
                u32 a[OUT_T][8], in[OUT_T][8];
                Consumer::Words<OUT_T> w;
                c.load(a);
                c.expect(w, O + OUT_T * copy, 1);
                c.release(a);
                gamma = reinterpret_cast<const u32*>(layer.feed_forward_norm)[threadIdx.x];
                if constexpr (UP_EARLY > 0) {
                    c.load<0, UP_EARLY>(up);
                    c.release<0, UP_EARLY>(up);
                }
                c.await(w, epoch);
                c.give(in, w.v, plain);
                float acc[4];
                c.rows(acc, a, in);
                c.put(1, 0, acc[0], acc[1]);
                barrier_arrive(2, SUMMING);
            }
            const u32* norm_next = reinterpret_cast<const u32*>(l + 1 < N_LAYERS ? step.layers[l + 1].attention_norm : step.final_norm);
            {
                u32 in[1][8];
                Consumer::Words<1> w;
                c.load<UP_EARLY, 6>(up);
                c.expect(w, Y + copy, 2);
                c.release<UP_EARLY, 6>(up);
                c.await(w, epoch);
                c.give(in, w.v, [&](int r, u32 v) { return normed(r, v, gamma); });
                float acc[3][4];
                #pragma unroll
                for (int t = 0; t < 3; t++) c.tile(acc[t], up[2 * t], up[2 * t + 1], in[0]);
                c.put_squares(squares);
                #pragma unroll
                for (int t = 0; t < 3; t++) {
                    c.put(0, 8 * t, acc[t][0], acc[t][1]);
                    c.put(0, 24 + 8 * t, acc[t][2], acc[t][3]);
                }
                barrier_arrive(1, SUMMING);
            }
            {
                Consumer::Words<DOWN_T> w;
                float acc[4];
                if constexpr (BATCH < 4) {
                    u32 a[DOWN_T][8], in[DOWN_T][8];
                    c.load(a);
                    c.expect(w, H + DOWN_T * copy, 3);
                    c.release(a);
                    gamma = norm_next[threadIdx.x];
                    c.await(w, epoch);
                    c.give(in, w.v, plain);
                    c.rows(acc, a, in);
                } else {
                    c.expect(w, H + DOWN_T * copy, 3);
                    gamma = norm_next[threadIdx.x];
                    c.await(w, epoch);
                    c.slices(acc, w, plain);
                }
                c.put(1, 0, acc[0], acc[1]);
                barrier_arrive(2, SUMMING);
            }
        }
        c.place();
        u32 result[BATCH];
        {
            Consumer::Words<1> w;
            c.expect(w, X + b % COPIES * (BATCH * SLICE / 2), 0);
            c.await(w, epoch - 1);
            #pragma unroll
            for (int r = 0; r < BATCH; r++) {
                result[r] = w.v[0][r];
                __syncwarp();
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(c.staged + r * 128), "r"(normed(r, result[r], gamma)) : "memory");
            }
        }
        c.put_squares(squares);
        barrier_sync(3, WARPS * 32);
        float factors[BATCH];
        #pragma unroll
        for (int r = 0; r < BATCH; r++) {
            float sum = reinterpret_cast<const float*>(memory + AT_SQUARES)[r * WARPS + c.lane % WARPS];
            #pragma unroll
            for (int o = WARPS / 2; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
            factors[r] = Watch::dead() ? __int_as_float(0x7fc00000) : rsqrtf(sum / D_MODEL + EPSILON);
            if (b > 0 || r >= step.rows) continue;
            const u32 v = result[r];
            reinterpret_cast<u32*>(step.hidden)[r * (D_MODEL / 2) + threadIdx.x] =
                pack(low(v) * low(gamma) * factors[r], high(v) * high(gamma) * factors[r]);
        }
        if (!project(c, step, factors, epoch)) return;
    }
}

// ---- finishers

struct Finisher {
    Watch watch;
    int lane, pair, part;

    // Sums of a pair of outputs over all warps; all lanes know them, the upper half of them as the
    // lower.
    __device__ __forceinline__ float2 sum(const float (*sums)[BATCH][SUM_ROWS], int row, int at) const {
        float2 s = {0, 0};
        #pragma unroll
        for (int w = 0; w < WARPS / 2; w++) {
            const float2 v = *reinterpret_cast<const float2*>(&sums[part * (WARPS / 2) + w][row][at]);
            s.x += v.x, s.y += v.y;
        }
        s.x += __shfl_xor_sync(~0u, s.x, 16), s.y += __shfl_xor_sync(~0u, s.y, 16);
        return s;
    }
    // The factor of a norm, from all warps' sums of squares.
    __device__ __forceinline__ float factor(int row) const {
        const float4* squares = reinterpret_cast<const float4*>(memory + AT_SQUARES) + row * (WARPS / 4);
        float s[WARPS / 4];
        #pragma unroll
        for (int i = 0; i < WARPS / 4; i++) s[i] = (squares[i].x + squares[i].y) + (squares[i].z + squares[i].w);
        return rsqrtf(((s[0] + s[1]) + (s[2] + s[3])) / D_MODEL + EPSILON);
    }
};

__device__ __forceinline__ void finish(const Step& step, u32 epoch, Cut part) {
    Finisher f;
    const float(*sums)[WARPS][BATCH][SUM_ROWS] = reinterpret_cast<const float(*)[WARPS][BATCH][SUM_ROWS]>(memory + AT_SUMS);
    const int b = blockIdx.x, lane = f.lane = threadIdx.x % 32, first_row = threadIdx.x / 32 - WARPS;
    const int pair = f.pair = lane % 16;
    f.part = lane / 16;
    const bool leads = lane < 16;
    const int q0 = part(QKV_ROWS / 2, b), qn = part(QKV_ROWS / 2, b + 1) - q0;
    const int d0 = part(D_MODEL / 2, b), dn = part(D_MODEL / 2, b + 1) - d0;
    const int f0 = part(D_FF / 2, b), fn = part(D_FF / 2, b + 1) - f0;
    u64* scratch = step.scratch;
    float x[ROWS_EACH][2];
    // The scales of a pair of rows, read before their sums are there.
    const int own_d = d0 + min(lane % 4, dn - 1), own_f = f0 + min(pair, fn - 1);
    auto scales = [](const float* of, int pair) { return INT8 ? reinterpret_cast<const float2*>(of)[pair] : float2{1, 1}; };
    #pragma unroll 1
    for (int at = 0; at < step.steps; at++, epoch++) {
        #pragma unroll 1
        for (int l = 0; l < N_LAYERS; l++, epoch++) {
            const Scales& of = step.scales[l];
            const float2 of_qkv = scales(of.qkv, q0 + min(pair, qn - 1)), of_out = scales(of.out, own_d);
            const float2 of_gate = scales(of.up, own_f), of_up = scales(of.up, D_FF / 2 + own_f), of_down = scales(of.down, own_d);
            barrier_sync(1, SUMMING);
            #pragma unroll
            for (int i = 0; i < ROWS_EACH; i++) {
                const int row = first_row + i * FINISHERS;
                const float scale = f.factor(row);
                const float2 s = f.sum(sums[0], row, 2 * pair);
                if (leads && pair < qn) {
                    const float q[2] = {s.x * scale * of_qkv.x, s.y * scale * of_qkv.y};
                    publish(scratch + Q + row * QKV_ROWS + 2 * (q0 + pair), __float_as_uint(q[0]), __float_as_uint(q[1]), epoch);
                }
            }
            if (l == 0) {
                // The tokens are known since the warps that multiply arrived.
                #pragma unroll
                for (int i = 0; i < ROWS_EACH; i++) {
                    const u32 v = step.embedded(step.id(first_row + i * FINISHERS), own_d);
                    x[i][0] = low(v), x[i][1] = high(v);
                }
            }
            auto residual = [&](u64* to, float2 scales) {
                barrier_sync(2, SUMMING);
                #pragma unroll
                for (int i = 0; i < ROWS_EACH; i++) {
                    const int row = first_row + i * FINISHERS;
                    const float2 s = f.sum(sums[1], row, 2 * (lane % 4));
                    x[i][0] += s.x * scales.x, x[i][1] += s.y * scales.y;
                    const u32 v = pack(x[i][0], x[i][1]);
                    // Four lanes a copy.
                    if (lane % 4 < dn && lane / 4 < COPIES) publish(to + (lane / 4 * BATCH + row) * (D_MODEL / 2) + d0 + lane % 4, v, epoch);
                }
            };
            residual(scratch + Y, of_out);
            barrier_sync(1, SUMMING);
            #pragma unroll
            for (int i = 0; i < ROWS_EACH; i++) {
                const int row = first_row + i * FINISHERS;
                float2 gate = f.sum(sums[0], row, 2 * min(pair, 11)), up = f.sum(sums[0], row, 24 + 2 * min(pair, 11));
                const float scale = f.factor(row);
                gate.x *= scale * of_gate.x, gate.y *= scale * of_gate.y, up.x *= scale * of_up.x, up.y *= scale * of_up.y;
                const float h0 = gated(gate.x, up.x), h1 = gated(gate.y, up.y);
                if (pair < fn) {
                    #pragma unroll
                    for (int k = 0; k < COPIES; k += 2) {
                        if (k + f.part < COPIES) publish(scratch + H + ((k + f.part) * BATCH + row) * (D_FF / 2) + f0 + pair, pack(h0, h1), epoch);
                    }
                }
            }
            residual(scratch + X, of_down);
        }
    }
    if (b == 0 && first_row == 0 && lane == 0) step.state->epoch = epoch;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_step_few_rows(
    const Layer* layers, const Weight* embedding, const u16* final_norm, const float* cos, const float* sin, State* state,
    u64* scratch, const int* ids, const int* positions, const int* pages, u16* hidden, const Weight* head, float* logits,
    int* tokens, int* next, int* reached, int* following, const int* ends, const int* streams, const int* lines, const float* draw_numbers,
    const float* prompt, float* written, const float* bias, const __grid_constant__ StepNumbers numbers
) {
    const Step step{layers, embedding, head, final_norm, cos, sin, state, scratch, ids, positions, pages, hidden, logits, tokens, next, reached, following,
        ends, static_cast<int>(numbers.rows), static_cast<int>(numbers.pages_a_row), static_cast<int>(numbers.vocabulary),
        static_cast<int>(numbers.last_position), static_cast<int>(numbers.steps),
        min(static_cast<int>(numbers.ends_a_row), MOST_ENDS),
        reinterpret_cast<const Scales*>(numbers.scales),
        {streams, lines, draw_numbers, prompt, written, bias, static_cast<int>(numbers.n_lines), numbers.draws != 0}};
    if (failed(state, hidden, step.rows)) {
        const u64 all = static_cast<u64>(step.rows) * step.vocabulary;
        for (u64 i = blockIdx.x * THREADS + threadIdx.x; i < all; i += gridDim.x * THREADS) logits[i] = __int_as_float(0x7fc00000);
        for (int at = 0; at < step.steps && blockIdx.x == 0 && threadIdx.x < step.rows; at++) step.predict(at, threadIdx.x, -1);
        return;
    }
    StageRing ring{shared_address(memory)};
    if (threadIdx.x == 0) Watch::begin(), ring.init(WARPS), Step::at() = 0;
    if (threadIdx.x < 6 * WARPS) reinterpret_cast<volatile u32*>(memory + AT_RELEASED)[threadIdx.x] = 0;
    if (threadIdx.x < 32) Roles::write(step);
    const u32 epoch = reinterpret_cast<volatile State*>(state)->epoch + 1;
    bool goes_on = false;
    if (threadIdx.x < BATCH) {
        const int row = step.row(threadIdx.x), id = ids[row];
        step.set_id(threadIdx.x, id);
        goes_on = true;
        for (int i = 0; i < step.ends_a_row; i++) {
            const int end = ends[row * step.ends_a_row + i];
            Step::ends_kept()[threadIdx.x * MOST_ENDS + i] = end;
            goes_on = goes_on && end != id;
        }
    }
    // If all sequences have ended, there is nothing to do.
    if (!__syncthreads_or(goes_on)) {
        for (int at = 0; at < step.steps && blockIdx.x == 0 && threadIdx.x < step.rows; at++) step.predict(at, threadIdx.x, ids[threadIdx.x]);
        return;
    }
    const Cut part{BATCH == 1 && gridDim.x >= 132 && Share::splits_of(step.position(0, 0)) == 1};
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp < WARPS) {
        registers_raise<104>();
        consume(step, ring, epoch);
    } else {
        registers_lower<64>();
        if (warp < WARPS + FINISHERS) finish(step, epoch, part);
        else if (warp == WARPS + FINISHERS) produce(step, ring, part);
    }
    if (Watch::dead()) reinterpret_cast<volatile State*>(state)->error = 1;
}
