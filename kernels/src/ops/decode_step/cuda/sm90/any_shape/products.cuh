// Products of a block's rows of a matrix and all tokens.

// What a warp multiplies: tasks, each the rows of a tile along some steps, STEPS at a time. The
// first weights can be read before there is an input, and those of the next task before this one is
// over.
struct Weights {
    const Part& part;
    int warp, lane, tasks;
    int task, at, end;                                 // of what is multiplied
    int next, next_at, next_end;                       // of what is read
    const uint4* from[TILE];
    using Registers = uint4[STEPS][TILE];

    __device__ __forceinline__ Weights(const Step& step, const Part& part, Registers& v)
        : part(part), warp(step.warp), lane(step.lane) {
        tasks = ceil_div(part.all(), TILE) << part.split_bits;
        begin(warp);
        #pragma unroll
        for (int a = 0; a < STEPS; a++) read(v[a], a);
        turn();
    }
    __device__ __forceinline__ bool has() const { return task < tasks; }
    __device__ __forceinline__ int row() const { return (task >> part.split_bits) * TILE; }
    __device__ __forceinline__ int share() const { return task & ((1 << part.split_bits) - 1); }
    // Goes on with what was read.
    __device__ __forceinline__ void turn() { task = next, at = next_at, end = next_end; }
    __device__ __forceinline__ void begin(int which) {
        next = which;
        // Without a task all are zeros: what is not set lives on in registers.
        const int steps = next < tasks ? ceil_div(part.loads, 32) : 0, share = next & ((1 << part.split_bits) - 1);
        next_at = steps * share >> part.split_bits, next_end = steps * (share + 1) >> part.split_bits;
        #pragma unroll
        for (int i = 0; i < TILE; i++) {
            const int r = max(min((next >> part.split_bits) * TILE + i, part.all() - 1), 0);
            from[i] = reinterpret_cast<const uint4*>(part.weight + static_cast<u64>(part.line(r)) * part.pitch) + lane;
        }
    }
    // What is read next: further steps of the same rows, or another task's.
    __device__ __forceinline__ void ahead() {
        if (at + STEPS < end) next_at = at + STEPS;
        else begin(task + WARPS);
    }
    __device__ __forceinline__ void read(uint4 (&v)[TILE], int a) const {
        const int s = next_at + a;
        const bool there = s < next_end && s * 32 + lane < part.loads;
        #pragma unroll
        for (int i = 0; i < TILE; i++) v[i] = there ? stream(from[i] + s * 32) : make_uint4(0, 0, 0, 0);
    }
};

// This block's rows of a weight, by the input in shared memory: sums, which `sum_of` gives. Those of
// experts are multiplied by the inputs of their slots.
__device__ __forceinline__ void multiply(const Step& step, const Part& part, Weights& w, Weights::Registers& v) {
    constexpr int PARTS = WEIGHTS / HALVES;
    const Half* input = reinterpret_cast<const Half*>(memory);
    float* sums = step.sums();
    #pragma unroll 1
    while (w.has()) {
        float sum[TILE][BATCH] = {};
        const int row = w.row(), share = w.share();
        int inputs[BATCH];
        int count = BATCH;
        #pragma unroll
        for (int r = 0; r < BATCH; r++) inputs[r] = r * part.loads * WEIGHTS;
        if (part.mixed()) {
            const int place = part.place(row);
            count = routing().members[place];
            #pragma unroll
            for (int r = 0; r < BATCH; r++) {
                const int slot = routing().slots[place * BATCH + min(r, count - 1)];
                inputs[r] = (part.kind == Part::EXPERTS_UP ? slot / CHOICES : slot) * part.loads * WEIGHTS;
            }
        }
        bool more = true;
        #pragma unroll 1
        while (more) {
            const int from = w.at, end = w.end;
            more = from + STEPS < end;
            w.ahead();
            #pragma unroll
            for (int a = 0; a < STEPS; a++) {
                const int load = (from + a) * 32 + step.lane;
                if (from + a < end && load < part.loads) {
                    #pragma unroll
                    for (int p = 0; p < PARTS; p++) {
                        float f[TILE][HALVES];
                        #pragma unroll
                        for (int i = 0; i < TILE; i++) spread_weights(f[i], v[a][i], p);
                        #pragma unroll
                        for (int r = 0; r < BATCH; r++) {
                            if (MIXTURE && r > 0 && r >= count) break;
                            float x[HALVES];
                            const int at = inputs[r] + load * WEIGHTS + p * HALVES;
                            spread(x, *reinterpret_cast<const uint4*>(input + at));
                            #pragma unroll
                            for (int i = 0; i < TILE; i++) {
                                #pragma unroll
                                for (int k = 0; k < HALVES; k++) sum[i][r] = fmaf(f[i][k], x[k], sum[i][r]);
                            }
                        }
                    }
                }
                w.read(v[a], a);
            }
            w.turn();
        }
        #pragma unroll
        for (int i = 0; i < TILE; i++) {
            #pragma unroll
            for (int r = 0; r < BATCH; r++) {
                const float all = sum_lanes(sum[i][r]);
                if (step.lane == (i * BATCH + r) % 32 && row + i < part.rows) {
                    sums[(share * part.rows + row + i) * BATCH + r] = all;
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
        if (step.thread < least(own(), MOST_ROWS)) read(step.thread);
    }
    // Those of experts are read where they are needed.
    __device__ __forceinline__ int own() const { return part.mixed() ? 0 : part.count * part.own; }
    __device__ __forceinline__ void read(int i) {
        const int n = i < part.own ? part.first + i : part.n + part.first + i - part.own;
        if (INT8) scale = part.scales[n];
        if (part.bias) bias = part.bias[n];
    }
    __device__ __forceinline__ void keep(const Step& step) {
        #pragma unroll 1
        for (int i = step.thread; i < own(); i += THREADS) {
            if (i >= THREADS) read(i);
            at[i] = scale, at[MOST_ROWS + i] = bias;
        }
    }
    // What a product gives in a row of the block.
    __device__ __forceinline__ float total(const Step& step, int i, int row) const {
        return fmaf(sum_of(step, part, i, row), at[i], at[MOST_ROWS + i]);
    }
};
