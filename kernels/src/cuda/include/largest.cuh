// The largest logit and its token, as greedy sampling needs it.

constexpr int NO_TOKEN = 0x7fffffff;
#ifndef INFINITE
#define INFINITE __int_as_float(0x7f800000)
#endif

// A logit and its token: of two equal ones the first token. What is no number has a token of -1,
// and comes before all.
struct Largest {
    float logit = -INFINITE;
    int token = NO_TOKEN;

    __device__ __forceinline__ void or_else(float other, int others) {
        if (other > logit || (other == logit && others < token)) logit = other, token = others;
    }
    __device__ __forceinline__ void or_else(const Largest& other) { or_else(other.logit, other.token); }
    // Of lanes that are so far apart.
    template <int FROM, int TO>
    __device__ __forceinline__ void of_lanes() {
        #pragma unroll
        for (int o = FROM; o < TO; o <<= 1) or_else(__shfl_xor_sync(~0u, logit, o), __shfl_xor_sync(~0u, token, o));
    }
};
