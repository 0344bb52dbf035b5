// Greedy tokens of all rows.

__device__ __forceinline__ void predict(const Step& step, const Part& part) {
    float* of_warps = reinterpret_cast<float*>(memory + AT_REDUCED);
    u64* largest = step.scratch + AT_LARGEST;
    #pragma unroll 1
    for (int row = 0; row < step.rows; row++) {
        Largest best;
        #pragma unroll 1
        for (int i = step.thread; i < part.own; i += THREADS) {
            float logit = sum_of(step, part, i, row);
            if (INT8) logit *= part.scales[part.first + i];
            step.logits[static_cast<u64>(row) * VOCABULARY + part.first + i] = logit;
            if (logit != logit) best.or_else(INFINITE, -1);
            else best.or_else(logit, part.first + i);
        }
        best.of_lanes<1, 32>();
        if (step.lane == 0) {
            of_warps[2 * step.warp] = best.logit;
            of_warps[2 * step.warp + 1] = __int_as_float(best.token);
        }
        __syncthreads();
        if (step.warp == 0) {
            best = Largest{of_warps[2 * (step.lane % WARPS)], __float_as_int(of_warps[2 * (step.lane % WARPS) + 1])};
            best.of_lanes<1, 32>();
            if (step.lane == 0) {
                u64* to = largest + 2 * (row * BLOCKS + step.block);
                publish(to, best.logit, step.epoch), publish(to + 1, static_cast<u32>(best.token), step.epoch);
            }
        }
        __syncthreads();
    }
    if (step.block > 0) return;
    if (step.warp < step.rows) {
        Largest best;
        #pragma unroll 1
        for (int block = step.lane; block < BLOCKS; block += 32) {
            Two v;
            poll([&] {
                v = ask_two(largest + 2 * (step.warp * BLOCKS + block));
                return v.there(step.epoch);
            });
            best.or_else(__uint_as_float(v.a.v), static_cast<int>(v.b.v));
        }
        __syncwarp();
        best.of_lanes<1, 32>();
        if (step.lane == 0) {
            step.greedy[step.warp] = Watch::dead() || best.token == NO_TOKEN ? -1 : best.token;
            step.following[step.warp] = step.positions[step.warp] + 1;
        }
    }
}
