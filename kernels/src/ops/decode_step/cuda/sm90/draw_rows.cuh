// Draws for all rows of a whole step, in its own launch: each block groups the logits that it gave,
// and the first blocks draw for a row each, once all groups are there. See draw.cuh.

// Sampling parameters of rows; without sampling, each row is greedy.
struct Draws {
    const int *streams, *lines;                        // [rows]
    const float* numbers;                              // [rows, WAY_NUMBERS]
    const float* prompt;                               // [n_lines, vocabulary], as the next two
    float* written;
    const float* bias;
    int n_lines;
    bool some;

    __device__ __forceinline__ Way way(const float* logits, int vocabulary, int row, int position) const {
        const int line = lines[row] < n_lines ? lines[row] : -1;
        return {
            logits + static_cast<u64>(row) * vocabulary, {prompt, written, bias}, line, vocabulary,
            numbers + row * WAY_NUMBERS, static_cast<u32>(streams[row]), position};
    }
};

// What blocks tell of their logits: groups of each row, and that they are there.
struct GroupBoard {
    static constexpr int WORDS_OF_ROW = MOST_GROUPS * sizeof(Group) / 8;
    static constexpr int ROOM = BATCH * WORDS_OF_ROW + MOST_GROUPS / DRAW_WARPS;
    u64* words;

    __device__ __forceinline__ Group* groups(int row) const {
        return reinterpret_cast<Group*>(words + row * WORDS_OF_ROW);
    }
    __device__ __forceinline__ u64* ready(int block) const { return words + BATCH * WORDS_OF_ROW + block; }
};

// A group's tokens: those of a warp of a block, which has the tokens from Begin(block) on.
template <class Begin>
struct WarpTokens {
    Begin begin;
    int vocabulary;

    __device__ __forceinline__ int groups() const { return gridDim.x * DRAW_WARPS; }
    __device__ __forceinline__ int most() const {
        return ((vocabulary + gridDim.x - 1) / gridDim.x + DRAWERS - 1) / DRAWERS * 32;
    }
    __device__ __forceinline__ int token(int group, int i) const {
        const int block = group / DRAW_WARPS;
        const int token = begin(block) + group % DRAW_WARPS * 32 + i % 32 + i / 32 * DRAWERS;
        return token < begin(block + 1) ? token : NO_TOKEN;
    }
};

// By 512 threads of each block, those that gave its logits among them; those of the first blocks
// are told the token of their row, which stands `at` behind its position. What lay in shared memory
// is lost. Apart from the rest of a step, whose registers are scarce.
template <class Begin>
__device__ __noinline__ int draw_rows(
    Draws draws, const float* logits, int vocabulary, const int* positions, int at, int rows, Begin begin,
    GroupBoard board, u32 epoch
) {
    DrawMemory& own = *reinterpret_cast<DrawMemory*>(memory);
    const int thread = threadIdx.x, row = blockIdx.x, blocks = gridDim.x;
    const int first = begin(row), end = begin(row + 1);
    draw_barrier();
    #pragma unroll 1
    for (int r = 0; r < rows; r++) {
        const Way way = draws.way(logits, vocabulary, r, positions[r] + at);
        const bool weighs = way.weighs();
        Group group = grouped<1>(way, first, end);
        #pragma unroll
        for (int o = 16; o; o >>= 1) {
            Group other;
            other.largest = {
                __shfl_xor_sync(~0u, group.largest.logit, o), __shfl_xor_sync(~0u, group.largest.token, o)};
            other.mass = __shfl_xor_sync(~0u, group.mass, o);
            group.add(other, weighs);
        }
        if (thread % 32 == 0) board.groups(r)[row * DRAW_WARPS + thread / 32] = group;
    }
    draw_barrier();
    if (thread == 0) {
        // What all threads of the block wrote comes before it.
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        asm volatile(
            "st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(board.ready(row)), "l"(static_cast<u64>(epoch)) : "memory");
    }
    if (row >= rows) return NO_TOKEN;
    #pragma unroll 1
    for (int block = thread; block < blocks; block += DRAWERS) {
        u64 ready;
        #pragma unroll 1
        do {
            asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(ready) : "l"(board.ready(block)) : "memory");
        } while (ready != epoch && !Watch::late());
    }
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    draw_barrier();
    const Way way = draws.way(logits, vocabulary, row, positions[row] + at);
    const bool weighs = way.weighs();
    const WarpTokens<Begin> of{begin, vocabulary};
    Group together;
    #pragma unroll 4
    for (int g = thread; g < of.groups(); g += DRAWERS) {
        const float* at = reinterpret_cast<const float*>(board.groups(row) + g);
        Group group;
        group.largest = {__ldcg(at), __float_as_int(__ldcg(at + 1))}, group.mass = __ldcg(at + 2);
        own.tops[g] = group.largest.logit;
        together.add(group, weighs);
    }
    const int token = drawn(way, own, of, together);
    if (Watch::dead()) return -1;
    if (thread == 0 && way.line >= 0 && token >= 0) draws.written[way.line + token] += 1;
    return token;
}
