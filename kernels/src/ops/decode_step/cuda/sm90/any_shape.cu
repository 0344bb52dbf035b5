// A decode step of up to eight rows of a model of any shape, from tokens to logits and greedy
// tokens: a block of threads on each multiprocessor, all resident.
//
//               qkv          attention        output        up             down
//     x ---------------> qkv ----------> parts -------> y -----------> h -----------> x        words {value, epoch} in global memory
//        norm                            of heads         norm
//
//     weight [N, K]   +----------------------+
//     block 0         | warp 0, warp 1, ...  |   a warp multiplies two rows, or a part of their columns, by all tokens
//     block 1         |                      |
//                     +----------------------+
//
// A block owns some rows of each matrix. It publishes its results as words that readers poll: a
// word has arrived when its epoch is the layer's. Epochs keep counting over launches, so nothing is
// ever reset. A word is only overwritten by data that depends on all blocks that read it: a block
// reads only what it needs for its own rows, and publishes those. Whatever does not depend on the
// input is loaded before the input arrives: a warp's first weights, scales, biases, gammas, keys
// and values. All products share a few instructions, to fit the small instruction caches.
//
// The host defines BATCH, N_LAYERS, D_MODEL, N_HEADS, N_KV_HEADS, HEAD_DIM, D_FF, VOCABULARY,
// PAGE_TOKENS, WINDOW (0: all keys are seen), EPSILON, LAYER_NORM (1; 0: RMS norm), ACTIVATION (0:
// GELU by erf, 1: by tanh, 2: ReLU, 3: SiLU, 4: x * sigmoid(1.702 x), 5: squared ReLU), GATED,
// DTYPE (of activations, and of weights and a cache that are not INT8; 0: f32, 1: bf16, 2: f16),
// INT8 (1: weights are bytes with a scale for each row), CACHE_INT8 (1: keys and values are bytes
// with a scale for each head of a token), BLOCKS, and how many elements lie between two rows of a
// matrix: QKV_PITCH, OUT_PITCH, UP_PITCH, DOWN_PITCH, EMBEDDING_PITCH, HEAD_PITCH, POSITION_PITCH,
// ANGLE_PITCH. WORDS and SHARED are what it takes to be needed of words, and of bytes of shared
// memory.
constexpr int WARPS = 16, THREADS = 32 * WARPS;
constexpr int QKV_ROWS = (N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM, HEADS_WIDTH = N_HEADS * HEAD_DIM, GROUP = N_HEADS / N_KV_HEADS;
constexpr float NOTHING = -1e30f;                      // the score of a key that is none
constexpr int NO_TOKEN = 0x7fffffff;

#if DTYPE == 0
using Half = float;
#else
using Half = u16;
#endif
#if INT8
using Weight = signed char;
#else
using Weight = Half;
#endif
#if CACHE_INT8
using Cached = signed char;
#else
using Cached = Half;
#endif

__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---- numbers

__device__ __forceinline__ float to_float(Half x) {
#if DTYPE == 0
    return x;
#elif DTYPE == 1
    return __uint_as_float(static_cast<u32>(x) << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#endif
}
__device__ __forceinline__ Half from_float(float x) {
#if DTYPE == 0
    return x;
#elif DTYPE == 1
    Half y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
#else
    Half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
#endif
}
// Sixteen bytes of numbers.
constexpr int HALVES = 16 / sizeof(Half), WEIGHTS = 16 / sizeof(Weight);
__device__ __forceinline__ void spread(float (&f)[HALVES], uint4 v) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
#if DTYPE == 0
        f[i] = __uint_as_float(w[i]);
#elif DTYPE == 1
        f[2 * i] = __uint_as_float(w[i] << 16), f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
#else
        f[2 * i] = to_float(static_cast<u16>(w[i])), f[2 * i + 1] = to_float(static_cast<u16>(w[i] >> 16));
#endif
    }
}
// A byte of four as a number: less 128 in the last bits of 2^23.
__device__ __forceinline__ float from_byte(u32 four, int at) {
    return __uint_as_float(__byte_perm(four ^ 0x80808080u, 0x4b000000u, 0x7440 + at)) - 8388736.0f;
}
// HALVES of the WEIGHTS weights in sixteen bytes: the part `i` of them.
__device__ __forceinline__ void spread_weights(float (&f)[HALVES], uint4 v, int i) {
#if INT8
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int k = 0; k < HALVES; k++) {
        const int at = i * HALVES + k;
        f[k] = from_byte(w[at / 4], at % 4);
    }
#else
    spread(f, v);
#endif
}
// Weights are read once.
__device__ __forceinline__ uint4 stream(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
// Words of the exchange.
__device__ __forceinline__ u64 both(u32 v, u32 e) { return static_cast<u64>(e) << 32 | v; }
__device__ __forceinline__ void publish(u64* at, u32 v, u32 e) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(both(v, e)) : "memory");
}
__device__ __forceinline__ void publish(u64* at, float v, u32 e) { publish(at, __float_as_uint(v), e); }
struct Word {
    u32 v, e;
};
__device__ __forceinline__ Word ask(const u64* at) {
    u64 a;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(a) : "l"(at) : "memory");
    return {static_cast<u32>(a), static_cast<u32>(a >> 32)};
}
struct Two {
    Word a, b;

    __device__ __forceinline__ bool there(u32 epoch) const { return a.e == epoch && b.e == epoch; }
};
__device__ __forceinline__ Two ask_two(const u64* at) {
    u64 a, b;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(at) : "memory");
    return {{static_cast<u32>(a), static_cast<u32>(a >> 32)}, {static_cast<u32>(b), static_cast<u32>(b >> 32)}};
}
// Asks until all are there, or it is too late.
template <class Ask>
__device__ __forceinline__ void poll(Ask ask) {
    #pragma unroll 1
    for (int i = 0; !ask(); i++) {
        if (i % 32 == 31 && Watch::late()) return;
    }
}
__device__ __forceinline__ float activated(float x) {
#if ACTIVATION == 0
    return 0.5f * x * (1 + erff(x * 0.70710678118654752f));
#elif ACTIVATION == 1
    return 0.5f * x * (1 + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
#elif ACTIVATION == 2
    return x > 0 || x != x ? x : 0;
#elif ACTIVATION == 3
    return x / (1 + expf(-x));
#elif ACTIVATION == 4
    return x / (1 + expf(-1.702f * x));
#else
    return x > 0 || x != x ? x * x : 0;
#endif
}
__device__ __forceinline__ float sum_lanes(float v) {
    #pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

// ---- what a step works on

struct Layer {
    const Weight *qkv, *out, *up, *down;
    const float *qkv_scales, *out_scales, *up_scales, *down_scales;      // of INT8
    const float *qkv_bias, *out_bias, *up_bias, *down_bias;              // or 0
    const float *attention_gamma, *attention_beta, *feed_forward_gamma, *feed_forward_beta;
    const float *query_gamma, *key_gamma;                                // or 0
    Cached *keys, *values;                             // [pages, N_KV_HEADS, PAGE_TOKENS, HEAD_DIM]
    float *key_scales, *value_scales;                  // of INT8: [pages, N_KV_HEADS, PAGE_TOKENS]
};
static_assert(sizeof(Layer) == 176, "layers");
struct Numbers {
    u64 rows, pages_a_row, last_position;
    const Weight *embedding, *head;
    const float *embedding_scales, *head_scales;
    const float *final_gamma, *final_beta;
    const Half* position_embedding;                    // a row for each position, or 0
    const float *cos, *sin;                            // [positions, HEAD_DIM / 2], or 0
};

// The keys of a row are cut between blocks, and the query heads of a kv head, of which a warp has
// one.
constexpr int CHUNKS = ceil_div(GROUP, 4), HEADS = ceil_div(GROUP, CHUNKS), SHARERS = WARPS / HEADS, SPLIT_KEYS = 64;
constexpr int SPLITS = most(1, least(16, BLOCKS / (BATCH * N_KV_HEADS * CHUNKS)));

// What blocks exchange, in words: f32, but two numbers of 16 bits of h.
constexpr int H_WORDS = DTYPE == 0 ? D_FF : D_FF / 2;
constexpr int AT_X = 0, AT_Y = AT_X + BATCH * D_MODEL, AT_QKV = AT_Y + BATCH * D_MODEL, AT_H = AT_QKV + BATCH * QKV_ROWS;
constexpr int AT_PARTS = AT_H + BATCH * H_WORDS, AT_WEIGHT = AT_PARTS + BATCH * N_HEADS * SPLITS * HEAD_DIM;
constexpr int AT_LARGEST = AT_WEIGHT + ceil_div(BATCH * N_HEADS * SPLITS, 2) * 2;    // [BATCH, BLOCKS]: a logit, and its token
static_assert(AT_LARGEST + 2 * BATCH * BLOCKS == WORDS, "words");
static_assert(D_MODEL % 8 == 0 && D_FF % 8 == 0 && HEAD_DIM % 8 == 0 && HEAD_DIM <= 256 && BATCH <= 8, "sizes");
static_assert(D_MODEL % WEIGHTS == 0 && D_FF % WEIGHTS == 0 && HEADS_WIDTH % WEIGHTS == 0, "rows of whole loads");

// Rows that a warp takes at a time, and steps along them, of 16 bytes a lane.
constexpr int TILE = 2, STEPS = 4;

// How a block's warps share its rows of a weight [N, K]; where it is two in one, `COUNT`, a block
// owns the same rows of both. Rows are shared out by `UNIT`.
template <int N_, int K_, int PITCH_, int COUNT_ = 1, int UNIT = 2>
struct Product {
    static constexpr int N = N_, K = K_, PITCH = PITCH_, COUNT = COUNT_;
    static constexpr int ROWS = COUNT * UNIT * ceil_div(N / UNIT, BLOCKS);    // of a block, at most
    static constexpr int TILES = ceil_div(ROWS, TILE), ALL_STEPS = ceil_div(K / WEIGHTS, 32);
    // Steps that the busiest warp takes if `s` warps share a tile, and some for each tile.
    static __device__ constexpr int steps(int s) { return ceil_div(TILES * s, WARPS) * (ceil_div(ALL_STEPS, s) + 2); }
    static __device__ constexpr int best(int bits, int of) {
        return 1 << of > least(WARPS, ALL_STEPS) ? bits : best(steps(1 << of) < steps(1 << bits) ? of : bits, of + 1);
    }
    // Two to this are the warps that share a tile.
    static constexpr int SPLIT_BITS = best(0, 1), SUMS = (1 << SPLIT_BITS) * ROWS * BATCH;

    static __device__ __forceinline__ int begin(int block) { return UNIT * static_cast<int>(static_cast<u64>(N / UNIT) * static_cast<u32>(block) / BLOCKS); }
};
using Qkv = Product<QKV_ROWS, D_MODEL, QKV_PITCH>;
using Out = Product<D_MODEL, HEADS_WIDTH, OUT_PITCH>;
using Up = Product<D_FF, D_MODEL, UP_PITCH, GATED ? 2 : 1>;
using Down = Product<D_MODEL, D_FF, DOWN_PITCH>;
using Head = Product<VOCABULARY, D_MODEL, HEAD_PITCH, 1, 1>;

// Shared memory, in bytes.
constexpr int KEY_LANES = HEAD_DIM <= 8 ? 1 : HEAD_DIM <= 16 ? 2 : HEAD_DIM <= 32 ? 4 : HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32;
constexpr int INPUT = BATCH * most(D_MODEL, most(HEADS_WIDTH, D_FF)) * static_cast<int>(sizeof(Half));
constexpr int AT_NEW = HEADS * HEAD_DIM, AT_OUT = AT_NEW + 2 * HEAD_DIM, AT_PEAKS = AT_OUT + WARPS * HEAD_DIM;      // of attention, in floats
constexpr int ATTENTION = (AT_PEAKS + WARPS * 2) * 4;
constexpr int AT_SUMS = ceil_div(most(INPUT, ATTENTION), 16) * 16;
constexpr int SUMS = most(most(Qkv::SUMS, Out::SUMS), most(most(Up::SUMS, Down::SUMS), Head::SUMS)) * 4;
constexpr int AT_RESIDUAL = AT_SUMS + ceil_div(SUMS, 16) * 16;
constexpr int MOST_ROWS = most(most(Qkv::ROWS, Out::ROWS), Up::ROWS);
constexpr int AT_LAYERS = ceil_div(AT_RESIDUAL + BATCH * Out::ROWS * 4, 16) * 16, AT_EXTRAS = AT_LAYERS + 2 * static_cast<int>(sizeof(Layer));   // of two layers; of two products
constexpr int AT_REDUCED = AT_EXTRAS + 2 * 2 * MOST_ROWS * 4;
static_assert(AT_REDUCED + 2 * WARPS * 4 + WARPS * 8 == SHARED && SHARED <= AT_WATCH, "shared memory");

// The products of a layer, one after the other.
enum { QKV, OUT, UP, DOWN };

struct Step {
    const Layer* layers;
    State* state;
    u64* scratch;
    const int *ids, *positions, *pages;                // [rows], [rows], [rows, pages_a_row]
    Half* hidden;                                      // [rows, D_MODEL]
    float* logits;                                     // [rows, VOCABULARY]
    int *greedy, *following;                        // [rows]
    const Numbers& numbers;
    int rows, block, warp, lane, thread;
    u32 epoch;                                         // of the layer

    __device__ __forceinline__ float* sums() const { return reinterpret_cast<float*>(memory + AT_SUMS); }
    // Within the tables and the row's pages, whatever the device was given.
    __device__ __forceinline__ int position(int row) const {
        return static_cast<int>(min(static_cast<u32>(positions[row]), static_cast<u32>(numbers.last_position)));
    }
    // What enters the first layer.
    __device__ __forceinline__ float embedded(int row, int column) const {
        const u64 id = min(max(ids[row], 0), VOCABULARY - 1), at = id * EMBEDDING_PITCH + column;
#if INT8
        float x = numbers.embedding[at] * numbers.embedding_scales[id];
#else
        float x = to_float(numbers.embedding[at]);
#endif
        if (numbers.position_embedding) x += to_float(numbers.position_embedding[static_cast<u64>(position(row)) * POSITION_PITCH + column]);
        return x;
    }
};

// A product, as a block sees it.
struct Part {
    const Weight* weight;
    const float *scales, *bias;
    int n, pitch, k, count, rows, split_bits;          // as `Product` has them
    int first, own;                                    // rows of the block
};
template <class P>
__device__ __forceinline__ Part part_of(const Step& step, const Weight* weight, const float* scales, const float* bias) {
    const int first = P::begin(step.block), own = P::begin(step.block + 1) - first;
    return {weight, scales, bias, P::N, P::PITCH, P::K, P::COUNT, P::ROWS, P::SPLIT_BITS, first, own};
}

// ---- inputs, in shared memory [BATCH, K]

// Norm of x: what blocks published, or else what enters the first layer. After the last layer it is
// no number where a wait was too long.
__device__ __forceinline__ void normed(const Step& step, const u64* published, const float* gamma, const float* beta, bool last) {
    const u32 epoch = step.epoch;
    // Some warps to a row, and two columns to a lane.
    constexpr int OF_ROW = WARPS / BATCH, LANES = 32 * OF_ROW, N = ceil_div(D_MODEL, 2 * LANES), SOME = least(N, 8);
    const int row = step.warp / OF_ROW, first = step.thread % LANES * 2;
    float x[N][2], sum = 0;
    // Gamma and beta of a few columns come before what is waited for.
    constexpr bool EARLY = N <= 4;
    float2 g[N], b[N];
    auto weights = [&] {
        #pragma unroll
        for (int i = 0; i < N; i++) {
            const int column = min(first + i * (2 * LANES), D_MODEL - 2);
            g[i] = *reinterpret_cast<const float2*>(gamma + column);
            b[i] = make_float2(0, 0);
            if (LAYER_NORM && beta) b[i] = *reinterpret_cast<const float2*>(beta + column);
        }
    };
    if (EARLY) weights();
    #pragma unroll
    for (int i = 0; i < N; i++) x[i][0] = x[i][1] = 0;
    if (row < step.rows) {
        #pragma unroll
        for (int begin = 0; begin < N; begin += SOME) {
            if (published) {
                Two v[SOME];
                poll([&] {
                    bool all = true;
                    #pragma unroll
                    for (int i = 0; i < SOME; i++) {
                        const int column = first + (begin + i) * (2 * LANES);
                        if (column < D_MODEL) v[i] = ask_two(published + row * D_MODEL + column);
                        else v[i] = {{0, epoch}, {0, epoch}};
                    }
                    #pragma unroll
                    for (int i = 0; i < SOME; i++) all = all && v[i].there(epoch);
                    return all;
                });
                #pragma unroll
                for (int i = 0; i < SOME; i++) {
                    if (begin + i < N) x[begin + i][0] = __uint_as_float(v[i].a.v), x[begin + i][1] = __uint_as_float(v[i].b.v);
                }
            } else {
                #pragma unroll
                for (int i = 0; i < SOME; i++) {
                    const int column = first + (begin + i) * (2 * LANES);
                    if (begin + i < N && column < D_MODEL) x[begin + i][0] = step.embedded(row, column), x[begin + i][1] = step.embedded(row, column + 1);
                }
            }
        }
    }
    __syncwarp();
    float* reduced = reinterpret_cast<float*>(memory + AT_REDUCED);
    // Over the warps of a row.
    auto total = [&](float v, float* at) {
        v = sum_lanes(v);
        if (step.lane == 0) at[step.warp] = v;
        __syncthreads();
        float all = 0;
        #pragma unroll
        for (int w = 0; w < OF_ROW; w++) all += at[row * OF_ROW + w];
        return all;
    };
    float mean = 0;
#if LAYER_NORM
    #pragma unroll
    for (int i = 0; i < N; i++) sum += x[i][0] + x[i][1];
    mean = total(sum, reduced) / D_MODEL;
#endif
    sum = 0;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        if (first + i * (2 * LANES) >= D_MODEL) continue;
        x[i][0] -= mean, x[i][1] -= mean;
        sum = fmaf(x[i][0], x[i][0], fmaf(x[i][1], x[i][1], sum));
    }
    const float squares = total(sum, reduced + WARPS);
    // No warp of the block waits any longer.
    const float broken = last && Watch::dead() ? __int_as_float(0x7fc00000) : 0;
    const float factor = rsqrtf(squares / D_MODEL + EPSILON) + broken;
    if (!EARLY) weights();
    Half* to = reinterpret_cast<Half*>(memory) + row * D_MODEL;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int column = first + i * (2 * LANES);
        if (row >= step.rows || column >= D_MODEL) continue;
        to[column] = from_float(x[i][0] * factor * g[i].x + b[i].x), to[column + 1] = from_float(x[i][1] * factor * g[i].y + b[i].y);
    }
    __syncthreads();
}
// What stands between the products of the feed-forward layer.
__device__ __forceinline__ void of_feed_forward(const Step& step) {
    constexpr int PAIRS = H_WORDS / 2, SOME = 4;
    const u64* from = step.scratch + AT_H;
    #pragma unroll 1
    for (int begin = step.thread; begin < step.rows * PAIRS; begin += SOME * THREADS) {
        Two v[SOME];
        poll([&] {
            bool all = true;
            #pragma unroll
            for (int i = 0; i < SOME; i++) v[i] = ask_two(from + 2 * min(begin + i * THREADS, step.rows * PAIRS - 1));
            #pragma unroll
            for (int i = 0; i < SOME; i++) all = all && v[i].there(step.epoch);
            return all;
        });
        #pragma unroll
        for (int i = 0; i < SOME; i++) {
            const int at = begin + i * THREADS;
            if (at >= step.rows * PAIRS) break;
            Half* to = reinterpret_cast<Half*>(memory) + at / PAIRS * D_FF + at % PAIRS * (2 * D_FF / H_WORDS);
            *reinterpret_cast<uint2*>(to) = make_uint2(v[i].a.v, v[i].b.v);
        }
    }
    __syncthreads();
}

// ---- attention

struct Keys {
    int first, total, splits;

    __device__ __forceinline__ Keys(int position) {
        first = WINDOW ? max(0, position + 1 - WINDOW) : 0;
        total = position + 1 - first;
        splits = min(SPLITS, (total + SPLIT_KEYS - 1) / SPLIT_KEYS);
    }
    __device__ __forceinline__ int begin(int split) const { return first + static_cast<int>(static_cast<u32>(total) * split / static_cast<u32>(splits)); }
};

// A head of a row, normalised and rotated, by a warp; `to` is of shared memory.
__device__ __forceinline__ void placed(const Step& step, const u64* from, const float* gamma, bool rotates, int position, float scale, bool rounded, float* to) {
    constexpr int HALF = HEAD_DIM / 2, N = ceil_div(HALF, 32);
    float x[N][2], square = 0;
    float2 g[N], angle[N];
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = min(i * 32 + step.lane, HALF - 1);
        const u64 turned = static_cast<u64>(position) * ANGLE_PITCH + at;
        g[i] = gamma ? make_float2(gamma[at], gamma[HALF + at]) : make_float2(1, 1);
        angle[i] = rotates ? make_float2(step.numbers.cos[turned], step.numbers.sin[turned]) : make_float2(1, 0);
    }
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = i * 32 + step.lane;
        Word v[2] = {};
        if (at < HALF) poll([&] {
            v[0] = ask(from + at), v[1] = ask(from + HALF + at);
            return v[0].e == step.epoch && v[1].e == step.epoch;
        });
        __syncwarp();
        x[i][0] = __uint_as_float(v[0].v), x[i][1] = __uint_as_float(v[1].v);
        square = fmaf(x[i][0], x[i][0], fmaf(x[i][1], x[i][1], square));
    }
    const float factor = gamma ? rsqrtf(sum_lanes(square) / HEAD_DIM + EPSILON) : 1;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = i * 32 + step.lane;
        if (at >= HALF) continue;
        const float a = x[i][0] * factor * g[i].x, b = x[i][1] * factor * g[i].y;
        float c = (a * angle[i].x - b * angle[i].y) * scale, d = (b * angle[i].x + a * angle[i].y) * scale;
        if (rounded) c = to_float(from_float(c)), d = to_float(from_float(d));
        to[at] = c, to[HALF + at] = d;
    }
}

// Eight numbers of a key or value.
#if CACHE_INT8
struct Eight {
    uint2 v;
    float scale;

    __device__ __forceinline__ void read(const Cached* from, const float* scales, u64 line, bool there) {
        v = make_uint2(0, 0), scale = 0;
        if (there) v = *reinterpret_cast<const uint2*>(from), scale = scales[line];
    }
    __device__ __forceinline__ void floats(float (&f)[8]) const {
        const u32 w[2] = {v.x, v.y};
        #pragma unroll
        for (int i = 0; i < 8; i++) f[i] = from_byte(w[i / 4], i % 4) * scale;
    }
};
// The numbers of a warp's head in shared memory become the nearest bytes by their scale, its
// largest magnitude over 127, and what these stand for; they are kept in a line of the cache, if
// there is one.
__device__ __forceinline__ void to_bytes(float* numbers, int lane, Cached* kept, float* scale_kept) {
    float largest = 0, all = 0;
    #pragma unroll 1
    for (int i = lane; i < HEAD_DIM; i += 32) largest = fmaxf(largest, fabsf(numbers[i])), all += fabsf(numbers[i]);
    #pragma unroll
    for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
    all = sum_lanes(all);
    // None that can be counted with where one of the numbers is none, or all together are too
    // large.
    const float scale = all < 3.4028235e38f ? largest > 0 ? largest / 127 : 1 : all;
    #pragma unroll 1
    for (int i = lane; i < HEAD_DIM; i += 32) {
        const float byte = fmaxf(fminf(roundf(numbers[i] / scale), 127), -127);
        numbers[i] = byte * scale;
        if (kept) kept[i] = static_cast<signed char>(byte);
    }
    if (kept && lane == 0) *scale_kept = scale;
}
#else
struct Eight {
    uint4 v[sizeof(Half) / 2];

    __device__ __forceinline__ void read(const Cached* from, const float*, u64, bool there) {
        #pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Half)) / 2; i++) {
            v[i] = make_uint4(0, 0, 0, 0);
            if (there) v[i] = *(reinterpret_cast<const uint4*>(from) + i);
        }
    }
    __device__ __forceinline__ void floats(float (&f)[8]) const {
        #pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Half)) / 2; i++) {
            float some[HALVES];
            spread(some, v[i]);
            #pragma unroll
            for (int k = 0; k < HALVES; k++) f[i * HALVES + k] = some[k];
        }
    }
};
#endif

// Eight numbers in shared memory, or zeros.
__device__ __forceinline__ void eight(float (&to)[8], const float* from, bool there) {
    #pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const float4 v = there ? *reinterpret_cast<const float4*>(from + i) : make_float4(0, 0, 0, 0);
        to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
}

// A query head over some keys. A group of KEY_LANES lanes takes a key at a time, eight numbers a
// lane, and has a maximum of its own.
struct Attention {
    float q[8], out[8] = {}, peak = NOTHING, sum = 0;

    __device__ __forceinline__ void add(const float (&key)[8], const float (&value)[8], bool there) {
        float s = 0;
        #pragma unroll
        for (int i = 0; i < 8; i++) s = fmaf(key[i], q[i], s);
        #pragma unroll
        for (int o = 1; o < KEY_LANES; o <<= 1) s += __shfl_xor_sync(~0u, s, o);
        if (!there) s = NOTHING;
        const float highest = fmaxf(peak, s), correction = exp_2(peak - highest), p = there ? exp_2(s - highest) : 0;
        peak = highest, sum = fmaf(sum, correction, p);
        #pragma unroll
        for (int i = 0; i < 8; i++) out[i] = fmaf(out[i], correction, p * value[i]);
    }
};

__device__ __forceinline__ void attend(const Step& step, const Layer& layer) {
    constexpr int SLOTS = 32 / KEY_LANES, APART = SHARERS * SLOTS;
    float* shared = reinterpret_cast<float*>(memory);
    const int slot = step.lane / KEY_LANES, column = step.lane % KEY_LANES * 8;
    const bool active = column < HEAD_DIM;
    #pragma unroll 1
    for (int task = step.block; task < step.rows * (N_KV_HEADS * CHUNKS * SPLITS); task += BLOCKS) {
        const int split = task % SPLITS, chunk = task / SPLITS % CHUNKS, kv_head = task / (SPLITS * CHUNKS) % N_KV_HEADS;
        const int row = task / (SPLITS * CHUNKS * N_KV_HEADS), position = step.position(row);
        const Keys keys(position);
        if (split >= keys.splits) continue;
        const bool newest = split == keys.splits - 1;
        const int begin = keys.begin(split), end = newest ? position : keys.begin(split + 1);
        const int first_head = kv_head * GROUP + chunk * HEADS, heads = min(HEADS, GROUP - chunk * HEADS);
        const u64* qkv = step.scratch + AT_QKV + row * QKV_ROWS;
        const int* pages = step.pages + row * static_cast<int>(step.numbers.pages_a_row);
        const bool rotates = step.numbers.cos;

        auto line_of = [&](int token) {
            return (static_cast<u64>(pages[token / PAGE_TOKENS]) * N_KV_HEADS + kv_head) * PAGE_TOKENS + token % PAGE_TOKENS;
        };
        // The next key and value are loaded during the products of the last.
        Eight k, v;
        const int own_head = step.warp % HEADS, sharer = step.warp / HEADS;
        int at = sharer < SHARERS ? begin + sharer * SLOTS + slot : end;
        auto read = [&] {
            const int known = max(min(at, end - 1), 0);
            const u64 line = line_of(known), first = line * HEAD_DIM + column;
            k.read(layer.keys + first, layer.key_scales, line, at < end && active), v.read(layer.values + first, layer.value_scales, line, at < end && active);
        };
        read();

        // A warp a head: queries, then the key, then the value of this token.
        if (step.warp < (newest ? HEADS + 2 : HEADS)) {
            const int w = step.warp;
            const bool query = w < HEADS, value = w > HEADS;
            const int head = query ? first_head + min(w, heads - 1) : N_HEADS + (value ? N_KV_HEADS : 0) + kv_head;
            const float scale = query ? rsqrtf(static_cast<float>(HEAD_DIM)) * 1.4426950408889634f : 1;
            float* to = shared + (query ? w * HEAD_DIM : AT_NEW + (value ? HEAD_DIM : 0));
            const float* gamma = query ? layer.query_gamma : value ? nullptr : layer.key_gamma;
            placed(step, qkv + head * HEAD_DIM, gamma, rotates && !value, position, scale, !query && !CACHE_INT8, to);
            __syncwarp();
            if (!query) {
                const u64 line = line_of(position);
                Cached* kept = (value ? layer.values : layer.keys) + line * HEAD_DIM;
#if CACHE_INT8
                to_bytes(to, step.lane, chunk == 0 ? kept : nullptr, (value ? layer.value_scales : layer.key_scales) + line);
#else
                #pragma unroll 1
                for (int i = step.lane; i < HEAD_DIM && chunk == 0; i += 32) kept[i] = from_float(to[i]);
#endif
            }
        }
        __syncthreads();

        Attention a;
        eight(a.q, shared + own_head * HEAD_DIM + column, active);
        // The newest key comes first, and is one lane group's.
        float key[8], value[8];
        bool there = newest && sharer == SHARERS - 1 && slot == 0;
        eight(key, shared + AT_NEW + column, there && active), eight(value, shared + AT_NEW + HEAD_DIM + column, there && active);
        #pragma unroll 1
        for (;;) {
            if (__any_sync(~0u, there)) a.add(key, value, there);
            there = at < end;
            if (!__any_sync(~0u, there)) break;
            k.floats(key), v.floats(value);
            at += APART;
            read();
        }
        // The keys of a warp together, then the warps of a head.
        float highest = a.peak;
        #pragma unroll
        for (int o = KEY_LANES; o < 32; o <<= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
        const float correction = exp_2(a.peak - highest);
        a.sum *= correction;
        #pragma unroll
        for (int i = 0; i < 8; i++) a.out[i] *= correction;
        #pragma unroll
        for (int o = KEY_LANES; o < 32; o <<= 1) {
            a.sum += __shfl_xor_sync(~0u, a.sum, o);
            #pragma unroll
            for (int i = 0; i < 8; i++) a.out[i] += __shfl_xor_sync(~0u, a.out[i], o);
        }
        if (slot == 0 && active) {
            float4* to = reinterpret_cast<float4*>(shared + AT_OUT + step.warp * HEAD_DIM + column);
            to[0] = make_float4(a.out[0], a.out[1], a.out[2], a.out[3]), to[1] = make_float4(a.out[4], a.out[5], a.out[6], a.out[7]);
        }
        if (step.lane == 0) *reinterpret_cast<float2*>(shared + AT_PEAKS + step.warp * 2) = make_float2(highest, a.sum);
        __syncthreads();
        #pragma unroll 1
        for (int i = step.thread; i < heads * HEAD_DIM; i += THREADS) {
            const int h = i / HEAD_DIM;
            float highest = NOTHING, total = 0, out = 0;
            #pragma unroll 4
            for (int w = h; w < SHARERS * HEADS; w += HEADS) highest = fmaxf(highest, shared[AT_PEAKS + w * 2]);
            #pragma unroll 4
            for (int w = h; w < SHARERS * HEADS; w += HEADS) {
                const float2 peak = *reinterpret_cast<const float2*>(shared + AT_PEAKS + w * 2);
                const float f = exp_2(peak.x - highest);
                total = fmaf(f, peak.y, total), out = fmaf(f, shared[AT_OUT + w * HEAD_DIM + i % HEAD_DIM], out);
            }
            const int at = (row * N_HEADS + first_head + h) * SPLITS + split;
            publish(step.scratch + AT_PARTS + at * HEAD_DIM + i % HEAD_DIM, out / total, step.epoch);
            if (i % HEAD_DIM == 0) publish(step.scratch + AT_WEIGHT + at, highest + log2f(total), step.epoch);
        }
        __syncthreads();
    }
}

// The splits of all heads together, in shared memory: two columns a thread.
__device__ __forceinline__ void of_heads(const Step& step) {
    constexpr int PAIRS = HEADS_WIDTH / 2, SOME = least(SPLITS, 4);
    #pragma unroll 1
    for (int i = step.thread; i < step.rows * PAIRS; i += THREADS) {
        const int row = i / PAIRS, head = i / (HEAD_DIM / 2), column = i % (HEAD_DIM / 2) * 2, splits = Keys(step.position(row)).splits;
        const u64 *weights = step.scratch + AT_WEIGHT + head * SPLITS, *from = step.scratch + AT_PARTS + head * (SPLITS * HEAD_DIM) + column;
        float x = 0, y = 0, peak = NOTHING, total = 0;
        #pragma unroll 1
        for (int begin = 0; begin < splits; begin += SOME) {
            Two v[SOME];
            Word w[SOME];
            poll([&] {
                bool all = true;
                #pragma unroll
                for (int s = 0; s < SOME; s++) {
                    const int split = min(begin + s, splits - 1);
                    w[s] = ask(weights + split), v[s] = ask_two(from + split * HEAD_DIM);
                }
                #pragma unroll
                for (int s = 0; s < SOME; s++) all = all && w[s].e == step.epoch && v[s].there(step.epoch);
                return all;
            });
            float highest = peak;
            #pragma unroll
            for (int s = 0; s < SOME; s++) highest = fmaxf(highest, __uint_as_float(w[s].v));
            const float correction = exp_2(peak - highest);
            x *= correction, y *= correction, total *= correction, peak = highest;
            #pragma unroll
            for (int s = 0; s < SOME; s++) {
                const float weight = begin + s < splits ? exp_2(__uint_as_float(w[s].v) - highest) : 0;
                total += weight, x = fmaf(weight, __uint_as_float(v[s].a.v), x), y = fmaf(weight, __uint_as_float(v[s].b.v), y);
            }
        }
        Half* to = reinterpret_cast<Half*>(memory) + i * 2;
        to[0] = from_float(x / total), to[1] = from_float(y / total);
    }
    __syncthreads();
}

// ---- products

// What a warp multiplies: the rows of a tile, along its steps. Its first weights can be read before
// there is an input.
struct Weights {
    const Part& part;
    int warp, lane, tiles, task, at, end;
    const uint4* from[TILE];
    using Registers = uint4[STEPS][TILE];

    __device__ __forceinline__ Weights(const Step& step, const Part& part, Registers& v) : part(part), warp(step.warp), lane(step.lane) {
        tiles = ceil_div(part.count * part.own, TILE);
        begin(warp, v);
    }
    __device__ __forceinline__ bool has() const { return task < tiles << part.split_bits; }
    __device__ __forceinline__ int row() const { return (task >> part.split_bits) * TILE; }
    __device__ __forceinline__ int share() const { return task & ((1 << part.split_bits) - 1); }
    __device__ __forceinline__ int loads() const { return part.k / WEIGHTS; }
    __device__ __forceinline__ bool begin(int next, Registers& v) {
        task = next;
        // Without a task all are zeros: what is not set lives on in registers.
        const int steps = has() ? ceil_div(loads(), 32) : 0;
        at = steps * share() >> part.split_bits, end = steps * (share() + 1) >> part.split_bits;
        #pragma unroll
        for (int i = 0; i < TILE; i++) {
            const int r = min(row() + i, part.count * part.own - 1);
            const int n = r < part.own ? part.first + r : part.n + part.first + r - part.own;
            from[i] = reinterpret_cast<const uint4*>(part.weight + static_cast<u64>(max(n, 0)) * part.pitch) + lane;
        }
        #pragma unroll
        for (int a = 0; a < STEPS; a++) read(v[a], at + a);
        return has();
    }
    __device__ __forceinline__ int load(int s) const { return s * 32 + lane; }
    __device__ __forceinline__ void read(uint4 (&v)[TILE], int s) const {
        const bool there = s < end && load(s) < loads();
        #pragma unroll
        for (int i = 0; i < TILE; i++) v[i] = there ? stream(from[i] + s * 32) : make_uint4(0, 0, 0, 0);
    }
};

// This block's rows of a weight, by the input in shared memory: sums, which `sum_of` gives.
__device__ __forceinline__ void multiply(const Step& step, const Part& part, Weights& w, Weights::Registers& v) {
    constexpr int PARTS = WEIGHTS / HALVES;
    const Half* input = reinterpret_cast<const Half*>(memory);
    float* sums = step.sums();
    #pragma unroll 1
    for (bool more = w.has(); more; more = w.task + WARPS < w.tiles << part.split_bits && w.begin(w.task + WARPS, v)) {
        float sum[TILE][BATCH] = {};
        #pragma unroll 1
        for (; w.at < w.end; w.at += STEPS) {
            #pragma unroll
            for (int a = 0; a < STEPS; a++) {
                const int load = w.load(w.at + a);
                if (w.at + a < w.end && load < w.loads()) {
                    #pragma unroll
                    for (int p = 0; p < PARTS; p++) {
                        float f[TILE][HALVES];
                        #pragma unroll
                        for (int i = 0; i < TILE; i++) spread_weights(f[i], v[a][i], p);
                        #pragma unroll
                        for (int r = 0; r < BATCH; r++) {
                            float x[HALVES];
                            spread(x, *reinterpret_cast<const uint4*>(input + r * part.k + load * WEIGHTS + p * HALVES));
                            #pragma unroll
                            for (int i = 0; i < TILE; i++) {
                                #pragma unroll
                                for (int k = 0; k < HALVES; k++) sum[i][r] = fmaf(f[i][k], x[k], sum[i][r]);
                            }
                        }
                    }
                }
                w.read(v[a], w.at + STEPS + a);
            }
        }
        #pragma unroll
        for (int i = 0; i < TILE; i++) {
            #pragma unroll
            for (int r = 0; r < BATCH; r++) {
                const float all = sum_lanes(sum[i][r]);
                if (step.lane == (i * BATCH + r) % 32 && w.row() + i < part.rows) sums[(w.share() * part.rows + w.row() + i) * BATCH + r] = all;
            }
        }
    }
    __syncthreads();
}
__device__ __forceinline__ float sum_of(const Step& step, const Part& part, int at, int row) {
    float all = 0;
    #pragma unroll 4
    for (int s = 0; s < 1 << part.split_bits; s++) all += step.sums()[(s * part.rows + at) * BATCH + row];
    return all;
}

// The scales and biases of a block's rows, in shared memory; products take turns. A thread's first
// ones are read before they are kept, so that it does not wait for them.
struct Extras {
    const Part& part;
    float* at;
    float scale = 1, bias = 0;

    __device__ __forceinline__ Extras(const Step& step, const Part& part, int turn)
        : part(part), at(reinterpret_cast<float*>(memory + AT_EXTRAS) + turn % 2 * (2 * MOST_ROWS)) {
        if (step.thread < least(part.count * part.own, MOST_ROWS)) read(step.thread);
    }
    __device__ __forceinline__ void read(int i) {
        const int n = i < part.own ? part.first + i : part.n + part.first + i - part.own;
        if (INT8) scale = part.scales[n];
        if (part.bias) bias = part.bias[n];
    }
    __device__ __forceinline__ void keep(const Step& step) {
        #pragma unroll 1
        for (int i = step.thread; i < part.count * part.own; i += THREADS) {
            if (i >= THREADS) read(i);
            at[i] = scale, at[MOST_ROWS + i] = bias;
        }
    }
    // What a product gives in a row of the block.
    __device__ __forceinline__ float total(const Step& step, int i, int row) const {
        return fmaf(sum_of(step, part, i, row), at[i], at[MOST_ROWS + i]);
    }
};

// ---- greedy tokens

// Of two equal logits the first token is meant; what is no number is above all, with a token of -1.
struct Argmax {
    float logit;
    int token;

    __device__ __forceinline__ void or_else(float other, int others) {
        if (other > logit || (other == logit && others < token)) logit = other, token = others;
    }
    __device__ __forceinline__ void of_lanes() {
        #pragma unroll
        for (int o = 16; o; o >>= 1) or_else(__shfl_xor_sync(~0u, logit, o), __shfl_xor_sync(~0u, token, o));
    }
};

__device__ __forceinline__ void predict(const Step& step, const Part& part) {
    const float infinity = __int_as_float(0x7f800000);
    float* of_warps = reinterpret_cast<float*>(memory + AT_REDUCED);
    u64* largest = step.scratch + AT_LARGEST;
    #pragma unroll 1
    for (int row = 0; row < step.rows; row++) {
        Argmax best{-infinity, NO_TOKEN};
        #pragma unroll 1
        for (int i = step.thread; i < part.own; i += THREADS) {
            float logit = sum_of(step, part, i, row);
            if (INT8) logit *= part.scales[part.first + i];
            step.logits[static_cast<u64>(row) * VOCABULARY + part.first + i] = logit;
            if (logit != logit) best.or_else(infinity, -1);
            else best.or_else(logit, part.first + i);
        }
        best.of_lanes();
        if (step.lane == 0) of_warps[2 * step.warp] = best.logit, of_warps[2 * step.warp + 1] = __int_as_float(best.token);
        __syncthreads();
        if (step.warp == 0) {
            best = Argmax{of_warps[2 * (step.lane % WARPS)], __float_as_int(of_warps[2 * (step.lane % WARPS) + 1])};
            best.of_lanes();
            if (step.lane == 0) {
                u64* to = largest + 2 * (row * BLOCKS + step.block);
                publish(to, best.logit, step.epoch), publish(to + 1, static_cast<u32>(best.token), step.epoch);
            }
        }
        __syncthreads();
    }
    if (step.block > 0) return;
    if (step.warp < step.rows) {
        Argmax best{-infinity, NO_TOKEN};
        #pragma unroll 1
        for (int block = step.lane; block < BLOCKS; block += 32) {
            Two v;
            poll([&] {
                v = ask_two(largest + 2 * (step.warp * BLOCKS + block));
                return v.there(step.epoch);
            });
            best.or_else(__uint_as_float(v.a.v), static_cast<int>(v.b.v));
        }
        __syncwarp();
        best.of_lanes();
        if (step.lane == 0) {
            step.greedy[step.warp] = Watch::dead() || best.token == NO_TOKEN ? -1 : best.token;
            step.following[step.warp] = step.positions[step.warp] + 1;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_step_any_shape(
    const Layer* layers, State* state, u64* scratch, const int* ids, const int* positions, const int* pages, Half* hidden, float* logits,
    int* greedy, int* following, const __grid_constant__ Numbers numbers
) {
    Step step{layers, state, scratch, ids, positions, pages, hidden, logits, greedy, following, numbers,
        static_cast<int>(numbers.rows), static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32),
        static_cast<int>(threadIdx.x), reinterpret_cast<volatile State*>(state)->layers};
    const float nan = __int_as_float(0x7fc00000);
    // After a step whose waits were too long, none is right: the result is no number.
    if (reinterpret_cast<volatile State*>(state)->error) {
        const u64 all = static_cast<u64>(step.rows) * VOCABULARY;
        for (u64 i = step.block * THREADS + step.thread; i < all; i += BLOCKS * THREADS) logits[i] = nan;
        if (step.block > 0) return;
        for (int i = step.thread; i < step.rows * D_MODEL; i += THREADS) hidden[i] = from_float(nan);
        if (step.thread < step.rows) greedy[step.thread] = -1, following[step.thread] = positions[step.thread] + 1;
        return;
    }
    if (step.thread == 0) Watch::begin();
    // Rows that are none are zeros, or numbers of other layers.
    for (int i = step.thread; i < AT_SUMS / 16; i += THREADS) reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
    // The residual stream of the block's rows.
    float* residual = reinterpret_cast<float*>(memory + AT_RESIDUAL);
    const int first = Out::begin(step.block), own = Out::begin(step.block + 1) - first;
    #pragma unroll 1
    for (int i = step.thread; i < step.rows * own; i += THREADS) residual[i % own * BATCH + i / own] = step.embedded(i / own, first + i % own);
    constexpr int POINTERS = sizeof(Layer) / 8;
    u64* kept = reinterpret_cast<u64*>(memory + AT_LAYERS);
    if (step.thread < POINTERS) kept[step.thread] = reinterpret_cast<const u64*>(layers)[step.thread];
    // After the last layer comes the head, in place of queries, keys and values.
    #pragma unroll 1
    for (int l = 0; l <= N_LAYERS; l++) {
        const bool last = l == N_LAYERS;
        const Layer& layer = reinterpret_cast<const Layer*>(kept)[l % 2];
        u64* next = kept + (l + 1) % 2 * POINTERS;
        #pragma unroll 1
        for (int turn = QKV; turn <= (last ? QKV : DOWN); turn++) {
            // A block that owns no rows meets no other barrier: its warps would overwrite addresses
            // that others still read.
            __syncthreads();
            // The next layer takes the place of the one before.
            if (turn == QKV && step.thread < POINTERS) next[step.thread] = reinterpret_cast<const u64*>(layers + min(l + 1, N_LAYERS - 1))[step.thread];
            if (turn == OUT) attend(step, layer);
            Part part;
            if (turn == QKV && last) part = part_of<Head>(step, numbers.head, numbers.head_scales, nullptr);
            else if (turn == QKV) part = part_of<Qkv>(step, layer.qkv, layer.qkv_scales, layer.qkv_bias);
            else if (turn == OUT) part = part_of<Out>(step, layer.out, layer.out_scales, layer.out_bias);
            else if (turn == UP) part = part_of<Up>(step, layer.up, layer.up_scales, layer.up_bias);
            else part = part_of<Down>(step, layer.down, layer.down_scales, layer.down_bias);
            Extras extras(step, part, turn);
            {
                Weights::Registers held;
                Weights weights(step, part, held);
                if (part.own > 0 || last) {
                    if (turn == OUT) {
                        of_heads(step);
                    } else if (turn == DOWN) {
                        of_feed_forward(step);
                    } else {
                        const u64* from = turn == UP ? scratch + AT_Y : l > 0 ? scratch + AT_X : nullptr;
                        const float* gamma = turn == UP ? layer.feed_forward_gamma : last ? numbers.final_gamma : layer.attention_gamma;
                        const float* beta = turn == UP ? layer.feed_forward_beta : last ? numbers.final_beta : layer.attention_beta;
                        normed(step, from, gamma, beta, last);
                    }
                    if (!last) extras.keep(step);
                    multiply(step, part, weights, held);
                }
            }
            if (last) {
                if (step.block == 0) {
                    for (int i = step.thread; i < step.rows * D_MODEL; i += THREADS) hidden[i] = reinterpret_cast<const Half*>(memory)[i];
                }
                predict(step, part);
                break;
            }
            if (turn == QKV) step.epoch++;
            // A line of threads for each token.
            constexpr int LINE = THREADS / BATCH;
            const int row = step.thread / LINE, begin = step.thread % LINE;
            if (row >= step.rows) continue;
            if (turn != UP) {
                u64* to = scratch + (turn == QKV ? AT_QKV : turn == OUT ? AT_Y : AT_X) + row * part.n + part.first;
                #pragma unroll 1
                for (int i = begin; i < part.own; i += LINE) {
                    float v = extras.total(step, i, row);
                    if (turn != QKV) v = residual[i * BATCH + row] += v;
                    publish(to + i, v, step.epoch);
                }
                continue;
            }
            auto inner = [&](int i) {
                const float v = activated(extras.total(step, i, row));
                return GATED ? v * extras.total(step, part.own + i, row) : v;
            };
            u64* to = scratch + AT_H + row * H_WORDS + part.first / (D_FF / H_WORDS);
            #pragma unroll 1
            for (int i = begin; i < part.own / (D_FF / H_WORDS); i += LINE) {
#if DTYPE == 0
                publish(to + i, inner(i), step.epoch);
#else
                publish(to + i, from_float(inner(2 * i)) | static_cast<u32>(from_float(inner(2 * i + 1))) << 16, step.epoch);
#endif
            }
        }
    }
    // All blocks have read it long before.
    if (step.block == 0 && step.thread == 0) state->layers = step.epoch;
    if (Watch::dead()) reinterpret_cast<volatile State*>(state)->error = 1;
}
