// Mixtures of experts: the router's product, the choice of experts, and a block's rows of these.
//
//     row 0 chose 7 2 5        7: slot 0
//     row 1 chose 2 1 9  --->  2: slots 1, 3        of which each block has some rows of the
//                              5: slot 2 ..         matrices: each chosen expert is read once
//
// A slot is a choice of a row. Each block computes the same choices from the same logits.

// Keys that are ordered as the numbers are.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// The router's logits of the block's experts, by the input in shared memory. A thread has four
// columns of every 4 * THREADS; those of the first expert are read before there is an input, into
// the registers that hold weights in other products.
struct RouterProduct {
    static constexpr int ACROSS = 4 * THREADS, N = ceil_div(D_MODEL, ACROSS);
    static_assert(!MIXTURE || N <= STEPS * TILE, "a router's row in registers");
    struct __align__(4 * sizeof(Half)) Four {
        Half v[4];
    };

    static __device__ __forceinline__ int begin(int block) { return N_EXPERTS * block / BLOCKS; }
    static __device__ __forceinline__ int own(int block) { return begin(block + 1) - begin(block); }
    static __device__ __forceinline__ void read(const Step& step, const Layer& layer, int i, Weights::Registers& v) {
        #pragma unroll
        for (int n = 0; n < least(N, STEPS * TILE); n++) {
            const int column = n * ACROSS + 4 * step.thread;
            if (i >= own(step.block) || column >= D_MODEL) continue;
            const float* from = layer.router + static_cast<u64>(begin(step.block) + i) * D_MODEL + column;
            v[n / TILE][n % TILE] = *reinterpret_cast<const uint4*>(from);
        }
    }
    static __device__ __forceinline__ void multiply(const Step& step, const Layer& layer, Weights::Registers& v) {
        float* sums = step.sums();                     // [WARPS, BATCH]
        #pragma unroll 1
        for (int i = 0; i < own(step.block); i++) {
            float sum[BATCH] = {};
            #pragma unroll
            for (int n = 0; n < least(N, STEPS * TILE); n++) {
                const int column = n * ACROSS + 4 * step.thread;
                if (column >= D_MODEL) continue;
                const uint4 w = v[n / TILE][n % TILE];
                #pragma unroll
                for (int r = 0; r < BATCH; r++) {
                    const Half* input = reinterpret_cast<const Half*>(memory) + r * D_MODEL + column;
                    const Four x = *reinterpret_cast<const Four*>(input);
                    sum[r] = fmaf(to_float(x.v[0]), __uint_as_float(w.x), sum[r]);
                    sum[r] = fmaf(to_float(x.v[1]), __uint_as_float(w.y), sum[r]);
                    sum[r] = fmaf(to_float(x.v[2]), __uint_as_float(w.z), sum[r]);
                    sum[r] = fmaf(to_float(x.v[3]), __uint_as_float(w.w), sum[r]);
                }
            }
            read(step, layer, i + 1, v);
            #pragma unroll
            for (int r = 0; r < BATCH; r++) {
                const float all = sum_lanes(sum[r]);
                if (step.lane == r) sums[step.warp * BATCH + r] = all;
            }
            __syncthreads();
            if (step.thread < step.rows) {
                const int expert = begin(step.block) + i;
                float all = layer.router_bias ? layer.router_bias[expert] : 0;
                #pragma unroll
                for (int w = 0; w < WARPS; w++) all += sums[w * BATCH + step.thread];
                publish(step.scratch + AT_LOGITS + step.thread * N_EXPERTS + expert, all, step.epoch);
            }
            __syncthreads();
        }
    }
};

// The experts of a row and their weights, by a warp.
__device__ __forceinline__ void choose(const Step& step, const Layer& layer, int row) {
    constexpr int N = most(1, ceil_div(N_EXPERTS, 32));
    Routing& to = routing();
    const float* logits = to.logits + row * N_EXPERTS;
    float scores[N], highest = -INFINITE, total = 0;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int expert = i * 32 + step.lane;
        scores[i] = expert < N_EXPERTS ? logits[expert] : -INFINITE;
        highest = fmaxf(highest, scores[i]);
    }
    // The largest logits have the largest probabilities, and those of the chosen ones alone are
    // quotients of these: of all experts they are only needed for what is not normalised, or biased.
    const bool of_all = !SIGMOID && (!NORMALIZED || layer.choice_bias);
    if (of_all) {
        #pragma unroll
        for (int o = 16; o; o >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
        #pragma unroll
        for (int i = 0; i < N; i++) total += expf(scores[i] - highest);
        total = sum_lanes(total);
    }
    u32 keys[N];
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int expert = i * 32 + step.lane;
        float score = SIGMOID ? sigmoid(scores[i]) : of_all ? expf(scores[i] - highest) / total : scores[i];
        if (layer.choice_bias) score += layer.choice_bias[min(expert, N_EXPERTS - 1)];
        keys[i] = expert < N_EXPERTS ? ordered(score) : 0;
    }
    // Of equal scores the first expert.
    int own = 0;
    #pragma unroll 1
    for (int choice = 0; choice < CHOICES; choice++) {
        u32 best = 0, first = N_EXPERTS - 1;
        #pragma unroll
        for (int i = 0; i < N; i++) best = max(best, keys[i]);
        best = __reduce_max_sync(~0u, best);
        #pragma unroll
        for (int i = N; i-- > 0;) first = keys[i] == best ? min(i * 32 + step.lane, N_EXPERTS - 1) : first;
        first = __reduce_min_sync(~0u, first);
        #pragma unroll
        for (int i = 0; i < N; i++) keys[i] = i * 32 + step.lane == first ? 0 : keys[i];
        if (step.lane == choice) own = first;
    }
    const bool chooses = step.lane < CHOICES;
    const float logit = chooses ? logits[own] : -INFINITE;
    float weight;
    if (SIGMOID) {
        weight = chooses ? sigmoid(logit) : 0;
        if (NORMALIZED) weight /= sum_lanes(weight) + 1e-20f;
    } else if (NORMALIZED) {
        highest = logit;
        #pragma unroll
        for (int o = 16; o; o >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
        weight = expf(logit - highest);
        weight /= sum_lanes(weight);
    } else {
        weight = expf(logit - highest) / total;
    }
    if (!chooses) return;
    const int slot = row * CHOICES + step.lane;
    to.chosen[slot] = own, to.weights[slot] = weight * EXPERT_SCALE;
}

// The choices of all rows, and the slots of each expert that was chosen, in the order of slots.
__device__ __forceinline__ void route(const Step& step, const Layer& layer) {
    static_assert(CHOICES <= 32 && SLOTS < THREADS, "a lane or thread for each choice");
    Routing& to = routing();
    #pragma unroll 1
    for (int i = step.thread; i < step.rows * N_EXPERTS; i += THREADS) {
        Word v;
        poll([&] {
            v = ask(step.scratch + AT_LOGITS + i);
            return v.e == step.epoch;
        });
        to.logits[i] = __uint_as_float(v.v);
    }
    __syncthreads();
    if (step.warp < step.rows) choose(step, layer, step.warp);
    __syncthreads();
    const int slots = step.rows * CHOICES, slot = step.thread;
    if (BATCH == 1) {
        if (slot == 0) to.count = CHOICES;
        if (slot < CHOICES) {
            to.experts[slot] = to.chosen[slot], to.members[slot] = 1;
            to.slots[slot] = to.places[slot] = slot;
        }
    } else {
        // The first slot with the same expert, and how many are before this one, and after.
        int first = slot, before = 0, after = 0, place = 0;
        const int expert = slot < slots ? to.chosen[slot] : -1;
        #pragma unroll 4
        for (int other = 0; other < slots; other++) {
            if (to.chosen[other] != expert) continue;
            first = min(first, other), before += other < slot, after += other > slot;
        }
        if (slot < slots) to.places[slot] = first == slot;
        __syncthreads();
        #pragma unroll 4
        for (int other = 0; other < slots; other++) place += other < first ? to.places[other] : 0;
        __syncthreads();
        if (slot < slots) {
            // A row never has an expert twice.
            before = min(before, BATCH - 1);
            to.places[slot] = place * BATCH + before, to.slots[place * BATCH + before] = slot;
            if (first == slot) to.experts[place] = expert, to.members[place] = min(after + 1, BATCH);
        }
        if (slot == slots) to.count = place;
    }
    __syncthreads();
}

// Whether a block has any.
__device__ __forceinline__ bool mixes(int block) { return Out::begin(block + 1) > Out::begin(block); }

// What a block has of experts: rows of their first projections, shared out between the blocks that
// own rows of the second ones, as if the matrices of all chosen experts were one; and its own rows
// of each second projection.
__device__ __forceinline__ Part up_of_experts(const Step& step, const Layer& layer) {
    const int units = routing().count * (EXPERT_FF / 2);
    // Where there are fewer pairs of rows than blocks, those that have one are numbered by it.
    const int first = Out::begin(step.block), mixer = MIXERS < BLOCKS ? first / 2 : step.block;
    const int begin = 2 * static_cast<int>(static_cast<u64>(units) * static_cast<u32>(mixer) / MIXERS);
    const int end = 2 * static_cast<int>(static_cast<u64>(units) * static_cast<u32>(mixer + 1) / MIXERS);
    return {layer.up, layer.up_scales, layer.up_bias, EXPERT_FF, EXPERTS_UP_PITCH, D_MODEL / WEIGHTS, GATES,
        EXPERT_UP_ROWS, EXPERT_UP_BITS, mixes(step.block) ? begin : 0, mixes(step.block) ? end - begin : 0,
        Part::EXPERTS_UP};
}
__device__ __forceinline__ Part down_of_experts(const Step& step, const Layer& layer) {
    const int first = Out::begin(step.block), own = Out::begin(step.block + 1) - first;
    return {layer.down, layer.down_scales, layer.down_bias, D_MODEL, EXPERTS_DOWN_PITCH, EXPERT_FF / WEIGHTS, 1,
        EXPERT_DOWN_ROWS, EXPERT_DOWN_BITS, first, own, Part::EXPERTS_DOWN};
}
__device__ __forceinline__ int Part::place(int r) const {
    return kind == EXPERTS_UP ? (first + (r < own ? r : r - own)) / EXPERT_FF : r / max(own, 1);
}
__device__ __forceinline__ int Part::line_of_experts(int r) const {
    if (kind == EXPERTS_UP) {
        const int at = first + (r < own ? r : r - own), place = at / EXPERT_FF;
        return routing().experts[place] * (GATES * EXPERT_FF) + at - place * EXPERT_FF + (r < own ? 0 : EXPERT_FF);
    }
    const int place = r / max(own, 1);
    return routing().experts[place] * D_MODEL + first + r - place * own;
}

// What a product gives in row `r` of the block, for the slot `member` of that row's expert.
__device__ __forceinline__ float total_of_experts(
    const Step& step, const Part& part, const Layer& layer, int r, int member
) {
    const bool up = part.kind == Part::EXPERTS_UP;
    const int line = part.line_of_experts(r);
    const float* bias = up ? layer.up_bias : layer.down_bias;
    float all = sum_of(step, part, r, member);
    if (INT8) all *= (up ? layer.up_scales : layer.down_scales)[line];
    return bias ? all + bias[line] : all;
}
// What stands between the products of experts, for the slots of the block's rows.
__device__ __forceinline__ void publish_inner(const Step& step, const Part& part, const Layer& layer) {
    const int units = part.own / OF_WORD;
    #pragma unroll 1
    for (int at = step.thread; at < units * BATCH; at += THREADS) {
        const int i = at % units * OF_WORD, member = at / units, place = part.place(i);
        if (member >= routing().members[place]) continue;
        auto inner = [&](int i) {
            const float v = activated(total_of_experts(step, part, layer, i, member));
            return GATED ? v * total_of_experts(step, part, layer, part.own + i, member) : v;
        };
        const int slot = routing().slots[place * BATCH + member], column = part.first + i - place * EXPERT_FF;
        u64* to = step.scratch + AT_H + slot * (EXPERT_FF / OF_WORD) + column / OF_WORD;
#if DTYPE == 0
        publish(to, inner(i), step.epoch);
#else
        publish(to, from_float(inner(i)) | static_cast<u32>(from_float(inner(i + 1))) << 16, step.epoch);
#endif
    }
}
// The weighted outputs of a row's experts, in the order of its choices.
__device__ __forceinline__ float sum_of_experts(
    const Step& step, const Part& part, const Layer& layer, int i, int row
) {
    float all = 0;
    #pragma unroll 1
    for (int slot = row * CHOICES; slot < (row + 1) * CHOICES; slot++) {
        const int place = routing().places[slot];
        const float own = total_of_experts(step, part, layer, place / BATCH * part.own + i, place % BATCH);
        all = fmaf(routing().weights[slot], own, all);
    }
    return all;
}
