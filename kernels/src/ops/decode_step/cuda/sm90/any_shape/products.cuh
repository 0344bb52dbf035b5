// Products of a block's rows of a matrix and all tokens.

// What a warp multiplies: the rows of a tile, along its steps. Its first weights can be read before
// there is an input.
struct Weights {
    const Part& part;
    int warp, lane, tiles, task, at, end;
    const uint4* from[TILE];
    using Registers = uint4[STEPS][TILE];

    __device__ __forceinline__ Weights(const Step& step, const Part& part, Registers& v)
        : part(part), warp(step.warp), lane(step.lane) {
        tiles = ceil_div(part.count * part.own, TILE);
        begin(warp, v);
    }
    __device__ __forceinline__ bool has() const { return task < tiles << part.split_bits; }
    __device__ __forceinline__ int row() const { return (task >> part.split_bits) * TILE; }
    __device__ __forceinline__ int share() const { return task & ((1 << part.split_bits) - 1); }
    __device__ __forceinline__ int loads() const { return part.k / WEIGHTS; }
    __device__ __forceinline__ bool begin(int next, Registers& v) {
        task = next;
        // Without a task all are zeros: what is not set lives on in registers.
        const int steps = has() ? ceil_div(loads(), 32) : 0;
        at = steps * share() >> part.split_bits, end = steps * (share() + 1) >> part.split_bits;
        #pragma unroll
        for (int i = 0; i < TILE; i++) {
            const int r = min(row() + i, part.count * part.own - 1);
            const int n = r < part.own ? part.first + r : part.n + part.first + r - part.own;
            from[i] = reinterpret_cast<const uint4*>(part.weight + static_cast<u64>(max(n, 0)) * part.pitch) + lane;
        }
        #pragma unroll
        for (int a = 0; a < STEPS; a++) read(v[a], at + a);
        return has();
    }
    __device__ __forceinline__ int load(int s) const { return s * 32 + lane; }
    __device__ __forceinline__ void read(uint4 (&v)[TILE], int s) const {
        const bool there = s < end && load(s) < loads();
        #pragma unroll
        for (int i = 0; i < TILE; i++) v[i] = there ? stream(from[i] + s * 32) : make_uint4(0, 0, 0, 0);
    }
};

// This block's rows of a weight, by the input in shared memory: sums, which `sum_of` gives.
__device__ __forceinline__ void multiply(const Step& step, const Part& part, Weights& w, Weights::Registers& v) {
    constexpr int PARTS = WEIGHTS / HALVES;
    const Half* input = reinterpret_cast<const Half*>(memory);
    float* sums = step.sums();
    #pragma unroll 1
    for (bool more = w.has(); more; more = w.task + WARPS < w.tiles << part.split_bits && w.begin(w.task + WARPS, v)) {
        float sum[TILE][BATCH] = {};
        #pragma unroll 1
        for (; w.at < w.end; w.at += STEPS) {
            #pragma unroll
            for (int a = 0; a < STEPS; a++) {
                const int load = w.load(w.at + a);
                if (w.at + a < w.end && load < w.loads()) {
                    #pragma unroll
                    for (int p = 0; p < PARTS; p++) {
                        float f[TILE][HALVES];
                        #pragma unroll
                        for (int i = 0; i < TILE; i++) spread_weights(f[i], v[a][i], p);
                        #pragma unroll
                        for (int r = 0; r < BATCH; r++) {
                            float x[HALVES];
                            spread(
                                x, *reinterpret_cast<const uint4*>(input + r * part.k + load * WEIGHTS + p * HALVES));
                            #pragma unroll
                            for (int i = 0; i < TILE; i++) {
                                #pragma unroll
                                for (int k = 0; k < HALVES; k++) sum[i][r] = fmaf(f[i][k], x[k], sum[i][r]);
                            }
                        }
                    }
                }
                w.read(v[a], w.at + STEPS + a);
            }
        }
        #pragma unroll
        for (int i = 0; i < TILE; i++) {
            #pragma unroll
            for (int r = 0; r < BATCH; r++) {
                const float all = sum_lanes(sum[i][r]);
                if (step.lane == (i * BATCH + r) % 32 && w.row() + i < part.rows) {
                    sums[(w.share() * part.rows + w.row() + i) * BATCH + r] = all;
                }
            }
        }
    }
    __syncthreads();
}
__device__ __forceinline__ float sum_of(const Step& step, const Part& part, int at, int row) {
    float all = 0;
    #pragma unroll 4
    for (int s = 0; s < 1 << part.split_bits; s++) all += step.sums()[(s * part.rows + at) * BATCH + row];
    return all;
}

// The scales and biases of a block's rows, in shared memory; products take turns. A thread's first
// ones are read before they are kept, so that it does not wait for them.
struct Extras {
    const Part& part;
    float* at;
    float scale = 1, bias = 0;

    __device__ __forceinline__ Extras(const Step& step, const Part& part, int turn)
        : part(part), at(reinterpret_cast<float*>(memory + AT_EXTRAS) + turn % 2 * (2 * MOST_ROWS)) {
        if (step.thread < least(part.count * part.own, MOST_ROWS)) read(step.thread);
    }
    __device__ __forceinline__ void read(int i) {
        const int n = i < part.own ? part.first + i : part.n + part.first + i - part.own;
        if (INT8) scale = part.scales[n];
        if (part.bias) bias = part.bias[n];
    }
    __device__ __forceinline__ void keep(const Step& step) {
        #pragma unroll 1
        for (int i = step.thread; i < part.count * part.own; i += THREADS) {
            if (i >= THREADS) read(i);
            at[i] = scale, at[MOST_ROWS + i] = bias;
        }
    }
    // What a product gives in a row of the block.
    __device__ __forceinline__ float total(const Step& step, int i, int row) const {
        return fmaf(sum_of(step, part, i, row), at[i], at[MOST_ROWS + i]);
    }
};
