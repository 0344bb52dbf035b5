// Attention of one new token a row over keys and values in pages: which block has which pages, and
// what its warps do with them. What blocks exchange is the kernel's affair.
//
// Included behind BATCH, BLOCKS, CONSUMERS, TEAMS, the places in shared memory (AT_PARTS,
// AT_QUERIES, AT_NEW, AT_PEAKS, AT_POSITIONS, AT_BEFORE, AT_CUTS, AT_WALK), and Step with `cos`,
// `sin`, `pages` and `pages_a_row`. A Consumer has `ring`, `warp`, `lane`, `thread`, `nil`,
// `at_input` and `at_weight`.

// Up to so many pages a head, or a block, heads are not cut.
constexpr int WHOLE_HEADS = 4;
// What it takes to begin a head, in pages.
constexpr int HEAD_COST = 1;
// Each team has its own place in shared memory.
constexpr int TEAM = 32 * TEAM_WARPS;
constexpr int QUERIES_BYTES = GROUP * HEAD_DIM * 2;
constexpr int NEW_BYTES = 2 * HEAD_DIM * 2;
constexpr int PARTS_BYTES = TEAM_WARPS * GROUP * HEAD_DIM * 4;
constexpr int PEAKS_BYTES = TEAM_WARPS * GROUP * 8;

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
__device__ __forceinline__ void team_sync(u32 team) {
    asm volatile("bar.sync %0, %1;" ::"r"(3 + team), "n"(TEAM) : "memory");
}
__device__ __forceinline__ uint4 ask(const u32* at) {
    uint4 v;
    asm volatile(
        "ld.relaxed.gpu.global.v4.b32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at)
        : "memory");
    return v;
}
__device__ __forceinline__ uint2 ask_2(const u32* at) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ void keep(u32 at, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
struct Four {
    u32 v[4];
};
__device__ __forceinline__ Four matrices(u32 at) {
    Four f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.v[0]), "=r"(f.v[1]), "=r"(f.v[2]), "=r"(f.v[3]) : "r"(at) : "memory");
    return f;
}
__device__ __forceinline__ Four matrices_transposed(u32 at) {
    Four f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.v[0]), "=r"(f.v[1]), "=r"(f.v[2]), "=r"(f.v[3]) : "r"(at) : "memory");
    return f;
}
__device__ __forceinline__ void multiply(float (&c)[4], const Four& a, u32 b0, u32 b1) {
    multiply(c, a.v[0], a.v[1], a.v[2], a.v[3], b0, b1);
}
// Where in a tile of [rows, 64] a row's eight columns lie.
__device__ __forceinline__ u32 swizzled(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
// Asks until it is ready.
template <class F>
__device__ __forceinline__ void poll(F ready) {
    #pragma unroll 1
    for (int i = 0; !ready(); i++) {
        if (i % 32 == 31 && Watch::late()) return;
    }
}

// ---- which keys a block attends to: of all pages of all kv heads of all rows, in this order, what
// takes equally long; or whole heads, where they are short

// Pages `first` to `last` of all that a kv head of a row has.
struct Segment {
    int row, head, first, last, pages, position;
};
struct Walk {
    int at, end, row;
    static __device__ __forceinline__ int* before() { return reinterpret_cast<int*>(memory + AT_BEFORE); }
    static __device__ __forceinline__ int* positions() { return reinterpret_cast<int*>(memory + AT_POSITIONS); }
    static __device__ __forceinline__ int* cuts() { return reinterpret_cast<int*>(memory + AT_CUTS); }
    static __device__ __forceinline__ int pages(int row) { return positions()[row] / PAGE_TOKENS + 1; }
    // Where a block's pages begin, as all are counted.
    static __device__ __forceinline__ int begin(int block) { return cuts()[block]; }
    Walk() = default;
    __device__ __forceinline__ explicit Walk(int block) : at(begin(block)), end(begin(block + 1)), row(0) {
        while (at < end && before()[row + 1] <= at) row++;
    }
    __device__ __forceinline__ bool next(Segment& s) {
        if (at >= end) return false;
        while (before()[row + 1] <= at) row++;
        const int off = at - before()[row];
        s.row = row, s.pages = pages(row), s.position = positions()[row];
        s.head = off / s.pages, s.first = off % s.pages, s.last = min(s.pages, s.first + end - at);
        at += s.last - s.first;
        return true;
    }
};

// The first of a block's pages, as all of them are counted. To begin a head takes as long as some
// pages.
__device__ __forceinline__ int cut(int block, int rows) {
    const int *before = Walk::before(), all = before[rows], heads = rows * N_KV_HEADS;
    if (all <= WHOLE_HEADS * min(heads, BLOCKS)) {
        const int head = heads * block / BLOCKS, row = head / N_KV_HEADS;
        return row == rows ? all : before[row] + head % N_KV_HEADS * Walk::pages(row);
    }
    constexpr int ROW_COST = HEAD_COST * N_KV_HEADS;
    const int cost = static_cast<int>(static_cast<u64>(all + rows * ROW_COST) * block / BLOCKS);
    int row = 0;
    while (row < rows && before[row + 1] + (row + 1) * ROW_COST <= cost) row++;
    if (row == rows) return all;
    const int off = cost - before[row] - row * ROW_COST, pages = Walk::pages(row), head = off / (pages + HEAD_COST);
    return before[row] + head * pages + max(off - head * (pages + HEAD_COST) - HEAD_COST, 0);
}

// Where this block's pages begin and end, once one thread has found it.
__device__ __forceinline__ Walk& kept_walk() { return *reinterpret_cast<Walk*>(memory + AT_WALK); }
// Finds which block has which pages; by one warp, with a barrier of all behind it.
__device__ __forceinline__ void share_out(const Step& step, int lane) {
    constexpr int EACH = (BATCH + 31) / 32;
    int sum = 0, own[EACH];
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int row = lane * EACH + i;
        own[i] = sum;
        if (row >= step.rows) continue;
        const int position = clamped(step.positions[row], step.last_position);
        Walk::positions()[row] = position, sum += (position / PAGE_TOKENS + 1) * N_KV_HEADS;
    }
    int all = sum;
    #pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const int other = __shfl_up_sync(~0u, all, o);
        if (lane >= o) all += other;
    }
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (lane * EACH + i <= BATCH) Walk::before()[lane * EACH + i] = all - sum + own[i];
    }
    if (lane == 31) Walk::before()[BATCH] = all;
    __syncwarp();
    for (int block = lane; block <= BLOCKS; block += 32) Walk::cuts()[block] = cut(block, step.rows);
    __syncwarp();
    if (lane == 0) kept_walk() = Walk(blockIdx.x);
}

// The pages of a block in their order, for the thread that brings them.
struct Pages {
    const Step& step;
    Walk walk;
    Segment s;
    int page, at;
    bool more;

    __device__ __forceinline__ Pages(const Step& step, const Walk& walk) : step(step), walk(walk) { begin(); }
    __device__ __forceinline__ void begin() {
        more = walk.next(s);
        if (more) page = s.first, ask();
    }
    // Where the page is: requested while the one before is loading.
    __device__ __forceinline__ void ask() { at = step.pages[s.row * step.pages_a_row + page]; }
    __device__ __forceinline__ bool there() const { return more; }
    __device__ __forceinline__ void advance() {
        if (++page < s.last) ask();
        else begin();
    }
    // Blocks of 16 tokens of the page that there are.
    __device__ __forceinline__ int blocks() const {
        return page == s.pages - 1 ? s.position % PAGE_TOKENS / 16 + 1 : PAGE_TOKENS / 16;
    }
    __device__ __forceinline__ u32 bytes() const { return blocks() * 32 * HEAD_DIM; }
    // Keys or values, by their maps: as [blocks, HEAD_DIM / 64, 16, 64], at once where the page is
    // full.
    __device__ __forceinline__ void load(const TensorMap* keys_or_values, u32 to, u32 barrier) const {
        const int block = (at * N_KV_HEADS + s.head) * (PAGE_TOKENS / 16);
        if (blocks() == PAGE_TOKENS / 16) {
            asm volatile(
                "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                " [%0], [%1, {%2, %2, %2, %3}], [%4];" ::"r"(to),
                "l"(keys_or_values + KEY_PAGES_MAP), "r"(0), "r"(block), "r"(barrier) : "memory");
            return;
        }
        #pragma unroll 1
        for (int i = 0; i < blocks(); i++) {
            asm volatile(
                "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                " [%0], [%1, {%2, %2, %2, %3}], [%4];" ::"r"(to + i * 32 * HEAD_DIM),
                "l"(keys_or_values + KEYS_MAP), "r"(0), "r"(block + i), "r"(barrier) : "memory");
        }
    }
};
static_assert(VALUES_MAP == KEYS_MAP + 1 && VALUE_PAGES_MAP == KEY_PAGES_MAP + 1, "maps");

constexpr int LANES = HEAD_DIM / 8;                    // of a head
// What a thread of a team has of a kv head: eight columns of a query, or of the new key or value.
struct Place {
    u32 head, lane;                                    // GROUP: the key; GROUP + 1: the value

    __device__ __forceinline__ explicit Place(u32 thread) : head(thread / LANES), lane(thread % LANES) {}
    static __device__ __forceinline__ bool has(u32 thread) { return thread < LANES * (GROUP + 2); }
    __device__ __forceinline__ bool query() const { return head < GROUP; }
    __device__ __forceinline__ bool value() const { return head > GROUP; }
    // Where in a row of queries, keys and values, in numbers.
    __device__ __forceinline__ u32 column(const Segment& s) const {
        const u32 from = query() ? s.head * GROUP + head : N_HEADS + (value() ? N_KV_HEADS : 0) + s.head;
        return from * HEAD_DIM + lane * 8;
    }
};
struct Angles {
    float4 cos[2], sin[2];

    __device__ __forceinline__ void load(const Step& step, const Place& place, int position) {
        const u32 angle = position * (HEAD_DIM / 2) + place.lane % (LANES / 2) * 8;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            cos[i] = *reinterpret_cast<const float4*>(step.cos + angle + 4 * i);
            sin[i] = *reinterpret_cast<const float4*>(step.sin + angle + 4 * i);
        }
    }
};
// Queries of a kv head, and the new key and value, with their norms and positions: into shared
// memory. By the threads that have some;
// `page` is the segment's last one.
__device__ __forceinline__ void put(
    const Layer& layer, const Segment& s, u32 team, const Place& place, const Angles& angles, int page, uint4 v
) {
    const bool query = place.query(), value = place.value();
    const u32 lane = place.lane, mask = __ballot_sync(~0u, !value);
    if (!value) {
        const u32 w[4] = {v.x, v.y, v.z, v.w};
        float x[8], square = 0;
        #pragma unroll
        for (int i = 0; i < 4; i++) x[2 * i] = low(w[i]), x[2 * i + 1] = high(w[i]);
        #pragma unroll
        for (int i = 0; i < 8; i++) square = fmaf(x[i], x[i], square);
        #pragma unroll
        for (int o = LANES / 2; o; o >>= 1) square += __shfl_xor_sync(mask, square, o);
        const float factor = rsqrtf(square / HEAD_DIM + EPSILON);
        const uint4 g = *reinterpret_cast<const uint4*>((query ? layer.query_norm : layer.key_norm) + lane * 8);
        const u32 gs[4] = {g.x, g.y, g.z, g.w};
        #pragma unroll
        for (int i = 0; i < 4; i++) x[2 * i] *= factor * low(gs[i]), x[2 * i + 1] *= factor * high(gs[i]);
        const bool upper = lane >= LANES / 2;
        u32 out[4];
        #pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 cos = angles.cos[i / 4], sin = angles.sin[i / 4];
            const float cs[4] = {cos.x, cos.y, cos.z, cos.w}, sn[4] = {sin.x, sin.y, sin.z, sin.w};
            float y[4];
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                const float other = __shfl_xor_sync(mask, x[i + k], LANES / 2);
                y[k] = x[i + k] * cs[k] + (upper ? other : -other) * sn[k];
            }
            out[i / 2] = pack(y[0], y[1]), out[i / 2 + 1] = pack(y[2], y[3]);
        }
        v = make_uint4(out[0], out[1], out[2], out[3]);
    }
    const u32 at = query ? AT_QUERIES + team * QUERIES_BYTES + place.head * HEAD_DIM * 2
                         : AT_NEW + team * NEW_BYTES + (value ? HEAD_DIM * 2 : 0);
    *reinterpret_cast<uint4*>(memory + at + lane * 16) = v;
    if (!query && s.last == s.pages) {
        const u64 token = static_cast<u64>(page * N_KV_HEADS + s.head) * PAGE_TOKENS + s.position % PAGE_TOKENS;
        *reinterpret_cast<uint4*>((value ? layer.values : layer.keys) + token * HEAD_DIM + lane * 8) = v;
    }
}

// A head's softmax over some of its keys: the largest score, and behind it the sum of powers, and
// two columns of the values' sum.
struct Part {
    float peak, sum;
    float2 out;

    __device__ __forceinline__ void add(float other_peak, float other_sum, float2 other) {
        const float most = fmaxf(peak, other_peak), f0 = exp_2(peak - most), f1 = exp_2(other_peak - most);
        peak = most, sum = sum * f0 + other_sum * f1;
        out.x = out.x * f0 + other.x * f1, out.y = out.y * f0 + other.y * f1;
    }
};
// Each of the next blocks that has a part of a row's head which this block begins: `add(block)`
// waits for it.
template <class Add>
__device__ __forceinline__ void each_other(const Segment& s, Add add) {
    int block = blockIdx.x + 1, done = s.last;
    #pragma unroll 1
    for (; done < s.pages; block++) {
        // A block that has no pages says nothing.
        const int pages = Walk::begin(block + 1) - Walk::begin(block);
        if (pages == 0) continue;
        done += pages;
        add(block);
    }
}
constexpr int PAIRS_OF_HEAD = HEAD_DIM / 2, PARTED = GROUP * PAIRS_OF_HEAD;
static_assert(PARTED <= TEAM && TEAMS > 1, "heads");
// A segment whose queries are in shared memory: of a team's thread `t` below PARTED, head t /
// PAIRS_OF_HEAD of the group, columns 2 (t % PAIRS_OF_HEAD) and the next.
template <class Consumer>
__device__ __forceinline__ Part attend(Consumer& c, const Segment& s) {
    constexpr int STEPS = HEAD_DIM / 16;
    const u32 lane = c.lane, g = lane / 4, q = lane % 4;
    const u32 team = c.warp / TEAM_WARPS, warp = c.warp % TEAM_WARPS, thread = c.thread % TEAM;
    const unsigned char* at_queries = memory + AT_QUERIES + team * QUERIES_BYTES;
    const unsigned char* at_new = memory + AT_NEW + team * NEW_BYTES;
    const float scale = rsqrtf(static_cast<float>(HEAD_DIM)) * 1.4426950408889634f;
    u32 queries[STEPS][2];
    #pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const u32* at = reinterpret_cast<const u32*>(at_queries + (g * HEAD_DIM + k * 16 + 2 * q) * 2);
        queries[k][0] = g < GROUP ? at[0] : 0, queries[k][1] = g < GROUP ? at[4] : 0;
    }
    float out[STEPS][4] = {}, peak[2] = {NOTHING, NOTHING}, sum[2] = {0, 0};
    #pragma unroll 1
    for (int page = s.first; page < s.last; page++) {
        const bool newest = page == s.pages - 1;
        const int at = s.position % PAGE_TOKENS, of_warp = at / 16;
        const bool takes = !newest || warp <= of_warp, has_new = newest && warp == of_warp;
        c.ring.await();
        u32 last = 0;
        u32 p[2];
        float correction[2];
        if (takes) {
            const u32 tile = c.ring.stage() + warp * (32 * HEAD_DIM);
            if (has_new) {
                const uint4 v = *reinterpret_cast<const uint4*>(at_new + lane % LANES * 16);
                if (lane < LANES) keep(tile + lane / 8 * 2048 + swizzled(at % 16, lane % 8), v);
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                __syncwarp();
            }
            float score[2][4] = {};
            Four a[STEPS];
            #pragma unroll
            for (int k = 0; k < STEPS; k++) a[k] = matrices(tile + k / 4 * 2048 + (c.at_input ^ 32 * (k % 4)));
            #pragma unroll
            for (int k = 0; k < STEPS; k++) multiply(score[k & 1], a[k], queries[k][0], queries[k][1]);
            last = a[STEPS - 1].v[3];
            float x[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = warp * 16 + g + 8 * (i >> 1);
                x[i] = newest && key > at ? NOTHING : (score[0][i] + score[1][i]) * scale;
            }
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                float most = fmaxf(x[h], x[h + 2]);
                #pragma unroll
                for (int o = 4; o < 32; o <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
                most = fmaxf(most, peak[h]);
                correction[h] = exp_2(peak[h] - most);
                peak[h] = most;
                x[h] = exp_2(x[h] - most), x[h + 2] = exp_2(x[h + 2] - most);
                sum[h] = sum[h] * correction[h] + x[h] + x[h + 2];
            }
            // From keys by heads to heads by keys.
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 from = 8 * q + g / 2;
                const float a0 = __shfl_sync(~0u, x[2 * i], from), a1 = __shfl_sync(~0u, x[2 * i + 1], from);
                const float b0 = __shfl_sync(~0u, x[2 * i], from + 4), b1 = __shfl_sync(~0u, x[2 * i + 1], from + 4);
                p[i] = g & 1 ? pack(a1, b1) : pack(a0, b0);
            }
        }
        __syncwarp();
        c.ring.release(lane, last, c.nil);
        c.ring.await();
        last = 0;
        if (takes) {
            const u32 tile = c.ring.stage() + warp * (32 * HEAD_DIM);
            if (has_new) {
                // The newest value; none behind it.
                const uint4 v = *reinterpret_cast<const uint4*>(at_new + HEAD_DIM * 2 + lane % LANES * 16);
                #pragma unroll 1
                for (int row = at % 16 + lane / LANES; row < 16; row += 32 / LANES) {
                    const u32 to = tile + lane % LANES / 8 * 2048 + swizzled(row, lane % 8);
                    keep(to, row > at % 16 ? make_uint4(0, 0, 0, 0) : v);
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                __syncwarp();
            }
            Four a[STEPS];
            #pragma unroll
            for (int m = 0; m < STEPS; m++) {
                a[m] = matrices_transposed(tile + m / 4 * 2048 + (c.at_weight ^ 32 * (m % 4)));
            }
            #pragma unroll
            for (int m = 0; m < STEPS; m++) {
                #pragma unroll
                for (int i = 0; i < 4; i++) out[m][i] *= correction[i & 1];
                multiply(out[m], a[m], p[0], p[1]);
            }
            last = a[STEPS - 1].v[3];
        }
        __syncwarp();
        c.ring.release(lane, last, c.nil);
    }
    // All warps' parts together.
    float* parts = reinterpret_cast<float*>(memory + AT_PARTS + team * PARTS_BYTES);
    float2* peaks = reinterpret_cast<float2*>(memory + AT_PEAKS + team * PEAKS_BYTES);
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        #pragma unroll
        for (int o = 4; o < 32; o <<= 1) sum[h] += __shfl_xor_sync(~0u, sum[h], o);
    }
    if (2 * q < GROUP) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            float* to = parts + (warp * GROUP + 2 * q + h) * HEAD_DIM + g;
            #pragma unroll
            for (int m = 0; m < STEPS; m++) to[m * 16] = out[m][h], to[m * 16 + 8] = out[m][h + 2];
            if (g == 0) peaks[warp * GROUP + 2 * q + h] = make_float2(peak[h], sum[h]);
        }
    }
    team_sync(team);
    Part part{NOTHING, 0, {0, 0}};
    if (thread >= PARTED) return part;
    const u32 head = thread / PAIRS_OF_HEAD, pair = thread % PAIRS_OF_HEAD;
    #pragma unroll
    for (int w = 0; w < TEAM_WARPS; w++) part.peak = fmaxf(part.peak, peaks[w * GROUP + head].x);
    #pragma unroll
    for (int w = 0; w < TEAM_WARPS; w++) {
        const float2 p = peaks[w * GROUP + head];
        const float2 v = *reinterpret_cast<const float2*>(parts + (w * GROUP + head) * HEAD_DIM + 2 * pair);
        const float f = exp_2(p.x - part.peak);
        part.sum = fmaf(p.y, f, part.sum), part.out.x = fmaf(v.x, f, part.out.x), part.out.y = fmaf(v.y, f, part.out.y);
    }
    return part;
}

// A segment of another team's: its stages are released unread.
template <class Consumer>
__device__ __forceinline__ void pass_by(Consumer& c, const Segment& s) {
    #pragma unroll 1
    for (int i = 0; i < 2 * (s.last - s.first); i++) {
        c.ring.await();
        c.ring.release(c.lane, 0, c.nil);
    }
}

// What a thread needs for its place of a segment, asked for before the segment's turn.
struct Ahead {
    uint4 v;
    Angles angles;
    int page;

    template <class Value>
    __device__ __forceinline__ void load(const Step& step, u32 thread, const Segment& s, Value value) {
        if (!Place::has(thread)) return;
        const Place place(thread);
        angles.load(step, place, s.position);
        page = step.pages[s.row * step.pages_a_row + s.pages - 1];
        v = value(s.row * QKV_ROWS + place.column(s));
    }
};

// Teams take a block's segments in turns: one puts its heads together while pages of the other's
// come. `value(at)`: eight queries, keys or values as their projection leaves them. `done(segment,
// part, head, pair)` for what comes of each, by PARTED threads.
template <class Consumer, class Value, class Done>
__device__ __forceinline__ void attend_in_turns(
    Consumer& c, const Step& step, const Layer& layer, Walk walk, Value value, Done done
) {
    const u32 team = c.warp / TEAM_WARPS, thread = c.thread % TEAM;
    Segment s, next;
    Ahead ahead;
    bool more = walk.next(s);
    if (more && team == 0) ahead.load(step, thread, s, value);
    #pragma unroll 1
    for (u32 turn = 0; more; s = next, turn++) {
        more = walk.next(next);
        if (turn % TEAMS != team) {
            if (more && (turn + 1) % TEAMS == team) ahead.load(step, thread, next, value);
            pass_by(c, s);
            continue;
        }
        if (Place::has(thread)) put(layer, s, team, Place(thread), ahead.angles, ahead.page, ahead.v);
        team_sync(team);
        const Part part = attend(c, s);
        if (thread < PARTED) done(s, part, thread / PAIRS_OF_HEAD, thread % PAIRS_OF_HEAD);
    }
}
