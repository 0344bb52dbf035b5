// A decode step of up to eight rows of a model of any shape, from tokens to logits and greedy
// tokens: a block of threads on each multiprocessor, all resident.
//
// Between the products are words {value, epoch} in global memory:
//
//               qkv          attention        output        up             down
//     x ---------------> qkv ----------> parts -------> y -----------> h -----------> x
//        norm                            of heads         norm
//
//     weight [N, K]   +----------------------+
//     block 0         | warp 0, warp 1, ...  |   a warp multiplies two rows, or a part of their
//     block 1         |                      |   columns, by all tokens
//                     +----------------------+
//
// Layers with a router have experts instead of `up` and `down`, and one exchange more: see
// any_shape/experts.cuh.
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
// matrix: QKV_PITCH, OUT_PITCH, UP_PITCH, DOWN_PITCH, EXPERTS_UP_PITCH, EXPERTS_DOWN_PITCH,
// EMBEDDING_PITCH, HEAD_PITCH, POSITION_PITCH, ANGLE_PITCH. N_EXPERTS is 0 without experts. With
// them, D_FF is that of layers without, or 0, and there are CHOICES (experts of a token), EXPERT_FF
// (their inner width), SIGMOID (the router's scores; 0: softmax), NORMALIZED and EXPERT_SCALE. WORDS
// and SHARED are what it takes to be needed of words, and of bytes of shared memory.
constexpr int WARPS = 16, THREADS = 32 * WARPS;
constexpr int QKV_ROWS = (N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM;
constexpr int HEADS_WIDTH = N_HEADS * HEAD_DIM;
constexpr int GROUP = N_HEADS / N_KV_HEADS;
constexpr int GATES = GATED ? 2 : 1, OF_WORD = DTYPE == 0 ? 1 : 2;      // numbers in a word of h
constexpr float NOTHING = -1e30f;                      // the score of a key that is none

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

#include "exchange.cuh"
#include "largest.cuh"
#include "numbers.cuh"

// ---- what a step works on

struct Layer {
    const Weight *qkv, *out, *up, *down;
    const float *qkv_scales, *out_scales, *up_scales, *down_scales;      // of INT8
    const float *qkv_bias, *out_bias, *up_bias, *down_bias;              // or 0
    const float *attention_gamma, *attention_beta, *feed_forward_gamma, *feed_forward_beta;
    const float *query_gamma, *key_gamma;                                // or 0
    Cached *keys, *values;                             // [pages, N_KV_HEADS, PAGE_TOKENS, HEAD_DIM]
    float *key_scales, *value_scales;                  // of INT8: [pages, N_KV_HEADS, PAGE_TOKENS]
    // [N_EXPERTS, D_MODEL], or 0 where the layer has no experts; `up` and `down` are theirs, one
    // after another; of each the gate first.
    const float *router, *router_bias, *choice_bias;
};
static_assert(sizeof(Layer) == 200, "layers");
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

// Choices of all rows, and the most experts that they may be of.
constexpr bool MIXTURE = N_EXPERTS > 0;
constexpr int SLOTS = BATCH * CHOICES, MOST_CHOSEN = least(N_EXPERTS, SLOTS);
struct Routing {
    float logits[most(1, BATCH * N_EXPERTS)];
    int chosen[SLOTS], places[SLOTS];                  // of a slot: its expert, and where it is in `slots`
    float weights[SLOTS];
    int count;                                         // of experts that were chosen
    int experts[most(1, MOST_CHOSEN)], members[most(1, MOST_CHOSEN)], slots[most(1, MOST_CHOSEN * BATCH)];
};

// What blocks exchange, in words: f32, but two numbers of 16 bits of h.
constexpr int H_WORDS = most(D_FF, MIXTURE ? CHOICES * EXPERT_FF : 0) / OF_WORD;
constexpr int AT_X = 0;
constexpr int AT_Y = AT_X + BATCH * D_MODEL;
constexpr int AT_QKV = AT_Y + BATCH * D_MODEL;
constexpr int AT_H = AT_QKV + BATCH * QKV_ROWS;
constexpr int AT_LOGITS = AT_H + BATCH * H_WORDS;
constexpr int AT_PARTS = AT_LOGITS + ceil_div(BATCH * N_EXPERTS, 2) * 2;
constexpr int AT_WEIGHT = AT_PARTS + BATCH * N_HEADS * SPLITS * HEAD_DIM;
// [BATCH, BLOCKS]: a logit, and its token.
constexpr int AT_LARGEST = AT_WEIGHT + ceil_div(BATCH * N_HEADS * SPLITS, 2) * 2;
static_assert(AT_LARGEST + 2 * BATCH * BLOCKS == WORDS, "words");
static_assert(EXPERT_FF % 8 == 0 && EXPERT_FF % WEIGHTS == 0, "experts");
static_assert(D_MODEL % 8 == 0 && D_FF % 8 == 0 && HEAD_DIM % 8 == 0 && HEAD_DIM <= 256 && BATCH <= 8, "sizes");
static_assert(D_MODEL % WEIGHTS == 0 && D_FF % WEIGHTS == 0 && HEADS_WIDTH % WEIGHTS == 0, "rows of whole loads");

// Rows that a warp takes at a time, and steps along them, of 16 bytes a lane.
constexpr int TILE = 2, STEPS = 4;

// Steps that the busiest warp takes if `s` warps share a tile, and some for each tile.
__device__ constexpr int busiest(int tiles, int steps, int s) {
    return ceil_div(tiles * s, WARPS) * (ceil_div(steps, s) + 2);
}
// Two to this are the warps that share a tile.
__device__ constexpr int split_bits(int tiles, int steps, int bits = 0, int of = 1) {
    if (1 << of > least(WARPS, steps)) return bits;
    const bool better = busiest(tiles, steps, 1 << of) < busiest(tiles, steps, 1 << bits);
    return split_bits(tiles, steps, better ? of : bits, of + 1);
}

// How a block's warps share its rows of a weight [N, K]; where it is two in one, `COUNT`, a block
// owns the same rows of both. Rows are shared out by `UNIT`.
template <int N_, int K_, int PITCH_, int COUNT_ = 1, int UNIT = 2>
struct Product {
    static constexpr int N = N_, K = K_, PITCH = PITCH_, COUNT = COUNT_;
    static constexpr int ROWS = COUNT * UNIT * ceil_div(N / UNIT, BLOCKS);    // of a block, at most
    static constexpr int TILES = ceil_div(ROWS, TILE), ALL_STEPS = ceil_div(K / WEIGHTS, 32);
    static constexpr int SPLIT_BITS = split_bits(TILES, ALL_STEPS), SUMS = (1 << SPLIT_BITS) * ROWS * BATCH;

    static __device__ __forceinline__ int begin(int block) {
        return UNIT * static_cast<int>(static_cast<u64>(N / UNIT) * static_cast<u32>(block) / BLOCKS);
    }
};
using Qkv = Product<QKV_ROWS, D_MODEL, QKV_PITCH>;
using Out = Product<D_MODEL, HEADS_WIDTH, OUT_PITCH>;
using Up = Product<D_FF, D_MODEL, UP_PITCH, GATED ? 2 : 1>;
using Down = Product<D_MODEL, D_FF, DOWN_PITCH>;
using Head = Product<VOCABULARY, D_MODEL, HEAD_PITCH, 1, 1>;
// Experts are shared out between blocks with rows of x. A row's sums have an order that does not
// depend on other rows: warps share tiles as they do for one row.
constexpr int MIXERS = least(BLOCKS, D_MODEL / 2);
__device__ constexpr int expert_rows(int chosen) { return GATES * 2 * ceil_div(chosen * (EXPERT_FF / 2), MIXERS); }
constexpr int EXPERT_UP_ROWS = expert_rows(MOST_CHOSEN), EXPERT_DOWN_ROWS = MOST_CHOSEN * Out::ROWS;
constexpr int EXPERT_UP_BITS = split_bits(ceil_div(expert_rows(CHOICES), TILE), ceil_div(D_MODEL / WEIGHTS, 32));
constexpr int EXPERT_DOWN_BITS = split_bits(CHOICES * ceil_div(Out::ROWS, TILE), ceil_div(EXPERT_FF / WEIGHTS, 32));
constexpr int EXPERT_SUMS =
    BATCH * most(EXPERT_UP_ROWS << EXPERT_UP_BITS, most(EXPERT_DOWN_ROWS << EXPERT_DOWN_BITS, MIXTURE ? WARPS : 0));

// Shared memory, in bytes.
constexpr int KEY_LANES =
    HEAD_DIM <= 8 ? 1 : HEAD_DIM <= 16 ? 2 : HEAD_DIM <= 32 ? 4 : HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32;
constexpr int INPUT = BATCH * most(most(D_MODEL, HEADS_WIDTH), H_WORDS * OF_WORD) * static_cast<int>(sizeof(Half));
// Of attention, in floats.
constexpr int AT_NEW = HEADS * HEAD_DIM;
constexpr int AT_OUT = AT_NEW + 2 * HEAD_DIM;
constexpr int AT_PEAKS = AT_OUT + WARPS * HEAD_DIM;
constexpr int ATTENTION = (AT_PEAKS + WARPS * 2) * 4;
constexpr int AT_SUMS = ceil_div(most(INPUT, ATTENTION), 16) * 16;
constexpr int SUMS =
    most(most(Qkv::SUMS, Out::SUMS), most(most(Up::SUMS, Down::SUMS), most(Head::SUMS, EXPERT_SUMS))) * 4;
constexpr int AT_RESIDUAL = AT_SUMS + ceil_div(SUMS, 16) * 16;
constexpr int MOST_ROWS = most(most(Qkv::ROWS, Out::ROWS), Up::ROWS);
constexpr int AT_LAYERS = ceil_div(AT_RESIDUAL + BATCH * Out::ROWS * 4, 16) * 16; // of two layers
constexpr int AT_EXTRAS = AT_LAYERS + 2 * static_cast<int>(sizeof(Layer));        // of two products
constexpr int AT_REDUCED = AT_EXTRAS + 2 * 2 * MOST_ROWS * 4;
constexpr int AT_ROUTING = AT_REDUCED + 2 * WARPS * 4 + WARPS * 8;
constexpr int OF_ROUTING = MIXTURE ? static_cast<int>(sizeof(Routing)) : 0;
static_assert(AT_ROUTING + OF_ROUTING == SHARED && SHARED <= AT_WATCH, "shared memory");
__device__ __forceinline__ Routing& routing() { return *reinterpret_cast<Routing*>(memory + AT_ROUTING); }

// The products of a layer, one after the other; the router's where there are experts.
enum { QKV, OUT, ROUTER, UP, DOWN, TURNS };

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
        if (numbers.position_embedding) {
            x += to_float(numbers.position_embedding[static_cast<u64>(position(row)) * POSITION_PITCH + column]);
        }
        return x;
    }
};

// A product, as a block sees it.
struct Part {
    const Weight* weight;
    const float *scales, *bias;
    int n, pitch, loads, count, rows, split_bits;      // as `Product` has them; loads of a row
    int first, own;                                    // rows of the block
    // Of experts that were chosen, as if their matrices were one: for `up` the block's rows of all
    // gates, and those of what is gated, for `down` the same rows of each expert.
    enum { DENSE, EXPERTS_UP, EXPERTS_DOWN } kind = DENSE;

    __device__ __forceinline__ bool mixed() const { return MIXTURE && kind != DENSE; }
    __device__ __forceinline__ int all() const {
        return MIXTURE && kind == EXPERTS_DOWN ? routing().count * own : count * own;
    }
    // The line of the weight where the block's row `r` is; and at which place its expert is.
    __device__ __forceinline__ int line(int r) const {
        return mixed() ? line_of_experts(r) : r < own ? first + r : n + first + r - own;
    }
    __device__ __forceinline__ int line_of_experts(int r) const;
    __device__ __forceinline__ int place(int r) const;
};
template <class P>
__device__ __forceinline__ Part part_of(
    const Step& step, const Weight* weight, const float* scales, const float* bias
) {
    const int first = P::begin(step.block), own = P::begin(step.block + 1) - first;
    return {weight, scales, bias, P::N, P::PITCH, P::K / WEIGHTS, P::COUNT, P::ROWS, P::SPLIT_BITS, first, own};
}

#include "any_shape/inputs.cuh"
#include "any_shape/attention.cuh"
#include "any_shape/products.cuh"
#include "any_shape/experts.cuh"
#include "any_shape/greedy.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_step_any_shape(
    const Layer* layers, State* state, u64* scratch, const int* ids, const int* positions, const int* pages,
    Half* hidden, float* logits, int* greedy, int* following, const __grid_constant__ Numbers numbers
) {
    Step step{layers, state, scratch, ids, positions, pages, hidden, logits, greedy, following, numbers,
        static_cast<int>(numbers.rows), static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x / 32),
        static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x),
        reinterpret_cast<volatile State*>(state)->layers};
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
    for (int i = step.thread; i < AT_SUMS / 16; i += THREADS) {
        reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
    }
    // The residual stream of the block's rows.
    float* residual = reinterpret_cast<float*>(memory + AT_RESIDUAL);
    {
        const int first = Out::begin(step.block), own = Out::begin(step.block + 1) - first;
        #pragma unroll 1
        for (int i = step.thread; i < step.rows * own; i += THREADS) {
            residual[i % own * BATCH + i / own] = step.embedded(i / own, first + i % own);
        }
    }
    constexpr int POINTERS = sizeof(Layer) / 8;
    u64* kept = reinterpret_cast<u64*>(memory + AT_LAYERS);
    if (step.thread < POINTERS) kept[step.thread] = reinterpret_cast<const u64*>(layers)[step.thread];
    // After the last layer comes the head, in place of queries, keys and values.
    #pragma unroll 1
    for (int phase = 0; phase <= N_LAYERS * TURNS; phase++) {
        const int l = phase / TURNS, turn = phase % TURNS;
        const bool last = l == N_LAYERS;
        const Layer& layer = reinterpret_cast<const Layer*>(kept)[l % 2];
        u64* next = kept + (l + 1) % 2 * POINTERS;
        const bool mixed = MIXTURE && !last && layer.router;
        if (turn == ROUTER && !mixed) continue;
        // A block that owns no rows meets no other barrier: its warps would overwrite addresses
        // that others still read.
        __syncthreads();
        // The next layer takes the place of the one before.
        if (turn == QKV && step.thread < POINTERS) {
            next[step.thread] = reinterpret_cast<const u64*>(layers + min(l + 1, N_LAYERS - 1))[step.thread];
        }
        if (turn == OUT) attend(step, layer);
        if (mixed && turn == UP && mixes(step.block)) route(step, layer);
        Part part{};
        if (turn == QKV && last) part = part_of<Head>(step, numbers.head, numbers.head_scales, nullptr);
        else if (turn == QKV) part = part_of<Qkv>(step, layer.qkv, layer.qkv_scales, layer.qkv_bias);
        else if (turn == OUT) part = part_of<Out>(step, layer.out, layer.out_scales, layer.out_bias);
        else if (mixed && turn == UP) part = up_of_experts(step, layer);
        else if (mixed && turn == DOWN) part = down_of_experts(step, layer);
        else if (turn == UP) part = part_of<Up>(step, layer.up, layer.up_scales, layer.up_bias);
        else if (turn == DOWN) part = part_of<Down>(step, layer.down, layer.down_scales, layer.down_bias);
        Extras extras(step, part, turn > ROUTER ? turn - 1 : turn);
        {
            Weights::Registers held;
            Weights weights(step, part, held);
            if (MIXTURE && turn == ROUTER) RouterProduct::read(step, layer, 0, held);
            if (part.own > 0 || last || turn == ROUTER && (RouterProduct::own(step.block) > 0 || mixes(step.block))) {
                if (turn == OUT) {
                    of_heads(step);
                } else if (turn == DOWN) {
                    of_feed_forward(step, mixed ? CHOICES * EXPERT_FF : D_FF);
                } else if (!mixed || turn != UP) {
                    const bool first_norm = turn == QKV;
                    const u64* from = !first_norm ? scratch + AT_Y : l > 0 ? scratch + AT_X : nullptr;
                    const float* gamma = !first_norm ? layer.feed_forward_gamma
                        : last ? numbers.final_gamma : layer.attention_gamma;
                    const float* beta = !first_norm ? layer.feed_forward_beta
                        : last ? numbers.final_beta : layer.attention_beta;
                    normed(step, from, gamma, beta, last);
                }
                if (MIXTURE && turn == ROUTER) {
                    RouterProduct::multiply(step, layer, held);
                } else {
                    if (!last) extras.keep(step);
                    multiply(step, part, weights, held);
                }
            }
        }
        if (MIXTURE && turn == ROUTER) continue;
        if (last) {
            if (step.block == 0) {
                for (int i = step.thread; i < step.rows * D_MODEL; i += THREADS) {
                    hidden[i] = reinterpret_cast<const Half*>(memory)[i];
                }
            }
            predict(step, part);
            break;
        }
        if (turn == QKV) step.epoch++;
        // A line of threads for each token.
        constexpr int LINE = THREADS / BATCH;
        const int row = step.thread / LINE, begin = step.thread % LINE;
        if (mixed && turn == UP) {
            publish_inner(step, part, layer);
            continue;
        }
        if (row >= step.rows) continue;
        if (turn != UP) {
            u64* to = scratch + (turn == QKV ? AT_QKV : turn == OUT ? AT_Y : AT_X) + row * part.n + part.first;
            #pragma unroll 1
            for (int i = begin; i < part.own; i += LINE) {
                float v = mixed && turn == DOWN
                    ? sum_of_experts(step, part, layer, i, row)
                    : extras.total(step, i, row);
                if (turn != QKV) v = residual[i * BATCH + row] += v;
                publish(to + i, v, step.epoch);
            }
            continue;
        }
        auto inner = [&](int i) {
            const float v = activated(extras.total(step, i, row));
            return GATED ? v * extras.total(step, part.own + i, row) : v;
        };
        u64* to = scratch + AT_H + row * (D_FF / OF_WORD) + part.first / OF_WORD;
        #pragma unroll 1
        for (int i = begin; i < part.own / OF_WORD; i += LINE) {
#if DTYPE == 0
            publish(to + i, inner(i), step.epoch);
#else
            publish(
                to + i, from_float(inner(2 * i)) | static_cast<u32>(from_float(inner(2 * i + 1))) << 16,
                step.epoch);
#endif
        }
    }
    // All blocks have read it long before.
    if (step.block == 0 && step.thread == 0) state->layers = step.epoch;
    if (Watch::dead()) reinterpret_cast<volatile State*>(state)->error = 1;
}
