/* Products in bfloat16, for processors with AVX-512 BF16. */

#include "avx512.h"

#define IN_WORD 2
#define TALL 8

typedef bf16 element;
typedef __m512 reg;

INLINE reg loaded(const element *from) { return load(from); }

INLINE void stored(element *to, reg x) { store(to, x); }

INLINE reg exponentials(reg x) { return exponential(x); }

INLINE reg multiply_add(reg sum, reg input, reg weights) { return _mm512_dpbf16_ps(sum, (__m512bh)input, (__m512bh)weights); }

/* `second` elements further is the second row; 0: there is none. */
INLINE reg words_of(const element *first, int64_t second) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)first));
    if (!second) return (reg)low;
    return (reg)_mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(first + second))), 16));
}

#include "products.h"
