// Attention, gradients of keys and values (Dao, 2023): tiles of keys and values stay, queries and the output's gradients come by,
// those of all heads that share the keys. Everything is transposed: a key has a row.
//
//   P^T = exp(scale K Q^T - log_sum_exp)     dS^T = P^T (V dO^T - delta)     dV = P^T dO     dK = scale dS^T Q
//
// A second producer warp brings what is known of each query: log_sum_exp and delta.

constexpr int QUERIES = 64;
// The sums of wide heads leave no registers for probabilities of 32 bits: 16 have to do.
constexpr bool WIDE = HEAD_DIM > 64;
constexpr int KEPT_BYTES = KEPT * HEAD_DIM * 2;
constexpr int Q_BYTES = QUERIES * HEAD_DIM * 2;
constexpr int STATISTICS_BYTES = QUERIES * 8;

struct Shared {
    u32 base = shared_base();

    __device__ u32 k() const { return base; }
    __device__ u32 v() const { return base + KEPT_BYTES; }
    __device__ u32 q(int stage) const { return base + 2 * KEPT_BYTES + stage * 2 * Q_BYTES; }
    __device__ u32 grad(int stage) const { return q(stage) + Q_BYTES; }
    __device__ u32 out(int consumer) const { return q(STAGES) + consumer * 64 * HEAD_DIM * 2; }
    __device__ u32 statistics(int stage) const { return out(CONSUMERS) + stage * STATISTICS_BYTES; }
    __device__ u32 barrier(int index) const { return statistics(STAGES) + 8 * index; }
    __device__ u32 kept_full() const { return barrier(0); }
    __device__ u32 kept_empty() const { return barrier(1); }
    // One arrival of each producer warp.
    __device__ u32 full(int stage) const { return barrier(2 + stage); }
    __device__ u32 empty(int stage) const { return barrier(2 + STAGES + stage); }
};

__device__ void produce(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const TensorMap& grad_map,
                        const Info& info, const Shared& shared) {
    Tiles tiles(info.keys, info.kv_heads, info.batch);
    Ring<STAGES> at;
    u32 kept_parity = 1;
    int group = static_cast<int>(info.heads / info.kv_heads);
    for (Tile tile; tiles.next(tile);) {
        barrier_wait(shared.kept_empty(), kept_parity);
        kept_parity ^= 1;
        barrier_expect(shared.kept_full(), 2 * KEPT_BYTES);
        bring<KEPT>(shared.k(), k_map, tile.first, tile.head, tile.batch, shared.kept_full());
        bring<KEPT>(shared.v(), v_map, tile.first, tile.head, tile.batch, shared.kept_full());
        Range range = seeing_queries<QUERIES>(info, tile.first, KEPT);
        for (int member = 0; member < group; member++) {
            for (int block = range.begin; block < range.end; block++) {
                barrier_wait(shared.empty(at.stage), at.parity ^ 1);
                u32 full = shared.full(at.stage);
                int head = tile.head * group + member;
                barrier_expect(full, 2 * Q_BYTES);
                bring<QUERIES>(shared.q(at.stage), q_map, block * QUERIES, head, tile.batch, full);
                bring<QUERIES>(shared.grad(at.stage), grad_map, block * QUERIES, head, tile.batch, full);
                at.advance();
            }
        }
    }
}

__device__ void produce_statistics(const float2* statistics, const Info& info, const Shared& shared) {
    Tiles tiles(info.keys, info.kv_heads, info.batch);
    Ring<STAGES> at;
    int lane = threadIdx.x % 32, group = static_cast<int>(info.heads / info.kv_heads);
    for (Tile tile; tiles.next(tile);) {
        Range range = seeing_queries<QUERIES>(info, tile.first, KEPT);
        for (int member = 0; member < group; member++) {
            u64 head = static_cast<u64>(tile.batch) * info.heads + tile.head * group + member;
            for (int block = range.begin; block < range.end; block++) {
                barrier_wait(shared.empty(at.stage), at.parity ^ 1);
                #pragma unroll
                for (int i = lane; i < QUERIES; i += 32) {
                    int query = block * QUERIES + i;
                    // Behind the last query all probabilities are 0.
                    float2 of_row = make_float2(INFINITE, 0.0f);
                    if (query < info.queries) {
                        of_row = statistics[head * info.queries + query];
                    }
                    u32 place = shared.statistics(at.stage) + 4 * i;
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"(place), "f"(of_row.x * LOG2_E) : "memory");
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"(place + QUERIES * 4), "f"(of_row.y) : "memory");
                }
                __syncwarp();
                if (lane == 0) {
                    barrier_arrive(shared.full(at.stage));
                }
                at.advance();
            }
        }
    }
}

__device__ __forceinline__ float half_of(u32 pair, int half) {
    float2 both = unpack(pair);
    return half ? both.y : both.x;
}

// What is known of the two queries that this thread has in block `i` of 8.
__device__ __forceinline__ float2 statistic(u32 place, int i) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(place + 4 * (i * 8 + threadIdx.x % 4 * 2)));
    return pair;
}

__device__ void consume(const TensorMap& d_k_map, const TensorMap& d_v_map, const Info& info, const Shared& shared,
                        int consumer) {
    Tiles tiles(info.keys, info.kv_heads, info.batch);
    Ring<STAGES> at;
    u32 kept_parity = 0;
    int thread = threadIdx.x % WARPGROUP;
    float scale = scale_of(info), scale_log2 = scale * LOG2_E;
    u32 rows = consumer * 64 * ROW_BYTES;
    int group = static_cast<int>(info.heads / info.kv_heads);
    Turns turns(consumer);
    for (Tile tile; tiles.next(tile);) {
        int key = tile.first + consumer * 64;
        Range range = seeing_queries<QUERIES>(info, tile.first, KEPT);
        float d_key[HEAD_DIM / 8][4], d_value[HEAD_DIM / 8][4];
        #pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++) {
            #pragma unroll
            for (int value = 0; value < 4; value++) {
                d_key[i][value] = d_value[i][value] = 0.0f;
            }
        }
        barrier_wait(shared.kept_full(), kept_parity);
        kept_parity ^= 1;
        turns.begin();
        int blocks = (range.end - range.begin) * group, block = range.begin, before = 0;
        for (int step = 0; step < blocks; step++, block = block + 1 < range.end ? block + 1 : range.begin) {
            float scores[QUERIES / 8][4], d_scores[QUERIES / 8][4];
            u32 packed[QUERIES / 16][4], d_packed[QUERIES / 16][4];
            barrier_wait(shared.full(at.stage), at.parity);
            wgmma_fence();
            rows_by_rows<KEPT, QUERIES>(scores, shared.k() + rows, shared.q(at.stage));
            wgmma_commit();
            turns.end();
            // The products of the step before are done, too.
            wgmma_wait<0>();
            if (step > 0) {
                release(shared.empty(before));
            }
            #pragma unroll
            for (int i = 0; i < QUERIES / 8; i++) {
                float2 log_sum_exp = statistic(shared.statistics(at.stage), i);
                #pragma unroll
                for (int value = 0; value < 4; value++) {
                    float of_query = value % 2 ? log_sum_exp.y : log_sum_exp.x;
                    scores[i][value] = power_of_2(fmaf(scores[i][value], scale_log2, -of_query));
                }
            }
            if (!spans(queries_of(info, key), queries_of(info, key + 63), block * QUERIES, QUERIES)) {
                mask_sums<QUERIES>(scores, 0.0f, block * QUERIES, [&](int row) { return queries_of(info, key + row); });
            }
            pack_sums<QUERIES>(packed, scores);
            wgmma_fence();
            rows_by_rows<KEPT, QUERIES>(d_scores, shared.v() + rows, shared.grad(at.stage));
            wgmma_commit();
            sums_by_columns<QUERIES>(d_value, packed, shared.grad(at.stage), true);
            wgmma_commit();
            wgmma_wait<1>();
            #pragma unroll
            for (int i = 0; i < QUERIES / 8; i++) {
                float2 delta = statistic(shared.statistics(at.stage) + QUERIES * 4, i);
                #pragma unroll
                for (int value = 0; value < 4; value++) {
                    float probability = WIDE ? half_of(packed[i / 2][i % 2 * 2 + value / 2], value % 2) : scores[i][value];
                    d_scores[i][value] = probability * (d_scores[i][value] - (value % 2 ? delta.y : delta.x));
                }
            }
            pack_sums<QUERIES>(d_packed, d_scores);
            turns.begin();
            wgmma_fence();
            sums_by_columns<QUERIES>(d_key, d_packed, shared.q(at.stage), true);
            wgmma_commit();
            before = at.stage;
            at.advance();
        }
        turns.end();
        wgmma_wait<0>();
        if (blocks > 0) {
            release(shared.empty(before));
        }
        release(shared.kept_empty());
        write_rows(d_value, make_float2(1.0f, 1.0f), shared.out(consumer), d_v_map, key, tile.head, tile.batch, 1 + consumer);
        write_rows(d_key, make_float2(scale, scale), shared.out(consumer), d_k_map, key, tile.head, tile.batch, 1 + consumer);
    }
    if (thread == 0) {
        tma_store_wait();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_kv_hopper(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                                 const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap grad_map,
                                 const __grid_constant__ TensorMap d_k_map, const __grid_constant__ TensorMap d_v_map,
                                 const void*, const void*, const void*, const void*, void*, void*,
                                 const float2* statistics, const __grid_constant__ Info info) {
    Shared shared;
    if (threadIdx.x == 0) {
        barrier_init(shared.kept_full(), 1);
        barrier_init(shared.kept_empty(), RELEASES);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared.full(stage), 2);
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
        } else if (threadIdx.x / 32 == 1) {
            produce_statistics(statistics, info, shared);
        }
    } else {
        registers_raise<232>();
        consume(d_k_map, d_v_map, info, shared, warpgroup - 1);
    }
}
