// The producer: a warp that streams the block's weights, keys and values through the ring.

struct Producer {
    StageRing ring;
    Watch watch;
    u32 opened = 0;
    bool leads = threadIdx.x % 32 == 0;

    StageRing arriving = ring;
    bool dead = false;
    u32 limit, flying = 0;                             // stages on their way: at most, and now

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
            for (int r = 0; r < 32; r += 8) {
                p.lines(layer.qkv + static_cast<u64>(q0 + r) * D_MODEL, max(0, min(8, qn - r)));
            }
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
            for (int t = 0; t < OUT_T; t++) {
                p.slices(layer.out + static_cast<u64>(d0) * HEADS_WIDTH + t * SLICE, dn, HEADS_WIDTH);
            }
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
