// The head: logits of the block's rows, greedy and sampled tokens.

// The greedy token of each row; `best` is this thread's candidate. If a step follows, each block
// finds it by itself.
__device__ __forceinline__ void predict_greedy(const Consumer& c, const Step& step, Largest best, int at, u32 epoch) {
    const int warp = c.warp, lane = c.lane, block = opaque_block();
    // Of the warp, of the block, of all: lanes of a row of the batch are four apart.
    best.of_lanes<4, 32>();
    Largest* of_warps = reinterpret_cast<Largest*>(memory + AT_PART);
    if (lane < BATCH) of_warps[lane * WARPS + warp] = best;
    barrier_sync(3, WARPS * 32);
    if (warp >= step.rows) return;
    best = of_warps[warp * WARPS + lane % WARPS];
    best.of_lanes<1, WARPS>();
    u64* words_of = step.scratch + LARGEST + warp * (2 * MOST_BLOCKS);
    if (Watch::dead()) best = {INFINITE, -1};
    if (lane == 0) publish(words_of + 2 * block, __float_as_uint(best.logit), best.token, epoch);
    if (at + 1 < step.steps || block == 0) {
        u32 logit[MOST_BLOCKS / 32], token[MOST_BLOCKS / 32], wrong;
        #pragma unroll 1
        do {
            wrong = 0;
            u32 e[MOST_BLOCKS / 32][2];
            #pragma unroll
            for (int i = 0; i < MOST_BLOCKS / 32; i++) {
                words(
                    words_of + 2 * min(i * 32 + lane, static_cast<int>(gridDim.x) - 1), logit[i], e[i][0], token[i],
                    e[i][1]);
            }
            #pragma unroll
            for (int i = 0; i < MOST_BLOCKS / 32; i++) wrong |= (e[i][0] ^ epoch) | (e[i][1] ^ epoch);
        } while (__any_sync(~0u, wrong != 0) && !__any_sync(~0u, c.watch.late()));
        #pragma unroll
        for (int i = 0; i < MOST_BLOCKS / 32; i++) best.or_else(__uint_as_float(logit[i]), token[i]);
        best.of_lanes<1, 32>();
        int token_of_row = Watch::dead() || best.token == NO_TOKEN ? -1 : best.token;
        if (step.ended(warp)) token_of_row = step.id(warp);
        __syncwarp();
        if (lane == 0) {
            step.set_id(warp, token_of_row);
            for (int r = step.rows; r < BATCH && warp == 0; r++) step.set_id(r, token_of_row);
            if (block == 0) step.predict(at, warp, token_of_row);
        }
    }
}

// The head of this block's rows: all columns of the input lie in shared memory, and `factors` are
// the norm's. Then what the rows predict; where a step follows, all threads that multiply know of
// it.
__device__ __forceinline__ bool project(Consumer& c, const Step& step, const float (&factors)[BATCH], u32 epoch) {
    constexpr u32 HALF_LINE = Consumer::HALF_LINE;
    // What follows from it is found anew in each step: kept, it would not fit the registers.
    const int block = opaque_block();
    const int warp = c.warp, lane = c.lane, g = lane / 4, q = lane % 4, half = c.half;
    const u32 weights = g * LINE + q * (HALF_LINE / 4) + half * HALF_LINE;
    const u32 input = c.ring.base + AT_INPUT + min(g / 2, BATCH - 1) * 128 + half * 64 + q * 16;
    const HeadRows head(step.vocabulary, block);
    float factor = factors[0];
    #pragma unroll
    for (int r = 1; r < BATCH; r++) factor = q == r ? factors[r] : factor;
    Largest best;
    constexpr int EIGHTS = HEAD_ROWS / 8;
    static_assert(EIGHTS <= 2, "rows of a product");
    // As many warps as there are stages in the ring: each waits for one of these only, time after
    // time, and alone releases it.
    static_assert(STAGES <= WARPS, "a warp a stage");
    StageRing ring = c.ring;
    c.ring.skip(head.stages());
    ring.skip(warp);
    u32 of_head = reinterpret_cast<volatile u32*>(memory + AT_RELEASED_OF_HEAD)[warp];
    #pragma unroll 1
    for (int first = warp < STAGES ? warp * HEAD_ROWS : head.count; first < head.count; first += STAGES * HEAD_ROWS) {
        float scales[EIGHTS];
        #pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            const int token = min(head.first + first + e * 8 + g, step.vocabulary - 1);
            scales[e] = INT8 ? factor * step.scales->head[token] : factor;
        }
        c.watch.wait(ring.full(), ring.parity);
        float d[4][4] = {};
        u32 last = 0;
        #pragma unroll 4
        for (int k = 0; k < WARPS; k++) {
            const u32 at = k * (2 * HALF_LINE) + weights;
            uint4 a[2][2] = {};
            #pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
                a[e][0] = shared_weights(ring.stage() + e * (8 * LINE) + at);
                a[e][1] = shared_weights(ring.stage() + e * (8 * LINE) + (at ^ HALF_LINE));
            }
            const uint4 b[2] = {shared_16(input + k * (BATCH * 128)), shared_16((input ^ 64) + k * (BATCH * 128))};
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                multiply(d[2 * i], a[0][i].x, a[1][i].x, a[0][i].y, a[1][i].y, b[i].x, b[i].y);
                multiply(d[2 * i + 1], a[0][i].z, a[1][i].z, a[0][i].w, a[1][i].w, b[i].z, b[i].w);
            }
            last = a[EIGHTS - 1][1].w;
        }
        __syncwarp();
        c.count(AT_RELEASED_OF_HEAD, ++of_head, last);
        ring.skip(STAGES);
        #pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            float sums[2];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                sums[i] = (d[0][2 * e + i] + d[1][2 * e + i]) + (d[2][2 * e + i] + d[3][2 * e + i]);
            }
            const float logit = (half ? sums[1] : sums[0]) * scales[e];
            const int row = first + e * 8 + g, token = head.first + row;
            if (q < min(step.rows, BATCH) && row < head.count) {
                step.logits[static_cast<u64>(q) * step.vocabulary + token] = logit;
                if (logit != logit) best = {INFINITE, -1};
                best.or_else(logit, token);
            }
        }
    }
    const int at = Step::at();
    const bool follows = at + 1 < step.steps;
    if (DRAWS && step.draws.some) {
        // Nothing of the ring is on its way any more, once all warps are here.
        barrier_sync(3, WARPS * 32);
        const int vocabulary = step.vocabulary;
        auto begin = [=](int block) { return HeadRows::at(vocabulary, block); };
        int token = draw_rows(
            step.draws, step.logits, vocabulary, step.positions, at, step.rows, begin, {step.scratch + BOARD}, epoch);
        c.release_all(head.stages());
        u64* drawn = step.scratch + DRAWN;
        if (block < step.rows && warp == 0) {
            if (step.ended(block)) token = step.id(block);
            if (lane == 0) {
                step.predict(at, block, token);
                // What was counted comes before it.
                asm volatile("fence.acq_rel.gpu;" ::: "memory");
                publish(drawn + block, static_cast<u32>(token), epoch);
            }
            __syncwarp();
        }
        if (follows && threadIdx.x < BATCH) {
            u32 token, e;
            do {
                word(drawn + step.row(threadIdx.x), token, e);
            } while (e != epoch && !c.watch.late());
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            step.set_id(threadIdx.x, token);
        }
    } else {
        c.release_all(head.stages());
        predict_greedy(c, step, best, at, epoch);
    }
    if (!follows) return false;
    if (threadIdx.x == 0) Step::at() = at + 1;
    barrier_sync(3, WARPS * 32);
    return true;
}
