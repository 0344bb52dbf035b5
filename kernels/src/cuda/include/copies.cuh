// Copies into shared memory that a thread does not wait for: 16 bytes each.
//
// PTX ISA, section 9.7.9.25.3 (cp.async).

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

