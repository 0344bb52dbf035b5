// What kernels for Ampere and later (sm_80) share, besides common.cuh: copies into shared memory
// that a thread does not wait for, and products by a warp.
//
// PTX ISA, sections 9.7.9.25.3 (cp.async) and 9.7.14.5 (mma).

// The name of an operation's kernel.
#define KERNEL_OF(operation) operation##_ampere
#define HAS_TMA 0

// Where a block's shared memory begins: at a multiple of 128 bytes.
__device__ __forceinline__ u32 shared_base() {
    extern __shared__ __align__(128) unsigned char memory[];
    return shared_address(memory);
}

// ---- cp.async: 16 bytes from memory to shared memory.

__device__ __forceinline__ void copy_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Only if `copies`; zeros, and nothing is read, if `zero`.
__device__ __forceinline__ void copy_async_if(bool copies, u32 to, const void* from, bool zero) {
    asm volatile(
        "{ .reg .pred copies, zero; setp.ne.b32 copies, %2, 0; setp.ne.b32 zero, %3, 0;\n"
        "@copies cp.async.cg.shared.global.L2::128B [%0], [%1], 16, zero; }" ::"r"(to),
        "l"(from), "r"(static_cast<int>(copies)), "r"(static_cast<int>(zero))
        : "memory");
}

// Eight bytes.
__device__ __forceinline__ void copy_async_8(u32 to, const void* from, bool zero) {
    asm volatile("{ .reg .pred zero; setp.ne.b32 zero, %2, 0;\ncp.async.ca.shared.global [%0], [%1], 8, zero; }" ::
                 "r"(to), "l"(from), "r"(static_cast<int>(zero))
                 : "memory");
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups of this thread but the last PENDING ones.
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- mma: 16 rows of `a` by 8 columns of `b`, 16 of K (8 in TF32), all in the registers of a warp.
//
// Sums: lane l has columns 2 (l % 4) and the next of row l / 4 in [0] and [1], and of row l / 4 + 8
// in [2] and [3]. `a` is four matrices of 8 rows and 16 bytes of K as `matrices_load` gives them:
// rows 0 to 7 and 8 to 15 of the first 16 bytes, then of the next; `b` is two, 8 columns of each.

// Four matrices, transposed: 16-bit rows of K become columns.
__device__ __forceinline__ void matrices_load_transposed(u32 (&matrices)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

#if defined(TF32) && TF32
#define MMA_KIND "m16n8k8.row.col.f32.tf32.tf32.f32"
#else
#define MMA_KIND "m16n8k16.row.col.f32." HALF "." HALF ".f32"
#endif

__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b_first, u32 b_second) {
    asm volatile("mma.sync.aligned." MMA_KIND " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_first), "r"(b_second));
}

// The bits of a number of f32 rounded to TF32, which a product would cut off.
__device__ __forceinline__ u32 round_to_tf32(u32 bits) {
    u32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
    return rounded;
}

// Transposes four words of four lanes side by side: word i of lane j becomes word j of lane i.
__device__ __forceinline__ void transpose_words(u32 (&words)[4]) {
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    #pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 other = __shfl_xor_sync(~0u, odd ? words[i] : words[i + 1], 1);
        words[i] = odd ? other : words[i], words[i + 1] = odd ? words[i + 1] : other;
    }
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 other = __shfl_xor_sync(~0u, high ? words[i] : words[i + 2], 2);
        words[i] = high ? other : words[i], words[i + 2] = high ? words[i + 2] : other;
    }
}

// 16 bytes to memory, where they are to be written.
__device__ __forceinline__ void store_if(bool writes, void* to, const u32 (&words)[4]) {
    asm volatile("{ .reg .pred writes; setp.ne.b32 writes, %0, 0;\n"
                 "@writes st.global.v4.b32 [%1], {%2, %3, %4, %5}; }" ::
                 "r"(static_cast<int>(writes)), "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}
