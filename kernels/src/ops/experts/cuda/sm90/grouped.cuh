// What grouped products on Hopper share, besides gemm.cuh.
//
//   a thread:   wait empty[s] -> TMA into a[s], and into b[s] of both blocks -> full[s] counts the bytes
//   consumers:  wait full[s] -> wgmma -> arrive at empty[s] of both blocks

using Half = unsigned short;

constexpr int WARPS = WARPGROUP / 32;
// Where a consumer's warp puts 16 rows of 64 columns of the result.
constexpr int BUFFER_BYTES = 16 * ROW_BYTES;

// Layout of shared memory.
struct Shared {
    u32 base;

    __device__ u32 a(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ u32 b(int stage) const { return a(stage) + A_BYTES; }
    __device__ u32 buffer(int warp) const { return base + STAGES * STAGE_BYTES + warp * BUFFER_BYTES; }
    __device__ u32 full(int stage) const { return buffer(CONSUMERS * WARPS) + 8 * stage; }
    __device__ u32 empty(int stage) const { return full(STAGES + stage); }
};

// 16 bytes to memory. An assignment became four stores.
__device__ __forceinline__ void memory_store(void* to, uint4 bytes) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bytes.x), "r"(bytes.y), "r"(bytes.z),
                 "r"(bytes.w)
                 : "memory");
}

// Frees a stage in both blocks.
__device__ __forceinline__ void free_stage(const Shared& shared, int stage) {
    int thread = threadIdx.x % WARPGROUP;
    if (thread < BLOCKS) {
        barrier_arrive(shared.empty(stage), thread);
    }
}

// A warpgroup: the sums of some stages, for the 64 rows of `a` that begin so far behind its first
// row. `meanwhile` is done while the first products run, and `before_last` when the last stage is
// there.
template <typename Meanwhile, typename BeforeLast>
__device__ __forceinline__ void multiply_stages(Sums& sums, const Shared& shared, Ring<STAGES>& at, int stages,
                                                u32 a_offset, const Meanwhile& meanwhile,
                                                const BeforeLast& before_last) {
    auto multiply = [&](bool add, bool last) {
        barrier_wait(shared.full(at.stage), at.parity);
        u32 a = shared.a(at.stage) + a_offset;
        if (last) {
            before_last(a);
        }
        multiply_stage(sums, a, shared.b(at.stage), add);
    };
    multiply(false, stages == 1);
    int before = at.stage;
    at.advance();
    meanwhile();
    for (int step = 1; step < stages; step++) {
        multiply(true, step == stages - 1);
        wgmma_wait<1>();
        free_stage(shared, before);
        before = at.stage;
        at.advance();
    }
    wgmma_wait<0>();
    free_stage(shared, before);
}

// A warpgroup without rows: one warp frees the stages. Others wait for it, as a barrier tells two
// rounds apart and not three.
__device__ __forceinline__ void skip_stages(const Shared& shared, Ring<STAGES>& at, int stages, int barrier) {
    for (int step = 0; step < stages; step++) {
        if (threadIdx.x % WARPGROUP < 32) {
            barrier_wait(shared.full(at.stage), at.parity);
            free_stage(shared, at.stage);
        }
        at.advance();
    }
    named_barrier(barrier, WARPGROUP);
}

// Prepares barriers, and lets a thread bring stages and two warpgroups multiply.
template <typename Produce, typename Consume>
__device__ __forceinline__ void in_roles(const Shared& shared, const Produce& produce, const Consume& consume) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared.full(stage), 1);
            barrier_init(shared.empty(stage), BLOCKS * CONSUMERS);
        }
        barrier_init_fence();
    }
    cluster_sync();
    int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        registers_lower<40>();
        if (threadIdx.x == 0) {
            produce();
        }
    } else {
        registers_raise<232>();
        consume(warpgroup - 1);
    }
    // The other block may still write to this one's memory.
    cluster_sync();
}

