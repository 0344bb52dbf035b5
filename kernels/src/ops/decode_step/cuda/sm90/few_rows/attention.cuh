// Attention of the block's share of keys, and the join of splits.

// Attention of one row's query heads of a kv head over some of its keys. A group of eight lanes
// takes a key at a time.
struct Attention {
    float q[GROUP][16], out[GROUP][16], peak[GROUP], sum[GROUP];

    __device__ __forceinline__ void score(float (&s)[GROUP], uint4 u, uint4 v) const {
        const u32 k[8] = {u.x, u.y, u.z, u.w, v.x, v.y, v.z, v.w};
        float t[GROUP][2];
        #pragma unroll
        for (int h = 0; h < GROUP; h++) t[h][0] = t[h][1] = 0;
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            #pragma unroll
            for (int h = 0; h < GROUP; h++) {
                t[h][0] = fmaf(low(k[i]), q[h][2 * i], t[h][0]);
                t[h][1] = fmaf(high(k[i]), q[h][2 * i + 1], t[h][1]);
            }
        }
        #pragma unroll
        for (int h = 0; h < GROUP; h++) s[h] = t[h][0] + t[h][1];
        #pragma unroll
        for (int o = 1; o < 8; o <<= 1) {
            #pragma unroll
            for (int h = 0; h < GROUP; h++) s[h] += __shfl_xor_sync(~0u, s[h], o);
        }
    }
    // All lanes together; a lane without a key has a score of NOTHING.
    __device__ __forceinline__ void add(const float (&s)[GROUP], uint4 u, uint4 v) {
        bool more = false;
        #pragma unroll
        for (int h = 0; h < GROUP; h++) more = more || s[h] > peak[h];
        if (__any_sync(~0u, more)) {
            #pragma unroll
            for (int h = 0; h < GROUP; h++) {
                // The four keys of a warp have one maximum.
                float most = fmaxf(peak[h], s[h]);
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
                const float correction = exp_2(peak[h] - most);
                peak[h] = most, sum[h] *= correction;
                #pragma unroll
                for (int i = 0; i < 16; i++) out[h][i] *= correction;
            }
        }
        float p[GROUP];
        #pragma unroll
        for (int h = 0; h < GROUP; h++) p[h] = exp_2(s[h] - peak[h]);
        weigh(p, u, v);
    }
    __device__ __forceinline__ void weigh(const float (&p)[GROUP], uint4 u, uint4 v) {
        const u32 k[8] = {u.x, u.y, u.z, u.w, v.x, v.y, v.z, v.w};
        #pragma unroll
        for (int h = 0; h < GROUP; h++) sum[h] += p[h];
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            #pragma unroll
            for (int h = 0; h < GROUP; h++) {
                out[h][2 * i] = fmaf(p[h], low(k[i]), out[h][2 * i]);
                out[h][2 * i + 1] = fmaf(p[h], high(k[i]), out[h][2 * i + 1]);
            }
        }
    }
};

static_assert(ONE_SPLIT * PAGE_TOKENS <= 16 * WARPS, "a warp has sixteen keys");

// Where a block has all keys of a row, and they are few: each warp scores sixteen of them on tensor
// cores, weighs their values by its own maximum, and waits for no other warp; the last one has the
// newest key, too. Lane 4 g + q has the scores of the keys g and g + 8 for head q % 2; of the
// values, a group of eight lanes takes a key at a time. Tells what was read last: the stages are
// not released yet.
__device__ __forceinline__ u32 few_keys(Consumer& c, Attention& a, int stages, int position, u32 new_key) {
    const int warp = c.warp, lane = c.lane, g = lane / 4, q = lane % 4;
    const bool some = warp * 16 < position, last = warp == WARPS - 1;
    StageRing keys = c.ring, values = c.ring;
    keys.skip(some ? warp / 4 : 0);
    values.skip(stages + (some ? warp / 4 : 0));
    u32 read[2] = {0, 0};
    float s[2] = {NOTHING, NOTHING};
    if (some) {
        const u32 apart = q * 16 + (g & 1) * 64;  // columns as in a stage of weights: two a head
        const u32 queries = c.ring.base + AT_QUERIES + (g / 2 % GROUP) * (HEAD_DIM * 2) + apart;
        const uint4 b[4] = {
            shared_16(queries), shared_16(queries ^ 64), shared_16(queries + 128), shared_16((queries ^ 64) + 128)};
        c.watch.wait(keys.full(), keys.parity);
        const u32 at = keys.stage() + (warp % 4 * 16 + g) * (HEAD_DIM * 2) + apart;
        float d[2][4] = {};
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 from = (i & 1 ? at ^ 64 : at) + i / 2 * 128;
            const uint4 u = shared_16(from), v = shared_16(from + 8 * HEAD_DIM * 2);
            multiply(d[0], u.x, v.x, u.y, v.y, b[i].x, b[i].y);
            multiply(d[1], u.z, v.z, u.w, v.w, b[i].z, b[i].w);
            read[0] = v.w;
        }
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const float score = g & 1 ? d[0][2 * i + 1] + d[1][2 * i + 1] : d[0][2 * i] + d[1][2 * i];
            s[i] = warp * 16 + 8 * i + g < position ? score : NOTHING;
        }
    }
    float most = fmaxf(s[0], s[1]);
    #pragma unroll
    for (int o = 4; o < 32; o <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    #pragma unroll
    for (int h = 0; h < GROUP; h++) a.peak[h] = __shfl_sync(~0u, most, h);
    if (last) {
        const uint2 k = reinterpret_cast<const uint2*>(memory + AT_NEW)[lane];
        float p[GROUP];
        #pragma unroll
        for (int h = 0; h < GROUP; h++) {
            const float4 v = reinterpret_cast<const float4*>(memory + AT_Q)[h * (HEAD_DIM / 4) + lane];
            const float newest = sum_lanes(low(k.x) * v.x + high(k.x) * v.y + low(k.y) * v.z + high(k.y) * v.w);
            a.peak[h] = fmaxf(a.peak[h], newest);
            p[h] = lane < 8 ? exp_2(newest - a.peak[h]) : 0;
        }
        a.weigh(p, shared_16(new_key + HEAD_DIM * 2), shared_16(new_key + HEAD_DIM * 2 + 128));
    }
    if (some) {
        const float peak = q & 1 ? a.peak[1] : a.peak[0];
        #pragma unroll
        for (int i = 0; i < 2; i++) s[i] = exp_2(s[i] - peak);
        c.watch.wait(values.full(), values.parity);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            // Keys 4 i to 4 i + 3 of the warp.
            const int key = 4 * i + lane / 8;
            const u32 at = values.stage() + (warp % 4 * 16 + key) * (HEAD_DIM * 2) + lane % 8 * 16;
            uint4 u = shared_16(at), v = shared_16(at + 128);
            read[1] = v.w;
            float p[GROUP];
            #pragma unroll
            for (int h = 0; h < GROUP; h++) p[h] = __shfl_sync(~0u, s[i / 2], key % 8 * 4 + h);
            // The value of a key that is none is not to be a NaN.
            if (warp * 16 + key >= position) u = v = uint4{0, 0, 0, 0};
            a.weigh(p, u, v);
        }
    }
    return read[0] ^ read[1];
}

__device__ __forceinline__ void attend(
    Consumer& c, const Step& step, const Layer& layer, int block, int at, u32 epoch
) {
    const Share share(__shfl_sync(~0u, block, 0), step, at);
    const int position = share.position;
    float* shared_q = reinterpret_cast<float*>(memory + AT_Q);
    u32* fresh = reinterpret_cast<u32*>(memory + AT_NEW);
    float2* peaks = reinterpret_cast<float2*>(memory + AT_PEAK);
    float* part = reinterpret_cast<float*>(memory + AT_PART);
    const int warp = c.warp, lane = c.lane;
    const bool newest = share.split == share.splits - 1;
    const u32 page = step.pages[step.row(share.row) * step.pages_a_row + position / PAGE_TOKENS];

    // A warp a head: queries, then the key, then the value of this token.
    if (warp < GROUP + 2 && (warp < GROUP || newest)) {
        const int head =
            warp < GROUP ? share.kv_head * GROUP + warp : N_HEADS + (warp - GROUP) * N_KV_HEADS + share.kv_head;
        float2 cosine = {0, 0}, sine = {0, 0};
        u32 gamma[2] = {0, 0};
        if (warp <= GROUP) {
            cosine = reinterpret_cast<const float2*>(step.cos + static_cast<u64>(position) * (HEAD_DIM / 2))[lane];
            sine = reinterpret_cast<const float2*>(step.sin + static_cast<u64>(position) * (HEAD_DIM / 2))[lane];
            const u32* weights = reinterpret_cast<const u32*>(warp < GROUP ? layer.query_norm : layer.key_norm);
            gamma[0] = weights[lane], gamma[1] = weights[32 + lane];
        }
        const u64* from = step.scratch + Q + share.row * QKV_ROWS + head * HEAD_DIM + 2 * lane;
        u32 x[4], e[4];
        #pragma unroll 1
        for (;;) {
            words(from, x[0], e[0], x[1], e[1]);
            words(from + 64, x[2], e[2], x[3], e[3]);
            bool ready = e[0] == epoch && e[1] == epoch && e[2] == epoch && e[3] == epoch;
            if (__all_sync(~0u, ready || c.watch.late())) break;
        }
        float v[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) v[i] = __uint_as_float(x[i]);
        if (warp <= GROUP) {
            float factor =
                rsqrtf(sum_lanes(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) / HEAD_DIM + EPSILON);
            v[0] *= factor * low(gamma[0]), v[1] *= factor * high(gamma[0]);
            v[2] *= factor * low(gamma[1]), v[3] *= factor * high(gamma[1]);
            float a0 = v[0] * cosine.x - v[2] * sine.x, a1 = v[1] * cosine.y - v[3] * sine.y;
            v[2] = v[2] * cosine.x + v[0] * sine.x, v[3] = v[3] * cosine.y + v[1] * sine.y;
            v[0] = a0, v[1] = a1;
        }
        if (warp < GROUP) {
            constexpr float SCALE = 0.08838834764831845f * 1.4426950408889634f;
            u32* packed = reinterpret_cast<u32*>(memory + AT_QUERIES) + warp * (HEAD_DIM / 2);
            packed[lane] = pack(v[0] * SCALE, v[1] * SCALE), packed[32 + lane] = pack(v[2] * SCALE, v[3] * SCALE);
            reinterpret_cast<float2*>(shared_q + warp * HEAD_DIM)[lane] = {v[0] * SCALE, v[1] * SCALE};
            reinterpret_cast<float2*>(shared_q + warp * HEAD_DIM + 64)[lane] = {v[2] * SCALE, v[3] * SCALE};
        } else {
            u32 lo = pack(v[0], v[1]), hi = pack(v[2], v[3]);
            u32* to = fresh + (warp - GROUP) * (HEAD_DIM / 2);
            to[lane] = lo, to[32 + lane] = hi;
        }
    }
    barrier_sync(3, WARPS * 32);
    if (newest && warp >= WARPS - 2) {
        const u64 at =
            ((static_cast<u64>(page) * N_KV_HEADS + share.kv_head) * PAGE_TOKENS + position % PAGE_TOKENS) * HEAD_DIM;
        const u32* from = fresh + (warp - (WARPS - 2)) * (HEAD_DIM / 2);
        u32* line = reinterpret_cast<u32*>((warp == WARPS - 2 ? layer.keys : layer.values) + at);
        line[lane] = from[lane], line[32 + lane] = from[32 + lane];
    }

    Attention a;
    const int eighth = lane % 8, key = warp * 4 + lane / 8;
    const u32 mine = key * HEAD_DIM * 2 + eighth * 16, new_key = shared_address(fresh) + eighth * 16;
    #pragma unroll
    for (int h = 0; h < GROUP; h++) {
        a.peak[h] = NOTHING, a.sum[h] = 0;
        #pragma unroll
        for (int i = 0; i < 16; i++) a.out[h][i] = 0;
    }
    u32 read = 0;
    if (share.splits == 1) {
        read = few_keys(c, a, share.last, position, new_key);
    } else {
        const u32 queries = shared_address(shared_q) + eighth * 32;
        #pragma unroll
        for (int h = 0; h < GROUP; h++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 v = shared_floats(queries + h * (HEAD_DIM * 4) + (i / 2) * 256 + (i % 2) * 16);
                a.q[h][4 * i] = v.x, a.q[h][4 * i + 1] = v.y, a.q[h][4 * i + 2] = v.z, a.q[h][4 * i + 3] = v.w;
            }
        }
        // The newest key comes first, then those of the cache. A key that is none counts nothing:
        // its probability is 0, once there is a score; and its value is not to be a NaN.
        #pragma unroll 1
        for (int stage = share.first - newest; stage < share.last; stage++) {
            float s[GROUP];
            const bool cached = stage >= share.first;
            const bool there = cached ? stage * PAGE_TOKENS + key < position : key == PAGE_TOKENS - 1;
            if (!cached && warp != WARPS - 1) continue;
            const bool busy = !cached || stage * PAGE_TOKENS + warp * 4 < position;
            const StageRing keys = c.ring;
            if (cached) {
                c.watch.wait(c.ring.full(), c.ring.parity);
                c.ring.advance();
                c.watch.wait(c.ring.full(), c.ring.parity);
            }
            u32 at = cached ? keys.stage() + mine : new_key;
            uint4 u = shared_16(at), v = shared_16(at + 128);
            at = cached ? c.ring.stage() + mine : at + HEAD_DIM * 2;
            if (busy) a.score(s, u, v);
            u = shared_16(at), v = shared_16(at + 128);
            if (cached) {
                c.ring.advance();
                c.release(2, v.w);
            }
            if (!busy) continue;
            if (!there) {
                #pragma unroll
                for (int h = 0; h < GROUP; h++) s[h] = NOTHING * 2;
                u = v = uint4{0, 0, 0, 0};
            }
            a.add(s, u, v);
        }
    }

    // The four keys of a warp together: half of the lanes go on with a head each, and half of these
    // with half of its values.
    float kept[16];
    #pragma unroll
    for (int h = 0; h < GROUP; h++) {
        a.sum[h] += __shfl_xor_sync(~0u, a.sum[h], 8);
        a.sum[h] += __shfl_xor_sync(~0u, a.sum[h], 16);
    }
    const bool upper = lane & 16, far = lane & 8;
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        const float other = __shfl_xor_sync(~0u, upper ? a.out[0][i] : a.out[1][i], 16);
        kept[i] = (upper ? a.out[1][i] : a.out[0][i]) + other;
    }
    float* to = part + (warp * GROUP + (upper ? 1 : 0)) * HEAD_DIM + (far ? 64 : 0) + eighth * 8;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        const float other = __shfl_xor_sync(~0u, far ? kept[i] : kept[8 + i], 8);
        kept[i] = (far ? kept[8 + i] : kept[i]) + other;
    }
    reinterpret_cast<float4*>(to)[0] = {kept[0], kept[1], kept[2], kept[3]};
    reinterpret_cast<float4*>(to)[1] = {kept[4], kept[5], kept[6], kept[7]};
    if (lane < GROUP) peaks[warp * GROUP + lane] = lane ? float2{a.peak[1], a.sum[1]} : float2{a.peak[0], a.sum[0]};
    barrier_sync(3, WARPS * 32);

    // All warps together: a lane has a pair of values of a quarter of the warps.
    static_assert(WARPS == 16 && GROUP == 2 && COPIES <= 4, "quarters");
    {
        const int h = warp / (WARPS / GROUP), pair = warp % (WARPS / GROUP) * 8 + lane % 8;
        const int head = share.kv_head * GROUP + h;
        float2 seen[WARPS / 4], v[WARPS / 4];
        #pragma unroll
        for (int i = 0; i < WARPS / 4; i++) {
            const int w = lane / 8 * (WARPS / 4) + i;
            seen[i] = peaks[w * GROUP + h];
            v[i] = reinterpret_cast<const float2*>(part + (w * GROUP + h) * HEAD_DIM)[pair];
        }
        float best = fmaxf(fmaxf(seen[0].x, seen[1].x), fmaxf(seen[2].x, seen[3].x));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 8));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 16));
        float total = 0, o0 = 0, o1 = 0;
        #pragma unroll
        for (int i = 0; i < WARPS / 4; i++) {
            const float f = exp_2(seen[i].x - best);
            total = fmaf(f, seen[i].y, total), o0 = fmaf(f, v[i].x, o0), o1 = fmaf(f, v[i].y, o1);
        }
        #pragma unroll
        for (int o = 8; o < 32; o <<= 1) {
            total += __shfl_xor_sync(~0u, total, o);
            o0 += __shfl_xor_sync(~0u, o0, o);
            o1 += __shfl_xor_sync(~0u, o1, o);
        }
        const float inverse = total > 0 ? __fdividef(1, total) : 0;
        o0 *= inverse, o1 *= inverse;
        // A copy each of the first lanes.
        if (share.splits == 1) {
            u64* to = step.scratch + O + share.row * (HEADS_WIDTH / 2) + head * (HEAD_DIM / 2) + pair;
            if (lane / 8 < COPIES) publish(to + lane / 8 * (BATCH * HEADS_WIDTH / 2), pack(o0, o1), epoch);
        } else if (lane < 8) {
            const int at = (share.row * N_HEADS + head) * SPLITS + share.split;
            publish(step.scratch + PARTS + at * HEAD_DIM + 2 * pair, __float_as_uint(o0), __float_as_uint(o1), epoch);
            if (pair == 0) {
                publish(step.scratch + WEIGHTS + at, __float_as_uint(total > 0 ? best + log_2(total) : NOTHING), epoch);
            }
        }
    }
    if (share.splits > 1) return;
    // The barrier told that all stages were there.
    c.ring.skip(2 * share.last);
    c.release(2 * share.last, read);
}

// The splits of a head together, by two warps.
__device__ __forceinline__ void combine(Consumer& c, const Step& step, int row, int head, u32 epoch) {
    const int pair = c.warp % 2 * 32 + c.lane, at = (row * N_HEADS + head) * SPLITS;
    u32 v, e;
    #pragma unroll 1
    for (;;) {
        word(step.scratch + WEIGHTS + at + c.lane % SPLITS, v, e);
        if (__all_sync(~0u, e == epoch || c.watch.late())) break;
    }
    const float mine = __uint_as_float(v);
    float best = mine;
    #pragma unroll
    for (int o = SPLITS / 2; o; o >>= 1) best = fmaxf(best, __shfl_xor_sync(~0u, best, o));
    const float f = exp_2(mine - best);
    float total = f;
    #pragma unroll
    for (int o = SPLITS / 2; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
    const float weight = f / total;
    float o0 = 0, o1 = 0;
    #pragma unroll
    for (int half = 0; half < SPLITS; half += 8) {
        constexpr int N = SPLITS < 8 ? SPLITS : 8;
        u32 x[N][2], y[N][2];
        #pragma unroll 1
        for (;;) {
            u32 wrong = 0;
            #pragma unroll
            for (int s = 0; s < N; s++) {
                words(step.scratch + PARTS + (at + half + s) * HEAD_DIM + 2 * pair, x[s][0], y[s][0], x[s][1], y[s][1]);
            }
            #pragma unroll
            for (int s = 0; s < N; s++) wrong |= (y[s][0] ^ epoch) | (y[s][1] ^ epoch);
            if (__all_sync(~0u, wrong == 0 || c.watch.late())) break;
        }
        #pragma unroll
        for (int s = 0; s < N; s++) {
            const float w = __shfl_sync(~0u, weight, half + s);
            o0 = fmaf(__uint_as_float(x[s][0]), w, o0), o1 = fmaf(__uint_as_float(x[s][1]), w, o1);
        }
    }
    copies<BATCH * HEADS_WIDTH / 2>(
        step.scratch + O + row * (HEADS_WIDTH / 2) + head * (HEAD_DIM / 2) + pair, pack(o0, o1), epoch);
}
