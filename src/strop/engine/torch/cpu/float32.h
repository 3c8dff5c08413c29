/* What the compiled functions in float32 share: plain C that a compiler turns into AVX2 instructions. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8     /* float32 in a register */
#define MAX_DIM 256 /* of a head */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* anywhere in memory */

/* exp(x) to 2 units in the last place: Cephes' polynomial; 0 below -87, and of x > 88 that of 88. */
INLINE float exponential(float x) {
    const int is_tiny = x < -87.0f; /* what it is multiplied with would be denormal, and slow */
    x = is_tiny ? -87.0f : x > 88.0f ? 88.0f : x; /* nan stays nan */
    float n = x * 1.44269504088896341f + 12582912.0f; /* the sum has no place for a fraction */
    n -= 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f, p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return is_tiny ? 0.0f : p * power;
}

INLINE float inner_product(const float *a, const float *b, int64_t width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += a[i] * b[i];
    return sum;
}
