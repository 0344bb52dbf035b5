// The consumers: warps that multiply their columns of the block's rows.

struct Consumer {
    static constexpr u32 HALF_LINE = LINE / WARPS / 2;
    StageRing ring;
    Watch watch;
    const Step& step;
    int warp, lane;
    u32 first;                                         // where a lane's weights lie in a stage:
                                                       // here, and HALF_LINE from here
    u32 staged, operand;                               // offset of a warp's input
    u32 sum;                                           // where a lane leaves its sums
    int half;                                          // of 64 columns: which a lane takes first
    u32 released = 0;                                  // stages of this warp

    __device__ Consumer(StageRing ring, const Step& step) : ring(ring), step(step) { place(); }
    // Found out again where it is needed, rather than kept in registers.
    __device__ __forceinline__ void place() {
        u32 thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        warp = thread / 32, lane = thread % 32;
        const int g = lane / 4, q = lane % 4, row = min(g / 2, BATCH - 1);
        // Rows of a stage begin in the same bank: every second one takes the other half of its
        // columns first.
        half = g & 1;
        first = g * LINE + warp * (2 * HALF_LINE) + q * (HALF_LINE / 4) + half * HALF_LINE;
        staged = ring.base + AT_INPUT + warp * BATCH * 128 + lane * 4;
        sum = ring.base + AT_SUMS + ((warp * BATCH + q) * SUM_ROWS + g) * 4;
        operand = staged - lane * 4 + row * 128 + half * 64 + q * 16;
    }
    __device__ __forceinline__ u32 nil() const { return static_cast<u32>(step.rows) >> 31; }
    // Weights into registers, eight rows a stage.
    template <int FROM, int TO, int N>
    __device__ __forceinline__ void load(u32 (&a)[N][8]) {
        #pragma unroll
        for (int s = FROM; s < TO; s++) {
            watch.wait(ring.full(), ring.parity);
            const uint4 u = shared_weights(ring.stage() + first);
            const uint4 v = shared_weights(ring.stage() + (first ^ HALF_LINE));
            a[s][0] = u.x, a[s][1] = u.y, a[s][2] = u.z, a[s][3] = u.w;
            a[s][4] = v.x, a[s][5] = v.y, a[s][6] = v.z, a[s][7] = v.w;
            ring.advance();
        }
    }
    // Releases stages once `value`, the last one loaded from them, has arrived: a store does not
    // wait for loads. The producer's next copy to them comes later, since the loads are complete. A
    // count per warp is cheaper than a barrier arrival per stage.
    __device__ __forceinline__ void release(int stages, u32 value) {
        __syncwarp();
        released += stages;
        count(AT_RELEASED, released, value);
    }
    __device__ __forceinline__ void count(u32 at, u32 released, u32 value) const {
        if (lane == 0) {
            asm volatile(
                "st.shared.u32 [%0], %1;" ::"r"(ring.base + at + warp * 4 + (value & nil())), "r"(released) : "memory");
        }
    }
    // Stages of which others released their own, and the last that this warp read of a step: what
    // it read and wrote is done.
    __device__ __forceinline__ void release_all(int stages) {
        asm volatile("fence.acq_rel.cta;" ::: "memory");
        release(stages, 0);
    }
    template <int FROM, int TO, int N>
    __device__ __forceinline__ void release(const u32 (&a)[N][8]) { release(TO - FROM, a[TO - 1][7]); }
    template <int N>
    __device__ __forceinline__ void load(u32 (&a)[N][8]) { load<0, N>(a); }
    template <int N>
    __device__ __forceinline__ void release(const u32 (&a)[N][8]) { release<0, N>(a); }
    // This warp's columns of the input: each lane asks for a pair of values in each slice of each
    // row.
    template <int T>
    struct Words {
        u32 v[T][BATCH], e[T][BATCH];
        const u64* at;
        Patience patience;
    };
    // From where, and which of a layer's four inputs.
    template <int T>
    __device__ __forceinline__ void expect(Words<T>& w, int from, int input) {
        w.at = step.scratch + (from + static_cast<int>(threadIdx.x));
        w.patience.begin(ring.base + AT_WAITED, warp, input);
    }
    template <int T>
    __device__ __forceinline__ void await(Words<T>& w, u32 epoch) {
        constexpr int WIDTH = T * SLICE / 2;
        w.patience.hold();
        #pragma unroll 1
        for (;;) {
            u32 wrong = 0;
            #pragma unroll
            for (int t = 0; t < T; t++) {
                #pragma unroll
                for (int r = 0; r < BATCH; r++) word(w.at + r * WIDTH + t * 512, w.v[t][r], w.e[t][r]);
            }
            #pragma unroll
            for (int t = 0; t < T; t++) {
                #pragma unroll
                for (int r = 0; r < BATCH; r++) wrong |= w.e[t][r] ^ epoch;
            }
            if (__all_sync(~0u, wrong == 0)) break;
            if (__any_sync(~0u, watch.late())) break;
        }
        w.patience.end(lane);
    }
    // As operands of the product.
    template <int T, class Then>
    __device__ __forceinline__ void give(u32 (&b)[T][8], const u32 (&v)[T][BATCH], Then then) {
        #pragma unroll
        for (int first = 0; first < T; first += INPUTS) {
            __syncwarp();
            #pragma unroll
            for (int t = first; t < T && t < first + INPUTS; t++) {
                #pragma unroll
                for (int r = 0; r < BATCH; r++) {
                    asm volatile(
                        "st.shared.u32 [%0], %1;" ::"r"(staged + ((t - first) * WARPS * BATCH + r) * 128),
                        "r"(then(r, v[t][r]))
                        : "memory");
                }
            }
            __syncwarp();
            #pragma unroll
            for (int t = first; t < T && t < first + INPUTS; t++) {
                const uint4 u = shared_16(operand + (t - first) * (WARPS * BATCH * 128));
                const uint4 w = shared_16((operand ^ 64) + (t - first) * (WARPS * BATCH * 128));
                b[t][0] = u.x, b[t][1] = u.y, b[t][2] = u.z, b[t][3] = u.w;
                b[t][4] = w.x, b[t][5] = w.y, b[t][6] = w.z, b[t][7] = w.w;
            }
        }
    }
    // Two chains of products, which a sum ends.
    __device__ __forceinline__ void tile(
        float (&c)[4], const u32 (&above)[8], const u32 (&below)[8], const u32 (&b)[8]
    ) {
        float d[4] = {0, 0, 0, 0};
        #pragma unroll
        for (int i = 0; i < 4; i++) c[i] = 0;
        #pragma unroll
        for (int i = 0; i < 8; i += 4) {
            multiply(c, above[i], below[i], above[i + 1], below[i + 1], b[i], b[i + 1]);
            multiply(d, above[i + 2], below[i + 2], above[i + 3], below[i + 3], b[i + 2], b[i + 3]);
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) c[i] += d[i];
    }
    // The same with many rows, for which registers do not hold all slices: one after the other.
    template <int T, class Then>
    __device__ __forceinline__ void slices(float (&c)[4], const Words<T>& w, Then then) {
        float d[4][4] = {};
        #pragma unroll
        for (int t = 0; t < T; t++) {
            u32 a[1][8], b[1][8], v[1][BATCH];
            #pragma unroll
            for (int r = 0; r < BATCH; r++) v[0][r] = w.v[t][r];
            load(a);
            give(b, v, then);
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                multiply(d[i], a[0][2 * i], 0, a[0][2 * i + 1], 0, b[0][2 * i], b[0][2 * i + 1]);
            }
            release(a);
        }
        #pragma unroll
        for (int i = 0; i < 2; i++) c[i] = (d[0][i] + d[1][i]) + (d[2][i] + d[3][i]);
    }
    // Eight rows, of several slices.
    template <int T>
    __device__ __forceinline__ void rows(float (&c)[4], const u32 (&a)[T][8], const u32 (&b)[T][8]) {
        float d[4][4] = {};
        #pragma unroll
        for (int t = 0; t < T; t++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                multiply(d[i], a[t][2 * i], 0, a[t][2 * i + 1], 0, b[t][2 * i], b[t][2 * i + 1]);
            }
        }
        #pragma unroll
        for (int i = 0; i < 2; i++) c[i] = (d[0][i] + d[1][i]) + (d[2][i] + d[3][i]);
    }
    float square[BATCH];
    // This warp's part of the sums of squares.
    __device__ __forceinline__ void put_squares(u32 squares) {
        #pragma unroll
        for (int r = 0; r < BATCH; r++) {
            const float s = sum_lanes(square[r]);
            if (lane == 0) {
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(squares + (r * WARPS + warp) * 4), "f"(s) : "memory");
            }
        }
    }
    // This warp's part of the sums of eight rows.
    __device__ __forceinline__ void put(int buffer, int at, float c0, float c1) {
        const u32 to = sum + (buffer * SUMS + at) * 4;
        const float v = half ? c1 : c0;
        if (lane % 4 < BATCH) asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
    }
};
