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
// Between the products are words {bf16, bf16, epoch}:
//
//                   qkv          attention        output        gate, up         down
//   input    x ------------> q, k, v --------> o --------> x' ---------> h ----------> x
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
constexpr int INPUTS = BATCH <= 2 ? 3 : 1;  // slices of a warp's input that shared memory holds
constexpr int OUT_T = HEADS_WIDTH / SLICE, DOWN_T = D_FF / SLICE;
static_assert(
    D_MODEL == SLICE && HEADS_WIDTH % SLICE == 0 && D_FF % SLICE == 0 && GROUP == 2 && HEAD_DIM == 128 && BATCH <= 4,
    "sizes");

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
    int* next;                                         // [rows]: the last of these
    int* reached;                                      // [rows]: where the last step's tokens stand
    int* following;                                    // [rows]: the positions behind those
    const int* ends;                                   // [rows, ends_a_row]: tokens behind which a
                                                       // row keeps its token
    int rows, pages_a_row, vocabulary, last_position, steps, ends_a_row;
    const Scales* scales;                              // of each block
    Draws draws;

    // Rows that are none are the first once more: they write what it writes, and are not told of.
    __device__ __forceinline__ int row(int r) const { return r < rows ? r : 0; }
    // Of the step that is `at` behind the first.
    __device__ __forceinline__ int position(int r, int at) const {
        return clamped(positions[row(r)] + at, last_position);
    }
    // The tokens that a step reads lie in shared memory.
    static __device__ __forceinline__ volatile int* ids_read();
    // How many steps of the launch are over.
    static __device__ __forceinline__ volatile int& at();
    __device__ __forceinline__ int id(int r) const { return ids_read()[r]; }
    __device__ __forceinline__ void set_id(int r, int token) const {
        ids_read()[r] = min(max(token, 0), vocabulary - 1);
    }
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
constexpr int LARGEST = WEIGHTS + BATCH * N_HEADS * SPLITS; // [rows, blocks]: a logit and its token
constexpr int MOST_BLOCKS = MOST_GROUPS / DRAW_WARPS;
constexpr int DRAWN = LARGEST + BATCH * 2 * MOST_BLOCKS;   // [rows]: tokens
constexpr int BOARD = DRAWN + BATCH;

// Shared memory, in bytes.
constexpr int AT_SUMS = STAGE * STAGES;
constexpr int AT_PART = AT_SUMS + 2 * SUMS * 4;
constexpr int AT_INPUT = AT_PART + WARPS * GROUP * HEAD_DIM * 4;
constexpr int AT_Q = AT_INPUT + INPUTS * WARPS * BATCH * 128;
constexpr int AT_QUERIES = AT_Q + GROUP * HEAD_DIM * 4;
constexpr int AT_NEW = AT_QUERIES + GROUP * HEAD_DIM * 2;
constexpr int AT_PEAK = AT_NEW + 2 * HEAD_DIM * 2;
constexpr int AT_IDS = AT_PEAK + WARPS * GROUP * 8;
constexpr int AT_ROLES = AT_IDS + 16;
constexpr int AT_STEP = AT_ROLES + 4;
constexpr int AT_SQUARES = AT_IDS + 32;
constexpr int AT_BARRIERS = AT_SQUARES + BATCH * WARPS * 4;
constexpr int AT_RELEASED = AT_BARRIERS + STAGES * 16;
constexpr int AT_RELEASED_OF_HEAD = AT_RELEASED + WARPS * 4;
constexpr int AT_WAITED = AT_RELEASED_OF_HEAD + WARPS * 4;
constexpr int AT_ENDS = AT_WAITED + WARPS * 16;
constexpr int SHARED = AT_ENDS + BATCH * MOST_ENDS * 4;
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
    asm volatile(
        "ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "r"(at)
        : "memory");
    return v;
}
// Eight weights of a row, as bf16.
__device__ __forceinline__ uint4 shared_weights(u32 at) {
    if (!INT8) return shared_16(at);
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return {from_bytes(v.x, 0x4140), from_bytes(v.x, 0x4342), from_bytes(v.y, 0x4140), from_bytes(v.y, 0x4342)};
}

#include "exchange.cuh"
#include "few_rows/shares.cuh"
#include "few_rows/producer.cuh"
#include "few_rows/consumer.cuh"
#include "few_rows/attention.cuh"
#include "few_rows/head.cuh"

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
            const u32* norm_next = reinterpret_cast<const u32*>(
                l + 1 < N_LAYERS ? step.layers[l + 1].attention_norm : step.final_norm);
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
                asm volatile(
                    "st.shared.u32 [%0], %1;" ::"r"(c.staged + r * 128), "r"(normed(r, result[r], gamma)) : "memory");
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

#include "few_rows/finisher.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_step_few_rows(
    const Layer* layers, const Weight* embedding, const u16* final_norm, const float* cos, const float* sin,
    State* state, u64* scratch, const int* ids, const int* positions, const int* pages, u16* hidden,
    const Weight* head, float* logits, int* tokens, int* next, int* reached, int* following, const int* ends,
    const int* streams, const int* lines, const float* draw_numbers, const float* prompt, float* written,
    const float* bias, const __grid_constant__ StepNumbers numbers
) {
    const Step step{layers, embedding, head, final_norm, cos, sin, state, scratch, ids, positions, pages, hidden,
        logits, tokens, next, reached, following, ends,
        static_cast<int>(numbers.rows), static_cast<int>(numbers.pages_a_row), static_cast<int>(numbers.vocabulary),
        static_cast<int>(numbers.last_position), static_cast<int>(numbers.steps),
        min(static_cast<int>(numbers.ends_a_row), MOST_ENDS),
        reinterpret_cast<const Scales*>(numbers.scales),
        {streams, lines, draw_numbers, prompt, written, bias, static_cast<int>(numbers.n_lines), numbers.draws != 0}};
    if (failed(state, hidden, step.rows)) {
        const u64 all = static_cast<u64>(step.rows) * step.vocabulary;
        for (u64 i = blockIdx.x * THREADS + threadIdx.x; i < all; i += gridDim.x * THREADS) {
            logits[i] = __int_as_float(0x7fc00000);
        }
        for (int at = 0; at < step.steps && blockIdx.x == 0 && threadIdx.x < step.rows; at++) {
            step.predict(at, threadIdx.x, -1);
        }
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
        for (int at = 0; at < step.steps && blockIdx.x == 0 && threadIdx.x < step.rows; at++) {
            step.predict(at, threadIdx.x, ids[threadIdx.x]);
        }
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
