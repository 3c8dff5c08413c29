/* What the compiled functions of strop share: bfloat16 in memory, float32 in registers, for processors with AVX-512 BF16. */

#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16  /* float32 in a register */
#define PAIRED 32 /* bfloat16 in a register */
#define MAX_DIM 256 /* of a head */
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

INLINE __m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

INLINE __m256i narrowed(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

INLINE __m512 rounded(__m512 x) { return widened(narrowed(x)); }

INLINE __m512 load(const bf16 *from) { return widened(_mm256_loadu_si256((const __m256i *)from)); }

INLINE void store(bf16 *to, __m512 x) { _mm256_storeu_si256((__m256i *)to, narrowed(x)); }

INLINE __mmask16 lanes_below(int64_t n) { return n >= LANES ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

INLINE float single(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

INLINE __m512bh load_pairs(const bf16 *from) { return (__m512bh)_mm512_loadu_si512(from); }

/* exp(x) to 2 units in the last place: Cephes' polynomial; of x < -87 that of -87. */
INLINE __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x); /* of the two, nan is kept where it comes second */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}
