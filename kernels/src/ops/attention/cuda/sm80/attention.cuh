// What the attention kernels for Ampere and later share: heads in memory and in shared memory, and
// products of a warp.
//
// Rows of a head in shared memory are in blocks of 64 columns, `[rows, 128 bytes]` each, with
// chunks of 16 bytes swizzled: chunk ^ row % 8.
//
// Compiled with: HALF, HEAD_DIM (64, 128), MASK, DROPOUT (0, 1).

constexpr int ROW = 128;

// Elements between batches, heads and rows of a tensor.
struct Strides {
    u64 batch, head, row;

    __device__ __forceinline__ u64 of(int in_batch, int in_head) const { return in_batch * batch + in_head * head; }
};

// An integer of shared memory.
__device__ __forceinline__ int load_int(u32 place) { return __float_as_int(shared_float(place)); }

__device__ __forceinline__ void store_int(u32 place, int value) { shared_store(place, __int_as_float(value)); }

// Where a chunk of a row is in a tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ u32 chunk_of(int row, int chunk) {
    return chunk / 8 * ROWS * ROW + row * ROW + ((chunk % 8 ^ row % 8) << 4);
}

// Copies ROWS rows of a head, of which `left` exist: the others become zeros.
template <int ROWS, int THREADS>
__device__ __forceinline__ void copy_rows(u32 to, const unsigned short* from, u64 stride, int left) {
    constexpr int ACROSS = HEAD_DIM / 8, APART = THREADS / ACROSS;
    static_assert(ROWS % APART == 0 && APART % 8 == 0, "rows");
    int row = threadIdx.x / ACROSS, chunk = threadIdx.x % ACROSS;
    const char* at = reinterpret_cast<const char*>(from + row * stride + chunk * 8);
    to += chunk_of<ROWS>(row, chunk);
    #pragma unroll
    for (int i = 0; i < ROWS / APART; i++) {
        copy_async_if(true, to + i * APART * ROW, at + i * (APART * 2 * stride), row + i * APART >= left);
    }
}

// Where a lane loads fragments from, in a tile: of rows as the left side of a product, or as the
// right side, in which they are columns; and of rows that are K of either side. Tiles begin at
// multiples of 128 bytes, so that the swizzle of another step along the columns differs by its bits
// alone.
struct Lane {
    u32 near, far;

    __device__ __forceinline__ Lane() {
        int line = threadIdx.x % 8, second = threadIdx.x / 8 % 2, fourth = threadIdx.x / 16 % 2;
        near = (line + second * 8) * ROW + ((fourth ^ line) << 4),
        far = (line + fourth * 8) * ROW + ((second ^ line) << 4);
    }

    // A lane for which columns begin at another multiple of 16 of a block of 64.
    __device__ __forceinline__ Lane from_column(int column) const {
        Lane lane = *this;
        u32 bits = column % 64 / 16 << 5;
        lane.near ^= bits, lane.far ^= bits;
        return lane;
    }

    template <int ROWS>
    static __device__ __forceinline__ u32 at(u32 tile, u32 lane, int row, int block) {
        return (tile + lane ^ block % 4 << 5) + block / 4 * ROWS * ROW + row * ROW;
    }

    // 16 rows from `row` on, 16 columns from `16 * step` on.
    template <int ROWS>
    __device__ __forceinline__ void left(u32 (&a)[4], u32 tile, int row, int step) const {
        matrices_load(a, at<ROWS>(tile, near, row, step));
    }

    // Two blocks of eight rows.
    template <int ROWS>
    __device__ __forceinline__ void right(u32 (&b)[4], u32 tile, int row, int step) const {
        matrices_load(b, at<ROWS>(tile, far, row, step));
    }

    // 16 rows from `row` on as K, two blocks of eight columns from `16 * block` on.
    template <int ROWS>
    __device__ __forceinline__ void right_transposed(u32 (&b)[4], u32 tile, int row, int block) const {
        matrices_load_transposed(b, at<ROWS>(tile, near, row, block));
    }

    // 16 columns from `16 * block` on as rows of the left side, 16 rows from `row` on as K.
    template <int ROWS>
    __device__ __forceinline__ void left_transposed(u32 (&a)[4], u32 tile, int row, int block) const {
        matrices_load_transposed(a, at<ROWS>(tile, far, row, block));
    }
};

template <int N>
__device__ __forceinline__ void clear(float (&sums)[N][4]) {
    #pragma unroll
    for (int i = 0; i < N; i++) {
        sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
    }
}

// Sums of 16 rows and 16 columns, as the left side of a product.
__device__ __forceinline__ void pack_sums(u32 (&packed)[4], const float (&first)[4], const float (&second)[4]) {
    packed[0] = pack(first[0], first[1]), packed[1] = pack(first[2], first[3]);
    packed[2] = pack(second[0], second[1]), packed[3] = pack(second[2], second[3]);
}

// Puts `instead` in the place of a lane's sums of a row in columns outside a span that is less
// `column`: those of half `half` of 16 rows.
template <int N>
__device__ __forceinline__ void mask_row(float (&sums)[N / 8][4], int half, float instead, int column, Span span) {
    int own = column + threadIdx.x % 4 * 2;
    u32 seen = among_first<N>(span.last + 1 - own) & ~among_first<N>(span.first - own);
    #pragma unroll
    for (int i = 0; i < N / 4; i++) {
        if (!(seen >> i & 1)) {
            sums[i / 2][2 * half + i % 2] = instead;
        }
    }
}

// Writes a row's sums from four lanes, 16 bytes each, multiplied by a factor.
template <int N>
__device__ __forceinline__ void write_row(bool there, unsigned short* row, const float (&sums)[N][4], int half,
                                          float factor) {
    #pragma unroll
    for (int first = 0; first < N; first += 4) {
        u32 words[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            words[i] = pack(sums[first + i][2 * half] * factor, sums[first + i][2 * half + 1] * factor);
        }
        transpose_words(words);
        store_if(there, row + first * 8 + threadIdx.x % 4 * 8, words);
    }
}
