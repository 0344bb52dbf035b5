// The gradients of layer norms and RMS norms.
//
//   x, grad (and residual)   [rows, COLUMNS]
//                            A warp processes one row at a time, and prefetches the row STAGES
//                            iterations ahead into shared memory. Warps do not wait for each other.
//   d_x       inverse (scaled - mean(scaled) - normed mean(scaled normed)) (+ residual)
//                            where scaled = grad gamma; RMS norms omit mean(scaled)
//   partial   [blocks, 1 or 2, COLUMNS]: the sums of grad normed and, if SHIFTED, of grad
//                            Summed in registers over a warp's rows, at the end over the warps.
//
// Compiled with: HALF, COLUMNS (a multiple of 8), WARPS, STAGES, LAYER, SHIFTED, ADDS (a residual)
// and GAMMA_F32 (gamma is f32, otherwise 16-bit).

constexpr int THREADS = 32 * WARPS;
// Eight-element vectors per row, and per lane.
constexpr int VECTORS = COLUMNS / 8;
constexpr int EACH = (VECTORS + 31) / 32;
constexpr int MATRIX_BYTES = COLUMNS * 2;
constexpr int STAGE_BYTES = (ADDS ? 3 : 2) * MATRIX_BYTES;
constexpr int KINDS = SHIFTED ? 2 : 1;

#if GAMMA_F32
using Gamma = float;
#else
using Gamma = unsigned short;
#endif

__device__ __forceinline__ float widen(float x) { return x; }

struct Info {
    // Row strides are in elements.
    u64 rows, x_stride, grad_stride, residual_stride;
};

struct Shared {
    u32 base;

    __device__ u32 stage(int warp, int stage) const { return base + (warp * STAGES + stage) * STAGE_BYTES; }
    __device__ u32 gamma() const { return stage(WARPS, 0); }
    // With TMA.
    __device__ u32 full(int warp, int stage) const { return gamma() + COLUMNS * 4 + (warp * STAGES + stage) * 8; }
    // Overwrites the stages.
    __device__ u32 sums(int warp, int kind) const { return base + (warp * KINDS + kind) * COLUMNS * 4; }
};

__device__ __forceinline__ void load(float (&values)[8], u32 address) {
    #pragma unroll
    for (int four = 0; four < 2; four++) {
        uint4 bits = shared_load(address + 16 * four);
        values[4 * four] = __uint_as_float(bits.x), values[4 * four + 1] = __uint_as_float(bits.y);
        values[4 * four + 2] = __uint_as_float(bits.z), values[4 * four + 3] = __uint_as_float(bits.w);
    }
}

__device__ __forceinline__ void store(u32 address, const float (&values)[8]) {
    #pragma unroll
    for (int four = 0; four < 2; four++) {
        const float* from = values + 4 * four;
        uint4 bits = {__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
                      __float_as_uint(from[3])};
        shared_store(address + 16 * four, bits);
    }
}

// Calls `of(i, v)` for each of this lane's vectors v of a row.
template <class F>
__device__ __forceinline__ void each_vector(F of) {
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        int v = i * 32 + threadIdx.x % 32;
        if (VECTORS % 32 == 0 || v < VECTORS) {
            of(i, v);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL_OF(norm_backward)(const unsigned short* x, const unsigned short* grad, const unsigned short* residual,
                             const float* mean, const float* inverse, const Gamma* gamma, unsigned short* d_x,
                             float* partial, const __grid_constant__ Info info) {
    Shared shared{shared_base()};
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int rows = static_cast<int>(info.rows), row = blockIdx.x * WARPS + warp, step = gridDim.x * WARPS;
#if HAS_TMA
    auto bring = [&](int row, int stage) {
        if (lane == 0 && row < rows) {
            u32 full = shared.full(warp, stage), place = shared.stage(warp, stage);
            barrier_expect(full, STAGE_BYTES);
            bulk_load(place, x + row * info.x_stride, MATRIX_BYTES, full);
            bulk_load(place + MATRIX_BYTES, grad + row * info.grad_stride, MATRIX_BYTES, full);
            if (ADDS) {
                bulk_load(place + 2 * MATRIX_BYTES, residual + row * info.residual_stride, MATRIX_BYTES, full);
            }
        }
    };
    if (lane == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared.full(warp, stage), 1);
        }
        barrier_init_fence();
    }
    Ring<STAGES> at;
    auto await = [&] {
        barrier_wait(shared.full(warp, at.stage), at.parity);
        return shared.stage(warp, at.stage);
    };
#else
    // A row is a group of each lane's copies, whether or not there is one.
    auto bring = [&](int row, int stage) {
        if (row < rows) {
            each_vector([&](int, int v) {
                u32 place = shared.stage(warp, stage) + v * 16;
                copy_async(place, x + row * info.x_stride + v * 8);
                copy_async(place + MATRIX_BYTES, grad + row * info.grad_stride + v * 8);
                if (ADDS) {
                    copy_async(place + 2 * MATRIX_BYTES, residual + row * info.residual_stride + v * 8);
                }
            });
        }
        copies_commit();
    };
    struct {
        int stage = 0;

        __device__ __forceinline__ void advance() { stage = stage + 1 == STAGES ? 0 : stage + 1; }
    } at;
    auto await = [&] {
        copies_wait<STAGES - 1>();
        __syncwarp();
        return shared.stage(warp, at.stage);
    };
#endif
    for (int stage = 0; stage < STAGES; stage++) {
        bring(row + stage * step, stage);
    }
    for (int column = threadIdx.x; column < COLUMNS; column += THREADS) {
        shared_store(shared.gamma() + column * 4, widen(gamma[column]));
    }
    float d_gamma[EACH][8] = {}, d_beta[EACH][8] = {};
    float scale = 0.0f, centre = 0.0f;
    if (row < rows) {
        scale = inverse[row];
        centre = LAYER ? mean[row] : 0.0f;
    }
    __syncthreads();
    for (; row < rows; row += step) {
        int next = min(row + step, rows - 1);
        float next_scale = inverse[next], next_centre = LAYER ? mean[next] : 0.0f;
        u32 place = await();
        float scaled_normed = 0.0f, scaled_alone = 0.0f, shift = -centre * scale;
        each_vector([&](int, int v) {
            float xs[8], grads[8], gammas[8];
            unpack(xs, shared_load(place + v * 16));
            unpack(grads, shared_load(place + MATRIX_BYTES + v * 16));
            load(gammas, shared.gamma() + v * 32);
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                float normed = fmaf(xs[k], scale, shift), scaled = grads[k] * gammas[k];
                scaled_normed = fmaf(scaled, normed, scaled_normed);
                scaled_alone += LAYER ? scaled : 0.0f;
            }
        });
        // Both means times -inverse: the factor of normed in d_x, and the constant term.
        float of_normed = sum_lanes(scaled_normed) * (-scale / COLUMNS);
        float besides = LAYER ? sum_lanes(scaled_alone) * (-scale / COLUMNS) : 0.0f;
        each_vector([&](int i, int v) {
            float xs[8], grads[8], gammas[8], values[8] = {};
            unpack(xs, shared_load(place + v * 16));
            unpack(grads, shared_load(place + MATRIX_BYTES + v * 16));
            load(gammas, shared.gamma() + v * 32);
            if (ADDS) {
                unpack(values, shared_load(place + 2 * MATRIX_BYTES + v * 16));
            }
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                float normed = fmaf(xs[k], scale, shift), scaled = grads[k] * gammas[k];
                values[k] += fmaf(scaled, scale, fmaf(normed, of_normed, besides));
                d_gamma[i][k] = fmaf(grads[k], normed, d_gamma[i][k]);
                d_beta[i][k] += SHIFTED ? grads[k] : 0.0f;
            }
            reinterpret_cast<uint4*>(d_x + static_cast<u64>(row) * COLUMNS)[v] = pack(values);
        });
        // All lanes must have read the row before it is overwritten.
        __syncwarp();
        bring(row + STAGES * step, at.stage);
        at.advance();
        scale = next_scale, centre = next_centre;
    }
#if !HAS_TMA
    copies_wait<0>();
#endif
    // All warps must be done with their rows, which the sums overwrite.
    __syncthreads();
    each_vector([&](int i, int v) {
        store(shared.sums(warp, 0) + v * 32, d_gamma[i]);
        if (SHIFTED) {
            store(shared.sums(warp, 1) + v * 32, d_beta[i]);
        }
    });
    __syncthreads();
    for (int column = threadIdx.x; column < KINDS * COLUMNS; column += THREADS) {
        float sum = 0.0f;
        #pragma unroll
        for (int other = 0; other < WARPS; other++) {
            sum += shared_float(shared.sums(other, 0) + column * 4);
        }
        partial[static_cast<u64>(blockIdx.x) * KINDS * COLUMNS + column] = sum;
    }
}
