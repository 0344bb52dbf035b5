// What all kernels of whole decode steps share: how far the exchange between blocks is, and waits
// that end, after WAIT_SECONDS, which the host defines.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct State {
    u32 epoch, error;                                  // of few rows; of all
    u32 turns[3];                                      // of 8, 16 and 32 rows: whose turn it is of
                                                       // the sets of words
    u32 layers;                                        // of any shape: those of all launches
    u32 large_batch[3];                                // of 64, 96 and 128 rows: the number of the
                                                       // last flags
};

// Shared memory: the last bytes are the watch's.
constexpr int SHARED_BYTES = 232448, AT_WATCH = SHARED_BYTES - 16;
extern __shared__ __align__(1024) unsigned char memory[];

__device__ __forceinline__ float exp_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// No wait is for ever: past the limit all waits are over at once, and the error stands in the
// state.
struct Watch {
    static constexpr u32 LIMIT = WAIT_SECONDS * (WAIT_SECONDS > 2 ? 976562u : 1000000000u);

    static __device__ __forceinline__ volatile u32* at(int i) {
        return reinterpret_cast<volatile u32*>(memory + AT_WATCH) + i;
    }
    static __device__ __forceinline__ u32 ticks() {
#if WAIT_SECONDS > 2
        // In units of 1,024 ns, or they would come around too soon.
        u64 t;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
        return t >> 10;
#else
        u32 t;
        asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t));
        return t;
#endif
    }
    static __device__ __forceinline__ void begin() { *at(0) = ticks(), *at(1) = 0; }
    static __device__ __forceinline__ bool dead() { return *at(1); }
    static __device__ __forceinline__ bool late() {
        const bool late = ticks() - *at(0) > LIMIT;
        if (late) *at(1) = 1;
        return late;
    }
    // Whether the phase of this parity is over; if not, it was waited for too long. To ask for the
    // time takes longer than to try.
    static __device__ __forceinline__ bool wait(u32 barrier, u32 parity) {
        #pragma unroll 1
        for (u32 i = 1;; i++) {
            u32 done;
            asm volatile(
                "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p; }"
                : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
            if (done) return true;
            if (dead() || i % 64 == 0 && late()) return false;
        }
    }
};
