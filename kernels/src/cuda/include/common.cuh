// What CUDA C++ kernels of all families share: 16-bit values, lanes, activations, dropout. No
// header of CUDA is needed, so that NVRTC has little to read. HALF names the 16-bit dtype: "bf16"
// or "f16".

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr float LOG2_E = 1.4426950408889634f;
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// A barrier of some of the block's threads; 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 2 to the power of x, to 2 units in the last place; what is too small becomes 0.
__device__ __forceinline__ float power_of_2(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// An activation by its number: 0 is none, 1 GELU by tanh, 2 ReLU, 3 SiLU, 4 x sigmoid(1.702 x).
template <int KIND>
__device__ __forceinline__ float activate(float x) {
    if (KIND == 0) {
        return x;
    }
    if (KIND == 2) {
        return fmaxf(x, 0.0f);
    }
    // x sigmoid(y): of GELU, y = 2 sqrt(2 / pi) (x + 0.044715 x^3).
    float y = KIND == 1 ? 1.5957691216f * x * fmaf(0.044715f * x, x, 1.0f) : KIND == 4 ? 1.702f * x : x;
    return __fdividef(x, 1.0f + power_of_2(-1.4426950409f * y));
}

// The same, and its slope.
template <int KIND>
__device__ __forceinline__ float activate(float x, float& slope) {
    if (KIND == 0) {
        slope = 1.0f;
        return x;
    }
    if (KIND == 2) {
        slope = x > 0.0f ? 1.0f : 0.0f;
        return fmaxf(x, 0.0f);
    }
    // x s(y), s being the sigmoid: its slope is s + x s (1 - s) y'.
    constexpr float ROOT = 1.5957691216f, CUBIC = 0.044715f;
    float y = KIND == 1 ? ROOT * x * fmaf(CUBIC * x, x, 1.0f) : x;
    float y_slope = KIND == 1 ? fmaf(3.0f * ROOT * CUBIC * x, x, ROOT) : 1.0f;
    float s = __fdividef(1.0f, 1.0f + power_of_2(-1.4426950409f * y)), value = x * s;
    slope = fmaf(value * y_slope, 1.0f - s, s);
    return value;
}

// ---- 16-bit values

// Two values as one register, the first in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn." HALF "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ float2 unpack(u32 pair) {
    float2 values;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;\ncvt.f32." HALF " %0, low;\ncvt.f32." HALF " %1, high; }"
        : "=f"(values.x), "=f"(values.y)
        : "r"(pair));
    return values;
}

__device__ __forceinline__ float widen(unsigned short half) {
    float value;
    asm("cvt.f32." HALF " %0, %1;" : "=f"(value) : "h"(half));
    return value;
}
#else
// Older devices do not convert bf16, which is the upper half of an f32.
__device__ __forceinline__ float widen(unsigned short half) {
    if (HALF[0] == 'b') {
        return __uint_as_float(static_cast<u32>(half) << 16);
    }
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

__device__ __forceinline__ float2 unpack(u32 pair) {
    if (HALF[0] == 'b') {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }
    return make_float2(widen(static_cast<unsigned short>(pair)), widen(static_cast<unsigned short>(pair >> 16)));
}
#endif

// Eight values from and to four registers.
__device__ __forceinline__ void unpack(float (&values)[8], uint4 pairs) {
    float2 two[4] = {unpack(pairs.x), unpack(pairs.y), unpack(pairs.z), unpack(pairs.w)};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        values[2 * i] = two[i].x, values[2 * i + 1] = two[i].y;
    }
}

__device__ __forceinline__ uint4 pack(const float (&values)[8]) {
    return make_uint4(pack(values[0], values[1]), pack(values[2], values[3]), pack(values[4], values[5]),
                      pack(values[6], values[7]));
}

// ---- Lanes of a warp, and shared memory

// The sum over a warp's lanes, and the largest; every lane has it.
__device__ __forceinline__ float sum_lanes(float v) {
    #pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

__device__ __forceinline__ float largest_lane(float v) {
    #pragma unroll
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

__device__ __forceinline__ float shared_float(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void shared_store(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// 16 bytes of shared memory.
__device__ __forceinline__ uint4 shared_load(u32 address) {
    uint4 bytes;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bytes.x), "=r"(bytes.y), "=r"(bytes.z), "=r"(bytes.w)
                 : "r"(address)
                 : "memory");
    return bytes;
}

__device__ __forceinline__ void shared_store(u32 address, uint4 bytes) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(bytes.x), "r"(bytes.y), "r"(bytes.z),
                 "r"(bytes.w)
                 : "memory");
}

// Four 8 by 8 matrices from shared memory: lane l gives the address of row l % 8 of matrix l / 8,
// and gets two elements of row l / 4 of each.
__device__ __forceinline__ void matrices_load(u32 (&matrices)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

// ---- Dropout by the random bits of random/mod.rs: a cipher of five rounds over a row's number
// gives 32 bits. Another one over these and the number of a pair of columns gives twice 16 bits: for
// the even column and for the odd one. The first round of the second gives the same for 131,072
// columns of a row.

// As words of a launch: 16 bits below `threshold` drop a number, and others are multiplied by
// `kept`, the bits of an f32.
struct DropoutInfo {
    u64 threshold, kept;
    // Added to the number of a row.
    u64 first_row;
    // Of the rounds of both ciphers.
    u64 row_keys[5], column_keys[5];

    __device__ __forceinline__ u32 limit() const { return static_cast<u32>(threshold); }
    __device__ __forceinline__ float factor() const { return __uint_as_float(static_cast<u32>(kept)); }
};

__device__ constexpr u32 MULTIPLIERS[5] = {0x6b43, 0x5a2d, 0x72e5, 0x4f1b, 0x6e4b};

// One round; the left half is in the low bits.
__device__ __forceinline__ u32 cipher_round(u32 state, u32 key, u32 multiplier) {
    u32 right = state >> 16, product = (right ^ key) * multiplier;
    return right | ((state ^ product ^ product >> 15) << 16);
}

// A row, ready for pairs of columns that have the same `column >> 17`: its state behind the first
// round of a pair 0, the right half mixed with the next round's key.
__device__ __forceinline__ u32 random_row(const DropoutInfo& dropout, u32 row, int column) {
    row += static_cast<u32>(dropout.first_row);
    #pragma unroll
    for (int round = 0; round < 5; round++) {
        row = cipher_round(row, static_cast<u32>(dropout.row_keys[round]), MULTIPLIERS[round]);
    }
    // The high half of the pair's number meets the right half.
    row ^= static_cast<u32>(column) >> 17 << 16;
    return cipher_round(row, static_cast<u32>(dropout.column_keys[0]), MULTIPLIERS[0]) ^
           static_cast<u32>(dropout.column_keys[1]) << 16;
}

// 16 random bits of each column of a pair.
struct RandomPair {
    u32 even, odd;
};

// The other four rounds. Halves are kept mixed with their round's key, so that a round is a
// product, a shift and two operations.
__device__ __forceinline__ RandomPair random_pair(const DropoutInfo& dropout, u32 row, int pair) {
    u32 keys[5];
    #pragma unroll
    for (int round = 1; round < 5; round++) {
        keys[round] = static_cast<u32>(dropout.column_keys[round]);
    }
    u32 first = (row >> 16) ^ (pair & 0xffff);
    u32 product = first * MULTIPLIERS[1];
    u32 second = ((row ^ product ^ product >> 15) & 0xffff) ^ keys[2];
    product = second * MULTIPLIERS[2];
    u32 third = ((first ^ product ^ product >> 15) & 0xffff) ^ (keys[1] ^ keys[3]);
    product = third * MULTIPLIERS[3];
    u32 fourth = ((second ^ product ^ product >> 15) & 0xffff) ^ (keys[2] ^ keys[4]);
    product = fourth * MULTIPLIERS[4];
    return {fourth ^ keys[4], ((third ^ product ^ product >> 15) & 0xffff) ^ keys[3]};
}
