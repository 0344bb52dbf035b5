// Activations, weights and cached numbers of DTYPE or INT8 to f32 and back, and the activation.

__device__ __forceinline__ float to_float(Half x) {
#if DTYPE == 0
    return x;
#elif DTYPE == 1
    return __uint_as_float(static_cast<u32>(x) << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#endif
}
__device__ __forceinline__ Half from_float(float x) {
#if DTYPE == 0
    return x;
#elif DTYPE == 1
    Half y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
#else
    Half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
#endif
}
// Sixteen bytes of numbers.
constexpr int HALVES = 16 / sizeof(Half), WEIGHTS = 16 / sizeof(Weight);
__device__ __forceinline__ void spread(float (&f)[HALVES], uint4 v) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
#if DTYPE == 0
        f[i] = __uint_as_float(w[i]);
#elif DTYPE == 1
        f[2 * i] = __uint_as_float(w[i] << 16), f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
#else
        f[2 * i] = to_float(static_cast<u16>(w[i])), f[2 * i + 1] = to_float(static_cast<u16>(w[i] >> 16));
#endif
    }
}
// A byte of four as a number: less 128 in the last bits of 2^23.
__device__ __forceinline__ float from_byte(u32 four, int at) {
    return __uint_as_float(__byte_perm(four ^ 0x80808080u, 0x4b000000u, 0x7440 + at)) - 8388736.0f;
}
// HALVES of the WEIGHTS weights in sixteen bytes: the part `i` of them.
__device__ __forceinline__ void spread_weights(float (&f)[HALVES], uint4 v, int i) {
#if INT8
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int k = 0; k < HALVES; k++) {
        const int at = i * HALVES + k;
        f[k] = from_byte(w[at / 4], at % 4);
    }
#else
    spread(f, v);
#endif
}
// Weights are read once.
__device__ __forceinline__ uint4 stream(const void* at) {
    uint4 v;
    asm volatile(
        "ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at));
    return v;
}
__device__ __forceinline__ float activated(float x) {
#if ACTIVATION == 0
    return 0.5f * x * (1 + erff(x * 0.70710678118654752f));
#elif ACTIVATION == 1
    return 0.5f * x * (1 + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
#elif ACTIVATION == 2
    return x > 0 || x != x ? x : 0;
#elif ACTIVATION == 3
    return x / (1 + expf(-x));
#elif ACTIVATION == 4
    return x / (1 + expf(-1.702f * x));
#else
    return x > 0 || x != x ? x * x : 0;
#endif
}
__device__ __forceinline__ float sum_lanes(float v) {
    #pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
