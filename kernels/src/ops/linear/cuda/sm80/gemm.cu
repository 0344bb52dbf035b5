// out = activation(a * b + bias), or dropout(a * b + bias) + residual, each part optional, or
// (a * b) * slopes, for 16-bit matrices on Ampere and later; or out = a * b for f32.
//
//                          b  K x N
//                        +---------+
//                        | COLUMNS |
//       a  M x K         +---------+
//   +---------------+    +----+----+
//   |               |    | w0 | w1 |   copies    | s+3 | s+4 | s+5 | ..
//   |     ROWS      |    +----+----+   fragments | s,1 | s,2 | s,3 | s+1,0
//   |               |    | w2 | w3 |   products  | s,0 | s,1 | s,2 | s,3
//   +---------------+    +----+----+
//
// A block computes a tile of ROWS x COLUMNS, each of its warps a part of it. Threads copy stages of
// `a` and `b`, STAGES - 1 of them ahead, into a ring in shared memory: each into the stage that the
// step before has left free. A warp loads fragments of these (if DOUBLE, those of the next 32 bytes
// of K) and multiplies.
//
// Blocks are persistent: each computes whole tiles, one after another, and copies the first stages
// of the next one while it writes a result. The remaining tiles, too few for all blocks, are cut
// along K into one run of equal length per block (stream-K: Osama et al., 2023). The block with the
// end of a cut tile adds the partial sums that earlier blocks stored in `partial`, in a fixed
// order, so equal inputs give equal bits. A block computes its runs from the last to the first, so
// it waits only for what blocks of lower numbers do first.
//
// In shared memory a matrix that is contiguous along K has rows of DEPTH_BYTES of K; one that is
// contiguous along M or N has blocks of 64 of these, K rows of 128 bytes each. Chunks of 16 bytes
// are swizzled, so that the eight of a matrix that `ldmatrix` loads are in different banks:
//
//   rows of 128 bytes    chunk ^ row % 8              rows of 64 bytes    chunk ^ row / 2 % 4
//
// f32 matrices are contiguous along K, and are multiplied in TF32, which has 11 of f32's 24 bits;
// or, if SPLIT, as three products, one after the other. Each row of `a` and `b` has its rounded
// numbers first, whole stages of them, and then what was rounded off.
//
//   a  | rounded | rest |   *   b  | rounded | rest |
//       =   rest * rounded + rounded * rest + rounded * rounded
//
// Tensor cores cut off bits of what they add up (Ootomo and Yokota, 2022): every PROMOTED bytes of
// K the sums are added to others by f32 units.
//
// Compiled with: TF32 (1: for f32), SPLIT, HALF, ROWS, COLUMNS, DEPTH_BYTES (64, 128), WARPS_M and
// WARPS_N (warps along the rows and columns of a tile), STAGES, BLOCKS (blocks of a
// multiprocessor), DOUBLE (1: fragments are loaded a step ahead), A_MAJOR_M, B_MAJOR_N (1 if the
// matrix is contiguous along M or N), OUT_F32 (1: f32 sums, which may be added to `out`), ROW_SUMS
// (1: also the sums of each row of `a`, which is contiguous along M: f32 results), ACTIVATION (0:
// none; 1: GELU by tanh; 2: ReLU; 3: SiLU), GATED (1: the activation is gated; `b` has all gates
// first, and is contiguous along K), DROPOUT (1: without an activation, 16 bits), SLOPES (matrices
// of slopes: with an activation they are written, too; without one the product is multiplied by
// each of them. 1, or 2 side by side for a gated activation; then there are as many products side
// by side).
//
// For a gated activation, half of each warp's columns are gates, and half are what they gate: both
// of a pair are in the same thread's sums. For the gradient an activation leaves its slopes: for a
// gate g and its value u, these are u * activation'(g) and activation(g).
//
// For the gradient of a weight, `a` is the gradient of outputs, and the sums of its rows are the
// bias's gradient: sums over each stage, which another launch adds up. The stages are distributed
// over columns of tiles, and over the warps of a row of warps.

constexpr int WARPS = WARPS_M * WARPS_N, THREADS = 32 * WARPS;
constexpr int WARP_ROWS = ROWS / WARPS_M, WARP_COLUMNS = COLUMNS / WARPS_N;
constexpr int ROW_BLOCKS = WARP_ROWS / 16, COLUMN_BLOCKS = WARP_COLUMNS / 8;
constexpr int ELEMENT = TF32 ? 4 : 2;
// Of K in a stage, and in a chunk of 16 bytes.
constexpr int DEPTH = DEPTH_BYTES / ELEMENT, CHUNK = 16 / ELEMENT;
// Products along K of a stage.
constexpr int STEPS = DEPTH_BYTES / 32;
constexpr int PROMOTED = 512 / DEPTH_BYTES;
constexpr int A_BYTES = ROWS * DEPTH_BYTES, B_BYTES = COLUMNS * DEPTH_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
// Columns of the result that a tile has, and blocks of 8 that a warp has.
constexpr int OUT_COLUMNS = GATED ? COLUMNS / 2 : COLUMNS, OUT_BLOCKS = OUT_COLUMNS / WARPS_N / 8;
// Rows of tiles that are computed at about the same time, so that they share columns of `b` in the
// L2 cache.
constexpr int GROUP = 512 / ROWS;

// A matrix: chunks of 16 bytes between two lines, and bytes between two lines that a thread copies.
struct Strides {
    u64 stride, apart;
};

struct Info {
    // n: columns of the result.
    u64 m, n, k;
    Strides a, b;
    // Elements between two rows of `other`.
    u64 other_stride;
    // Tiles of the result along M and N, stages per tile, and the number of whole tiles.
    u64 rows, columns, stages, whole_tiles;
    // Stages per block of the cut tiles, and the number of blocks with one more.
    u64 cut_stages, cut_more;
    // 0: no bias; 1: of f32; 2: of 16 bits.
    u64 bias;
    // Whether the epilogue reads `other` or `out`: a residual, f32 sums to add to, or slopes.
    u64 adds;
    DropoutInfo dropout;
};

struct Buffers {
    const char *a, *b;
    void* out;
    // A residual, slopes, or the sums of rows of `a` over each stage: [stages, M].
    void* other;
    const void* bias;
    // Partial results of split tiles, and flags that they are complete.
    float4* partial;
    u32* ready;
};

// A run of stages of a tile; `end` is 0 after the last run.
struct alignas(16) Work {
    int row, column;
    int begin, end;
    // The first of all stages of the tile, where it is among those that are cut.
    int tile_start;
    int unused[3];
};
// Works copied but not finished, and one more: each has at least one stage.
constexpr int WORKS = STAGES + 1;

// The first stage of a block's share of the cut tiles.
__device__ __forceinline__ int cut(const Info& info, int block) {
    return static_cast<int>(info.cut_stages) * block + min(block, static_cast<int>(info.cut_more));
}

__device__ __forceinline__ void place(const Info& info, Work& work, int tile) {
    int rows = info.rows, columns = info.columns;
    int group = tile / (GROUP * columns), in_group = tile % (GROUP * columns);
    int height = min(GROUP, rows - group * GROUP);
    work.row = (group * GROUP + in_group % height) * ROWS;
    work.column = in_group / height * OUT_COLUMNS;
}

// The work of a number: first whole tiles, then what this block has of those that are cut.
__device__ __forceinline__ Work work_of(const Info& info, int number) {
    Work work = {};
    int tile = blockIdx.x + number * gridDim.x, stages = info.stages, whole = info.whole_tiles;
    if (tile < whole) {
        place(info, work, tile);
        work.end = stages;
        return work;
    }
    int begin = cut(info, blockIdx.x), end = cut(info, blockIdx.x + 1);
    // Pieces from the last one on.
    int piece = (tile - whole) / static_cast<int>(gridDim.x), in_cut = (end - 1) / stages - piece;
    work.tile_start = in_cut * stages;
    if (begin >= end || work.tile_start + stages <= begin) {
        return work;
    }
    place(info, work, whole + in_cut);
    work.begin = max(begin - work.tile_start, 0), work.end = min(end - work.tile_start, stages);
    return work;
}

// What a thread copies of LENGTH rows or columns of a matrix: 16 bytes at a time, in lines that are
// APART. A line is a row along K, or one of K where the matrix is contiguous along the other axis.
template <int LENGTH, bool MAJOR_K, bool HALVES>
struct Loader {
    static constexpr int ACROSS = MAJOR_K ? DEPTH_BYTES / 16 : 8;
    static constexpr int APART = THREADS / ACROSS;
    static constexpr int COPIES = LENGTH * DEPTH_BYTES / 16 / THREADS;
    static_assert(
        LENGTH * DEPTH_BYTES % (16 * THREADS) == 0 && APART % 8 == 0 && (MAJOR_K || APART <= DEPTH), "copies");
    static constexpr int HALF_COLUMNS = WARP_COLUMNS / 2;

    // A thread's first copy of the next stage; rows or columns from there on, 0 if there is nothing
    // to copy.
    const char* from;
    int left;

    static __device__ __forceinline__ int line() { return threadIdx.x / ACROSS; }
    static __device__ __forceinline__ int chunk() { return threadIdx.x % ACROSS; }

    // Of a gated activation's columns, those of a warp are half gates and half what they gate.
    static __device__ __forceinline__ int column_of(int line) {
        return line / WARP_COLUMNS * HALF_COLUMNS + line % HALF_COLUMNS;
    }

    // Goes to a tile that begins with row or column `first`, and its stage from `k` on.
    __device__ __forceinline__ void place(const char* matrix, const Strides& strides, int first, int length, int k) {
        if (MAJOR_K) {
            int at = first + (HALVES ? column_of(line()) : line());
            if (HALVES && line() % WARP_COLUMNS >= HALF_COLUMNS) {
                at += length;
            }
            from = matrix + at * (strides.stride * 16) + k * ELEMENT + chunk() * 16;
            left = HALVES ? 1 : length - first - line();
        } else {
            from = matrix + (k + line()) * (strides.stride * 16) + first * ELEMENT + chunk() * 16;
            left = length - first - chunk() * CHUNK;
        }
    }

    __device__ __forceinline__ void advance(const Strides& strides) {
        from += MAJOR_K ? DEPTH_BYTES : DEPTH / APART * strides.apart;
    }

    // Where the copies begin in a tile.
    static __device__ __forceinline__ u32 to() {
        if (!MAJOR_K) {
            return line() * 128 + ((chunk() ^ line() % 8) << 4);
        }
        return line() * DEPTH_BYTES + ((chunk() ^ (DEPTH_BYTES == 128 ? line() % 8 : line() / 2 % 4)) << 4);
    }

    // Copy `i` of a stage, of which `left_k` of K are in the matrix: the rest becomes 0. Rows and
    // columns of no result stay what they were. Without branches, between which products would not
    // be put.
    __device__ __forceinline__ void copy(int i, u32 tile, const Strides& strides, int length, int left_k) const {
        // Lines from the first copy's, and rows or columns.
        int lines = MAJOR_K ? i * APART : i * APART % DEPTH, apart = MAJOR_K ? lines : i * APART / DEPTH * 64;
        u64 distance = lines / APART * strides.apart;
        if (HALVES) {
            distance = lines / WARP_COLUMNS * HALF_COLUMNS + lines % HALF_COLUMNS +
                (lines % WARP_COLUMNS >= HALF_COLUMNS ? length : 0);
            distance *= strides.stride * 16;
        }
        int place = MAJOR_K ? lines * DEPTH_BYTES : apart * DEPTH * 2 + lines * 128;
        bool zero = left_k <= (MAJOR_K ? chunk() * CHUNK : line() + lines);
        copy_async_if(
            HALVES ? left > 0 : apart < left, tile + to() + place, from + distance + (MAJOR_K ? 0 : apart * 2), zero);
    }
};

using LoaderA = Loader<ROWS, !A_MAJOR_M, false>;
using LoaderB = Loader<COLUMNS, !B_MAJOR_N, GATED>;
static_assert(
    !GATED || !B_MAJOR_N && (LoaderB::APART % WARP_COLUMNS == 0 || LoaderB::HALF_COLUMNS % LoaderB::APART == 0),
    "gates");

// Copies the stages of all works of a block, one after another, and lists the works in shared
// memory.
struct Producer {
    static constexpr int COPIES = LoaderA::COPIES + LoaderB::COPIES;
    const Buffers& buffers;
    const Info& info;
    Work* works;
    // The number of the next work; of this one, what stages and how much of K are left.
    int number = 0, stages, left_k;
    LoaderA a;
    LoaderB b;

    __device__ __forceinline__ Producer(const Buffers& of, const Info& with, Work* list)
        : buffers(of), info(with), works(list) {
        advance();
    }

    __device__ __forceinline__ void advance() {
        Work work = work_of(info, number);
        if (threadIdx.x == 0) {
            works[number % WORKS] = work;
        }
        number++;
        stages = work.end - work.begin;
        int third = static_cast<int>(info.stages) / 3, k = work.begin, part = SPLIT ? k / third : 0;
        if (SPLIT) {
            step = k;
            k -= part * third;
        }
        left_k = SPLIT ? DEPTH : static_cast<int>(info.k) - k * DEPTH;
        a.place(buffers.a, info.a, work.row, info.m, (SPLIT && part == 0 ? k + third : k) * DEPTH);
        b.place(buffers.b, info.b, work.column, info.n, (SPLIT && part == 1 ? k + third : k) * DEPTH);
        if (stages == 0) {
            a.left = b.left = 0;
        }
    }

    // One of all copies of a stage.
    __device__ __forceinline__ void copy(int i, u32 stage) const {
        if (i < LoaderA::COPIES) {
            a.copy(i, stage, info.a, info.m, left_k);
        } else {
            b.copy(i - LoaderA::COPIES, stage + A_BYTES, info.b, info.n, left_k);
        }
    }

    // To the next stage.
    __device__ __forceinline__ void finish() {
        copies_commit();
        a.advance(info.a), b.advance(info.b);
        if (SPLIT) {
            // What is behind the rest of a row is the next one's.
            int third = static_cast<int>(info.stages) / 3, bytes = third * DEPTH_BYTES;
            step++;
            a.from -= step == third ? 2 * bytes : step == 2 * third ? bytes : 0;
            b.from -= step == 2 * third ? 2 * bytes : 0;
        } else {
            left_k -= DEPTH;
        }
        if (--stages == 0) {
            advance();
        }
    }

    // With SPLIT, the stage of all three products.
    [[maybe_unused]] int step;
};

// Where a lane loads fragments of a warp's rows or columns in a tile.
template <int LENGTH, bool MAJOR_K, bool IS_A>
struct Places {
    // Blocks of 16 are as far apart, but for the swizzle, where they begin at a multiple of 64.
    static constexpr bool ALIKE = MAJOR_K || LENGTH % 64 == 0;
    u32 at[ALIKE ? 1 : LENGTH / 16];

    __device__ __forceinline__ Places(int first) {
        int lane = threadIdx.x % 32, line = lane % 8, second = lane / 8 % 2, fourth = lane / 16;
        if (MAJOR_K) {
            // Of `a` the second matrix has the next rows, of `b` the next bytes of K.
            int row = first + line + (IS_A ? second : fourth) * 8, chunk = IS_A ? fourth : second;
            at[0] = row * DEPTH_BYTES + ((chunk ^ (DEPTH_BYTES == 128 ? line : line / 2)) << 4);
            return;
        }
        int k = line + (IS_A ? fourth : second) * 8;
        #pragma unroll
        for (int i = 0; i < (ALIKE ? 1 : LENGTH / 16); i++) {
            int column = first + i * 16, chunk = column % 64 / 8 + (IS_A ? second : fourth);
            at[i] = column / 64 * DEPTH * 128 + k * 128 + ((chunk ^ line) << 4);
        }
    }

    __device__ __forceinline__ void load(u32 (&matrices)[4], u32 tile, int i, int step) const {
        if (MAJOR_K) {
            matrices_load(matrices, tile + (at[0] ^ step << 5) + i * 16 * DEPTH_BYTES);
        } else if (ALIKE) {
            matrices_load_transposed(matrices, tile + (at[0] ^ i % 4 << 5) + i / 4 * DEPTH * 128 + step * 16 * 128);
        } else {
            matrices_load_transposed(matrices, tile + at[ALIKE ? 0 : i] + step * 16 * 128);
        }
        if (TF32) {
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                matrices[j] = round_to_tf32(matrices[j]);
            }
        }
    }
};

using Sums = float[ROW_BLOCKS][COLUMN_BLOCKS][4];

__device__ __forceinline__ void clear(Sums& sums) {
    #pragma unroll
    for (int i = 0; i < ROW_BLOCKS; i++) {
        #pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS; j++) {
            #pragma unroll
            for (int value = 0; value < 4; value++) {
                sums[i][j][value] = 0.0f;
            }
        }
    }
}

using Columns = u32[COLUMN_BLOCKS / 2][4];

// A block of rows by all columns, forwards or backwards, so that an operand stays.
__device__ __forceinline__ void multiply(
    float (&sums)[COLUMN_BLOCKS][4], const u32 (&a)[4], const Columns& b, bool back
) {
    #pragma unroll
    for (int along = 0; along < COLUMN_BLOCKS; along++) {
        int j = back ? COLUMN_BLOCKS - 1 - along : along;
        multiply(sums[j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}

// Stores the sums of a tile's first or middle stages for the block that has its end.
__device__ __forceinline__ void leave(const Sums& sums, const Buffers& buffers) {
    float4* partial =
        buffers.partial + static_cast<u64>(blockIdx.x) * (ROW_BLOCKS * COLUMN_BLOCKS * THREADS) + threadIdx.x;
    #pragma unroll
    for (int i = 0; i < ROW_BLOCKS; i++) {
        #pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS; j++) {
            const float(&four)[4] = sums[i][j];
            __stcg(partial + (i * COLUMN_BLOCKS + j) * THREADS, make_float4(four[0], four[1], four[2], four[3]));
        }
    }
    // One thread's release covers what the others wrote before the barrier.
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(buffers.ready + blockIdx.x) : "memory");
    }
}

// Adds the sums that another block stored, and frees its slot.
__device__ __forceinline__ void collect(Sums& sums, const Buffers& buffers, int block) {
    u32* ready = buffers.ready + block;
    if (threadIdx.x == 0) {
        u32 there = 0;
        #pragma unroll 1
        for (u32 tries = 0; !there; tries++) {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(ready) : "memory");
            if (tries > 1u << 26) {
                __trap();
            }
        }
    }
    __syncthreads();
    const float4* partial =
        buffers.partial + static_cast<u64>(block) * (ROW_BLOCKS * COLUMN_BLOCKS * THREADS) + threadIdx.x;
    #pragma unroll
    for (int i = 0; i < ROW_BLOCKS; i++) {
        #pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS; j++) {
            float4 more = __ldcg(partial + (i * COLUMN_BLOCKS + j) * THREADS);
            sums[i][j][0] += more.x, sums[i][j][1] += more.y, sums[i][j][2] += more.z, sums[i][j][3] += more.w;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *ready = 0;
    }
}

// What a lane's sums are in a result: its first row and column, and how many rows and columns there
// are from these on.
struct Position {
    int row, column;
    const Info& info;

    __device__ __forceinline__ Position(const Work& work, const Info& of) : info(of) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        row = work.row + warp / WARPS_N * WARP_ROWS + lane / 4;
        column = work.column + warp % WARPS_N * (OUT_COLUMNS / WARPS_N);
    }

    // The row of a half of a block of rows.
    __device__ __forceinline__ int row_of(int i, int half) const { return row + i * 16 + half * 8; }
};

#if OUT_F32
// Straight from the registers: four threads write 32 bytes of a row.
template <bool ADDS>
__device__ __forceinline__ void store(const Sums& sums, const Buffers& buffers, const Info& info, const Work& work) {
    Position at(work, info);
    int first = at.column + threadIdx.x % 4 * 2, m = info.m, n = info.n;
    float2* out = reinterpret_cast<float2*>(static_cast<float*>(buffers.out) + at.row * info.n + first);
    #pragma unroll
    for (int i = 0; i < ROW_BLOCKS; i++) {
        #pragma unroll
        for (int half = 0; half < 2; half++, out += 4 * info.n) {
            int row = at.row_of(i, half);
            #pragma unroll
            for (int group = 0; group < COLUMN_BLOCKS; group += 4) {
                float2 before[4];
                #pragma unroll
                for (int j = 0; ADDS && j < 4; j++) {
                    if (row < m && first + (group + j) * 8 < n) {
                        before[j] = __ldcg(out + (group + j) * 4);
                    }
                }
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    float x = sums[i][group + j][2 * half], y = sums[i][group + j][2 * half + 1];
                    if (row < m && first + (group + j) * 8 < n) {
                        out[(group + j) * 4] = ADDS ? make_float2(x + before[j].x, y + before[j].y) : make_float2(x, y);
                    }
                }
            }
        }
    }
}

__device__ __forceinline__ void store(const Sums& sums, const Buffers& buffers, const Info& info, const Work& work) {
    if (info.adds) {
        store<true>(sums, buffers, info, work);
    } else {
        store<false>(sums, buffers, info, work);
    }
}
#else
// Of a matrix of 16 bits: four lanes of a row have 16 bytes of it each, of one block of eight
// columns. Transposed, each lane has two columns of each of four blocks, as sums do. Lanes exchange
// words also where some have none to read or to write.
__device__ __forceinline__ void write_row(bool there, unsigned short* to, u32 (&words)[4]) {
    transpose_words(words);
    store_if(there, to, words);
}

__device__ __forceinline__ void read_row(bool there, const unsigned short* from, u32 (&words)[4]) {
    uint4 read = make_uint4(0, 0, 0, 0);
    if (there) {
        read = *reinterpret_cast<const uint4*>(from);
    }
    words[0] = read.x, words[1] = read.y, words[2] = read.z, words[3] = read.w;
    transpose_words(words);
}

// Two numbers of a bias from an even column on.
__device__ __forceinline__ float2 bias_of(const Buffers& buffers, const Info& info, int column, bool there) {
    if (!there) {
        return make_float2(0.0f, 0.0f);
    }
    if (info.bias == 1) {
        const float* bias = static_cast<const float*>(buffers.bias) + column;
        return make_float2(bias[0], bias[1]);
    }
    const unsigned short* bias = static_cast<const unsigned short*>(buffers.bias) + column;
    return make_float2(widen(bias[0]), widen(bias[1]));
}

// The end of a tile, four blocks of columns at a time. BIASED and ADDS are decided ahead of the
// loops.
template <bool BIASED, bool ADDS>
__device__ __forceinline__ void store(const Sums& sums, const Buffers& buffers, const Info& info, const Work& work) {
    Position at(work, info);
    int quarter = threadIdx.x % 4, m = info.m, n = info.n;
    constexpr int MATRICES = !ACTIVATION && SLOPES > 1 ? SLOPES : 1;
    unsigned short* out = static_cast<unsigned short*>(buffers.out);
    unsigned short* other = static_cast<unsigned short*>(buffers.other);
    [[maybe_unused]] u32 numbers[ROW_BLOCKS][2];
    if (DROPOUT) {
        #pragma unroll
        for (int i = 0; i < ROW_BLOCKS * 2; i++) {
            numbers[i / 2][i % 2] = random_row(info.dropout, at.row_of(i / 2, i % 2), work.column);
        }
    }
    #pragma unroll
    for (int first = 0; first < OUT_BLOCKS; first += 4) {
        // The columns of this lane's sums in each block, and those of the block that it writes.
        int column = at.column + first * 8 + quarter * 2, own = at.column + first * 8 + quarter * 8;
        float2 bias[4] = {}, gated_bias[4] = {};
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            if (BIASED) {
                bias[j] = bias_of(buffers, info, column + j * 8, column + j * 8 < n);
            }
            if (BIASED && GATED) {
                gated_bias[j] = bias_of(buffers, info, n + column + j * 8, true);
            }
        }
        unsigned short* to = out + at.row * (info.n * MATRICES) + own;
        unsigned short* to_other = other + at.row * info.other_stride + own;
        int rows_left = own < n ? m - at.row : 0;
        #pragma unroll
        for (int i = 0; i < ROW_BLOCKS; i++) {
            #pragma unroll
            for (int half = 0; half < 2; half++, to += 8 * MATRICES * info.n, to_other += 8 * info.other_stride) {
                bool there = i * 16 + half * 8 < rows_left;
                u32 results[4];
#if ACTIVATION
                u32 slopes[4], activated[4];
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    float result[2], slope[2], value[2];
                    #pragma unroll
                    for (int one = 0; one < 2; one++) {
                        float x = sums[i][first + j][2 * half + one], up = 1.0f;
                        if (GATED) {
                            up = sums[i][(first + j + OUT_BLOCKS) % COLUMN_BLOCKS][2 * half + one];
                        }
                        if (BIASED) {
                            x += one ? bias[j].y : bias[j].x;
                            up += GATED ? one ? gated_bias[j].y : gated_bias[j].x : 0.0f;
                        }
                        float of_x;
                        value[one] = activate<ACTIVATION>(x, of_x);
                        result[one] = value[one] * up, slope[one] = of_x * up;
                    }
                    results[j] = pack(result[0], result[1]);
                    slopes[j] = pack(slope[0], slope[1]);
                    activated[j] = pack(value[0], value[1]);
                }
                if (SLOPES) {
                    write_row(there, to_other, slopes);
                }
                if (SLOPES && GATED) {
                    write_row(there, to_other + info.n, activated);
                }
                write_row(there, to, results);
#else
                #pragma unroll
                for (int matrix = 0; matrix < MATRICES; matrix++) {
                    u32 others[4] = {};
                    if (ADDS) {
                        read_row(there, to_other + matrix * info.n, others);
                    }
                    #pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float x = sums[i][first + j][2 * half], y = sums[i][first + j][2 * half + 1];
                        if (BIASED) {
                            x += bias[j].x, y += bias[j].y;
                        }
                        if (DROPOUT) {
                            RandomPair random = random_pair(info.dropout, numbers[i][half], (column + j * 8) / 2);
                            x = random.even < info.dropout.limit() ? 0.0f : x * info.dropout.factor();
                            y = random.odd < info.dropout.limit() ? 0.0f : y * info.dropout.factor();
                        }
                        if (ADDS) {
                            float2 two = unpack(others[j]);
                            x = SLOPES ? x * two.x : x + two.x, y = SLOPES ? y * two.y : y + two.y;
                        }
                        results[j] = pack(x, y);
                    }
                    write_row(there, to + matrix * info.n, results);
                }
#endif
            }
        }
    }
}

__device__ __forceinline__ void store(const Sums& sums, const Buffers& buffers, const Info& info, const Work& work) {
    // With slopes there is no bias.
    if (!ACTIVATION && SLOPES) {
        store<false, true>(sums, buffers, info, work);
    } else if (!ACTIVATION && info.adds) {
        if (info.bias) {
            store<true, true>(sums, buffers, info, work);
        } else {
            store<false, true>(sums, buffers, info, work);
        }
    } else if (info.bias) {
        store<true, false>(sums, buffers, info, work);
    } else {
        store<false, false>(sums, buffers, info, work);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_ampere(const char* a, const char* b, void* out, void* other, const void* bias, float4* partial, u32* ready,
                const __grid_constant__ Info info) {
    extern __shared__ __align__(128) unsigned char memory[];
    u32 shared = shared_address(memory);
    Buffers buffers{a, b, out, other, bias, partial, ready};
    int warp = threadIdx.x / 32;
    Places<WARP_ROWS, !A_MAJOR_M, true> a_places(warp / WARPS_N * WARP_ROWS);
    Places<WARP_COLUMNS, !B_MAJOR_N, false> b_places(warp % WARPS_N * WARP_COLUMNS);
    Work* works = reinterpret_cast<Work*>(memory + STAGES * STAGE_BYTES);
    Producer producer(buffers, info, works);
    #pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; stage++) {
        #pragma unroll
        for (int i = 0; i < Producer::COPIES; i++) {
            producer.copy(i, shared + stage * STAGE_BYTES);
        }
        producer.finish();
    }
    u32 from = shared, to = shared + (STAGES - 1) * STAGE_BYTES;
    auto next_stage = [&](u32& stage) {
        stage = stage == shared + (STAGES - 1) * STAGE_BYTES ? shared : stage + STAGE_BYTES;
    };
    auto load_columns = [&](Columns& b, int step) {
        #pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS / 2; j++) {
            b_places.load(b[j], from + A_BYTES, j, step);
        }
    };
    // The next stage has arrived, and all warps have read the previous one.
    copies_wait<STAGES - 2>();
    __syncthreads();
    for (int number = 0;; number++) {
        const Work& work = works[number % WORKS];
        int end = work.end;
        if (end == 0) {
            break;
        }
        Sums sums;
        clear(sums);
        [[maybe_unused]] Sums promoted;
        if (SPLIT) {
            clear(promoted);
        }
        // Those of the next step are loaded in the middle of one: all columns, and rows as their
        // registers come free.
        u32 a[DOUBLE ? ROW_BLOCKS : 2][4];
        Columns b[DOUBLE ? 2 : 1];
        if (DOUBLE) {
            load_columns(b[0], 0);
            #pragma unroll
            for (int i = 0; i < ROW_BLOCKS; i++) {
                a_places.load(a[i], from, i, 0);
            }
        }
        #pragma unroll 1
        for (int stage = work.begin; stage < end; stage++) {
            [[maybe_unused]] float row_sums[ROW_BLOCKS][2] = {};
            [[maybe_unused]] bool adds_rows = false;
            if (ROW_SUMS) {
                int columns = info.columns;
                adds_rows = stage % columns == work.column / COLUMNS && stage / columns % WARPS_N == warp % WARPS_N;
            }
            #pragma unroll
            for (int step = 0; step < STEPS; step++) {
                if (DOUBLE && step == STEPS - 1) {
                    next_stage(from);
                    copies_wait<STAGES - 3>();
                    __syncthreads();
                }
                Columns& columns = b[DOUBLE ? step % 2 : 0];
                load_columns(b[DOUBLE ? (step + 1) % 2 : 0], DOUBLE ? (step + 1) % STEPS : step);
                if (!DOUBLE) {
                    a_places.load(a[0], from, 0, step);
                }
                #pragma unroll
                for (int i = 0; i < ROW_BLOCKS; i++) {
                    u32(&rows)[4] = a[DOUBLE ? i : i % 2];
                    if (!DOUBLE && i + 1 < ROW_BLOCKS) {
                        a_places.load(a[(i + 1) % 2], from, i + 1, step);
                    }
                    multiply(sums[i], rows, columns, i % 2);
                    if (ROW_SUMS && adds_rows) {
                        #pragma unroll
                        for (int matrix = 0; matrix < 4; matrix++) {
                            float2 two = unpack(rows[matrix]);
                            row_sums[i][matrix % 2] += two.x + two.y;
                        }
                    }
                    if (DOUBLE) {
                        a_places.load(rows, from, i, (step + 1) % STEPS);
                    }
                }
                // A few at a time, as a warp waits for each to be taken.
                #pragma unroll
                for (int copy = 0; copy < Producer::COPIES; copy++) {
                    if (copy * STEPS / Producer::COPIES == step) {
                        producer.copy(copy, to);
                    }
                }
            }
            producer.finish();
            next_stage(to);
            if (!DOUBLE) {
                next_stage(from);
                copies_wait<STAGES - 2>();
                __syncthreads();
            }
            if (ROW_SUMS && adds_rows) {
                float* to_sums = static_cast<float*>(buffers.other) + stage * info.m;
                int row = work.row + warp / WARPS_N * WARP_ROWS + threadIdx.x % 32 / 4;
                #pragma unroll
                for (int i = 0; i < ROW_BLOCKS * 2; i++) {
                    float sum = row_sums[i / 2][i % 2];
                    sum += __shfl_xor_sync(~0u, sum, 1);
                    sum += __shfl_xor_sync(~0u, sum, 2);
                    if (threadIdx.x % 4 == 0 && row + i * 8 < static_cast<int>(info.m)) {
                        to_sums[row + i * 8] = sum;
                    }
                }
            }
            if (SPLIT && ((stage + 1 - work.begin) % PROMOTED == 0 || stage + 1 == end)) {
                #pragma unroll
                for (int i = 0; i < ROW_BLOCKS * COLUMN_BLOCKS; i++) {
                    #pragma unroll
                    for (int value = 0; value < 4; value++) {
                        promoted[i / COLUMN_BLOCKS][i % COLUMN_BLOCKS][value] +=
                            sums[i / COLUMN_BLOCKS][i % COLUMN_BLOCKS][value];
                    }
                }
                clear(sums);
            }
        }
        Sums& result = SPLIT ? promoted : sums;
        if (end < static_cast<int>(info.stages)) {
            leave(result, buffers);
            continue;
        }
        if (work.begin > 0) {
            for (int block = blockIdx.x - 1; cut(info, block + 1) > work.tile_start; block--) {
                if (cut(info, block) < cut(info, block + 1)) {
                    collect(result, buffers, block);
                }
            }
        }
        store(result, buffers, info, work);
    }
    copies_wait<0>();
}
