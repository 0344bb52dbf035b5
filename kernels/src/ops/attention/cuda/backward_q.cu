// Attention, gradient of the queries (Dao, 2023): tiles of queries and of the output's gradient stay, keys and values come by.
//
//   P = exp(scale Q K^T - log_sum_exp)     dS = P (dO V^T - delta)     dQ = scale dS K
//
// KEYS: keys of a block, 128, or 64 for wide heads, whose sums take the registers.

constexpr int KEYS = HEAD_DIM == 64 ? 128 : 64;
constexpr int KEPT_BYTES = KEPT * HEAD_DIM * 2;
constexpr int KV_BYTES = KEYS * HEAD_DIM * 2;
constexpr int OUT_BYTES = 64 * HEAD_DIM * 2;

struct Shared {
    u32 base = shared_base();

    __device__ u32 q() const { return base; }
    __device__ u32 grad() const { return base + KEPT_BYTES; }
    __device__ u32 out(int consumer) const { return base + 2 * KEPT_BYTES + consumer * OUT_BYTES; }
    __device__ u32 k(int stage) const { return out(CONSUMERS) + stage * 2 * KV_BYTES; }
    __device__ u32 v(int stage) const { return k(stage) + KV_BYTES; }
    __device__ u32 barrier(int index) const { return k(STAGES) + 8 * index; }
    __device__ u32 kept_full() const { return barrier(0); }
    __device__ u32 kept_empty() const { return barrier(1); }
    __device__ u32 full(int stage) const { return barrier(2 + stage); }
    __device__ u32 empty(int stage) const { return barrier(2 + STAGES + stage); }
};

__device__ void produce(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const TensorMap& grad_map,
                        const Info& info, const Shared& shared) {
    Tiles tiles(info.queries, info.heads, info.batch);
    Ring<STAGES> at;
    u32 kept_parity = 1;
    int group = static_cast<int>(info.heads / info.kv_heads);
    for (Tile tile; tiles.next(tile);) {
        barrier_wait(shared.kept_empty(), kept_parity);
        kept_parity ^= 1;
        barrier_expect(shared.kept_full(), 2 * KEPT_BYTES);
        bring<KEPT>(shared.q(), q_map, tile.first, tile.head, tile.batch, shared.kept_full());
        bring<KEPT>(shared.grad(), grad_map, tile.first, tile.head, tile.batch, shared.kept_full());
        Range range = seen_keys<KEYS>(info, tile.first, KEPT);
        for (int block = range.begin; block < range.end; block++) {
            barrier_wait(shared.empty(at.stage), at.parity ^ 1);
            u32 full = shared.full(at.stage);
            barrier_expect(full, 2 * KV_BYTES);
            bring<KEYS>(shared.k(at.stage), k_map, block * KEYS, tile.head / group, tile.batch, full);
            bring<KEYS>(shared.v(at.stage), v_map, block * KEYS, tile.head / group, tile.batch, full);
            at.advance();
        }
    }
}

__device__ void consume(const TensorMap& d_q_map, const float2* statistics, const Info& info, const Shared& shared,
                        int consumer) {
    Tiles tiles(info.queries, info.heads, info.batch);
    Ring<STAGES> at;
    u32 kept_parity = 0;
    int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    float scale = scale_of(info), scale_log2 = scale * LOG2_E;
    u32 rows = consumer * 64 * ROW_BYTES;
    Turns turns(consumer);
    for (Tile tile; tiles.next(tile);) {
        int query = tile.first + consumer * 64;
        float log_sum_exp[2], delta[2];
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = query + warp * 16 + half * 8 + lane / 4;
            u64 place = (static_cast<u64>(tile.batch) * info.heads + tile.head) * info.queries + row;
            float2 of_row = row < info.queries ? statistics[place] : make_float2(INFINITE, 0.0f);
            log_sum_exp[half] = of_row.x * LOG2_E;
            delta[half] = of_row.y;
        }
        Range range = seen_keys<KEYS>(info, tile.first, KEPT);
        float scores[KEYS / 8][4], d_scores[KEYS / 8][4], d_query[HEAD_DIM / 8][4];
        u32 packed[KEYS / 16][4];
        int before = 0;
        barrier_wait(shared.kept_full(), kept_parity);
        kept_parity ^= 1;
        turns.begin();
        for (int block = range.begin; block < range.end; block++) {
            barrier_wait(shared.full(at.stage), at.parity);
            wgmma_fence();
            rows_by_rows<KEPT, KEYS>(scores, shared.q() + rows, shared.k(at.stage));
            wgmma_commit();
            rows_by_rows<KEPT, KEYS>(d_scores, shared.grad() + rows, shared.v(at.stage));
            wgmma_commit();
            turns.end();
            wgmma_wait<1>();
            if (block > range.begin) {
                release(shared.empty(before));
            }
            #pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
                #pragma unroll
                for (int value = 0; value < 4; value++) {
                    scores[i][value] = power_of_2(fmaf(scores[i][value], scale_log2, -log_sum_exp[value / 2]));
                }
            }
            if (!spans(keys_of(info, query), keys_of(info, query + 63), block * KEYS, KEYS)) {
                mask_sums<KEYS>(scores, 0.0f, block * KEYS, [&](int row) { return keys_of(info, query + row); });
            }
            wgmma_wait<0>();
            #pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
                #pragma unroll
                for (int value = 0; value < 4; value++) {
                    d_scores[i][value] = scores[i][value] * (d_scores[i][value] - delta[value / 2]);
                }
            }
            pack_sums<KEYS>(packed, d_scores);
            turns.begin();
            wgmma_fence();
            sums_by_columns<KEYS>(d_query, packed, shared.k(at.stage), block > range.begin);
            wgmma_commit();
            before = at.stage;
            at.advance();
        }
        turns.end();
        release(shared.kept_empty());
        wgmma_wait<0>();
        release(shared.empty(before));
        write_rows(d_query, make_float2(scale, scale), shared.out(consumer), d_q_map, query, tile.head, tile.batch,
                   1 + consumer);
    }
    if (thread == 0) {
        tma_store_wait();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_q_hopper(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                                const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap grad_map,
                                const __grid_constant__ TensorMap d_q_map, const void*, const void*, const void*,
                                const void*, void*, const float2* statistics, const __grid_constant__ Info info) {
    Shared shared;
    if (threadIdx.x == 0) {
        barrier_init(shared.kept_full(), 1);
        barrier_init(shared.kept_empty(), RELEASES);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared.full(stage), 1);
            barrier_init(shared.empty(stage), RELEASES);
        }
        barrier_init_fence();
    }
    __syncthreads();
    int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        registers_lower<40>();
        if (threadIdx.x == 0) {
            produce(q_map, k_map, v_map, grad_map, info, shared);
        }
    } else {
        registers_raise<232>();
        consume(d_q_map, statistics, info, shared, warpgroup - 1);
    }
}
