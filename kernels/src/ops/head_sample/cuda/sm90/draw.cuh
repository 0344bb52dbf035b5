// A row's token from its logits, without a sort, by a block of 512 threads: see draw.cu and
// few_rows.cu, which say who looks at which tokens.
//
//   groups of tokens      the largest of each, and, for top-p alone, the sum of its exponentials
//   candidates            all tokens above a bound that so many groups reach as have to
//   cut                   each candidate is told how many are above it, and their probabilities' sum
//   draw                  the largest logit plus Gumbel noise above the cut
//
// Where few candidates do not do, up to 4,096 are sorted; beyond, the cut is looked for among all
// tokens. The host defines DRAW_BARRIER, the barrier of these threads, KEYS, those of the random
// bits (random/mod.rs), and MOST_GROUPS, the room for groups.

constexpr int DRAWERS = 512, DRAW_WARPS = DRAWERS / 32;
// Halvings until few more are above a bound than have to.
constexpr int HALVINGS = 14;
// Groups that reach the bound where only probabilities count.
constexpr int REACHED = 64;
// Candidates that there is room for, and as many as are looked for where few do not do.
constexpr int CANDIDATES = 4096;
#define MANY_CANDIDATES 3000.0f
// The largest probability as an integer: as many as there are threads do not overflow.
#define WHOLE 4194304.0f
// Logits below it are those of tokens that are left out.
#define LEFT_OUT (-1e20f)

#include "largest.cuh"

struct DrawMemory {
    // The largest logit of each group: thread t has those at t + 512 i.
    float tops[MOST_GROUPS];
    // Groups with candidates, and these.
    unsigned short groups[MOST_GROUPS];
    alignas(16) float values[CANDIDATES];
    int tokens[CANDIDATES];
    // Probabilities, in parts of the largest of all.
    alignas(16) u32 weights[DRAWERS];
    float sums[DRAWERS];
    int listed;
    // Sums of the parts of an interval.
    u32 parts[2][DRAWERS];
    float floats[DRAW_WARPS];
    int integers[DRAW_WARPS];
};

__device__ __forceinline__ void draw_barrier() {
    asm volatile("bar.sync %0, %1;" ::"r"(DRAW_BARRIER), "r"(DRAWERS) : "memory");
}

// ---- what the threads have together; all of them are told

template <class Join>
__device__ __forceinline__ float joined(float v, DrawMemory& memory, Join join) {
    #pragma unroll
    for (int o = 16; o; o >>= 1) v = join(v, __shfl_xor_sync(~0u, v, o));
    draw_barrier();
    if (threadIdx.x % 32 == 0) memory.floats[threadIdx.x / 32] = v;
    draw_barrier();
    v = memory.floats[threadIdx.x % DRAW_WARPS];
    #pragma unroll
    for (int o = DRAW_WARPS / 2; o; o >>= 1) v = join(v, __shfl_xor_sync(~0u, v, o));
    return v;
}
__device__ __forceinline__ float largest_of(float v, DrawMemory& memory) {
    return joined(v, memory, [](float a, float b) { return fmaxf(a, b); });
}
__device__ __forceinline__ u32 sum_of(u32 v, DrawMemory& memory) {
    v = __reduce_add_sync(~0u, v);
    draw_barrier();
    if (threadIdx.x % 32 == 0) memory.integers[threadIdx.x / 32] = v;
    draw_barrier();
    return __reduce_add_sync(~0u,
                             threadIdx.x % 32 < DRAW_WARPS ? static_cast<u32>(memory.integers[threadIdx.x % 32]) : 0);
}
__device__ __forceinline__ float sum_of(float v, DrawMemory& memory) {
    return joined(v, memory, [](float a, float b) { return a + b; });
}
// ---- random bits, those of random/cubecl.rs

__device__ __forceinline__ u32 feistel(u32 state, int shift) {
    constexpr u32 keys[5] = {KEYS}, multipliers[5] = {0x6b43, 0x5a2d, 0x72e5, 0x4f1b, 0x6e4b};
    #pragma unroll
    for (int r = 0; r < 5; r++) {
        const u32 right = state >> 16, product = (right ^ (keys[r] >> shift & 0xffff)) * multipliers[r];
        state = right | ((state ^ product ^ (product >> 15)) & 0xffff) << 16;
    }
    return state;
}
__device__ __forceinline__ u32 row_bits(u32 row) { return feistel(row, 0); }
__device__ __forceinline__ float noisy(float logit, u32 place, int token) {
    const u32 state = feistel(static_cast<u32>(token) ^ place, 16), bits = (state & 0xffff) << 8 | state >> 24;
    return logit - logf(-logf((static_cast<float>(bits) + 0.5f) / 16777216.0f));
}

// ---- how a row draws

constexpr int WAY_NUMBERS = 7;

// Of each text, by token: how often in the prompt, how often behind it, and what is added to the
// logit.
struct Counts {
    const float *prompt, *written, *bias;
};

struct Way {
    const float* logits;
    Counts counts;
    // Where its text's begin; below 0 if it has none.
    long long line;
    int vocabulary, top_k;
    float temperature, top_p, min_p_ln, repetition, presence, frequency;
    // The random bits' place.
    u32 place;

    __device__ Way(const float* logits, Counts counts, int line, int vocabulary, const float* numbers, u32 stream,
                   int position)
        : logits(logits), counts(counts), line(static_cast<long long>(line) * vocabulary), vocabulary(vocabulary) {
        temperature = numbers[0], top_k = max(1, static_cast<int>(numbers[1])), top_p = numbers[2],
        min_p_ln = numbers[3];
        repetition = numbers[4], presence = numbers[5], frequency = numbers[6];
        place = row_bits(row_bits(stream) ^ static_cast<u32>(position));
    }
    __device__ __forceinline__ bool draws() const { return temperature > 0; }
    __device__ __forceinline__ bool by_rank() const { return draws() && top_k < vocabulary; }
    __device__ __forceinline__ bool by_mass() const { return draws() && top_p < 1; }
    __device__ __forceinline__ bool by_least() const { return draws() && min_p_ln > -INFINITE; }
    __device__ __forceinline__ bool cuts() const { return by_rank() || by_mass() || by_least(); }
    // Whether the probability of all tokens together is needed.
    __device__ __forceinline__ bool weighs() const { return by_mass() && !by_rank(); }

    // Whether noise comes before anything else, since nothing is left out.
    __device__ __forceinline__ bool noisy() const { return draws() && !cuts(); }

    // After biases and penalties.
    __device__ __forceinline__ float penalised(float logit, float before, float behind, float bias) const {
        logit += bias;
        if (before + behind > 0) logit = logit < 0 ? logit * repetition : logit / repetition;
        if (behind > 0) logit -= presence + behind * frequency;
        return logit;
    }
    __device__ __forceinline__ float penalised(float logit, int token) const {
        return penalised(logit, counts.prompt[line + token], __ldcg(counts.written + line + token),
                         counts.bias[line + token]);
    }
    // And after temperature.
    __device__ __forceinline__ float adjusted(float logit, int token) const {
        if (line >= 0) logit = penalised(logit, token);
        return draws() ? logit / temperature : logit;
    }
    __device__ __forceinline__ float logit(int token) const { return adjusted(__ldcg(logits + token), token); }
};

// Of a group of tokens.
struct Group {
    Largest largest;
    float mass = 0;

    // With `most` as the largest of both.
    __device__ __forceinline__ void add(const Group& other, bool weighs) {
        const float before = largest.logit;
        largest.or_else(other.largest);
        const float most = largest.logit;
        if (weighs && most > -INFINITE)
            mass = mass * expf(before - most) + other.mass * expf(other.largest.logit - most);
    }
};

// Logits side by side, which begin at a multiple of their size.
template <int WIDTH>
struct alignas(4 * WIDTH) Logits {
    float v[WIDTH];
};
template <int WIDTH>
__device__ __forceinline__ Logits<WIDTH> read(const float* from) {
    if constexpr (WIDTH == 4) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
        return {{v.x, v.y, v.z, v.w}};
    } else {
        return {{__ldcg(from)}};
    }
}

// A thread's tokens as a group: of all from `begin` on, every 512th vector. With noise, where
// nothing is left out of the draw. The temperature divides the largest alone, where it can wait.
template <int WIDTH, bool COUNTED, bool NOISE, bool WEIGHS>
__device__ __forceinline__ Group grouped(const Way& way, int begin, int end) {
    constexpr int READS = (WIDTH == 4 ? 4 : 8) / (COUNTED ? 2 : 1);
    int first = begin + threadIdx.x * WIDTH;
    const float inverse = way.draws() ? 1 / way.temperature : 1;
    float best = -INFINITE, mass = 0;
    int token = NO_TOKEN;
    bool broken = false;
    #pragma unroll 1
    for (; first < end; first += READS * DRAWERS * WIDTH) {
        Logits<WIDTH> logits[READS], prompt[READS], written[READS], bias[READS];
        #pragma unroll
        for (int i = 0; i < READS; i++) {
            const int at = min(first + i * (DRAWERS * WIDTH), end - WIDTH);
            logits[i] = read<WIDTH>(way.logits + at);
            if (!COUNTED) continue;
            prompt[i] = read<WIDTH>(way.counts.prompt + way.line + at);
            written[i] = read<WIDTH>(way.counts.written + way.line + at);
            bias[i] = read<WIDTH>(way.counts.bias + way.line + at);
        }
        const float before = best;
        #pragma unroll
        for (int i = 0; i < READS; i++) {
            #pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const int at = first + i * (DRAWERS * WIDTH) + j;
                float& v = logits[i].v[j];
                if (COUNTED) v = way.penalised(v, prompt[i].v[j], written[i].v[j], bias[i].v[j]);
                broken = broken || v != v;
                if (NOISE) v = noisy(v / way.temperature, way.place, at);
                if (at >= end) v = -INFINITE;
                // Of equal ones the first.
                if (v > best) best = v, token = at;
            }
        }
        if (!WEIGHS) continue;
        const float base = fmaxf(best, -3e38f);
        mass *= __expf((before - base) * inverse);
        #pragma unroll
        for (int i = 0; i < READS; i++) {
            #pragma unroll
            for (int j = 0; j < WIDTH; j++) mass += __expf((logits[i].v[j] - base) * inverse);
        }
    }
    Group group;
    group.largest = {way.draws() && !NOISE ? best / way.temperature : best, token};
    if (broken) group.largest = {INFINITE, -1};
    group.mass = mass;
    return group;
}
template <int WIDTH>
__device__ __forceinline__ Group grouped(const Way& way, int begin, int end) {
    if (way.line >= 0) {
        if (way.weighs()) return grouped<WIDTH, true, false, true>(way, begin, end);
        return way.noisy() ? grouped<WIDTH, true, true, false>(way, begin, end)
                           : grouped<WIDTH, true, false, false>(way, begin, end);
    }
    if (way.weighs()) return grouped<WIDTH, false, false, true>(way, begin, end);
    return way.noisy() ? grouped<WIDTH, false, true, false>(way, begin, end)
                       : grouped<WIDTH, false, false, false>(way, begin, end);
}

// ---- the cut

// All logits that are not below `floor`.
template <class Then>
__device__ __forceinline__ void each_logit(const Way& way, float floor, Then then) {
    #pragma unroll 8
    for (int token = threadIdx.x; token < way.vocabulary; token += DRAWERS) {
        const float v = way.logit(token);
        if (v >= floor && v > LEFT_OUT) then(v);
    }
}
// The least of the largest logits, none below `floor`, that weigh `wanted` together: one each, or,
// by mass, a share of all probability. By the sums of 512 equal parts of the interval, then of 512
// of the part where the cut is, three times. Sums are of integers, so that their order does not
// matter: of two halves of 14 bits each, which do where so many tokens share the probability.
__device__ __noinline__ float selected(const Way& way, DrawMemory& memory, float floor, float top, float wanted,
                                       bool by_mass) {
    const int thread = threadIdx.x;
    float low = top;
    // Less is no probability.
    if (by_mass) low = top - 40;
    else each_logit(way, floor, [&](float v) { low = fminf(low, v); });
    low = -largest_of(-low, memory);
    float width = (top - low) / DRAWERS;
    double above = 0, goal = 0;
    #pragma unroll 1
    for (int level = 0; level < 3 && width > 0; level++) {
        draw_barrier();
        memory.parts[0][thread] = memory.parts[1][thread] = 0;
        draw_barrier();
        each_logit(way, floor, [&](float v) {
            int at = static_cast<int>(floorf((v - low) / width));
            // The largest of all belongs to the last part.
            if (level == 0) at = min(at, DRAWERS - 1);
            if (at < 0 || at >= DRAWERS) return;
            const u32 weight = by_mass ? static_cast<u32>(expf(v - top) * 268435456.0f) : 1;
            atomicAdd(&memory.parts[0][at], weight & 16383);
            if (weight >> 14) atomicAdd(&memory.parts[1][at], weight >> 14);
        });
        draw_barrier();
        // Of all parts from this one up: 512 threads, a part each.
        double sum = memory.parts[0][thread] + 16384.0 * memory.parts[1][thread];
        double* sums = reinterpret_cast<double*>(memory.values);
        sums[thread] = sum;
        draw_barrier();
        #pragma unroll 1
        for (int o = 1; o < DRAWERS; o <<= 1) {
            const double other = thread + o < DRAWERS ? sums[thread + o] : 0;
            draw_barrier();
            sums[thread] = sum += other;
            draw_barrier();
        }
        if (level == 0) goal = by_mass ? wanted * sums[0] : wanted;
        // The highest part that reaches the goal; if none does, the lowest.
        const int at = static_cast<int>(largest_of(above + sum >= goal ? thread : 0, memory));
        above += at + 1 < DRAWERS ? sums[at + 1] : 0;
        low += at * width, width /= DRAWERS;
    }
    return low;
}
// The draw where the cut is looked for among all tokens.
__device__ __noinline__ Largest drawn_of_all(const Way& way, DrawMemory& memory, float top) {
    float floor = -INFINITE;
    if (way.by_rank()) floor = selected(way, memory, floor, top, way.top_k, false);
    if (way.by_mass()) floor = selected(way, memory, floor, top, way.top_p, true);
    if (way.by_least()) floor = fmaxf(floor, top + way.min_p_ln);
    Largest best;
    #pragma unroll 1
    for (int token = threadIdx.x; token < way.vocabulary; token += DRAWERS) {
        const float v = way.logit(token);
        if (v >= floor) best.or_else(noisy(v, way.place, token), token);
    }
    return best;
}

// How many of the threads say yes.
__device__ __forceinline__ int count_of(bool yes) {
    int count;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0;\n bar.red.popc.u32 %0, %2, %3, p; }"
                 : "=r"(count) : "r"(static_cast<u32>(yes)), "r"(DRAW_BARRIER), "r"(DRAWERS) : "memory");
    return count;
}
// A bound that so many threads' largest logits reach, or LEFT_OUT.
__device__ __forceinline__ float bound(float best, float top, int wanted, DrawMemory& memory) {
    float low = -largest_of(best > LEFT_OUT ? -best : -top, memory), high = top;
    if (count_of(best >= low) < wanted) return LEFT_OUT;
    #pragma unroll 1
    for (int h = 0; h < HALVINGS; h++) {
        const float middle = (low + high) * 0.5f;
        if (count_of(best >= middle) >= wanted) low = middle;
        else high = middle;
    }
    return low;
}

// The same of groups' largest logits.
__device__ __forceinline__ float bound_of_groups(int groups, float top, int wanted, DrawMemory& memory) {
    float least = top;
    for (int g = threadIdx.x; g < groups; g += DRAWERS) {
        if (memory.tops[g] > LEFT_OUT) least = fminf(least, memory.tops[g]);
    }
    auto reach = [&](float bound) {
        int above = 0;
        #pragma unroll 4
        for (int g = threadIdx.x; g < groups; g += DRAWERS) above += memory.tops[g] >= bound;
        return static_cast<int>(sum_of(static_cast<u32>(above), memory)) >= wanted;
    };
    float low = -largest_of(-least, memory), high = top;
    if (!reach(low)) return LEFT_OUT;
    #pragma unroll 1
    for (int h = 0; h < HALVINGS; h++) {
        const float middle = (low + high) * 0.5f;
        if (reach(middle)) low = middle;
        else high = middle;
    }
    return low;
}

// Candidates in the order of their logits, the largest first.
__device__ __forceinline__ void sort(int count, DrawMemory& memory) {
    int size = DRAWERS;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += DRAWERS) memory.values[i] = -INFINITE, memory.tokens[i] = NO_TOKEN;
    #pragma unroll 1
    for (int run = 2; run <= size; run *= 2) {
        #pragma unroll 1
        for (int apart = run / 2; apart; apart /= 2) {
            draw_barrier();
            #pragma unroll 1
            for (int i = threadIdx.x; i < size / 2; i += DRAWERS) {
                const int a = i / apart * (2 * apart) + i % apart, b = a + apart;
                const float va = memory.values[a], vb = memory.values[b];
                if (a & run ? va > vb : va < vb) {
                    const int token = memory.tokens[a];
                    memory.values[a] = vb, memory.values[b] = va;
                    memory.tokens[a] = memory.tokens[b], memory.tokens[b] = token;
                }
            }
        }
    }
    draw_barrier();
}

// The least candidate that is kept, of more than there are threads.
__device__ __noinline__ bool cut_of_many(const Way& way, DrawMemory& memory, int count, float low, float top,
                                         float mass, float& cut) {
    sort(count, memory);
    cut = -INFINITE;
    if (way.by_rank()) {
        if (count >= way.top_k) cut = memory.values[way.top_k - 1];
        else if (low > LEFT_OUT) return false;
    }
    if (!way.by_mass()) return true;
    // Each thread adds up candidates that follow each other.
    const int each = (count + DRAWERS - 1) / DRAWERS, first = threadIdx.x * each, end = min(first + each, count);
    float own = 0;
    for (int i = first; i < end; i++) own += memory.values[i] >= cut ? expf(memory.values[i] - top) : 0;
    draw_barrier();
    memory.sums[threadIdx.x] = own;
    draw_barrier();
    float sum = own;
    #pragma unroll 1
    for (int o = 1; o < DRAWERS; o <<= 1) {
        const float other = threadIdx.x >= o ? memory.sums[threadIdx.x - o] : 0;
        draw_barrier();
        memory.sums[threadIdx.x] = sum += other;
        draw_barrier();
    }
    const float all = memory.sums[DRAWERS - 1];
    if (way.by_rank()) mass = all;
    else if (all < way.top_p * mass && low > LEFT_OUT) return false;
    // The first that reaches it, of the thread where it is reached; where rounding keeps it from
    // that, all are kept.
    float reached = sum - own, least = -INFINITE;
    for (int i = first; i < end && reached < way.top_p * mass; i++) {
        reached += memory.values[i] >= cut ? expf(memory.values[i] - top) : 0;
        if (reached >= way.top_p * mass) least = memory.values[i];
    }
    cut = fmaxf(cut, largest_of(least, memory));
    return true;
}

// The candidates of the groups that are listed: a warp has every 16th of these, and reads of
// several at once.
template <class Tokens, class Then>
__device__ __forceinline__ void each_candidate(const Way& way, const DrawMemory& memory, const Tokens& of, int groups,
                                               float low, Then then) {
    #pragma unroll 1
    for (int i = threadIdx.x % 32; i < of.most(); i += 32) {
        #pragma unroll 1
        for (int g = threadIdx.x / 32; g < groups; g += 4 * DRAW_WARPS) {
            int token[4];
            float v[4];
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                const int at = g + k * DRAW_WARPS;
                token[k] = at < groups ? of.token(memory.groups[at], i) : NO_TOKEN;
                v[k] = __ldcg(way.logits + min(token[k], way.vocabulary - 1));
            }
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                if (token[k] >= way.vocabulary) continue;
                const float logit = way.adjusted(v[k], token[k]);
                if (logit >= low) then(logit, token[k]);
            }
        }
    }
}
// The tokens of one of `groups()` are `token(group, i)`, beyond the vocabulary where there are no
// more, for all i below `most()`. Whether the candidates above `low`, and their tokens, hold what
// is to be kept: then the draw among them is in `best`.
template <class Tokens>
__device__ __forceinline__ bool drawn_of_candidates(const Way& way, DrawMemory& memory, const Tokens& of, float low,
                                                    float top, float mass, Largest& best) {
    const int thread = threadIdx.x;
    // In which order they are listed does not matter: all sums over candidates are of integers, or
    // in the order of their logits.
    if (thread == 0) memory.listed = 0;
    draw_barrier();
    #pragma unroll 4
    for (int g = thread; g < of.groups(); g += DRAWERS) {
        if (memory.tops[g] >= low) memory.groups[atomicAdd(&memory.listed, 1)] = g;
    }
    draw_barrier();
    const int groups = memory.listed;
    draw_barrier();
    if (thread == 0) memory.listed = 0;
    draw_barrier();
    each_candidate(way, memory, of, groups, low, [&](float logit, int token) {
        const int place = atomicAdd(&memory.listed, 1);
        if (place < CANDIDATES) memory.values[place] = logit, memory.tokens[place] = token;
    });
    draw_barrier();
    const int count = memory.listed;
    if (count > CANDIDATES) return false;
    const float least = way.by_least() ? top + way.min_p_ln : -INFINITE;
    if (count > DRAWERS) {
        float cut;
        if (!cut_of_many(way, memory, count, low, top, mass, cut)) return false;
        best = Largest();
        for (int i = thread; i < count; i += DRAWERS) {
            const float v = memory.values[i];
            if (v >= fmaxf(cut, least)) best.or_else(noisy(v, way.place, memory.tokens[i]), memory.tokens[i]);
        }
        return true;
    }
    // A candidate per thread: the tokens above it decide whether it is kept.
    const bool mine = thread < count;
    const float value = mine ? memory.values[thread] : -INFINITE;
    const u32 weight = mine ? static_cast<u32>(__expf(value - top) * WHOLE + 0.5f) : 0;
    memory.weights[thread] = weight;
    // Whole fours of them.
    if (!mine) memory.values[thread] = -INFINITE;
    draw_barrier();
    int above = 0;
    u32 mass_above = 0;
    if (thread / 32 * 32 < count) {
        #pragma unroll 1
        for (int other = 0; other < count; other += 4) {
            const float4 v = *reinterpret_cast<const float4*>(memory.values + other);
            const uint4 w = *reinterpret_cast<const uint4*>(memory.weights + other);
            above += (v.x > value) + (v.y > value) + (v.z > value) + (v.w > value);
            mass_above +=
                (v.x > value ? w.x : 0) + (v.y > value ? w.y : 0) + (v.z > value ? w.z : 0) + (v.w > value ? w.w : 0);
        }
    }
    bool kept = mine && value >= least;
    if (way.by_rank()) {
        kept = kept && above < way.top_k;
        if (count < way.top_k && low > LEFT_OUT) return false;
    }
    if (way.by_mass()) {
        const u32 reached = sum_of(mine && (!way.by_rank() || above < way.top_k) ? weight : 0, memory);
        const float wanted = way.top_p * (way.by_rank() ? reached : mass * WHOLE);
        if (!way.by_rank() && reached < wanted && low > LEFT_OUT) return false;
        kept = kept && mass_above < wanted;
    }
    best = Largest();
    if (kept) best.or_else(noisy(value, way.place, memory.tokens[thread]), memory.tokens[thread]);
    return true;
}

// The token of a row: -1 if a logit is no number. `together` are this thread's groups, whose
// largest logits it left in memory.
template <class Tokens>
__device__ __forceinline__ int drawn(const Way& way, DrawMemory& memory, const Tokens& of, const Group& together) {
    Largest best = together.largest;
    bool broken = best.token < 0;
    if (way.cuts()) {
        const float top = largest_of(best.logit, memory);
        const float mass = way.weighs() ? sum_of(together.mass * expf(best.logit - top), memory) : 0;
        const float own = best.logit;
        bool found = false;
        const int few = way.by_rank() ? way.top_k : REACHED, groups = of.groups();
        if (top == INFINITE) {
            found = true;
        } else if (!way.by_rank() && !way.by_mass()) {
            found = drawn_of_candidates(way, memory, of, top + way.min_p_ln, top, mass, best);
        } else {
            if (few <= DRAWERS / 2)
                found = drawn_of_candidates(way, memory, of, bound(own, top, few, memory), top, mass, best);
            const float many = way.by_rank() ? way.top_k : groups * (1 - expf(-MANY_CANDIDATES / groups));
            if (!found && many <= groups)
                found =
                    drawn_of_candidates(way, memory, of, bound_of_groups(groups, top, many, memory), top, mass, best);
        }
        if (!found) best = drawn_of_all(way, memory, top);
    }
    // Of the warp, then of all.
    best.of_lanes<1, 32>();
    broken = __any_sync(~0u, broken);
    draw_barrier();
    if (threadIdx.x % 32 == 0)
        memory.floats[threadIdx.x / 32] = best.logit, memory.integers[threadIdx.x / 32] = broken ? -1 : best.token;
    draw_barrier();
    best = Largest();
    broken = false;
    #pragma unroll
    for (int w = 0; w < DRAW_WARPS; w++) {
        broken = broken || memory.integers[w] < 0;
        best.or_else(memory.floats[w], memory.integers[w]);
    }
    return broken ? -1 : min(best.token, way.vocabulary - 1);
}
