// The loss of each row of logits. The gradient replaces the logits.
//
//   logits of a row    | warp 0 | warp 1 | .. | warp 31 |
//
// A block processes one row at a time. Each warp prefetches its part of the row STAGES iterations
// ahead into shared memory, and reads it three times:
//
//   1  the maximum of the part
//   2  the sum of e^(x - maximum) and, with label smoothing, of x; then the parts of all warps are
//      combined, at the only barrier of the block
//   3  stores share (e^(x - maximum) / sum - weight), at the target less the target's weight
//
// Compiled with: HALF, VOCABULARY (columns that are not padding), STAGES, WARPS, KINDS (values per
// part), TARGET (the type of targets).

constexpr int THREADS = 32 * WARPS;
// Eight-element vectors per row, and per warp; logits in the last vector.
constexpr int VECTORS = (VOCABULARY + 7) / 8;
constexpr int PART = (VECTORS + WARPS - 1) / WARPS;
constexpr int IN_LAST = VOCABULARY - 8 * (VECTORS - 1);
static_assert(WARPS == 32 && VECTORS > PART * (WARPS - 1), "each lane has the numbers of a warp, and each warp a part");
// Minus infinity, twice.
constexpr u32 LEAST = HALF[0] == 'b' ? 0xff80ff80 : 0xfc00fc00;

struct Info {
    // `stride` is in elements; `first` is the index of the first row's target.
    u64 rows, stride, first;
    u64 gradients;
    // Bits of floats: subtracted for the target's logit, and for every logit.
    u64 target_weight, weight;
};

// Values of a part.
enum Kind { LARGEST, WEIGHT_SUM, LOGIT_SUM, TARGET_LOGIT };

struct Shared {
    u32 base;

    __device__ u32 part(int stage, int warp) const { return base + (stage * WARPS + warp) * PART * 16; }
    __device__ u32 full(int stage, int warp) const { return part(STAGES, 0) + (stage * WARPS + warp) * 8; }
    // Double-buffered: warps may process the next row while others still read this one's values.
    __device__ u32 of_part(int turn, Kind kind, int warp) const {
        return full(STAGES, 0) + ((turn * KINDS + kind) * WARPS + warp) * 4;
    }
};

__device__ __forceinline__ u32 larger(u32 a, u32 b) {
    u32 most;
    asm("max." HALF "x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
}

// Replaces the padding in a row's last vector by `other`.
__device__ __forceinline__ void cut(uint4& last, u32 other) {
    u32* pairs = &last.x;
    #pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        if (2 * pair >= IN_LAST) {
            pairs[pair] = other;
        } else if (2 * pair + 1 >= IN_LAST) {
            pairs[pair] = pairs[pair] & 0xffff | other & 0xffff0000;
        }
    }
}

// e^(x - largest), for `from` = largest / ln 2.
__device__ __forceinline__ float weight_of(float x, float from) { return power_of_2(fmaf(x, LOG2_E, -from)); }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    head_loss_hopper(unsigned short* logits, const TARGET* targets, const float* shares, float* nats,
                     const __grid_constant__ Info info) {
    Shared shared{shared_base()};
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // This warp's part of a row, in vectors.
    int begin = warp * PART, count = min(PART, VECTORS - begin);
    float target_weight = __uint_as_float(static_cast<u32>(info.target_weight)),
          weight = __uint_as_float(static_cast<u32>(info.weight));
    auto bring = [&](u64 row, int stage) {
        if (lane == 0 && row < info.rows) {
            u32 full = shared.full(stage, warp);
            barrier_expect(full, count * 16);
            bulk_load(shared.part(stage, warp), logits + row * info.stride + begin * 8, count * 16, full);
        }
    };
    if (lane == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared.full(stage, warp), 1);
        }
        barrier_init_fence();
    }
    __syncwarp();
    for (int stage = 0; stage < STAGES; stage++) {
        bring(blockIdx.x + static_cast<u64>(stage) * gridDim.x, stage);
    }
    Ring<STAGES> at;
    int turn = 0;
    float share_of_counted = info.gradients ? shares[0] : 0.0f;
    for (u64 row = blockIdx.x; row < info.rows; row += gridDim.x) {
        TARGET target = targets[info.first + row];
        bool counts = target >= 0 && target < VOCABULARY;
        // The target's index in this warp's part, if it has it, and whether this lane has it.
        int target_at = counts ? static_cast<int>(target) - begin * 8 : -1;
        bool has_target = target_at >= 0 && target_at < count * 8 && target_at / 8 % 32 == lane;
        barrier_wait(shared.full(at.stage, warp), at.parity);
        u32 part = shared.part(at.stage, warp);
        int last = IN_LAST < 8 && begin + count == VECTORS ? count - 1 : -1;
        if (last >= 0 && last % 32 == lane) {
            uint4 x = shared_load(part + last * 16);
            cut(x, LEAST);
            shared_store(part + last * 16, x);
            // TMA overwrites it next.
            async_proxy_fence();
        }
        u32 most = LEAST;
        #pragma unroll 4
        for (int v = lane; v < count; v += 32) {
            uint4 x = shared_load(part + v * 16);
            most = larger(most, larger(larger(x.x, x.y), larger(x.z, x.w)));
        }
        float2 most_of_pairs = unpack(most);
        float largest = largest_lane(fmaxf(most_of_pairs.x, most_of_pairs.y));
        // If all logits of a part are minus infinity, its sum is 0.
        float from = largest == -INFINITE ? 0.0f : largest * LOG2_E;
        float sums[4] = {};
        #pragma unroll 4
        for (int v = lane; v < count; v += 32) {
            float x[8];
            unpack(x, shared_load(part + v * 16));
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[i] += weight_of(x[2 * i], from) + weight_of(x[2 * i + 1], from);
            }
        }
        float sum = sum_lanes(sums[0] + sums[1] + (sums[2] + sums[3])), logit_sum = 0.0f;
        if (weight != 0.0f) {
            for (int v = lane; v < count; v += 32) {
                float x[8];
                uint4 pairs = shared_load(part + v * 16);
                if (v == last) {
                    cut(pairs, 0);
                }
                unpack(x, pairs);
                logit_sum += x[0] + x[1] + (x[2] + x[3]) + (x[4] + x[5] + (x[6] + x[7]));
            }
            logit_sum = sum_lanes(logit_sum);
        }
        if (lane == 0) {
            shared_store(shared.of_part(turn, LARGEST, warp), largest);
            shared_store(shared.of_part(turn, WEIGHT_SUM, warp), sum);
            shared_store(shared.of_part(turn, LOGIT_SUM, warp), logit_sum);
        }
        if (has_target) {
            unsigned short half;
            asm volatile("ld.shared.b16 %0, [%1];" : "=h"(half) : "r"(part + target_at * 2) : "memory");
            shared_store(shared.of_part(turn, TARGET_LOGIT, 0), widen(half));
        }
        __syncthreads();
        float of_part = shared_float(shared.of_part(turn, LARGEST, lane));
        largest = largest_lane(of_part);
        from = largest * LOG2_E;
        sum = sum_lanes(shared_float(shared.of_part(turn, WEIGHT_SUM, lane)) * weight_of(of_part, from));
        if (warp == 0) {
            logit_sum = sum_lanes(shared_float(shared.of_part(turn, LOGIT_SUM, lane)));
            if (lane == 0) {
                float of_target = counts ? shared_float(shared.of_part(turn, TARGET_LOGIT, 0)) : 0.0f;
                nats[info.first + row] =
                    counts ? largest + logf(sum) - target_weight * of_target - weight * logit_sum : 0.0f;
            }
        }
        if (info.gradients) {
            float share = counts ? share_of_counted : 0.0f, scale = share / sum, of_each = weight * share;
            unsigned short* out = logits + row * info.stride + begin * 8;
            #pragma unroll 2
            for (int v = lane; v < count; v += 32) {
                float x[8];
                unpack(x, shared_load(part + v * 16));
                #pragma unroll
                for (int i = 0; i < 8; i++) {
                    x[i] = fmaf(weight_of(x[i], from), scale, -of_each);
                }
                if (has_target && v == target_at / 8) {
                    #pragma unroll
                    for (int i = 0; i < 8; i++) {
                        x[i] -= i == target_at % 8 ? target_weight * share : 0.0f;
                    }
                }
                uint4 packed = pack(x);
                if (v == last) {
                    cut(packed, 0);
                }
                reinterpret_cast<uint4*>(out)[v] = packed;
            }
        }
        // All lanes must have read the part before it is overwritten.
        __syncwarp();
        bring(row + static_cast<u64>(STAGES) * gridDim.x, at.stage);
        at.advance();
        turn ^= 1;
    }
}
