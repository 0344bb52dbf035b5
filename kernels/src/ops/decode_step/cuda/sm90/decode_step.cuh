// What the kernels of whole decode steps for models of 1,024 columns share. The host defines BATCH,
// N_LAYERS, D_MODEL, N_HEADS, N_KV_HEADS, HEAD_DIM, D_FF, EPSILON, whether weights are INT8 (bytes
// with a scale for each row), and DRAWS: whether few rows draw their tokens in the same launch.
#if INT8
using Weight = unsigned char;
#else
using Weight = u16;
#endif

constexpr int PAGE_TOKENS = 64, GROUP = N_HEADS / N_KV_HEADS;
// Warps that attend to a page together, each to 16 of its tokens.
constexpr int TEAM_WARPS = PAGE_TOKENS / 16;
constexpr int QKV_ROWS = (N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM, HEADS_WIDTH = N_HEADS * HEAD_DIM;
constexpr float NOTHING = -1e30f;                      // the score of a key that is none

struct Layer {
    const Weight *qkv, *out, *up, *down;
    const u16 *attention_norm, *feed_forward_norm, *query_norm, *key_norm;
    u16 *keys, *values;                                // [pages, N_KV_HEADS, PAGE_TOKENS, HEAD_DIM]
};
// Of INT8.
struct Scales {
    const float *qkv, *out, *up, *down;                // of a block
    const float *embedding, *head;                     // the same for all
};
struct Numbers {
    u64 rows, pages_a_row, vocabulary, scales, last_position;
};

// A position within the rotary table and a row's pages, whatever the device was given.
__device__ __forceinline__ int clamped(int position, int last) {
    return static_cast<int>(min(static_cast<u32>(position), static_cast<u32>(last)));
}

__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ float gated(float gate, float up) {
    return __fdividef(gate, 1 + exp_2(-1.4426950408889634f * gate)) * up;
}
// Two of four signed bytes, by the bytes of `x`, as bf16: 128 + (the lower seven bits), less 128
// and the sign's 128.
__device__ __forceinline__ u32 from_bytes(u32 four, u32 which) {
    const u32 x = __byte_perm(four, 0, which);
    u32 v;
    asm("sub.rn.bf16x2 %0, %1, %2;"
        : "=r"(v)
        : "r"((x & 0x007f007fu) | 0x43004300u), "r"((x & 0x00800080u) | 0x43004300u));
    return v;
}
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// This block's number. The compiler does not know that it is the same each time.
__device__ __forceinline__ int opaque_block() {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

// A warp's wait for one of a layer's four inputs. How long it was in the layer before, which shared
// memory keeps, tells for how long there is no need to ask: each question takes from what L2 gives
// to the weights.
struct Patience {
    static constexpr u32 MOST_WAITED = 1 << 16;        // cycles
    static constexpr u32 EIGHTHS = BATCH == 4 ? (INT8 ? 4 : 5) : 3; // of the wait before
    u32 before, begun;

    // Where the warp's waits are kept, and for which input this one is.
    __device__ __forceinline__ void begin(u32 waits, u32 warp, int input) {
        before = waits + (warp * 4 + input) * 4;
        begun = cycles();
    }
    __device__ __forceinline__ void hold() const {
        u32 waited;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(waited) : "r"(before) : "memory");
        waited = min(waited, MOST_WAITED) * EIGHTHS / 8;
        #pragma unroll 1
        while (cycles() - begun < waited) {}
    }
    __device__ __forceinline__ void end(u32 lane) const {
        if (lane == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(before), "r"(cycles() - begun) : "memory");
    }
    static __device__ __forceinline__ u32 cycles() {
        u32 cycles;
        asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles));
        return cycles;
    }
};

// How a layer's tensors are read by TMA: its weights, and keys and values by blocks of 16 tokens
// and by whole pages.
enum { QKV_MAP, OUT_MAP, UP_MAP, DOWN_MAP, KEYS_MAP, VALUES_MAP, KEY_PAGES_MAP, VALUE_PAGES_MAP, MAPS };

// As many groups of 64 columns and rows of a weight as its map says, from these on.
__device__ __forceinline__ void load_groups(u32 to, const TensorMap* map, int group, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(map), "r"(0), "r"(row), "r"(group), "r"(barrier) : "memory");
}

// The stages that the producer fills and the consumers read, with two barriers each: full, empty.
template <int STAGE, int STAGES, int AT_BARRIERS>
struct RingOf {
    u32 base, slot = 0, parity = 0;
    u32 lost = 0;                                      // 1: a stage was waited for too long

    __device__ __forceinline__ u32 stage() const { return base + slot * STAGE; }
    __device__ __forceinline__ u32 full() const { return base + AT_BARRIERS + slot * 16; }
    __device__ __forceinline__ u32 empty() const { return full() + 8; }
    __device__ __forceinline__ void await() { lost |= Watch::wait(full(), parity) ? 0 : 1; }
    __device__ __forceinline__ void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    // Releases the stage once `value`, the last one loaded from it, has arrived: an arrival at a
    // barrier does not wait for loads. `nil` is a zero that is unknown to the compiler.
    __device__ __forceinline__ void release(int lane, u32 value, u32 nil) {
        // Not one that was lost: the producer would fill it while the copy before is still on its
        // way.
        if (lane == 0 && !lost) {
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty() + (value & nil)) : "memory");
        }
        advance();
    }
    __device__ __forceinline__ void skip(int stages) {
        for (slot += stages; slot >= STAGES; slot -= STAGES) parity ^= 1;
    }
    // By one thread, before all others begin.
    __device__ __forceinline__ void init(int consumers) const {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(base + AT_BARRIERS + s * 16, 1);
            barrier_init(base + AT_BARRIERS + s * 16 + 8, consumers);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
};

// After a step whose waits were too long, none is right: the result is no number.
__device__ __forceinline__ bool failed(State* state, u16* hidden, int rows) {
    if (!reinterpret_cast<volatile State*>(state)->error) return false;
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < rows * D_MODEL; i += blockDim.x) hidden[i] = 0x7fc0;
    }
    return true;
}

