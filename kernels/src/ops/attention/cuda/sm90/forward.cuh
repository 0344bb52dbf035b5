// Attention, forward (Dao et al., 2022; Shah et al., 2024): tiles of queries stay, keys and values
// come by, the last ones first.
//
// While the values of one block are multiplied, so are the queries by the keys of the next; softmax
// overlaps with the products of values.
//
// `Rows` defines the tiles, the locations of their queries, keys and values, and their visible
// keys: rows of one length (forward.cu), or of any length over pages (paged.cu).

constexpr int KEYS = 128;
constexpr int Q_BYTES = KEPT * HEAD_DIM * 2;
constexpr int KV_BYTES = KEYS * HEAD_DIM * 2;
constexpr int OUT_BYTES = 64 * HEAD_DIM * 2;
// The queries of the next tile come while those of one are multiplied.
constexpr int Q_STAGES = 2;
// Values of wide heads are waited for before the products of keys are begun, those of others behind
// that: so it is faster.
constexpr bool WIDE = HEAD_DIM > 64;

struct Shared {
    u32 base = shared_base();

    __device__ u32 q(int stage) const { return base + stage * Q_BYTES; }
    __device__ u32 out(int consumer) const { return q(Q_STAGES) + consumer * OUT_BYTES; }
    __device__ u32 k(int stage) const { return out(CONSUMERS) + stage * KV_BYTES; }
    __device__ u32 v(int stage) const { return k(STAGES + stage); }
    __device__ u32 barrier(int index) const { return v(STAGES) + 8 * index; }
    __device__ u32 q_full(int stage) const { return barrier(stage); }
    __device__ u32 q_empty(int stage) const { return barrier(Q_STAGES + stage); }
    __device__ u32 k_full(int stage) const { return barrier(2 * Q_STAGES + stage); }
    __device__ u32 k_empty(int stage) const { return k_full(STAGES + stage); }
    __device__ u32 v_full(int stage) const { return k_full(2 * STAGES + stage); }
    __device__ u32 v_empty(int stage) const { return k_full(3 * STAGES + stage); }
};

template <class Rows>
__device__ void produce(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const Rows& rows,
                        const Shared& shared) {
    typename Rows::Tiles tiles = rows.tiles();
    Ring<STAGES> k, v;
    Ring<Q_STAGES> q;
    int group = static_cast<int>(rows.info.heads / rows.info.kv_heads);
    for (typename Rows::Tile tile; tiles.next(tile);) {
        barrier_wait(shared.q_empty(q.stage), q.parity ^ 1);
        barrier_expect(shared.q_full(q.stage), Q_BYTES);
        rows.bring_queries(shared.q(q.stage), q_map, tile, shared.q_full(q.stage));
        q.advance();
        Range range = rows.seen(tile);
        int head = tile.head / group;
        // Keys are needed a block before the values.
        for (int block = range.end - 1; block >= range.begin - 1; block--) {
            if (block >= range.begin) {
                barrier_wait(shared.k_empty(k.stage), k.parity ^ 1);
                barrier_expect(shared.k_full(k.stage), KV_BYTES);
                rows.bring_keys(shared.k(k.stage), k_map, tile, block, head, shared.k_full(k.stage));
                k.advance();
            }
            if (block < range.end - 1) {
                barrier_wait(shared.v_empty(v.stage), v.parity ^ 1);
                barrier_expect(shared.v_full(v.stage), KV_BYTES);
                rows.bring_keys(shared.v(v.stage), v_map, tile, block + 1, head, shared.v_full(v.stage));
                v.advance();
            }
        }
    }
}

using Scores = float[KEYS / 8][4];
// Maxima and sums of a row in so many chains: each operation of a single one would wait for the one
// before.
constexpr int CHAINS = 8;

// Scores become probabilities, relative to the maximum so far; what older sums have to be
// multiplied by.
struct Softmax {
    float maximum[2] = {-INFINITE, -INFINITE};
    float sum[2] = {0.0f, 0.0f};
    float correction[2];

    __device__ __forceinline__ void apply(Scores& scores, float scale_log2) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float chains[CHAINS];
            #pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
                float pair = fmaxf(scores[i][2 * half], scores[i][2 * half + 1]);
                chains[i % CHAINS] = i < CHAINS ? pair : fmaxf(chains[i % CHAINS], pair);
            }
            float most = maximum[half];
            #pragma unroll
            for (int i = 0; i < CHAINS; i++) {
                most = fmaxf(most, chains[i]);
            }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            // A row that has seen nothing yet.
            float base = most == -INFINITE ? 0.0f : most * scale_log2;
            correction[half] = power_of_2(maximum[half] * scale_log2 - base);
            maximum[half] = most;
            #pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
                #pragma unroll
                for (int value = 2 * half; value < 2 * half + 2; value++) {
                    scores[i][value] = power_of_2(fmaf(scores[i][value], scale_log2, -base));
                }
                float pair = scores[i][2 * half] + scores[i][2 * half + 1];
                chains[i % CHAINS] = i < CHAINS ? pair : chains[i % CHAINS] + pair;
            }
            float added = 0.0f;
            #pragma unroll
            for (int i = 0; i < CHAINS; i++) {
                added += chains[i];
            }
            sum[half] = sum[half] * correction[half] + added;
        }
    }
};

template <class Rows>
__device__ __forceinline__ void mask_scores(Scores& scores, const Rows& rows, const typename Rows::Tile& tile,
                                            int query, int key) {
    if (!rows.all_seen(tile, query, key)) {
        mask_sums<KEYS>(scores, -INFINITE, key, [&](int row) { return rows.keys_of(tile, query + row); });
    }
}

template <class Rows>
__device__ void consume(const TensorMap& out_map, const Rows& rows, const Shared& shared, int consumer) {
    typename Rows::Tiles tiles = rows.tiles();
    Ring<STAGES> k, v;
    Ring<Q_STAGES> q;
    int warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
    float scale = scale_of(rows.info), scale_log2 = scale * LOG2_E;
    // The first of the consumer's queries in a tile.
    int query = consumer * 64;
    Scores scores;
    // A tile's queries by a block of keys: they have to be there.
    auto multiply = [&] {
        rows_by_rows<KEPT, KEYS>(scores, shared.q(q.stage) + consumer * 64 * ROW_BYTES, shared.k(k.stage));
    };
    auto first_keys_there = [&] {
        barrier_wait(shared.q_full(q.stage), q.parity);
        barrier_wait(shared.k_full(k.stage), k.parity);
    };
    auto values_there = [&](const typename Rows::Tile& tile, int block) {
        barrier_wait(shared.v_full(v.stage), v.parity);
        rows.clear_unseen(shared.v(v.stage), tile, block, 1 + consumer);
    };
    auto release_keys = [&] {
        warp_arrive(shared.k_empty(k.stage));
        k.advance();
    };
    auto release_values = [&] {
        warp_arrive(shared.v_empty(v.stage));
        v.advance();
    };
    typename Rows::Tile tile;
    bool more = tiles.next(tile);
    if (more) {
        first_keys_there();
        wgmma_fence();
        multiply();
        wgmma_commit();
        wgmma_wait<0>();
        release_keys();
    }
    while (more) {
        Range range = rows.seen(tile);
        u32 probabilities[KEYS / 16][4];
        float out[HEAD_DIM / 8][4];
        Softmax softmax;
        // Sums of a row are those of all its probabilities, dropped ones as well.
        auto drop = rows.drop(tile, query);

        mask_scores(scores, rows, tile, query, (range.end - 1) * KEYS);
        softmax.apply(scores, scale_log2);
        if (DROPOUT) {
            drop.apply(scores, range.end - 1);
        }
        pack_sums<KEYS>(probabilities, scores);
        bool add = false;
        for (int block = range.end - 2; block >= range.begin; block--) {
            barrier_wait(shared.k_full(k.stage), k.parity);
            if (WIDE) {
                values_there(tile, block + 1);
            }
            wgmma_fence();
            multiply();
            wgmma_commit();
            if (!WIDE) {
                values_there(tile, block + 1);
                wgmma_fence();
            }
            sums_by_columns<KEYS>(out, probabilities, shared.v(v.stage), add);
            wgmma_commit();
            add = true;
            wgmma_wait<1>();
            release_keys();
            mask_scores(scores, rows, tile, query, block * KEYS);
            softmax.apply(scores, scale_log2);
            if (DROPOUT) {
                drop.apply(scores, block);
            }
            // Maxima change often at first, and rarely then.
            bool changed = __any_sync(~0u, softmax.correction[0] != 1.0f || softmax.correction[1] != 1.0f);
            auto correct = [&] {
                #pragma unroll
                for (int i = 0; i < HEAD_DIM / 8; i++) {
                    #pragma unroll
                    for (int value = 0; value < 4; value++) {
                        out[i][value] *= softmax.correction[value / 2];
                    }
                }
            };
            // In straight-line code ptxas moves a wait ahead of everything before it, so that
            // nothing would overlap with the product: a branch on the softmax's result prevents
            // that. No sum is below 0, but wide heads lack registers for the comparison. PTX
            // requires all warps of a warpgroup to reach a wait by the same path; here they may
            // not, and rely on each warp waiting for itself, as on Hopper.
            if (!WIDE) {
                if (softmax.sum[0] < 0.0f) {
                    __trap();
                }
                wgmma_wait<0>();
                if (changed) {
                    correct();
                }
            } else if (changed) {
                wgmma_wait<0>();
                correct();
            } else {
                wgmma_wait<0>();
            }
            release_values();
            pack_sums<KEYS>(probabilities, scores);
        }
        warp_arrive(shared.q_empty(q.stage));
        q.advance();
        typename Rows::Tile done = tile;
        auto divide = [&] {
            float2 factors;
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum = softmax.sum[half];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                (half ? factors.y : factors.x) = __fdividef(drop.kept(), sum);
                if (lane % 4 == 0) {
                    rows.keep(done, query + warp * 16 + half * 8 + lane / 4, softmax.maximum[half] * scale, sum);
                }
            }
            return factors;
        };
        auto write = [&](float2 factors) {
            rows.write(out, factors, shared.out(consumer), out_map, done, query, 1 + consumer);
        };
        more = tiles.next(tile);
        values_there(done, range.begin);
        wgmma_fence();
        sums_by_columns<KEYS>(out, probabilities, shared.v(v.stage), add);
        wgmma_commit();
        if (more) {
            // The next tile's first scores, while this one is written.
            first_keys_there();
            wgmma_fence();
            multiply();
            wgmma_commit();
            float2 factors = divide();
            wgmma_wait<1>();
            release_values();
            write(factors);
            wgmma_wait<0>();
            release_keys();
        } else {
            float2 factors = divide();
            wgmma_wait<0>();
            release_values();
            write(factors);
        }
    }
    if (threadIdx.x % WARPGROUP == 0) {
        tma_store_wait();
    }
}

// All of a kernel, but for what its rows are.
template <class Rows>
__device__ __forceinline__ void attend(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map,
                                       const TensorMap& out_map, const Rows& rows) {
    Shared shared;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Q_STAGES; stage++) {
            barrier_init(shared.q_full(stage), 1);
            barrier_init(shared.q_empty(stage), RELEASES);
        }
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared.k_full(stage), 1);
            barrier_init(shared.v_full(stage), 1);
            barrier_init(shared.k_empty(stage), RELEASES);
            barrier_init(shared.v_empty(stage), RELEASES);
        }
        barrier_init_fence();
    }
    __syncthreads();
    // By the shuffle the compiler sees that it is the same in all lanes: what is computed of it
    // takes uniform registers.
    int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        registers_lower<40>();
        if (threadIdx.x == 0) {
            produce(q_map, k_map, v_map, rows, shared);
        }
    } else {
        registers_raise<232>();
        consume(out_map, rows, shared, warpgroup - 1);
    }
}
