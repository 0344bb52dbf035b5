// Attention over pages: a warp has a query head and some keys of a row.

struct Keys {
    int first, total, splits;

    __device__ __forceinline__ Keys(int position) {
        first = WINDOW ? max(0, position + 1 - WINDOW) : 0;
        total = position + 1 - first;
        splits = min(SPLITS, (total + SPLIT_KEYS - 1) / SPLIT_KEYS);
    }
    __device__ __forceinline__ int begin(int split) const {
        return first + static_cast<int>(static_cast<u32>(total) * split / static_cast<u32>(splits));
    }
};

// A head of a row, normalised and rotated, by a warp; `to` is of shared memory.
__device__ __forceinline__ void placed(
    const Step& step, const u64* from, const float* gamma, bool rotates, int position, float scale, bool rounded,
    float* to
) {
    constexpr int HALF = HEAD_DIM / 2, N = ceil_div(HALF, 32);
    float x[N][2], square = 0;
    float2 g[N], angle[N];
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = min(i * 32 + step.lane, HALF - 1);
        const u64 turned = static_cast<u64>(position) * ANGLE_PITCH + at;
        g[i] = gamma ? make_float2(gamma[at], gamma[HALF + at]) : make_float2(1, 1);
        angle[i] = rotates ? make_float2(step.numbers.cos[turned], step.numbers.sin[turned]) : make_float2(1, 0);
    }
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = i * 32 + step.lane;
        Word v[2] = {};
        if (at < HALF) poll([&] {
            v[0] = ask(from + at), v[1] = ask(from + HALF + at);
            return v[0].e == step.epoch && v[1].e == step.epoch;
        });
        __syncwarp();
        x[i][0] = __uint_as_float(v[0].v), x[i][1] = __uint_as_float(v[1].v);
        square = fmaf(x[i][0], x[i][0], fmaf(x[i][1], x[i][1], square));
    }
    const float factor = gamma ? rsqrtf(sum_lanes(square) / HEAD_DIM + EPSILON) : 1;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = i * 32 + step.lane;
        if (at >= HALF) continue;
        const float a = x[i][0] * factor * g[i].x, b = x[i][1] * factor * g[i].y;
        float c = (a * angle[i].x - b * angle[i].y) * scale, d = (b * angle[i].x + a * angle[i].y) * scale;
        if (rounded) c = to_float(from_float(c)), d = to_float(from_float(d));
        to[at] = c, to[HALF + at] = d;
    }
}

// Eight numbers of a key or value.
#if CACHE_INT8
struct Eight {
    uint2 v;
    float scale;

    __device__ __forceinline__ void read(const Cached* from, const float* scales, u64 line, bool there) {
        v = make_uint2(0, 0), scale = 0;
        if (there) v = *reinterpret_cast<const uint2*>(from), scale = scales[line];
    }
    __device__ __forceinline__ void floats(float (&f)[8]) const {
        const u32 w[2] = {v.x, v.y};
        #pragma unroll
        for (int i = 0; i < 8; i++) f[i] = from_byte(w[i / 4], i % 4) * scale;
    }
};
// The numbers of a warp's head in shared memory become the nearest bytes by their scale, its
// largest magnitude over 127, and what these stand for; they are kept in a line of the cache, if
// there is one.
__device__ __forceinline__ void to_bytes(float* numbers, int lane, Cached* kept, float* scale_kept) {
    float largest = 0, all = 0;
    #pragma unroll 1
    for (int i = lane; i < HEAD_DIM; i += 32) largest = fmaxf(largest, fabsf(numbers[i])), all += fabsf(numbers[i]);
    #pragma unroll
    for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
    all = sum_lanes(all);
    // None that can be counted with where one of the numbers is none, or all together are too
    // large.
    const float scale = all < 3.4028235e38f ? largest > 0 ? largest / 127 : 1 : all;
    #pragma unroll 1
    for (int i = lane; i < HEAD_DIM; i += 32) {
        const float byte = fmaxf(fminf(roundf(numbers[i] / scale), 127), -127);
        numbers[i] = byte * scale;
        if (kept) kept[i] = static_cast<signed char>(byte);
    }
    if (kept && lane == 0) *scale_kept = scale;
}
#else
struct Eight {
    uint4 v[sizeof(Half) / 2];

    __device__ __forceinline__ void read(const Cached* from, const float*, u64, bool there) {
        #pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Half)) / 2; i++) {
            v[i] = make_uint4(0, 0, 0, 0);
            if (there) v[i] = *(reinterpret_cast<const uint4*>(from) + i);
        }
    }
    __device__ __forceinline__ void floats(float (&f)[8]) const {
        #pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Half)) / 2; i++) {
            float some[HALVES];
            spread(some, v[i]);
            #pragma unroll
            for (int k = 0; k < HALVES; k++) f[i * HALVES + k] = some[k];
        }
    }
};
#endif

// Eight numbers in shared memory, or zeros.
__device__ __forceinline__ void eight(float (&to)[8], const float* from, bool there) {
    #pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const float4 v = there ? *reinterpret_cast<const float4*>(from + i) : make_float4(0, 0, 0, 0);
        to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
}

// A query head over some keys. A group of KEY_LANES lanes takes a key at a time, eight numbers a
// lane, and has a maximum of its own.
struct Attention {
    float q[8], out[8] = {}, peak = NOTHING, sum = 0;

    __device__ __forceinline__ void add(const float (&key)[8], const float (&value)[8], bool there) {
        float s = 0;
        #pragma unroll
        for (int i = 0; i < 8; i++) s = fmaf(key[i], q[i], s);
        #pragma unroll
        for (int o = 1; o < KEY_LANES; o <<= 1) s += __shfl_xor_sync(~0u, s, o);
        if (!there) s = NOTHING;
        const float highest = fmaxf(peak, s), correction = exp_2(peak - highest), p = there ? exp_2(s - highest) : 0;
        peak = highest, sum = fmaf(sum, correction, p);
        #pragma unroll
        for (int i = 0; i < 8; i++) out[i] = fmaf(out[i], correction, p * value[i]);
    }
};

__device__ __forceinline__ void attend(const Step& step, const Layer& layer) {
    constexpr int SLOTS = 32 / KEY_LANES, APART = SHARERS * SLOTS;
    float* shared = reinterpret_cast<float*>(memory);
    const int slot = step.lane / KEY_LANES, column = step.lane % KEY_LANES * 8;
    const bool active = column < HEAD_DIM;
    #pragma unroll 1
    for (int task = step.block; task < step.rows * (N_KV_HEADS * CHUNKS * SPLITS); task += BLOCKS) {
        const int split = task % SPLITS, chunk = task / SPLITS % CHUNKS;
        const int kv_head = task / (SPLITS * CHUNKS) % N_KV_HEADS;
        const int row = task / (SPLITS * CHUNKS * N_KV_HEADS), position = step.position(row);
        const Keys keys(position);
        if (split >= keys.splits) continue;
        const bool newest = split == keys.splits - 1;
        const int begin = keys.begin(split), end = newest ? position : keys.begin(split + 1);
        const int first_head = kv_head * GROUP + chunk * HEADS, heads = min(HEADS, GROUP - chunk * HEADS);
        const u64* qkv = step.scratch + AT_QKV + row * QKV_ROWS;
        const int* pages = step.pages + row * static_cast<int>(step.numbers.pages_a_row);
        const bool rotates = step.numbers.cos;

        auto line_of = [&](int token) {
            return (static_cast<u64>(pages[token / PAGE_TOKENS]) * N_KV_HEADS + kv_head) * PAGE_TOKENS +
                token % PAGE_TOKENS;
        };
        // The next key and value are loaded during the products of the last.
        Eight k, v;
        const int own_head = step.warp % HEADS, sharer = step.warp / HEADS;
        int at = sharer < SHARERS ? begin + sharer * SLOTS + slot : end;
        auto read = [&] {
            const int known = max(min(at, end - 1), 0);
            const u64 line = line_of(known), first = line * HEAD_DIM + column;
            k.read(layer.keys + first, layer.key_scales, line, at < end && active);
            v.read(layer.values + first, layer.value_scales, line, at < end && active);
        };
        read();

        // A warp a head: queries, then the key, then the value of this token.
        if (step.warp < (newest ? HEADS + 2 : HEADS)) {
            const int w = step.warp;
            const bool query = w < HEADS, value = w > HEADS;
            const int head = query ? first_head + min(w, heads - 1) : N_HEADS + (value ? N_KV_HEADS : 0) + kv_head;
            const float scale = query ? rsqrtf(static_cast<float>(HEAD_DIM)) * 1.4426950408889634f : 1;
            float* to = shared + (query ? w * HEAD_DIM : AT_NEW + (value ? HEAD_DIM : 0));
            const float* gamma = query ? layer.query_gamma : value ? nullptr : layer.key_gamma;
            placed(step, qkv + head * HEAD_DIM, gamma, rotates && !value, position, scale, !query && !CACHE_INT8, to);
            __syncwarp();
            if (!query) {
                const u64 line = line_of(position);
                Cached* kept = (value ? layer.values : layer.keys) + line * HEAD_DIM;
#if CACHE_INT8
                to_bytes(
                    to, step.lane, chunk == 0 ? kept : nullptr, (value ? layer.value_scales : layer.key_scales) + line);
#else
                #pragma unroll 1
                for (int i = step.lane; i < HEAD_DIM && chunk == 0; i += 32) kept[i] = from_float(to[i]);
#endif
            }
        }
        __syncthreads();

        Attention a;
        eight(a.q, shared + own_head * HEAD_DIM + column, active);
        // The newest key comes first, and is one lane group's.
        float key[8], value[8];
        bool there = newest && sharer == SHARERS - 1 && slot == 0;
        eight(key, shared + AT_NEW + column, there && active);
        eight(value, shared + AT_NEW + HEAD_DIM + column, there && active);
        #pragma unroll 1
        for (;;) {
            if (__any_sync(~0u, there)) a.add(key, value, there);
            there = at < end;
            if (!__any_sync(~0u, there)) break;
            k.floats(key), v.floats(value);
            at += APART;
            read();
        }
        // The keys of a warp together, then the warps of a head.
        float highest = a.peak;
        #pragma unroll
        for (int o = KEY_LANES; o < 32; o <<= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
        const float correction = exp_2(a.peak - highest);
        a.sum *= correction;
        #pragma unroll
        for (int i = 0; i < 8; i++) a.out[i] *= correction;
        #pragma unroll
        for (int o = KEY_LANES; o < 32; o <<= 1) {
            a.sum += __shfl_xor_sync(~0u, a.sum, o);
            #pragma unroll
            for (int i = 0; i < 8; i++) a.out[i] += __shfl_xor_sync(~0u, a.out[i], o);
        }
        if (slot == 0 && active) {
            float4* to = reinterpret_cast<float4*>(shared + AT_OUT + step.warp * HEAD_DIM + column);
            to[0] = make_float4(a.out[0], a.out[1], a.out[2], a.out[3]);
            to[1] = make_float4(a.out[4], a.out[5], a.out[6], a.out[7]);
        }
        if (step.lane == 0) *reinterpret_cast<float2*>(shared + AT_PEAKS + step.warp * 2) = make_float2(highest, a.sum);
        __syncthreads();
        #pragma unroll 1
        for (int i = step.thread; i < heads * HEAD_DIM; i += THREADS) {
            const int h = i / HEAD_DIM;
            float highest = NOTHING, total = 0, out = 0;
            #pragma unroll 4
            for (int w = h; w < SHARERS * HEADS; w += HEADS) highest = fmaxf(highest, shared[AT_PEAKS + w * 2]);
            #pragma unroll 4
            for (int w = h; w < SHARERS * HEADS; w += HEADS) {
                const float2 peak = *reinterpret_cast<const float2*>(shared + AT_PEAKS + w * 2);
                const float f = exp_2(peak.x - highest);
                total = fmaf(f, peak.y, total), out = fmaf(f, shared[AT_OUT + w * HEAD_DIM + i % HEAD_DIM], out);
            }
            const int at = (row * N_HEADS + first_head + h) * SPLITS + split;
            publish(step.scratch + AT_PARTS + at * HEAD_DIM + i % HEAD_DIM, out / total, step.epoch);
            if (i % HEAD_DIM == 0) publish(step.scratch + AT_WEIGHT + at, highest + log2f(total), step.epoch);
        }
        __syncthreads();
    }
}

// The splits of all heads together, in shared memory: two columns a thread.
__device__ __forceinline__ void of_heads(const Step& step) {
    constexpr int PAIRS = HEADS_WIDTH / 2, SOME = least(SPLITS, 4);
    #pragma unroll 1
    for (int i = step.thread; i < step.rows * PAIRS; i += THREADS) {
        const int row = i / PAIRS, head = i / (HEAD_DIM / 2), column = i % (HEAD_DIM / 2) * 2;
        const int splits = Keys(step.position(row)).splits;
        const u64* weights = step.scratch + AT_WEIGHT + head * SPLITS;
        const u64* from = step.scratch + AT_PARTS + head * (SPLITS * HEAD_DIM) + column;
        float x = 0, y = 0, peak = NOTHING, total = 0;
        #pragma unroll 1
        for (int begin = 0; begin < splits; begin += SOME) {
            Two v[SOME];
            Word w[SOME];
            poll([&] {
                bool all = true;
                #pragma unroll
                for (int s = 0; s < SOME; s++) {
                    const int split = min(begin + s, splits - 1);
                    w[s] = ask(weights + split), v[s] = ask_two(from + split * HEAD_DIM);
                }
                #pragma unroll
                for (int s = 0; s < SOME; s++) all = all && w[s].e == step.epoch && v[s].there(step.epoch);
                return all;
            });
            float highest = peak;
            #pragma unroll
            for (int s = 0; s < SOME; s++) highest = fmaxf(highest, __uint_as_float(w[s].v));
            const float correction = exp_2(peak - highest);
            x *= correction, y *= correction, total *= correction, peak = highest;
            #pragma unroll
            for (int s = 0; s < SOME; s++) {
                const float weight = begin + s < splits ? exp_2(__uint_as_float(w[s].v) - highest) : 0;
                total += weight;
                x = fmaf(weight, __uint_as_float(v[s].a.v), x);
                y = fmaf(weight, __uint_as_float(v[s].b.v), y);
            }
        }
        Half* to = reinterpret_cast<Half*>(memory) + i * 2;
        to[0] = from_float(x / total), to[1] = from_float(y / total);
    }
    __syncthreads();
}
