// Words {value, epoch} by which blocks exchange results: a word has arrived when its epoch is the
// reader's. Both are read and written at once.

__device__ __forceinline__ u64 both(u32 v, u32 e) { return static_cast<u64>(e) << 32 | v; }
__device__ __forceinline__ void publish(u64* at, u32 v, u32 e) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(both(v, e)) : "memory");
}
__device__ __forceinline__ void publish(u64* at, float v, u32 e) { publish(at, __float_as_uint(v), e); }
__device__ __forceinline__ void publish(u64* at, u32 v0, u32 v1, u32 e) {
    asm volatile(
        "st.relaxed.gpu.global.v2.b64 [%0], {%1,%2};" ::"l"(at), "l"(both(v0, e)), "l"(both(v1, e)) : "memory");
}
__device__ __forceinline__ void word(const u64* at, u32& v, u32& e) {
    u64 a;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(a) : "l"(at) : "memory");
    v = static_cast<u32>(a), e = static_cast<u32>(a >> 32);
}
__device__ __forceinline__ void words(const u64* at, u32& v0, u32& e0, u32& v1, u32& e1) {
    u64 a, b;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(at) : "memory");
    v0 = static_cast<u32>(a), e0 = static_cast<u32>(a >> 32), v1 = static_cast<u32>(b), e1 = static_cast<u32>(b >> 32);
}
struct Word {
    u32 v, e;
};
__device__ __forceinline__ Word ask(const u64* at) {
    Word a;
    word(at, a.v, a.e);
    return a;
}
struct Two {
    Word a, b;

    __device__ __forceinline__ bool there(u32 epoch) const { return a.e == epoch && b.e == epoch; }
};
__device__ __forceinline__ Two ask_two(const u64* at) {
    Two two;
    words(at, two.a.v, two.a.e, two.b.v, two.b.e);
    return two;
}
// Asks until all have arrived, or the time limit is over.
template <class Ask>
__device__ __forceinline__ void poll(Ask ask) {
    #pragma unroll 1
    for (int i = 0; !ask(); i++) {
        if (i % 32 == 31 && Watch::late()) return;
    }
}
