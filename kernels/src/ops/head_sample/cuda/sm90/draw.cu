// A token for each row of f32 logits, of whatever kind its draw is, in one launch: see draw.cuh. A
// cluster of SHARES blocks has a row.
//
//   [ block 0 | block 1 | .. ]   of the row's tokens; a thread's are a group, VECTOR side by side
//        ^---------'-------'     the first block reads all groups, and draws

static_assert(MOST_GROUPS == SHARES * DRAWERS, "groups");

struct Info {
    // Lines of counts, or 0.
    u64 vocabulary, lines;
};

// A group's tokens: those of a thread of one of the blocks.
struct ThreadTokens {
    int share;

    __device__ __forceinline__ int groups() const { return SHARES * DRAWERS; }
    __device__ __forceinline__ int most() const { return (share + DRAWERS * VECTOR - 1) / (DRAWERS * VECTOR) * VECTOR; }
    __device__ __forceinline__ int token(int group, int i) const {
        const int within = (i / VECTOR * DRAWERS + group % DRAWERS) * VECTOR + i % VECTOR;
        return within < share ? group / DRAWERS * share + within : NO_TOKEN;
    }
};

__device__ __forceinline__ u32 there(const void* here, u32 rank) {
    u32 at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(here)), "r"(rank));
    return at;
}
__device__ __forceinline__ float float_there(const void* here, u32 rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there(here, rank)) : "memory");
    return v;
}

extern "C" __global__ void __cluster_dims__(SHARES, 1, 1) __launch_bounds__(DRAWERS, 2) draw(
    const float* logits, const int* streams, const int* positions, const int* lines, const float* numbers,
    const float* prompt, float* written, const float* bias, int* out, const __grid_constant__ Info info
) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    DrawMemory& memory = *reinterpret_cast<DrawMemory*>(bytes);
    Group* groups = reinterpret_cast<Group*>(bytes + sizeof(DrawMemory));
    static_assert(sizeof(DrawMemory) + DRAWERS * sizeof(Group) <= SHARED, "shared memory");
    const int row = blockIdx.x / SHARES, vocabulary = info.vocabulary;
    const u32 rank = cluster_rank();
    const int line = lines[row] < static_cast<int>(info.lines) ? lines[row] : -1;
    const Way way(logits + static_cast<u64>(row) * vocabulary, {prompt, written, bias}, line, vocabulary,
                  numbers + row * WAY_NUMBERS, streams[row], positions[row]);
    const ThreadTokens of{(vocabulary / VECTOR + SHARES - 1) / SHARES * VECTOR};
    const int first = rank * of.share;
    groups[threadIdx.x] = grouped<VECTOR>(way, first, min(first + of.share, vocabulary));
    cluster_sync();
    if (rank > 0) {
        // No block ends before its groups are read.
        cluster_sync();
        return;
    }
    float logits_of[SHARES], masses[SHARES];
    int tokens[SHARES];
    const Group* own = groups + threadIdx.x;
    const bool weighs = way.weighs();
    #pragma unroll
    for (int r = 0; r < SHARES; r++) {
        logits_of[r] = float_there(&own->largest.logit, r),
        tokens[r] = __float_as_int(float_there(&own->largest.token, r));
        masses[r] = weighs ? float_there(&own->mass, r) : 0;
    }
    Group together;
    #pragma unroll
    for (int r = 0; r < SHARES; r++) {
        Group group;
        group.largest = {logits_of[r], tokens[r]}, group.mass = masses[r];
        memory.tops[r * DRAWERS + threadIdx.x] = logits_of[r];
        together.add(group, weighs);
    }
    // Others wait for this; it waits for none.
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    const int token = drawn(way, memory, of, together);
    if (threadIdx.x > 0) return;
    out[row] = token;
    if (line >= 0 && token >= 0) written[way.line + token] += 1;
}
