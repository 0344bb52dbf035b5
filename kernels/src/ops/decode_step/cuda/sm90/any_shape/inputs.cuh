// Inputs of products, in shared memory [BATCH, K].

// Norm of x: what blocks published, or else what enters the first layer. After the last layer it is
// no number where a wait was too long.
__device__ __forceinline__ void normed(
    const Step& step, const u64* published, const float* gamma, const float* beta, bool last
) {
    const u32 epoch = step.epoch;
    // Some warps to a row, and two columns to a lane.
    constexpr int OF_ROW = WARPS / BATCH, LANES = 32 * OF_ROW, N = ceil_div(D_MODEL, 2 * LANES), SOME = least(N, 8);
    const int row = step.warp / OF_ROW, first = step.thread % LANES * 2;
    float x[N][2], sum = 0;
    // Gamma and beta of a few columns come before what is waited for.
    constexpr bool EARLY = N <= 4;
    float2 g[N], b[N];
    auto weights = [&] {
        #pragma unroll
        for (int i = 0; i < N; i++) {
            const int column = min(first + i * (2 * LANES), D_MODEL - 2);
            g[i] = *reinterpret_cast<const float2*>(gamma + column);
            b[i] = make_float2(0, 0);
            if (LAYER_NORM && beta) b[i] = *reinterpret_cast<const float2*>(beta + column);
        }
    };
    if (EARLY) weights();
    #pragma unroll
    for (int i = 0; i < N; i++) x[i][0] = x[i][1] = 0;
    if (row < step.rows) {
        #pragma unroll
        for (int begin = 0; begin < N; begin += SOME) {
            if (published) {
                Two v[SOME];
                poll([&] {
                    bool all = true;
                    #pragma unroll
                    for (int i = 0; i < SOME; i++) {
                        const int column = first + (begin + i) * (2 * LANES);
                        if (column < D_MODEL) v[i] = ask_two(published + row * D_MODEL + column);
                        else v[i] = {{0, epoch}, {0, epoch}};
                    }
                    #pragma unroll
                    for (int i = 0; i < SOME; i++) all = all && v[i].there(epoch);
                    return all;
                });
                #pragma unroll
                for (int i = 0; i < SOME; i++) {
                    if (begin + i < N) {
                        x[begin + i][0] = __uint_as_float(v[i].a.v);
                        x[begin + i][1] = __uint_as_float(v[i].b.v);
                    }
                }
            } else {
                #pragma unroll
                for (int i = 0; i < SOME; i++) {
                    const int column = first + (begin + i) * (2 * LANES);
                    if (begin + i < N && column < D_MODEL) {
                        x[begin + i][0] = step.embedded(row, column);
                        x[begin + i][1] = step.embedded(row, column + 1);
                    }
                }
            }
        }
    }
    __syncwarp();
    float* reduced = reinterpret_cast<float*>(memory + AT_REDUCED);
    // Over the warps of a row.
    auto total = [&](float v, float* at) {
        v = sum_lanes(v);
        if (step.lane == 0) at[step.warp] = v;
        __syncthreads();
        float all = 0;
        #pragma unroll
        for (int w = 0; w < OF_ROW; w++) all += at[row * OF_ROW + w];
        return all;
    };
    float mean = 0;
#if LAYER_NORM
    #pragma unroll
    for (int i = 0; i < N; i++) sum += x[i][0] + x[i][1];
    mean = total(sum, reduced) / D_MODEL;
#endif
    sum = 0;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        if (first + i * (2 * LANES) >= D_MODEL) continue;
        x[i][0] -= mean, x[i][1] -= mean;
        sum = fmaf(x[i][0], x[i][0], fmaf(x[i][1], x[i][1], sum));
    }
    const float squares = total(sum, reduced + WARPS);
    // No warp of the block waits any longer.
    const float broken = last && Watch::dead() ? __int_as_float(0x7fc00000) : 0;
    const float factor = rsqrtf(squares / D_MODEL + EPSILON) + broken;
    if (!EARLY) weights();
    Half* to = reinterpret_cast<Half*>(memory) + row * D_MODEL;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int column = first + i * (2 * LANES);
        if (row >= step.rows || column >= D_MODEL) continue;
        to[column] = from_float(x[i][0] * factor * g[i].x + b[i].x);
        to[column + 1] = from_float(x[i][1] * factor * g[i].y + b[i].y);
    }
    __syncthreads();
}
// What stands between the products of the feed-forward layer, in so many columns.
__device__ __forceinline__ void of_feed_forward(const Step& step, int columns) {
    constexpr int SOME = 4;
    const int pairs = step.rows * columns / (2 * OF_WORD);
    const u64* from = step.scratch + AT_H;
    #pragma unroll 1
    for (int begin = step.thread; begin < pairs; begin += SOME * THREADS) {
        Two v[SOME];
        poll([&] {
            bool all = true;
            #pragma unroll
            for (int i = 0; i < SOME; i++) v[i] = ask_two(from + 2 * min(begin + i * THREADS, pairs - 1));
            #pragma unroll
            for (int i = 0; i < SOME; i++) all = all && v[i].there(step.epoch);
            return all;
        });
        #pragma unroll
        for (int i = 0; i < SOME; i++) {
            const int at = begin + i * THREADS;
            if (at >= pairs) break;
            Half* to = reinterpret_cast<Half*>(memory) + at * (2 * OF_WORD);
            *reinterpret_cast<uint2*>(to) = make_uint2(v[i].a.v, v[i].b.v);
        }
    }
    __syncthreads();
}
