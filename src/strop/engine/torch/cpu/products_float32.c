/* Products in float32, for processors with AVX-512 or AVX2. */

#ifdef __AVX512F__
#include "avx512.h"

#define TALL 8

typedef __m512 reg;

INLINE reg loaded(const float *from) { return _mm512_loadu_ps(from); }

INLINE void stored(float *to, reg x) { _mm512_storeu_ps(to, x); }

INLINE reg exponentials(reg x) { return exponential(x); }
#else
#include "float32.h"

#include <immintrin.h>

#define TALL 4

typedef __m256 reg;

INLINE reg loaded(const float *from) { return _mm256_loadu_ps(from); }

INLINE void stored(float *to, reg x) { _mm256_storeu_ps(to, x); }

INLINE reg exponentials(reg x) {
    for (int i = 0; i < LANES; i++) x[i] = exponential(x[i]);
    return x;
}
#endif

#define IN_WORD 1

typedef float element;

INLINE reg multiply_add(reg sum, reg input, reg weights) { return sum + input * weights; }

INLINE reg words_of(const element *row, int64_t second) {
    (void)second; /* a word is of one row */
    return loaded(row);
}

#include "products.h"
