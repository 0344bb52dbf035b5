// What kernels for Hopper (sm_90a) share, besides common.cuh: mbarriers, bulk tensor copies (TMA),
// wgmma.
//
// PTX ISA, sections 9.7.13 (mbarrier), 9.7.9.25 (cp.async.bulk.tensor) and 9.7.15 (wgmma).

// The name of an operation's kernel.
#define KERNEL_OF(operation) operation##_hopper
// Whether tiles are brought by TMA.
#define HAS_TMA 1

// A CUtensorMap: the layout of a matrix, and the box of one copy.
struct alignas(64) TensorMap {
    u64 words[16];
};

constexpr int WARPGROUP = 128;
// A row of a tile in shared memory: 64 elements of 16 bits, its 16-byte chunks in the order of the
// 128-byte swizzle.
constexpr int ROW_BYTES = 128;

// A place in a ring of stages, and the parity of the round.
template <int COUNT>
struct Ring {
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Where a block's shared memory begins: at a multiple of 1,024 bytes, as the swizzle needs it.
__device__ __forceinline__ u32 shared_base() {
    extern __shared__ __align__(1024) unsigned char memory[];
    u32 base = shared_address(memory);
    if (base % 1024 != 0) {
        __trap();
    }
    return base;
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- mbarrier: a phase ends when all arrivals and all bytes of it are in.

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers known to the other block of the cluster and to TMA.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrivals of a warp, when all of its threads have read what they release, or written what they
// give: one, as 32 take their time; racecheck does not know that __syncwarp orders the others
// before it, and is given 32.
#ifdef RACECHECK
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif

__device__ __forceinline__ void warp_arrive(u32 barrier) {
    __syncwarp();
    if (WARP_ARRIVALS == 32 || threadIdx.x % 32 == 0) {
        barrier_arrive(barrier);
    }
}

// Arrives at the same barrier of the cluster's block `rank`. That orders what this thread read
// before with what TMA writes behind the barrier; a wider scope than the default would empty the L1
// cache at each wait.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier), "r"(rank)
        : "memory");
}

// Waits for the end of the phase of this parity. A wait that never ends is an error in a kernel: it
// stops the kernel.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    #pragma unroll 1
    for (u32 tries = 0; tries < (1u << 26); tries++) {
        u32 done;
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
        if (done) {
            return;
        }
    }
    __trap();
}

// ---- TMA: boxes of a matrix, from and to shared memory. Elements outside the matrix are read as 0
// and not written.

__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
        "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// Brings a box into the L2 cache alone.
__device__ __forceinline__ void tma_prefetch(const TensorMap& map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(column), "r"(row)
                 : "memory");
}

// Brings a box to the same place in both blocks of the cluster; each block's barrier counts its
// bytes.
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<unsigned short>(3))
        : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap& map, u32 from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
                 "r"(row), "r"(from)
                 : "memory");
}

// The same for a box of the rows of a head, in a tensor of `[batch, heads, rows, columns]` under
// any strides.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, int column, int row, int head, int batch,
                                         u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap& map, u32 from, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
                 "r"(column), "r"(row), "r"(head), "r"(batch), "r"(from)
                 : "memory");
}

// Bytes without a map: 16 or a multiple, as are both addresses.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                 "r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until the stores of this thread have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Lets TMA and wgmma see what this thread has written to shared memory.
__device__ __forceinline__ void async_proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- wgmma: a warpgroup multiplies tiles of shared memory into sums in its registers.
//
// Sums of 64 rows: warp w has rows 16 w to 16 w + 15; of each run of 8 columns, lane l has columns
// 2 (l % 4) and the next, of row l / 4 in [0] and [1], of row l / 4 + 8 in [2] and [3].

// The layout of a tile with rows of 128 bytes. K-major: a row has 64 of K. MN-major: a row has 64
// of M or N, with ROWS such rows, followed by those of the next 64 of M or N.
template <int ROWS>
__device__ __forceinline__ u64 tile_descriptor(u32 address, u32 offset = 0) {
    constexpr u32 SWIZZLE_128 = 1u << 30, EIGHT_ROWS = 8 * ROW_BYTES / 16, NEXT_BLOCK = ROWS * ROW_BYTES / 16;
    // A constant offset is one addition to what is known of the tile.
    u32 low = (NEXT_BLOCK << 16 | (address & 0x3ffff) >> 4) + offset / 16;
    u64 descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(SWIZZLE_128 | EIGHT_ROWS));
    return descriptor;
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#define SUMS(sums) "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
#define EIGHT_SUMS(at) \
    SUMS(d[at]), SUMS(d[at + 1]), SUMS(d[at + 2]), SUMS(d[at + 3]), \
    SUMS(d[at + 4]), SUMS(d[at + 5]), SUMS(d[at + 6]), SUMS(d[at + 7])

// So many sums of a thread, as operands of `asm` and as their names in it.
#define SUMS_8 SUMS(d[0]), SUMS(d[1])
#define SUMS_16 SUMS_8, SUMS(d[2]), SUMS(d[3])
#define SUMS_24 SUMS_16, SUMS(d[4]), SUMS(d[5])
#define SUMS_32 EIGHT_SUMS(0)
#define SUMS_64 SUMS_32, EIGHT_SUMS(8)
#define SUMS_96 SUMS_64, EIGHT_SUMS(16)
#define SUMS_128 SUMS_96, EIGHT_SUMS(24)
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 NAMES_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_96 NAMES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_128 NAMES_96 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// TF32: numbers are of 32 bits, of which a product takes the upper 19; tiles are K-major, and have
// half as many of K in as many bytes.
#if TF32
#define WGMMA_KIND "k8.f32.tf32.tf32"
#define WGMMA_ORDERS(TRANSPOSED)
#else
#define WGMMA_KIND "k16.f32." HALF "." HALF
#define WGMMA_ORDERS(TRANSPOSED) ", " TRANSPOSED
#endif

// `d += a * b`, or `d = a * b` if `add` is 0: 64 rows of `a`, N columns of `b`, 16 of K (8 in
// TF32). `b` is a tile; `a` is a tile, too, or registers with 16 columns in the layout of sums: two
// blocks of 8 columns, packed. The operands after the sums are given by their names.
template <int N>
struct Wgmma;

#define WGMMA(N, COUNT, A, B, ADD, TRANSPOSED, ...)                                                                 \
    asm volatile(                                                                                                   \
        "{ .reg .pred p; setp.ne.b32 p, " ADD ", 0;\n"                                                              \
        "wgmma.mma_async.sync.aligned.m64n" #N WGMMA_KIND "\n"                                                      \
        "{" NAMES_##COUNT "},\n" A ", " B ", p, 1, 1" WGMMA_ORDERS(TRANSPOSED) "; }\n"                              \
        : SUMS_##COUNT                                                                                              \
        : __VA_ARGS__)

#define WGMMA_OF_TILES(N, COUNT, A, B, ADD, TRANSPOSED)                                                             \
    template <int TRANSPOSE_A, int TRANSPOSE_B>                                                                     \
    static __device__ __forceinline__ void multiply(float (&d)[N / 8][4], u64 a, u64 b, int add) {                  \
        WGMMA(N, COUNT, A, B, ADD, TRANSPOSED, "l"(a), "l"(b), "r"(add), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));       \
    }

#define WGMMA_OF_REGISTERS(N, COUNT, A, B, ADD, TRANSPOSED)                                                         \
    template <int TRANSPOSE_B>                                                                                      \
    static __device__ __forceinline__ void multiply(float (&d)[N / 8][4], const u32 (&a)[4], u64 b, int add) {      \
        WGMMA(N, COUNT, A, B, ADD, TRANSPOSED, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add),        \
              "n"(TRANSPOSE_B));                                                                                    \
    }

template <>
struct Wgmma<16> {
    WGMMA_OF_TILES(16, 8, "%8", "%9", "%10", "%11, %12")
    WGMMA_OF_REGISTERS(16, 8, "{%8, %9, %10, %11}", "%12", "%13", "%14")
};

template <>
struct Wgmma<32> {
    WGMMA_OF_TILES(32, 16, "%16", "%17", "%18", "%19, %20")
    WGMMA_OF_REGISTERS(32, 16, "{%16, %17, %18, %19}", "%20", "%21", "%22")
};

template <>
struct Wgmma<48> {
    WGMMA_OF_TILES(48, 24, "%24", "%25", "%26", "%27, %28")
};

template <>
struct Wgmma<64> {
    WGMMA_OF_TILES(64, 32, "%32", "%33", "%34", "%35, %36")
    WGMMA_OF_REGISTERS(64, 32, "{%32, %33, %34, %35}", "%36", "%37", "%38")
};

template <>
struct Wgmma<128> {
    WGMMA_OF_TILES(128, 64, "%64", "%65", "%66", "%67, %68")
    WGMMA_OF_REGISTERS(128, 64, "{%64, %65, %66, %67}", "%68", "%69", "%70")
};

template <>
struct Wgmma<192> {
    WGMMA_OF_TILES(192, 96, "%96", "%97", "%98", "%99, %100")
};

template <>
struct Wgmma<256> {
    WGMMA_OF_TILES(256, 128, "%128", "%129", "%130", "%131, %132")
};

#undef WGMMA_OF_REGISTERS
#undef WGMMA_OF_TILES
#undef WGMMA

// Four 8 by 8 matrices into shared memory: lane l gives the address of row l % 8 of matrix l / 8,
// and has two elements of row l / 4 of each.
__device__ __forceinline__ void matrices_store(u32 address, const u32 (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
}
