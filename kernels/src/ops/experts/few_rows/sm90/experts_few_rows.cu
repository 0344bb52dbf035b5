// One projection of a mixture of experts for few tokens, as in decoding: each chosen expert is read
// once, from memory to registers.
//
//     slots          0  1  2  3 ..        of tokens, CHOICES each
//     chosen         7  2  2  9 ..
//     places         2: slots 1 2    7: slot 0    9: slot 3 ..     experts with slots, in order
//     tasks          |  PER      |   PER     |   PER     |         two rows of a matrix each
//     blocks         |   0   |   1   |   2   |   3   | ..          as many tasks for each
//
// A warp multiplies the rows of its task by the inputs of up to MEMBERS slots of their expert, whose
// sums have an order that depends on nothing else.
//
// The host defines MODE (0: first projection, not gated; 1: gated; 2: second projection), K (columns),
// PITCH (elements between two rows of the weight), PER (tasks of an expert), N_EXPERTS, CHOICES,
// MOST_SLOTS, INDEX (the type of `chosen`), DTYPE, INT8 (0) and ACTIVATION as numbers.cuh has them,
// BIAS (whether there is one, f32), LIMIT (1: of what a gated activation gets), and SHARED, the bytes
// of shared memory.
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
#if DTYPE == 0
using Half = float;
#else
using Half = u16;
#endif
using Weight = Half;
#include "numbers.cuh"

constexpr int WARPS = 16, THREADS = 32 * WARPS, TILE = 2, STEPS = 4, MEMBERS = 8;
constexpr int LOADS = K / WEIGHTS, ALL_STEPS = (LOADS + 31) / 32;
constexpr int LINES = MODE == 1 ? 2 * PER : TILE * PER;    // of an expert's matrix
constexpr int SHARE = MODE == 2 ? 1 : CHOICES;             // slots with the same input
constexpr int OUTPUTS = MODE == 1 ? PER : LINES;
static_assert(K % WEIGHTS == 0, "rows of whole loads");

struct Slots {
    short chosen[MOST_SLOTS], sorted[MOST_SLOTS];          // experts by slot; slots by expert
    short experts[N_EXPERTS];                              // those with slots
    short starts[N_EXPERTS + 1];                           // where their slots begin in `sorted`
    int of_warps[2][WARPS], count;
};
static_assert(sizeof(Slots) == SHARED, "shared memory");
extern __shared__ __align__(16) unsigned char memory[];
__device__ __forceinline__ Slots& lists() { return *reinterpret_cast<Slots*>(memory); }

// Sorts the slots by their experts, stably. A thread counts those of an expert.
__device__ __forceinline__ void sort(const INDEX* chosen, int all) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    for (int i = thread; i < all; i += THREADS) {
        const INDEX expert = chosen[i];
        lists().chosen[i] = expert < 0 || expert >= N_EXPERTS ? N_EXPERTS - 1 : static_cast<short>(expert);
    }
    __syncthreads();
    int places = 0, begin = 0;
    #pragma unroll 1
    for (int from = 0; from < N_EXPERTS; from += THREADS) {
        const int expert = from + thread;
        int own = 0;
        #pragma unroll 8
        for (int i = 0; i < all; i++) own += lists().chosen[i] == expert;
        // Experts with slots before this one, and slots before its own.
        const u32 with = __ballot_sync(~0u, own > 0);
        int before = own;
        #pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int other = __shfl_up_sync(~0u, before, o);
            if (lane >= o) before += other;
        }
        if (lane == 31) lists().of_warps[0][warp] = __popc(with), lists().of_warps[1][warp] = before;
        __syncthreads();
        int place = places + __popc(with & ((1u << lane) - 1)), at = begin + before - own;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w < warp) place += lists().of_warps[0][w], at += lists().of_warps[1][w];
            places += lists().of_warps[0][w], begin += lists().of_warps[1][w];
        }
        if (own > 0) {
            lists().experts[place] = static_cast<short>(expert), lists().starts[place] = static_cast<short>(at);
            #pragma unroll 1
            for (int i = 0; own > 0; i++) {
                if (lists().chosen[i] == expert) lists().sorted[at++] = static_cast<short>(i), own--;
            }
        }
        __syncthreads();
    }
    if (thread == 0) lists().count = places, lists().starts[places] = static_cast<short>(all);
    __syncthreads();
}

// The tasks of a warp: two rows along all columns each, STEPS loads at a time. The first weights of
// the next task are read before this one is over.
struct Rows {
    const Half* weight;
    int lane, end_task;
    int task, at;                                          // of what is multiplied
    int next, next_at;                                     // of what is read
    const uint4* from[TILE];

    __device__ __forceinline__ void turn() { task = next, at = next_at; }
    __device__ __forceinline__ static int line(int task, int i) {
        const int place = task / PER, own = task - place * PER;
        return lists().experts[place] * LINES + (MODE == 1 ? own + i * PER : own * TILE + i);
    }
    __device__ __forceinline__ void begin(int which) {
        next = which, next_at = 0;
        #pragma unroll
        for (int i = 0; i < TILE; i++) {
            const u64 row = line(min(next, end_task - 1), i);
            from[i] = reinterpret_cast<const uint4*>(weight + row * PITCH) + lane;
        }
    }
    __device__ __forceinline__ void read(uint4 (&v)[TILE], int a) const {
        const int load = (next_at + a) * 32 + lane;
        const bool there = next < end_task && load < LOADS;
        #pragma unroll
        for (int i = 0; i < TILE; i++) v[i] = there ? stream(from[i] + (next_at + a) * 32) : make_uint4(0, 0, 0, 0);
    }
};

__device__ __forceinline__ float limited(float x, float least, float most) {
    return x < least ? least : x > most ? most : x;
}

struct Words {
    u64 n_slots, limit;                                    // the bits of an f32
};
extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_few_rows(
    const Half* x, const INDEX* chosen, const Half* weight, const float* bias, const float* weights, Half* out,
    const __grid_constant__ Words words
) {
    const int all = static_cast<int>(words.n_slots), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float limit = __uint_as_float(static_cast<u32>(words.limit));
    sort(chosen, all);
    const u64 tasks = static_cast<u64>(lists().count) * PER;
    const int first = static_cast<int>(tasks * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(tasks * (blockIdx.x + 1) / gridDim.x);
    if (first + warp >= end) return;
    Rows rows{weight, lane, end};
    uint4 v[STEPS][TILE];
    rows.begin(first + warp);
    #pragma unroll
    for (int a = 0; a < STEPS; a++) rows.read(v[a], a);
    rows.turn();
    // An expert with more slots than MEMBERS is read again for these.
    int member = 0;
    #pragma unroll 1
    while (rows.task < end) {
        const int task = rows.task, place = task / PER, start = lists().starts[place];
        const int left = lists().starts[place + 1] - start - member, count = min(left, MEMBERS);
        const int following = left > MEMBERS ? task : task + WARPS;
        const Half* inputs[MEMBERS];
        float sum[TILE][MEMBERS] = {};
        #pragma unroll
        for (int m = 0; m < MEMBERS; m++) {
            inputs[m] = x + static_cast<u64>(lists().sorted[start + member + min(m, count - 1)] / SHARE) * K;
        }
        bool more = true;
        #pragma unroll 1
        while (more) {
            const int at = rows.at;
            more = at + STEPS < ALL_STEPS;
            if (more) rows.next_at = at + STEPS;
            else rows.begin(following);
            #pragma unroll
            for (int a = 0; a < STEPS; a++) {
                const int load = (at + a) * 32 + lane;
                if (load < LOADS) {
                    float f[TILE][HALVES];
                    #pragma unroll
                    for (int i = 0; i < TILE; i++) spread(f[i], v[a][i]);
                    #pragma unroll
                    for (int m = 0; m < MEMBERS; m++) {
                        if (m > 0 && m >= count) break;
                        float some[HALVES];
                        spread(some, __ldg(reinterpret_cast<const uint4*>(inputs[m]) + load));
                        #pragma unroll
                        for (int i = 0; i < TILE; i++) {
                            #pragma unroll
                            for (int k = 0; k < HALVES; k++) sum[i][m] = fmaf(f[i][k], some[k], sum[i][m]);
                        }
                    }
                }
                rows.read(v[a], a);
            }
            rows.turn();
        }
        // A lane has the rows of a slot.
        float own[TILE] = {};
        #pragma unroll
        for (int m = 0; m < MEMBERS; m++) {
            if (m > 0 && m >= count) break;
            #pragma unroll
            for (int i = 0; i < TILE; i++) {
                const float total = sum_lanes(sum[i][m]);
                if (lane == m) own[i] = total;
            }
        }
        if (lane < count) {
            const int slot = lists().sorted[start + member + lane], column = task - place * PER;
            #pragma unroll
            for (int i = 0; BIAS && i < TILE; i++) own[i] += bias[Rows::line(task, i)];
            Half* to = out + static_cast<u64>(slot) * OUTPUTS;
            if (MODE == 1) {
                float gate = own[0], up = own[1];
                if (LIMIT) gate = limited(gate, -3.4028235e38f, limit), up = limited(up, -limit, limit) + 1;
                to[column] = from_float(activated(gate) * up);
            } else {
                #pragma unroll
                for (int i = 0; i < TILE; i++) {
                    to[TILE * column + i] = from_float(MODE == 2 ? own[i] * weights[slot] : activated(own[i]));
                }
            }
        }
        member = left > MEMBERS ? member + MEMBERS : 0;
    }
}
