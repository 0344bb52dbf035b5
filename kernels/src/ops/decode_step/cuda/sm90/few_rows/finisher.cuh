// The finishers: warps that sum what consumers leave, hold the residual stream, and publish.

struct Finisher {
    Watch watch;
    int lane, pair, part;

    // Sums of a pair of outputs over all warps; all lanes know them, the upper half of them as the
    // lower.
    __device__ __forceinline__ float2 sum(const float (*sums)[BATCH][SUM_ROWS], int row, int at) const {
        float2 s = {0, 0};
        #pragma unroll
        for (int w = 0; w < WARPS / 2; w++) {
            const float2 v = *reinterpret_cast<const float2*>(&sums[part * (WARPS / 2) + w][row][at]);
            s.x += v.x, s.y += v.y;
        }
        s.x += __shfl_xor_sync(~0u, s.x, 16), s.y += __shfl_xor_sync(~0u, s.y, 16);
        return s;
    }
    // The factor of a norm, from all warps' sums of squares.
    __device__ __forceinline__ float factor(int row) const {
        const float4* squares = reinterpret_cast<const float4*>(memory + AT_SQUARES) + row * (WARPS / 4);
        float s[WARPS / 4];
        #pragma unroll
        for (int i = 0; i < WARPS / 4; i++) s[i] = (squares[i].x + squares[i].y) + (squares[i].z + squares[i].w);
        return rsqrtf(((s[0] + s[1]) + (s[2] + s[3])) / D_MODEL + EPSILON);
    }
};

__device__ __forceinline__ void finish(const Step& step, u32 epoch, Cut part) {
    Finisher f;
    const float(*sums)[WARPS][BATCH][SUM_ROWS] =
        reinterpret_cast<const float(*)[WARPS][BATCH][SUM_ROWS]>(memory + AT_SUMS);
    const int b = blockIdx.x, lane = f.lane = threadIdx.x % 32, first_row = threadIdx.x / 32 - WARPS;
    const int pair = f.pair = lane % 16;
    f.part = lane / 16;
    const bool leads = lane < 16;
    const int q0 = part(QKV_ROWS / 2, b), qn = part(QKV_ROWS / 2, b + 1) - q0;
    const int d0 = part(D_MODEL / 2, b), dn = part(D_MODEL / 2, b + 1) - d0;
    const int f0 = part(D_FF / 2, b), fn = part(D_FF / 2, b + 1) - f0;
    u64* scratch = step.scratch;
    float x[ROWS_EACH][2];
    // The scales of a pair of rows, read before their sums are there.
    const int own_d = d0 + min(lane % 4, dn - 1), own_f = f0 + min(pair, fn - 1);
    auto scales = [](const float* of, int pair) {
        return INT8 ? reinterpret_cast<const float2*>(of)[pair] : float2{1, 1};
    };
    #pragma unroll 1
    for (int at = 0; at < step.steps; at++, epoch++) {
        #pragma unroll 1
        for (int l = 0; l < N_LAYERS; l++, epoch++) {
            const Scales& of = step.scales[l];
            const float2 of_qkv = scales(of.qkv, q0 + min(pair, qn - 1)), of_out = scales(of.out, own_d);
            const float2 of_gate = scales(of.up, own_f), of_up = scales(of.up, D_FF / 2 + own_f);
            const float2 of_down = scales(of.down, own_d);
            barrier_sync(1, SUMMING);
            #pragma unroll
            for (int i = 0; i < ROWS_EACH; i++) {
                const int row = first_row + i * FINISHERS;
                const float scale = f.factor(row);
                const float2 s = f.sum(sums[0], row, 2 * pair);
                if (leads && pair < qn) {
                    const float q[2] = {s.x * scale * of_qkv.x, s.y * scale * of_qkv.y};
                    publish(
                        scratch + Q + row * QKV_ROWS + 2 * (q0 + pair), __float_as_uint(q[0]), __float_as_uint(q[1]),
                        epoch);
                }
            }
            if (l == 0) {
                // The tokens are known since the warps that multiply arrived.
                #pragma unroll
                for (int i = 0; i < ROWS_EACH; i++) {
                    const u32 v = step.embedded(step.id(first_row + i * FINISHERS), own_d);
                    x[i][0] = low(v), x[i][1] = high(v);
                }
            }
            auto residual = [&](u64* to, float2 scales) {
                barrier_sync(2, SUMMING);
                #pragma unroll
                for (int i = 0; i < ROWS_EACH; i++) {
                    const int row = first_row + i * FINISHERS;
                    const float2 s = f.sum(sums[1], row, 2 * (lane % 4));
                    x[i][0] += s.x * scales.x, x[i][1] += s.y * scales.y;
                    const u32 v = pack(x[i][0], x[i][1]);
                    // Four lanes a copy.
                    if (lane % 4 < dn && lane / 4 < COPIES) {
                        publish(to + (lane / 4 * BATCH + row) * (D_MODEL / 2) + d0 + lane % 4, v, epoch);
                    }
                }
            };
            residual(scratch + Y, of_out);
            barrier_sync(1, SUMMING);
            #pragma unroll
            for (int i = 0; i < ROWS_EACH; i++) {
                const int row = first_row + i * FINISHERS;
                float2 gate = f.sum(sums[0], row, 2 * min(pair, 11)), up = f.sum(sums[0], row, 24 + 2 * min(pair, 11));
                const float scale = f.factor(row);
                gate.x *= scale * of_gate.x, gate.y *= scale * of_gate.y;
                up.x *= scale * of_up.x, up.y *= scale * of_up.y;
                const float h0 = gated(gate.x, up.x), h1 = gated(gate.y, up.y);
                if (pair < fn) {
                    #pragma unroll
                    for (int k = 0; k < COPIES; k += 2) {
                        if (k + f.part < COPIES) {
                            publish(
                                scratch + H + ((k + f.part) * BATCH + row) * (D_FF / 2) + f0 + pair, pack(h0, h1),
                                epoch);
                        }
                    }
                }
            }
            residual(scratch + X, of_down);
        }
    }
    if (b == 0 && first_row == 0 && lane == 0) step.state->epoch = epoch;
}
