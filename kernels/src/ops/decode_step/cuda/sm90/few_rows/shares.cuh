// Which rows of each matrix, and which keys, a block has.

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

    __device__ HeadRows(int vocabulary, int block)
        : first(at(vocabulary, block)), count(at(vocabulary, block + 1) - first) {}
    static __device__ __forceinline__ int at(int vocabulary, int block) {
        return static_cast<int>(static_cast<u64>(vocabulary) * static_cast<u32>(block) / gridDim.x);
    }
    __device__ __forceinline__ int stages() const { return (count + HEAD_ROWS - 1) / HEAD_ROWS; }
};

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

    static __device__ __forceinline__ volatile u32& read() {
        return *reinterpret_cast<volatile u32*>(memory + AT_ROLES);
    }
    // By one warp, before all others begin.
    static __device__ __forceinline__ void write(const Step& step) {
        const Share share(blockIdx.x, step, 0);
        const int row = blockIdx.x / N_HEADS;
        const bool joins = row < BATCH && Share::splits_of(step.position(row, 0)) > 1;
        read() = (share.some ? ATTENDS : 0) | (joins ? JOINS : 0);
    }
};
