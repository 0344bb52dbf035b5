// Attention, backward (Dao, 2023): tiles of keys and values stay, queries and the output's
// gradients come by, those of all heads that share the keys. Scores are transposed: a key has a
// row, and each consumer has half of a tile's keys.
//
//   P^T = exp(scale K Q^T - log_sum_exp)     dS^T = P^T (V dO^T - delta)
//   dV += P^T dO     dK += dS^T Q     dQ += dS K
//
// Sums of dQ are added up in f32, in memory; each consumer has half of the columns, over all 128
// keys. Equal inputs give equal bits, since the order is fixed: blocks take tiles of keys by a
// ticket, from a head's last to its first, and each begins with the first queries that see its
// keys. So those whose turn is before a block's are ahead of it, and nobody waits for a later
// ticket:
//
//            time ->
//   keys 2   | q 4 | q 5 |
//   keys 1   | q 2 | q 3 | q 4 | q 5 |
//   keys 0   | q 0 | q 1 | q 2 | q 3 | q 4 | q 5 |
//
// The first that reaches a tile of queries stores its sums, the next ones add theirs, and the last
// one writes the tile.
//
// Of the producer's warps one brings tiles, one what is known of each query (log_sum_exp and
// delta), one waits for turns, and one ends them. A consumer's step with tile i:
//
//   products      S(i)           dP(i)  dV(i)  dQ(i-1)         dK(i)
//   meanwhile            exp(i), dQ(i-2) goes to memory  dS(i)

constexpr int QUERIES = 64;
// The sums of wide heads leave no registers for probabilities of 32 bits: 16 have to do.
constexpr bool WIDE = HEAD_DIM > 64;
constexpr int KEPT_BYTES = KEPT * HEAD_DIM * 2;
constexpr int Q_BYTES = QUERIES * HEAD_DIM * 2;
// What is known of a tile's queries: of each one log_sum_exp, delta, and what its row is to the
// cipher; of all their DocumentTile.
constexpr int DELTA = QUERIES * 4, NUMBER = 2 * QUERIES * 4, DOCUMENT = NUMBER + DROPOUT * QUERIES * 4;
constexpr int DOCUMENT_BYTES = MASK == DOCUMENTS ? sizeof(DocumentTile) : 0, LATEST = DOCUMENT + (QUERIES + 1) * 4;
constexpr int STATISTICS_BYTES = DOCUMENT + DOCUMENT_BYTES;
// Gradients of scores: of one step they are written, of two they may be read.
constexpr int BUFFERS = 3;
constexpr int D_SCORES_BYTES = KEPT * QUERIES * 2;
// A consumer's columns of dQ, and their bytes on their way out.
constexpr int OWN_COLUMNS = HEAD_DIM / CONSUMERS;
constexpr int D_QUERY_BYTES = QUERIES * OWN_COLUMNS * 2;
// With wide heads there are no registers for probabilities with and without what is dropped: the
// former lie in shared memory for a while, 16 bytes of each thread side by side.
constexpr int ASIDE_BYTES = WIDE && DROPOUT ? KEPT * QUERIES * 2 : 0;
constexpr int ASIDE_STRIDE = CONSUMERS * WARPGROUP * 16;
static_assert(2 * KEPT_BYTES + STAGES * (2 * Q_BYTES + STATISTICS_BYTES) + BUFFERS * D_SCORES_BYTES + ASIDE_BYTES +
              CONSUMERS * D_QUERY_BYTES + 8 * (13 + 2 * STAGES) <= SHARED, "shared memory");

// What producers know of documents and of dropout takes them more registers.
constexpr bool SHARES_EVENLY = !WIDE && (MASK == DOCUMENTS || DROPOUT);
constexpr int PRODUCER_REGISTERS = SHARES_EVENLY ? 40 : 24;
constexpr int CONSUMER_REGISTERS = SHARES_EVENLY ? 232 : 240;

struct Shared {
    u32 base = shared_base();

    __device__ u32 k() const { return base; }
    __device__ u32 v() const { return base + KEPT_BYTES; }
    __device__ u32 q(int stage) const { return base + 2 * KEPT_BYTES + stage * 2 * Q_BYTES; }
    __device__ u32 grad(int stage) const { return q(stage) + Q_BYTES; }
    __device__ u32 d_scores(int buffer) const { return q(STAGES) + buffer * D_SCORES_BYTES; }
    // A consumer's gradients of keys and of values, on their way out, lie where gradients of scores
    // were.
    __device__ u32 out(int consumer) const { return d_scores(consumer); }
    __device__ u32 aside() const { return d_scores(BUFFERS); }
    __device__ u32 d_query(int consumer) const { return aside() + ASIDE_BYTES + consumer * D_QUERY_BYTES; }
    __device__ u32 statistics(int stage) const { return d_query(CONSUMERS) + stage * STATISTICS_BYTES; }
    __device__ u32 barrier(int index) const { return statistics(STAGES) + 8 * index; }
    __device__ u32 kept_full() const { return barrier(0); }
    // One arrival of each warp but the one that brings tiles.
    __device__ u32 kept_empty() const { return barrier(1); }
    __device__ u32 d_scores_full(int buffer) const { return barrier(2 + buffer); }
    // That it is the block's turn to add what a step gives to dQ; that the consumers have; that
    // others know.
    __device__ u32 turn(int step) const { return barrier(5 + step % 2); }
    __device__ u32 added(int step) const { return barrier(7 + step % 2); }
    __device__ u32 told(int step) const { return barrier(9 + step % 2); }
    // One arrival of each of two producer warps.
    __device__ u32 full(int stage) const { return barrier(11 + stage); }
    __device__ u32 empty(int stage) const { return barrier(11 + STAGES + stage); }
    // The ticket of what is kept, and its keys' extent.
    __device__ u32 ticket() const { return barrier(11 + 2 * STAGES); }
    // What becomes of a step's dQ.
    __device__ u32 kind(int step) const { return barrier(12 + 2 * STAGES) + step % 2 * 4; }
};

__device__ __forceinline__ void store_int(u32 place, int value) {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(place), "r"(value) : "memory");
}

__device__ __forceinline__ int load_int(u32 place) {
    int value;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(place) : "memory");
    return value;
}

// A tile of keys.
struct Keys {
    int batch, head, tile;
    // Of a padded row: its keys. Of documents: behind the last tile of queries that sees any.
    int extent = 0;

    __device__ __forceinline__ Keys(const Info& info, int ticket) {
        int across = tiles(info), kv_heads = static_cast<int>(info.kv_heads);
        tile = across - 1 - ticket % across;
        head = ticket / across % kv_heads;
        batch = ticket / across / kv_heads;
    }

    // Of a head.
    static __device__ __forceinline__ int tiles(const Info& info) {
        return (static_cast<int>(info.keys) + KEPT - 1) / KEPT;
    }

    // How many keys there are for queries to see.
    __device__ __forceinline__ int keys(const Info& info) const {
        return MASK == LENGTHS ? extent : static_cast<int>(info.keys);
    }

    __device__ __forceinline__ Range seeing(const Info& info) const {
        Range range = seeing_queries<QUERIES>(info, tile * KEPT, KEPT);
        if (MASK == LENGTHS && tile * KEPT >= extent) {
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
        first = (keys.keys(info) - 1) / KEPT, last = 0;
        if (CAUSAL) {
            int own = block * QUERIES + static_cast<int>(info.keys) - static_cast<int>(info.queries);
            int unseen = own - static_cast<int>(info.window) - (KEPT - 1);
            first = min(first, (own + QUERIES - 1) / KEPT);
            last = unseen < 0 ? 0 : unseen / KEPT + 1;
        }
        if (MASK == DOCUMENTS) {
            last = __ldg(&document_tile(rows, keys.batch, info.queries, block).earliest) / KEPT;
        }
    }
};

// Tiles of queries of a head.
__device__ __forceinline__ int query_tiles(const Info& info) {
    return (static_cast<int>(info.queries) + QUERIES - 1) / QUERIES;
}

__device__ void produce(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map,
                        const TensorMap& grad_map, const Info& info, const Shared& shared, u32* tickets,
                        const void* rows) {
    Ring<STAGES> at;
    int group = static_cast<int>(info.heads / info.kv_heads),
        count = Keys::tiles(info) * static_cast<int>(info.kv_heads * info.batch);
    for (u32 round = 0;; round++) {
        int ticket = atomicAdd(tickets, 1u);
        if (ticket == count + gridDim.x - 1) {
            // Nobody asks any more: each block has asked in vain once.
            *tickets = 0;
        }
        ticket = ticket < count ? ticket : -1;
        Keys keys(info, max(ticket, 0));
        if (MASK == LENGTHS) {
            keys.extent = length_of(rows, keys.batch, info.keys);
        } else if (MASK == DOCUMENTS) {
            keys.extent = document_tile(rows, keys.batch, info.queries, keys.tile * (KEPT / QUERIES)).end;
        }
        barrier_wait(shared.kept_empty(), round % 2 ^ 1);
        store_int(shared.ticket(), ticket);
        store_int(shared.ticket() + 4, keys.extent);
        if (ticket < 0) {
            barrier_arrive(shared.kept_full());
            return;
        }
        barrier_expect(shared.kept_full(), 2 * KEPT_BYTES);
        bring<KEPT>(shared.k(), k_map, keys.tile * KEPT, keys.head, keys.batch, shared.kept_full());
        bring<KEPT>(shared.v(), v_map, keys.tile * KEPT, keys.head, keys.batch, shared.kept_full());
        Range range = keys.seeing(info);
        for (int member = 0; member < group; member++) {
            for (int block = range.begin; block < range.end; block++) {
                barrier_wait(shared.empty(at.stage), at.parity ^ 1);
                u32 full = shared.full(at.stage);
                int head = keys.head * group + member;
                barrier_expect(full, 2 * Q_BYTES + DOCUMENT_BYTES);
                bring<QUERIES>(shared.q(at.stage), q_map, block * QUERIES, head, keys.batch, full);
                bring<QUERIES>(shared.grad(at.stage), grad_map, block * QUERIES, head, keys.batch, full);
                if (MASK == DOCUMENTS) {
                    bulk_load(shared.statistics(at.stage) + DOCUMENT,
                              &document_tile(rows, keys.batch, info.queries, block), DOCUMENT_BYTES, full);
                }
                at.advance();
            }
        }
    }
}

// The ticket of the keys that are kept, once they are there; below 0 if there are no more.
__device__ __forceinline__ int kept_ticket(const Shared& shared, u32 round) {
    barrier_wait(shared.kept_full(), round % 2);
    return load_int(shared.ticket());
}

// The keys of that ticket.
__device__ __forceinline__ Keys kept_keys(const Info& info, const Shared& shared, int ticket) {
    Keys keys(info, ticket);
    if (MASK == LENGTHS || MASK == DOCUMENTS) {
        keys.extent = load_int(shared.ticket() + 4);
    }
    return keys;
}

// By a warp, for each tile of queries that comes by: the step's number, the keys that are kept, the
// head's number among those of all rows, and the tile's in it.
template <class Then>
__device__ __forceinline__ void each_step(const Info& info, const Shared& shared, Then then) {
    int group = static_cast<int>(info.heads / info.kv_heads), step = 0;
    for (u32 round = 0;; round++) {
        int ticket = kept_ticket(shared, round);
        if (ticket < 0) {
            return;
        }
        Keys keys = kept_keys(info, shared, ticket);
        warp_arrive(shared.kept_empty());
        Range range = keys.seeing(info);
        int row_head = keys.batch * static_cast<int>(info.heads) + keys.head * group, block = range.begin;
        #pragma unroll 1
        for (int left = (range.end - range.begin) * group; left > 0; left--) {
            then(step, keys, row_head, block);
            step++;
            if (++block == range.end) {
                block = range.begin, row_head++;
            }
        }
    }
}

__device__ void produce_statistics(const float2* statistics, const Info& info, const Shared& shared) {
    each_step(info, shared, [&](int step, const Keys& keys, int row_head, int block) {
        int stage = step % STAGES;
        barrier_wait(shared.empty(stage), step / STAGES % 2 ^ 1);
        int queries = info.queries;
        u32 place = shared.statistics(stage);
        #pragma unroll
        for (int half = 0; half < QUERIES / 32; half++) {
            int i = half * 32 + threadIdx.x % 32, query = block * QUERIES + i;
            u32 row = static_cast<u32>(row_head) * queries + query;
            // Behind the last query all probabilities are 0.
            float2 of_row = make_float2(INFINITE, 0.0f);
            if (query < queries) {
                of_row = statistics[row];
            }
            shared_store(place + 4 * i, of_row.x * LOG2_E);
            shared_store(place + DELTA + 4 * i, of_row.y);
        }
        if (DROPOUT) {
            #pragma unroll 1
            for (int i = threadIdx.x % 32; i < QUERIES; i += 32) {
                u32 row = static_cast<u32>(row_head) * queries + block * QUERIES + i;
                store_int(place + NUMBER + 4 * i, random_row(info.dropout, row, keys.tile * KEPT));
            }
        }
        warp_arrive(shared.full(stage));
    });
}

// How a step's dQ is accumulated: stored first, added, or finished by the last one, with earlier
// sums if any.
enum Kind { STORE = 1, ADD, FINISH, ALONE };

// Waits until all tiles of keys whose turn is before have added to a tile of queries; `counts` says
// how many have.
__device__ void await_turns(const u32* counts, const Info& info, const Shared& shared, const void* rows) {
    each_step(info, shared, [&](int step, const Keys& keys, int row_head, int block) {
        if (threadIdx.x % 32 > 0) {
            return;
        }
        Order order(info, keys, block, rows);
        u32 before = order.first - keys.tile, there = 0;
        const u32* count = counts + row_head * query_tiles(info) + block;
        #pragma unroll 1
        for (u32 tries = 0; there != before; tries++) {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(count) : "memory");
            if (tries >> 26) {
                __trap();
            }
        }
        // Barriers are used again every other step: others know of the one before the last.
        barrier_wait(shared.told(step), step / 2 % 2 ^ 1);
        bool first = before == 0, last = keys.tile == order.last;
        store_int(shared.kind(step), last ? first ? ALONE : FINISH : first ? STORE : ADD);
        barrier_arrive(shared.turn(step));
    });
}

// Tells the next ones. The last one puts the count back to 0.
__device__ void end_turns(u32* counts, const Info& info, const Shared& shared, const void* rows) {
    each_step(info, shared, [&](int step, const Keys& keys, int row_head, int block) {
        if (threadIdx.x % 32 > 0) {
            return;
        }
        Order order(info, keys, block, rows);
        u32 done = keys.tile == order.last ? 0 : order.first - keys.tile + 1;
        barrier_wait(shared.added(step), step / 2 % 2);
        u32* count = counts + row_head * query_tiles(info) + block;
        // What the consumers have added comes before it.
        asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], %1;" ::"l"(count), "r"(done) : "memory");
        barrier_arrive(shared.told(step));
    });
}

__device__ __forceinline__ float half_of(u32 pair, int half) {
    float2 both = unpack(pair);
    return half ? both.y : both.x;
}

// What is known of the two queries that this thread has in block `i` of 8, from a list of all
// queries.
__device__ __forceinline__ int2 two_ints(u32 place, int i) {
    int2 pair;
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
                 : "=r"(pair.x), "=r"(pair.y)
                 : "r"(place + 4 * (i * 8 + threadIdx.x % 4 * 2)));
    return pair;
}

__device__ __forceinline__ float2 two_floats(u32 place, int i) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair.x), "=f"(pair.y)
                 : "r"(place + 4 * (i * 8 + threadIdx.x % 4 * 2)));
    return pair;
}

// dQ = dS K, of a consumer's columns.
__device__ __forceinline__ void multiply_d_query(float (&d_query)[OWN_COLUMNS / 8][4], const Shared& shared, int buffer,
                                                 int consumer) {
    int column = consumer * OWN_COLUMNS;
    u32 columns = shared.k() + column / 64 * KEPT * ROW_BYTES + column % 64 * 2;
    #pragma unroll
    for (int k = 0; k < KEPT / 16; k++) {
        u64 left = tile_descriptor<KEPT>(shared.d_scores(buffer), k * 16 * ROW_BYTES);
        u64 right = tile_descriptor<KEPT>(columns, k * 16 * ROW_BYTES);
        Wgmma<OWN_COLUMNS>::template multiply<1, 1>(d_query, left, right, k > 0);
    }
}

// dK += dS^T Q, of a consumer's keys. Of wide heads dS^T comes from shared memory, as there are no
// registers to keep it in.
__device__ __forceinline__ void multiply_d_key(float (&d_key)[HEAD_DIM / 8][4], const u32 (&d_packed)[QUERIES / 16][4],
                                               u32 d_scores, u32 q, int consumer) {
    if (!WIDE) {
        wgmma_fence();
        sums_by_columns<QUERIES>(d_key, d_packed, q, true);
        return;
    }
    named_barrier(1 + consumer, WARPGROUP);
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < QUERIES / 16; k++) {
        Wgmma<HEAD_DIM>::template multiply<0, 1>(d_key, tile_descriptor<KEPT>(d_scores, k * 32),
                                                 tile_descriptor<QUERIES>(q, k * 16 * ROW_BYTES), 1);
    }
}

// Puts what a consumer has of its keys and a tile of queries into shared memory.
__device__ __forceinline__ void stage_scores(const u32 (&packed)[QUERIES / 16][4], u32 place) {
    int thread = threadIdx.x % WARPGROUP, lane = thread % 32, line = thread / 32 * 16 + lane % 16;
    #pragma unroll
    for (int i = 0; i < QUERIES / 16; i++) {
        matrices_store(staged_chunk(place, line, 2 * i + lane / 16), packed[i]);
    }
    async_proxy_fence();
}

// Which probabilities of a thread are dropped: of its two keys and the queries that it has in 8
// blocks, a bit each. A pair of keys shares random bits, and is of two lanes, 4 apart: each
// computes those of one of its two queries in each block, for both.
struct Dropped {
    // Of the first and of the second query of each block: bits 15 - 2 i of the first key, 14 - 2 i
    // of the second.
    u32 queries[2] = {0, 0};

    // As sums lie.
    __device__ __forceinline__ bool at(int i, int value) const {
        return queries[value % 2] >> (15 - 2 * i - value / 2) & 1;
    }
};

__device__ __forceinline__ Dropped dropped_of(const Info& info, u32 numbers, int key) {
    u32 threshold = info.dropout.limit(), even = 0, odd = 0;
    bool has_odd = threadIdx.x / 4 % 2;
    int pair = (key + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4) / 2;
    #pragma unroll(WIDE ? 1 : QUERIES / 8)
    for (int i = 0; i < QUERIES / 8; i++) {
        int2 both = two_ints(numbers, i);
        u32 row = has_odd ? both.y : both.x;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            RandomPair random = random_pair(info.dropout, row, pair + half * 4);
            // The sign says what is below.
            even = __funnelshift_l(random.even - threshold, even, 1);
            odd = __funnelshift_l(random.odd - threshold, odd, 1);
        }
    }
    u32 other = __shfl_xor_sync(~0u, has_odd ? even : odd, 4);
    return {{has_odd ? other : even, has_odd ? odd : other}};
}

// Where a thread's sums of dQ go, if they are stored or added.
struct Destination {
    float4* to = nullptr;
    int kind = 0;

    __device__ __forceinline__ void pass(int i, const float (&sums)[4]) const {
        asm volatile(
            "{ .reg .pred stores, adds;\nsetp.eq.s32 stores, %5, 1;\nsetp.eq.s32 adds, %5, 2;\n"
            "@stores st.global.v4.f32 [%0], {%1, %2, %3, %4};\n"
            "@adds red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4}; }" ::"l"(to + i * WARPGROUP),
            "f"(sums[0]), "f"(sums[1]), "f"(sums[2]), "f"(sums[3]), "r"(kind)
            : "memory");
    }
};

// A tile of queries, of whose dQ a consumer has columns.
struct Queries {
    int batch, head, block;

    // Where a consumer's sums go, once it is their turn. The last one adds what others have, and
    // writes them.
    __device__ __forceinline__ Destination destination(float (&d_query)[OWN_COLUMNS / 8][4], const TensorMap& d_q_map,
                                                       float* sums, const Info& info, const Shared& shared,
                                                       int consumer, int step) const {
        int thread = threadIdx.x % WARPGROUP;
        u64 tile = (batch * static_cast<int>(info.heads) + head) * query_tiles(info) + block;
        float4* own = reinterpret_cast<float4*>(sums + tile * (QUERIES * HEAD_DIM)) +
                      consumer * (OWN_COLUMNS / 8 * WARPGROUP) + thread;
        barrier_wait(shared.turn(step), step / 2 % 2);
        int kind = __shfl_sync(~0u, load_int(shared.kind(step)), 0);
        if (kind < FINISH) {
            return {own, kind};
        }
        if (kind == FINISH) {
            #pragma unroll
            for (int i = 0; i < OWN_COLUMNS / 8; i++) {
                float4 there = __ldcg(own + i * WARPGROUP);
                d_query[i][0] += there.x, d_query[i][1] += there.y, d_query[i][2] += there.z, d_query[i][3] += there.w;
            }
        }
        write(d_query, d_q_map, info, shared, consumer);
        return {};
    }

    __device__ __forceinline__ void write(const float (&d_query)[OWN_COLUMNS / 8][4], const TensorMap& d_q_map,
                                          const Info& info, const Shared& shared, int consumer) const {
        int thread = threadIdx.x % WARPGROUP, lane = thread % 32, line = thread / 32 * 16 + lane % 16;
        u32 staged = shared.d_query(consumer);
        float scale = scale_of(info);
        if (thread == 0) {
            tma_store_wait_read();
        }
        named_barrier(1 + consumer, WARPGROUP);
        #pragma unroll
        for (int i = 0; i < OWN_COLUMNS / 8; i += 2) {
            u32 matrices[4];
            #pragma unroll
            for (int side = 0; side < 2; side++) {
                matrices[2 * side] = pack(d_query[i + side][0] * scale, d_query[i + side][1] * scale);
                matrices[2 * side + 1] = pack(d_query[i + side][2] * scale, d_query[i + side][3] * scale);
            }
            int chunk = i + lane / 16;
            // Rows of 128 bytes are swizzled, those of 64 are not.
            bool swizzled = OWN_COLUMNS == 64;
            matrices_store(staged + line * OWN_COLUMNS * 2 + ((swizzled ? chunk ^ line % 8 : chunk) << 4), matrices);
        }
        async_proxy_fence();
        named_barrier(1 + consumer, WARPGROUP);
        if (thread == 0) {
            tma_store(d_q_map, staged, consumer * OWN_COLUMNS, block * QUERIES, head, batch);
            tma_store_commit();
        }
    }
};

// A tile of queries whose dQ is on its way, in one register.
struct Pending {
    int head_and_block = -1;

    __device__ __forceinline__ bool some() const { return head_and_block >= 0; }
    __device__ __forceinline__ Queries queries(const Keys& keys) const {
        return {keys.batch, head_and_block >> 16, head_and_block & 0xffff};
    }
};

// Probabilities without those that are dropped, as the left side of a product.
__device__ __forceinline__ void pack_kept(u32 (&packed)[QUERIES / 16][4], const float (&scores)[QUERIES / 8][4],
                                          const Dropped& dropped) {
    float kept[QUERIES / 8][4];
    #pragma unroll
    for (int i = 0; i < QUERIES / 8; i++) {
        #pragma unroll
        for (int value = 0; value < 4; value++) {
            kept[i][value] = dropped.at(i, value) ? 0.0f : scores[i][value];
        }
    }
    pack_sums<QUERIES>(packed, kept);
}

// Keeps a thread's probabilities in 16 bits, with a sign where they are dropped.
__device__ __forceinline__ void put_aside(const float (&scores)[QUERIES / 8][4], const Dropped& dropped, u32 place) {
    #pragma unroll
    for (int i = 0; i < QUERIES / 16; i++) {
        u32 pairs[4];
        #pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            int at = 2 * i + pair / 2, value = pair % 2 * 2;
            u32 signs = (dropped.at(at, value) ? 0x8000 : 0) | (dropped.at(at, value + 1) ? 0x80000000 : 0);
            pairs[pair] = pack(scores[at][value], scores[at][value + 1]) | signs;
        }
        shared_store(place + i * ASIDE_STRIDE, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
    }
}

__device__ __forceinline__ void take_back(u32 (&packed)[QUERIES / 16][4], u32 place) {
    #pragma unroll
    for (int i = 0; i < QUERIES / 16; i++) {
        uint4 pairs = shared_load(place + i * ASIDE_STRIDE);
        packed[i][0] = pairs.x, packed[i][1] = pairs.y, packed[i][2] = pairs.z, packed[i][3] = pairs.w;
    }
}

// Makes 0 what queries have of keys before the first ones of their documents.
__device__ __forceinline__ void mask_documents(float (&scores)[QUERIES / 8][4], u32 first, int key) {
    int own = key + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
    #pragma unroll
    for (int i = 0; i < QUERIES / 8; i++) {
        int2 of_queries = two_ints(first, i);
        #pragma unroll
        for (int value = 0; value < 4; value++) {
            if (own + value / 2 * 8 < (value % 2 ? of_queries.y : of_queries.x)) {
                scores[i][value] = 0.0f;
            }
        }
    }
}

__device__ void consume(const TensorMap& d_q_map, const TensorMap& d_k_map, const TensorMap& d_v_map, float* sums,
                        const Info& info, const Shared& shared, int consumer) {
    Ring<STAGES> at;
    // Where gradients of scores are put, and where those are that dQ is computed of.
    Ring<BUFFERS> to, from;
    // Steps so far, with all keys.
    int steps = 0;
    int thread = threadIdx.x % WARPGROUP;
    u32 rows = consumer * 64 * ROW_BYTES, aside = shared.aside() + (consumer * WARPGROUP + thread) * 16;
    int group = static_cast<int>(info.heads / info.kv_heads);
    for (u32 round = 0;; round++) {
        int ticket = kept_ticket(shared, round);
        if (ticket < 0) {
            break;
        }
        Keys keys = kept_keys(info, shared, ticket);
        int key = keys.tile * KEPT + consumer * 64;
        auto queries_of_row = [&](int row) {
            return key + row < keys.keys(info) ? queries_of(info, key + row) : Span{0, -1};
        };
        Range range = keys.seeing(info);
        float d_key[HEAD_DIM / 8][4], d_value[HEAD_DIM / 8][4], d_query[OWN_COLUMNS / 8][4];
        #pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++) {
            #pragma unroll
            for (int value = 0; value < 4; value++) {
                d_key[i][value] = d_value[i][value] = 0.0f;
            }
        }
        // Gradients of scores go where those of the keys before lay.
        if (thread == 0) {
            tma_store_wait_read();
        }
        named_barrier(1 + CONSUMERS, CONSUMERS * WARPGROUP);
        Pending last, before_last;
        int head = keys.head * group, block = range.begin;
        for (int left = (range.end - range.begin) * group; left > 0; left--) {
            float scores[QUERIES / 8][4], d_scores[QUERIES / 8][4];
            u32 packed[QUERIES / 16][4], d_packed[QUERIES / 16][4];
            int stage = at.stage;
            u32 statistics = shared.statistics(stage);
            barrier_wait(shared.full(stage), at.parity);
            Dropped dropped;
            if (DROPOUT && WIDE) {
                // While there are registers.
                dropped = dropped_of(info, statistics + NUMBER, key);
            }
            wgmma_fence();
            rows_by_rows<KEPT, QUERIES>(scores, shared.k() + rows, shared.q(stage));
            wgmma_commit();
            // What the step before began is done.
            wgmma_wait<1>();
            if (last.some()) {
                warp_arrive(shared.empty(stage == 0 ? STAGES - 1 : stage - 1));
            }
            Destination destination;
            if (before_last.some()) {
                destination =
                    before_last.queries(keys).destination(d_query, d_q_map, sums, info, shared, consumer, steps - 2);
            }
            if (DROPOUT && !WIDE) {
                dropped = dropped_of(info, statistics + NUMBER, key);
            }
            // Read here, and asked in one branch with the rest of the mask, it costs 1% of the
            // time; in a branch of its own 8%.
            int latest = MASK == DOCUMENTS ? load_int(statistics + LATEST) : 0;
            wgmma_wait<0>();
            float scale_log2 = scale_of(info) * LOG2_E;
            #pragma unroll
            for (int i = 0; i < QUERIES / 8; i++) {
                float2 log_sum_exp = two_floats(statistics, i);
                #pragma unroll
                for (int value = 0; value < 4; value++) {
                    float of_query = value % 2 ? log_sum_exp.y : log_sum_exp.x;
                    scores[i][value] = power_of_2(fmaf(scores[i][value], scale_log2, -of_query));
                }
                // One by one, as memory takes them no faster.
                constexpr int EACH = QUERIES / OWN_COLUMNS;
                if (i % EACH == 0) {
                    destination.pass(i / EACH, d_query[i / EACH]);
                }
            }
            if (before_last.some()) {
                warp_arrive(shared.added(steps - 2));
            }
            if (!spans(queries_of_row(0), queries_of_row(63), block * QUERIES, QUERIES) ||
                MASK == DOCUMENTS && latest > key) {
                mask_sums<QUERIES>(scores, 0.0f, block * QUERIES, queries_of_row);
                if (MASK == DOCUMENTS) {
                    mask_documents(scores, statistics + DOCUMENT, key);
                }
            }
            if (DROPOUT && WIDE) {
                put_aside(scores, dropped, aside);
            }
            if (DROPOUT) {
                pack_kept(packed, scores, dropped);
            } else {
                pack_sums<QUERIES>(packed, scores);
            }
            wgmma_fence();
            rows_by_rows<KEPT, QUERIES>(d_scores, shared.v() + rows, shared.grad(stage));
            wgmma_commit();
            sums_by_columns<QUERIES>(d_value, packed, shared.grad(stage), true);
            wgmma_commit();
            // Without a step before, what is computed here, of what another may be writing, is not
            // used: products under a condition would wait for each other.
            if (last.some()) {
                barrier_wait(shared.d_scores_full(from.stage), from.parity);
            }
            wgmma_fence();
            multiply_d_query(d_query, shared, from.stage, consumer);
            wgmma_commit();
            if (last.some()) {
                from.advance();
            }
            wgmma_wait<2>();
            u32 whole[QUERIES / 16][4];
            if (DROPOUT && WIDE) {
                take_back(whole, aside);
            }
            #pragma unroll
            for (int i = 0; i < QUERIES / 8; i++) {
                float2 delta = two_floats(statistics + DELTA, i);
                #pragma unroll
                for (int value = 0; value < 4; value++) {
                    float probability =
                        WIDE ? half_of((DROPOUT ? whole : packed)[i / 2][i % 2 * 2 + value / 2], value % 2)
                             : scores[i][value];
                    float of_query = value % 2 ? delta.y : delta.x, gradient = d_scores[i][value];
                    if (DROPOUT) {
                        bool drops = WIDE ? __float_as_int(probability) < 0 : dropped.at(i, value);
                        gradient = drops ? 0.0f : gradient * info.dropout.factor();
                        probability = fabsf(probability);
                    }
                    d_scores[i][value] = probability * (gradient - of_query);
                }
            }
            pack_sums<QUERIES>(d_packed, d_scores);
            u32 place = shared.d_scores(to.stage) + rows;
            stage_scores(d_packed, place);
            warp_arrive(shared.d_scores_full(to.stage));
            multiply_d_key(d_key, d_packed, place, shared.q(stage), consumer);
            wgmma_commit();
            before_last = last, last = {head << 16 | block};
            steps++;
            at.advance();
            to.advance();
            if (++block == range.end) {
                block = range.begin, head++;
            }
        }
        // What is left of the last two steps.
        wgmma_wait<0>();
        if (last.some()) {
            warp_arrive(shared.empty(at.stage == 0 ? STAGES - 1 : at.stage - 1));
        }
        auto pass = [&](Pending pending, int step) {
            Destination destination =
                pending.queries(keys).destination(d_query, d_q_map, sums, info, shared, consumer, step);
            #pragma unroll
            for (int i = 0; i < OWN_COLUMNS / 8; i++) {
                destination.pass(i, d_query[i]);
            }
            warp_arrive(shared.added(step));
        };
        if (before_last.some()) {
            pass(before_last, steps - 2);
        }
        if (last.some()) {
            barrier_wait(shared.d_scores_full(from.stage), from.parity);
        }
        wgmma_fence();
        multiply_d_query(d_query, shared, from.stage, consumer);
        wgmma_commit();
        wgmma_wait<0>();
        warp_arrive(shared.kept_empty());
        if (last.some()) {
            from.advance();
            pass(last, steps - 1);
        }
        // Nobody reads gradients of scores any more.
        named_barrier(1 + CONSUMERS, CONSUMERS * WARPGROUP);
        float of_values = DROPOUT ? info.dropout.factor() : 1.0f;
        float2 factors = make_float2(of_values, of_values), scales = make_float2(scale_of(info), scale_of(info));
        write_rows(d_value, factors, shared.out(consumer), d_v_map, key, keys.head, keys.batch, 1 + consumer);
        write_rows(d_key, scales, shared.out(consumer), d_k_map, key, keys.head, keys.batch, 1 + consumer);
    }
    if (thread == 0) {
        tma_store_wait();
    }
}

// `sums` are f32, `[batch, heads, tiles of queries, QUERIES * HEAD_DIM]`. `marks` are 0 before and
// after: the next ticket, and how many tiles of keys have added to each tile of queries.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_hopper(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                              const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap grad_map,
                              const __grid_constant__ TensorMap d_q_map, const __grid_constant__ TensorMap d_k_map,
                              const __grid_constant__ TensorMap d_v_map, const void*, const void*, const void*,
                              const void*, void*, void*, void*, const float2* statistics, float* sums, u32* marks,
                              const void* rows, const __grid_constant__ Info info) {
    Shared shared;
    if (threadIdx.x == 0) {
        barrier_init(shared.kept_full(), 1);
        barrier_init(shared.kept_empty(), RELEASES + 3 * WARP_ARRIVALS);
        for (int buffer = 0; buffer < BUFFERS; buffer++) {
            barrier_init(shared.d_scores_full(buffer), RELEASES);
        }
        for (int step = 0; step < 2; step++) {
            barrier_init(shared.turn(step), 1);
            barrier_init(shared.added(step), RELEASES);
            barrier_init(shared.told(step), 1);
        }
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared.full(stage), 1 + WARP_ARRIVALS);
            barrier_init(shared.empty(stage), RELEASES);
        }
        barrier_init_fence();
    }
    __syncthreads();
    // By the shuffle the compiler sees that it is the same in all lanes: what is computed of it
    // takes uniform registers.
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
    if (warpgroup == 0) {
        registers_lower<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            produce(q_map, k_map, v_map, grad_map, info, shared, marks, rows);
        } else if (warp == 1) {
            produce_statistics(statistics, info, shared);
        } else if (warp == 2) {
            await_turns(marks + 1, info, shared, rows);
        } else if (warp == 3) {
            end_turns(marks + 1, info, shared, rows);
        }
    } else {
        registers_raise<CONSUMER_REGISTERS>();
        consume(d_q_map, d_k_map, d_v_map, sums, info, shared, warpgroup - 1);
    }
}
