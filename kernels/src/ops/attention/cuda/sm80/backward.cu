// Attention, backward (Dao, 2023): a block keeps a tile of keys and values, and iterates over the
// queries and the output's gradients of all heads that share the keys. Scores are transposed: a
// key has a row.
//
//   P^T = exp(scale K Q^T - log_sum_exp)     dS^T = P^T (V dO^T - delta)
//   dV += P^T dO     dK += dS^T Q     dQ += dS K
//
// Eight warps share each product: those of scores and of what is left of keys 4 along the keys and
// 2 along queries or columns, those of dQ by 32 columns each. P and dS go through shared memory.
//
//   copies      Q(i+1), dO(i+1)
//   products    S(i), dP(i)        P, dS to shared memory | dV(i), dK(i), dQ(i), to memory
//              ^ barrier: Q(i), dO(i) have arrived        ^ barrier: P(i), dS(i) are stored
//
// Sums of dQ are added up in f32, in memory. Equal inputs give equal bits, since the order is
// fixed: blocks take tiles of keys by a ticket, from a head's last to its first, and each begins
// with the first queries that see its keys. So those whose turn is before a block's are ahead of
// it, and nobody waits for a later ticket. The first that reaches a tile of queries stores its
// sums, the next ones add theirs, and the last one writes the tile.
//
// Compiled with: KEYS (64, 128), QUERIES (64, 128), STAGES (1, 2), and what attention.cuh says.

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int KEY_WARPS = 4, OTHER_WARPS = WARPS / KEY_WARPS;
constexpr int WARP_KEYS = KEYS / KEY_WARPS, KEY_BLOCKS = WARP_KEYS / 16;
constexpr int WARP_QUERIES = QUERIES / OTHER_WARPS, QUERY_BLOCKS = WARP_QUERIES / 8;
constexpr int WARP_COLUMNS = HEAD_DIM / OTHER_WARPS, COLUMN_BLOCKS = WARP_COLUMNS / 8;
// Of dQ.
constexpr int D_COLUMN_WARPS = HEAD_DIM / 32, D_QUERIES = QUERIES / (WARPS / D_COLUMN_WARPS), D_BLOCKS = D_QUERIES / 16;
constexpr int KV_BYTES = KEYS * HEAD_DIM * 2, Q_BYTES = QUERIES * HEAD_DIM * 2, STATISTICS_BYTES = QUERIES * 8;
constexpr int STAGE_BYTES = 2 * Q_BYTES + STATISTICS_BYTES, SCORES_BYTES = KEYS * QUERIES * 2;

// sums += a b over STEPS times 16 of K: blocks of 16 rows and of 16 columns, whose fragments are
// loaded a step ahead.
template <int STEPS, int LEFT, int RIGHT, class LoadLeft, class LoadRight>
__device__ __forceinline__ void pipelined(float (&sums)[LEFT][2 * RIGHT][4], LoadLeft load_left, LoadRight load_right) {
    u32 a[2][LEFT][4], b[2][RIGHT][4];
    auto load = [&](int step) {
        #pragma unroll
        for (int i = 0; i < LEFT; i++) {
            load_left(a[step % 2][i], i, step);
        }
        #pragma unroll
        for (int j = 0; j < RIGHT; j++) {
            load_right(b[step % 2][j], j, step);
        }
    };
    load(0);
    #pragma unroll
    for (int step = 0; step < STEPS; step++) {
        if (step + 1 < STEPS) {
            load(step + 1);
        }
        #pragma unroll
        for (int j = 0; j < RIGHT; j++) {
            const u32(&right)[4] = b[step % 2][j];
            #pragma unroll
            for (int i = 0; i < LEFT; i++) {
                multiply(sums[i][2 * j], a[step % 2][i], right[0], right[1]);
                multiply(sums[i][2 * j + 1], a[step % 2][i], right[2], right[3]);
            }
        }
    }
}

struct Launch {
    Info info;
    Strides q, k, v, grad, d_q, d_k, d_v;
};

struct Tensors {
    const unsigned short *q, *k, *v, *grad;
    unsigned short *d_q, *d_k, *d_v;
};

struct Shared {
    u32 base;

    __device__ u32 k() const { return base; }
    __device__ u32 v() const { return base + KV_BYTES; }
    __device__ u32 q(int stage) const { return base + 2 * KV_BYTES + stage * STAGE_BYTES; }
    __device__ u32 grad(int stage) const { return q(stage) + Q_BYTES; }
    // Of each query log_sum_exp and delta.
    __device__ u32 statistics(int stage) const { return grad(stage) + Q_BYTES; }
    __device__ u32 scores() const { return q(STAGES); }
    __device__ u32 d_scores() const { return scores() + SCORES_BYTES; }
    __device__ u32 ticket() const { return d_scores() + SCORES_BYTES; }
    // What becomes of a step's dQ.
    __device__ u32 kind() const { return ticket() + 4; }
};

// A tile of keys.
struct Keys {
    int batch, head, tile;
    // Of a padded row: its keys. Of documents: behind the last tile of queries that sees any.
    int extent = 0;

    // Of a head.
    static __device__ __forceinline__ int tiles(const Info& info) {
        return (static_cast<int>(info.keys) + KEYS - 1) / KEYS;
    }

    __device__ __forceinline__ Keys(const Info& info, int ticket, const void* rows) {
        int across = tiles(info), kv_heads = static_cast<int>(info.kv_heads);
        tile = across - 1 - ticket % across;
        head = ticket / across % kv_heads;
        batch = ticket / across / kv_heads;
        if (MASK == LENGTHS) {
            extent = length_of(rows, batch, info.keys);
        } else if (MASK == DOCUMENTS) {
            // Of 128 keys, in tiles of 64 queries.
            extent = (document_tile(rows, batch, info.queries, tile * KEYS / 128 * 2).end * 64 + QUERIES - 1) / QUERIES;
        }
    }

    // How many keys there are for queries to see.
    __device__ __forceinline__ int keys(const Info& info) const {
        return MASK == LENGTHS ? extent : static_cast<int>(info.keys);
    }

    __device__ __forceinline__ Range seeing(const Info& info) const {
        Range range = seeing_queries<QUERIES>(info, tile * KEYS, KEYS);
        if (MASK == LENGTHS && tile * KEYS >= extent) {
            range.end = 0;
        } else if (MASK == DOCUMENTS) {
            range.end = extent;
        }
        return range;
    }
};

// The tiles of keys that a tile of queries sees, in the order of their turns: from the first one
// down to the last.
struct Order {
    int first, last;

    __device__ __forceinline__ Order(const Info& info, const Keys& keys, int block, const void* rows) {
        first = (keys.keys(info) - 1) / KEYS, last = 0;
        if (CAUSAL) {
            int own = block * QUERIES + static_cast<int>(info.keys) - static_cast<int>(info.queries);
            int unseen = own - static_cast<int>(info.window) - (KEYS - 1);
            first = min(first, (own + QUERIES - 1) / KEYS);
            last = unseen < 0 ? 0 : unseen / KEYS + 1;
        }
        if (MASK == DOCUMENTS) {
            last = __ldg(&document_tile(rows, keys.batch, info.queries, block * (QUERIES / 64)).earliest) / 128 *
                   (128 / KEYS);
        }
    }
};

// How a step's dQ is accumulated: stored first, added, or finished by the last one, with earlier
// sums if any.
enum Kind { STORE = 1, ADD, FINISH, ALONE };

// One thread: waits until all tiles of keys with an earlier turn have added to a tile of queries.
// `there`: how many had when the step began.
__device__ __forceinline__ int await_turn(const u32* count, u32 there, const Order& order, int tile) {
    u32 before = order.first - tile;
    #pragma unroll 1
    for (u32 tries = 0; there != before; tries++) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(count) : "memory");
        if (tries >> 26) {
            __trap();
        }
    }
    bool first = before == 0, last = tile == order.last;
    return last ? first ? ALONE : FINISH : first ? STORE : ADD;
}

// Which probabilities of a lane are dropped: of its keys in 16 rows and the queries that it has in
// blocks of 8, a bit each. A pair of keys shares random bits, and is of two lanes, 4 apart: each
// computes those of one of its two queries in each block, for both.
struct Dropped {
    // Of the first and of the second query of each block: bit 2 i of the first key, 2 i + 1 of the
    // second.
    u32 queries[2];

    __device__ __forceinline__ Dropped(const Info& info, u32 first_row, int key) {
        u32 threshold = info.dropout.limit(), even = 0, odd = 0;
        bool has_odd = threadIdx.x / 4 % 2;
        int pair = (key + threadIdx.x % 32 / 4) / 2;
        #pragma unroll
        for (int i = 0; i < QUERY_BLOCKS; i++) {
            u32 row = random_row(info.dropout, first_row + i * 8 + threadIdx.x % 4 * 2 + has_odd, key);
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                RandomPair random = random_pair(info.dropout, row, pair + half * 4);
                even |= static_cast<u32>(random.even < threshold) << (2 * i + half);
                odd |= static_cast<u32>(random.odd < threshold) << (2 * i + half);
            }
        }
        u32 other = __shfl_xor_sync(~0u, has_odd ? even : odd, 4);
        queries[0] = has_odd ? other : even, queries[1] = has_odd ? odd : other;
    }

    // By the position of a sum.
    __device__ __forceinline__ bool at(int i, int value) const { return queries[value % 2] >> (2 * i + value / 2) & 1; }
};

// `sums` are f32, `[batch, heads, tiles of queries, QUERIES * HEAD_DIM]`. `marks` are 0 before and
// after: the next ticket, and how many tiles of keys have added to each tile of queries.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_ampere(const unsigned short* q, const unsigned short* k, const unsigned short* v,
                              const unsigned short* grad, unsigned short* d_q, unsigned short* d_k, unsigned short* d_v,
                              const float2* statistics, float* sums, u32* marks, const void* rows,
                              const __grid_constant__ Launch launch) {
    extern __shared__ __align__(128) unsigned char memory[];
    const Info& info = launch.info;
    Shared shared{shared_address(memory)};
    Lane lane;
    int warp = threadIdx.x / 32, in_block = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    // The warp's keys, and its queries or columns; of dQ its queries and columns.
    int own_keys = warp / OTHER_WARPS * WARP_KEYS, other = warp % OTHER_WARPS;
    int d_queries = warp / D_COLUMN_WARPS * D_QUERIES, d_columns = warp % D_COLUMN_WARPS * 32;
    int queries = info.queries, heads = info.heads, group = heads / static_cast<int>(info.kv_heads);
    int query_tiles = (queries + QUERIES - 1) / QUERIES;
    int count = Keys::tiles(info) * static_cast<int>(info.kv_heads * info.batch);
    float scale = scale_of(info), scale_log2 = scale * LOG2_E;
    for (;;) {
        // Nobody reads the keys before, nor their ticket.
        __syncthreads();
        if (threadIdx.x == 0) {
            int ticket = atomicAdd(marks, 1u);
            if (ticket == count + static_cast<int>(gridDim.x) - 1) {
                // Nobody asks any more: each block has asked in vain once.
                *marks = 0;
            }
            store_int(shared.ticket(), ticket);
        }
        __syncthreads();
        int ticket = load_int(shared.ticket());
        if (ticket >= count) {
            return;
        }
        Keys keys(info, ticket, rows);
        int key = keys.tile * KEYS;
        Range range = keys.seeing(info);
        auto copy_step = [&](int stage, int head, int block) {
            int first = block * QUERIES, left = queries - first;
            copy_rows<QUERIES, THREADS>(shared.q(stage), q + launch.q.of(keys.batch, head) + first * launch.q.row,
                                        launch.q.row, left);
            copy_rows<QUERIES, THREADS>(shared.grad(stage),
                                        grad + launch.grad.of(keys.batch, head) + first * launch.grad.row,
                                        launch.grad.row, left);
            if (threadIdx.x < QUERIES) {
                int query = first + threadIdx.x;
                const float2* from = statistics + (static_cast<u64>(keys.batch) * heads + head) * queries + query;
                copy_async_8(shared.statistics(stage) + threadIdx.x * 8, from, query >= queries);
            }
        };
        int left_keys = static_cast<int>(info.keys) - key;
        copy_rows<KEYS, THREADS>(shared.k(), k + launch.k.of(keys.batch, keys.head) + key * launch.k.row, launch.k.row,
                                 left_keys);
        copy_rows<KEYS, THREADS>(shared.v(), v + launch.v.of(keys.batch, keys.head) + key * launch.v.row, launch.v.row,
                                 left_keys);
        int head = keys.head * group, block = range.begin, left = max(range.end - range.begin, 0) * group, stage = 0;
        if (left > 0) {
            copy_step(0, head, block);
        }
        copies_commit();
        float d_key[KEY_BLOCKS][COLUMN_BLOCKS][4], d_value[KEY_BLOCKS][COLUMN_BLOCKS][4];
        #pragma unroll
        for (int i = 0; i < KEY_BLOCKS; i++) {
            clear(d_key[i]), clear(d_value[i]);
        }
        auto queries_of_row = [&](int row) {
            return key + row < keys.keys(info) ? queries_of(info, key + row) : Span{0, -1};
        };
        // The count of what was added last, and what it becomes.
        u32* added = nullptr;
        u32 done = 0;
        // The fence is for what others have added as well.
        auto tell = [&] {
            if (threadIdx.x == 0) {
                asm volatile("fence.acq_rel.gpu;" ::: "memory");
                if (added) {
                    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(added), "r"(done) : "memory");
                }
            }
        };
        #pragma unroll 1
        for (; left > 0; left--) {
            // The queries have arrived; all warps have read the previous P and dS, and added dQ.
            copies_wait<0>();
            __syncthreads();
            u64 of_tile = (static_cast<u64>(keys.batch) * heads + head) * query_tiles + block;
            u32 there = 0;
            if (threadIdx.x == 0) {
                asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(marks + 1 + of_tile) : "memory");
            }
            int next_head = head, next_block = block + 1;
            if (next_block == range.end) {
                next_block = range.begin, next_head++;
            }
            if (STAGES > 1 && left > 1) {
                copy_step(stage ^ 1, next_head, next_block);
            }
            copies_commit();
            float scores[KEY_BLOCKS][QUERY_BLOCKS][4], d_scores[KEY_BLOCKS][QUERY_BLOCKS][4];
            int first_query = other * WARP_QUERIES;
            auto multiply_scores = [&](float(&sums)[KEY_BLOCKS][QUERY_BLOCKS][4], u32 of_keys, u32 of_queries) {
                #pragma unroll
                for (int i = 0; i < KEY_BLOCKS; i++) {
                    clear(sums[i]);
                }
                pipelined<HEAD_DIM / 16, KEY_BLOCKS, QUERY_BLOCKS / 2>(
                    sums,
                    [&](u32(&a)[4], int i, int step) { lane.left<KEYS>(a, of_keys + own_keys * ROW, i * 16, step); },
                    [&](u32(&b)[4], int j, int step) {
                        lane.right<QUERIES>(b, of_queries + first_query * ROW, j * 16, step);
                    });
            };
            multiply_scores(scores, shared.k(), shared.q(stage));
            multiply_scores(d_scores, shared.v(), shared.grad(stage));
            int query = block * QUERIES + first_query;
            bool masks =
                !spans(queries_of_row(own_keys), queries_of_row(own_keys + WARP_KEYS - 1), query, WARP_QUERIES);
            const DocumentTile* documents = nullptr;
            if (MASK == DOCUMENTS) {
                documents = &document_tile(rows, keys.batch, queries, query / 64);
                bool second = WARP_QUERIES > 64 && (query / 64 + 1) * 64 < queries;
                masks = masks || documents->latest > key + own_keys || second && documents[1].latest > key + own_keys;
            }
            #pragma unroll
            for (int i = 0; i < KEY_BLOCKS; i++) {
                [[maybe_unused]] u32 numbers =
                    (static_cast<u32>(keys.batch) * static_cast<u32>(heads) + head) * static_cast<u32>(queries) + query;
                float probabilities[QUERY_BLOCKS][4];
                #pragma unroll
                for (int j = 0; j < QUERY_BLOCKS; j++) {
                    // log_sum_exp and delta of two queries.
                    uint4 known = shared_load(shared.statistics(stage) + (first_query + j * 8 + quarter * 2) * 8);
                    float log_sum_exp[2] = {__uint_as_float(known.x) * LOG2_E, __uint_as_float(known.z) * LOG2_E};
                    #pragma unroll
                    for (int value = 0; value < 4; value++) {
                        probabilities[j][value] =
                            power_of_2(fmaf(scores[i][j][value], scale_log2, -log_sum_exp[value % 2]));
                    }
                }
                if (masks) {
                    #pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int row = own_keys + i * 16 + half * 8 + in_block;
                        mask_row<WARP_QUERIES>(probabilities, half, 0.0f, query, queries_of_row(row));
                        if (MASK == DOCUMENTS) {
                            #pragma unroll
                            for (int j = 0; j < QUERY_BLOCKS; j++) {
                                #pragma unroll
                                for (int value = 0; value < 2; value++) {
                                    int of = query % 64 + j * 8 + quarter * 2 + value;
                                    if (query / 64 * 64 + of < queries &&
                                        key + row < __ldg(&documents[of / 64].first[of % 64])) {
                                        probabilities[j][2 * half + value] = 0.0f;
                                    }
                                }
                            }
                        }
                    }
                }
                auto put = [&](u32 tile, int j, int half, u32 pair) {
                    int row = own_keys + i * 16 + half * 8 + in_block;
                    u32 place = tile + chunk_of<KEYS>(row, first_query / 8 + j) + quarter * 4;
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(place), "r"(pair) : "memory");
                };
                [[maybe_unused]] u32 dropped[2] = {};
                if (DROPOUT) {
                    Dropped of(info, numbers, key + own_keys + i * 16);
                    dropped[0] = of.queries[0], dropped[1] = of.queries[1];
                }
                #pragma unroll
                for (int j = 0; j < QUERY_BLOCKS; j++) {
                    uint4 known = shared_load(shared.statistics(stage) + (first_query + j * 8 + quarter * 2) * 8);
                    float delta[2] = {__uint_as_float(known.y), __uint_as_float(known.w)}, kept[4], gradient[4];
                    #pragma unroll
                    for (int value = 0; value < 4; value++) {
                        bool drops = DROPOUT && dropped[value % 2] >> (2 * j + value / 2) & 1;
                        float probability = probabilities[j][value], d_score = d_scores[i][j][value];
                        if (DROPOUT) {
                            d_score = drops ? 0.0f : d_score * info.dropout.factor();
                        }
                        kept[value] = drops ? 0.0f : probability,
                        gradient[value] = probability * (d_score - delta[value % 2]);
                    }
                    #pragma unroll
                    for (int half = 0; half < 2; half++) {
                        put(shared.scores(), j, half, pack(kept[2 * half], kept[2 * half + 1]));
                        put(shared.d_scores(), j, half, pack(gradient[2 * half], gradient[2 * half + 1]));
                    }
                }
            }
            // Late in the step: the fence waits for the additions, which are complete by now.
            tell();
            if (threadIdx.x == 0) {
                Order order(info, keys, block, rows);
                added = marks + 1 + of_tile;
                done = keys.tile == order.last ? 0 : order.first - keys.tile + 1;
                store_int(shared.kind(), await_turn(added, there, order, keys.tile));
            }
            __syncthreads();
            int first_column = other * WARP_COLUMNS;
            Lane of_columns = lane.from_column(first_column), of_d_columns = lane.from_column(d_columns),
                 of_d_queries = lane.from_column(d_queries);
            auto multiply_keys = [&](float(&of_keys)[KEY_BLOCKS][COLUMN_BLOCKS][4], u32 left_tile, u32 right_tile) {
                right_tile += first_column / 64 * QUERIES * ROW;
                pipelined<QUERIES / 16, KEY_BLOCKS, COLUMN_BLOCKS / 2>(
                    of_keys,
                    [&](u32(&a)[4], int i, int step) { lane.left<KEYS>(a, left_tile + own_keys * ROW, i * 16, step); },
                    [&](u32(&b)[4], int j, int step) {
                        of_columns.right_transposed<QUERIES>(b, right_tile, step * 16, j);
                    });
            };
            multiply_keys(d_value, shared.scores(), shared.grad(stage));
            multiply_keys(d_key, shared.d_scores(), shared.q(stage));
            float d_query[D_BLOCKS][4][4];
            #pragma unroll
            for (int i = 0; i < D_BLOCKS; i++) {
                clear(d_query[i]);
            }
            u32 left_tile = shared.d_scores() + d_queries / 64 * KEYS * ROW,
                right_tile = shared.k() + d_columns / 64 * KEYS * ROW;
            pipelined<KEYS / 16, D_BLOCKS, 2>(
                d_query,
                [&](u32(&a)[4], int i, int step) { of_d_queries.left_transposed<KEYS>(a, left_tile, step * 16, i); },
                [&](u32(&b)[4], int j, int step) { of_d_columns.right_transposed<KEYS>(b, right_tile, step * 16, j); });
            int kind = load_int(shared.kind());
            float* own = sums + of_tile * (QUERIES * HEAD_DIM) + threadIdx.x;
            constexpr int OWN = D_BLOCKS * 16;
            auto value_of = [&](int i) -> float& { return d_query[i / 16][i / 4 % 4][i % 4]; };
            if (kind == ADD) {
                #pragma unroll
                for (int i = 0; i < OWN; i++) {
                    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(own + i * THREADS), "f"(value_of(i))
                                 : "memory");
                }
            } else if (kind == STORE) {
                #pragma unroll
                for (int i = 0; i < OWN; i++) {
                    __stcg(own + i * THREADS, value_of(i));
                }
            } else if (kind == FINISH) {
                // Half of them at once, for which there are registers.
                #pragma unroll
                for (int first = 0; first < OWN; first += 16) {
                    float more[16];
                    #pragma unroll
                    for (int i = 0; i < 16; i++) {
                        more[i] = __ldcg(own + (first + i) * THREADS);
                    }
                    #pragma unroll
                    for (int i = 0; i < 16; i++) {
                        value_of(first + i) += more[i];
                    }
                }
            }
            if (kind >= FINISH) {
                unsigned short* to = d_q + launch.d_q.of(keys.batch, head) + d_columns;
                #pragma unroll
                for (int i = 0; i < D_BLOCKS * 2; i++) {
                    int at = block * QUERIES + d_queries + i * 8 + in_block;
                    write_row(at < queries, to + at * launch.d_q.row, d_query[i / 2], i % 2, scale);
                }
            }
            if (STAGES == 1 && left > 1) {
                __syncthreads();
                copy_step(0, next_head, next_block);
                copies_commit();
            }
            head = next_head, block = next_block;
            stage ^= STAGES - 1;
        }
        copies_wait<0>();
        __syncthreads();
        tell();
        float of_values = DROPOUT ? info.dropout.factor() : 1.0f;
        #pragma unroll
        for (int i = 0; i < KEY_BLOCKS * 2; i++) {
            int row = own_keys + i * 8 + in_block, column = other * WARP_COLUMNS;
            bool there = row < left_keys;
            write_row(there, d_v + launch.d_v.of(keys.batch, keys.head) + (key + row) * launch.d_v.row + column,
                      d_value[i / 2], i % 2, of_values);
            write_row(there, d_k + launch.d_k.of(keys.batch, keys.head) + (key + row) * launch.d_k.row + column,
                      d_key[i / 2], i % 2, scale);
        }
    }
}
