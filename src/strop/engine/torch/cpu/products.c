/* inputs weight^T in bfloat16, of few rows or many, for processors with AVX-512 BF16.

   A weight is multiplied panel by panel: PANEL of its rows, packed so that a register holds the same two columns of LANES rows. A
   panel takes the place of its rows, so a weight is packed and unpacked where it lies. A result depends on nothing but its row of
   the inputs and its row of the weight: not on the other rows, nor on which thread computes it. */

#include "avx512.h"

#define VECTORS 3 /* registers across a panel; with TALL rows of inputs their sums fill three quarters of all registers */
#define PANEL (VECTORS * LANES)
#define TALL 8
#define MAX_COLUMNS 4096 /* of a weight: a panel of so many stays in the processor's cache */

enum { PLAIN, ADD, TIMES, SILU };

/* 16 x 16 words, each two bfloat16. */
INLINE void transpose(__m512i (*x)[LANES]) {
    __m512i y[LANES];
    for (int i = 0; i < 16; i += 2)
        y[i] = _mm512_unpacklo_epi32((*x)[i], (*x)[i + 1]), y[i + 1] = _mm512_unpackhi_epi32((*x)[i], (*x)[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            (*x)[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            (*x)[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4((*x)[i], (*x)[i + 4], 0x88), b = _mm512_shuffle_i32x4((*x)[i], (*x)[i + 4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4((*x)[i + 8], (*x)[i + 12], 0x88), d = _mm512_shuffle_i32x4((*x)[i + 8], (*x)[i + 12], 0xdd);
        y[i] = _mm512_shuffle_i32x4(a, c, 0x88), y[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        y[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), y[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; i++) (*x)[i] = y[i];
}

/* Between `vectors` x LANES rows of `columns` and their panel. */
INLINE void repack(int to_panel, int vectors, int64_t columns, const bf16 *from, bf16 *to) {
    for (int v = 0; v < vectors; v++)
        for (int64_t pair = 0; pair < columns / 2; pair += LANES) {
            __m512i x[LANES];
            for (int i = 0; i < LANES; i++) {
                const int64_t in_rows = (v * LANES + i) * columns + 2 * pair, in_panel = ((pair + i) * vectors + v) * PAIRED;
                x[i] = _mm512_loadu_si512(from + (to_panel ? in_rows : in_panel));
            }
            transpose(&x);
            for (int i = 0; i < LANES; i++) {
                const int64_t in_rows = (v * LANES + i) * columns + 2 * pair, in_panel = ((pair + i) * vectors + v) * PAIRED;
                _mm512_storeu_si512(to + (to_panel ? in_panel : in_rows), x[i]);
            }
        }
}

INLINE int vectors_of(int64_t panel, int64_t rows) {
    const int64_t left = (rows - panel * PANEL) / LANES;
    return left < VECTORS ? (int)left : VECTORS;
}

/* weight: (rows, columns), multiples of 16 and of 32. */
void strop_pack(int64_t num_threads, int64_t rows, int64_t columns, bf16 *weight) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t panel = 0; panel < (rows + PANEL - 1) / PANEL; panel++) {
        bf16 packed[PANEL * MAX_COLUMNS] __attribute__((aligned(64)));
        const int vectors = vectors_of(panel, rows);
        repack(1, vectors, columns, weight + panel * PANEL * columns, packed);
        memcpy(weight + panel * PANEL * columns, packed, (size_t)(vectors * LANES * columns) * sizeof(bf16));
    }
}

void strop_unpack(int64_t num_threads, int64_t rows, int64_t columns, const bf16 *weight, bf16 *out) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t panel = 0; panel < (rows + PANEL - 1) / PANEL; panel++)
        repack(0, vectors_of(panel, rows), columns, weight + panel * PANEL * columns, out + panel * PANEL * columns);
}

/* What a product writes, and what goes into it after the sums. */
typedef struct {
    int operation;
    const bf16 *bias, *other; /* (rows of the weight,) or none; as large as `out`, or none */
    bf16 *out;
    int64_t stride; /* of `out` */
} Target;

INLINE void finish(__m512 sum, const Target *to, int64_t row, int64_t column) {
    const int64_t place = row * to->stride + column;
    if (to->bias) sum = _mm512_add_ps(sum, load(to->bias + column));
    if (to->operation == ADD) sum = _mm512_add_ps(sum, load(to->other + place));
    if (to->operation == TIMES) sum = _mm512_mul_ps(sum, load(to->other + place));
    if (to->operation == SILU) {
        const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), sum));
        sum = _mm512_div_ps(sum, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
    }
    store(to->out + place, sum);
}

/* Up to TALL rows of inputs with one panel, whose first column is `column` of the result; reads ahead of itself. */
INLINE void tile(int vectors, int64_t columns, const bf16 *inputs, int64_t row, int64_t num_rows, const bf16 *panel, int64_t column,
                 const bf16 *ahead, const Target *to) {
    __m512 sums[TALL][VECTORS];
    const bf16 *of[TALL];
    for (int r = 0; r < TALL; r++) {
        of[r] = inputs + (row + r < num_rows ? row + r : num_rows - 1) * columns; /* the last row instead of none */
        for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_setzero_ps();
    }
    for (int64_t pair = 0; pair < columns / 2; pair++) {
        __m512bh weights[VECTORS];
        for (int v = 0; v < vectors; v++) weights[v] = load_pairs(panel + (pair * vectors + v) * PAIRED);
        if (ahead) _mm_prefetch((const char *)(ahead + pair * PAIRED), _MM_HINT_T1);
#pragma GCC unroll 8
        for (int r = 0; r < TALL; r++) {
            int32_t both;
            memcpy(&both, of[r] + 2 * pair, 4);
            for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], (__m512bh)_mm512_set1_epi32(both), weights[v]);
        }
    }
    for (int r = 0; r < TALL && row + r < num_rows; r++)
        for (int v = 0; v < vectors; v++) finish(sums[r][v], to, row + r, column + v * LANES);
}

/* out (num_rows, rows) = inputs (num_rows, columns) weight^T (+ bias), then + other, * other or its silu. */
void strop_product(int64_t num_threads, int64_t num_rows, int64_t rows, int64_t columns, int64_t is_packed, int64_t operation,
                   const bf16 *inputs, const bf16 *weight, const bf16 *bias, const bf16 *other, bf16 *out) {
    const Target to = {(int)operation, bias, other, out, rows};
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t panel = 0; panel < (rows + PANEL - 1) / PANEL; panel++) {
        bf16 scratch[PANEL * MAX_COLUMNS] __attribute__((aligned(64)));
        const int vectors = vectors_of(panel, rows);
        const bf16 *packed = weight + panel * PANEL * columns, *next = packed + PANEL * columns;
        if (!is_packed) repack(1, vectors, columns, packed, scratch), packed = scratch;
        for (int64_t row = 0; row < num_rows; row += TALL) {
            /* In the first tiles the next panel is fetched, a line for each pair of columns. */
            const bf16 *ahead = row / TALL < VECTORS ? next + row / TALL * (columns / 2) * PAIRED : NULL;
            if (vectors == 3)
                tile(3, columns, inputs, row, num_rows, packed, panel * PANEL, ahead, &to);
            else if (vectors == 2)
                tile(2, columns, inputs, row, num_rows, packed, panel * PANEL, ahead, &to);
            else
                tile(1, columns, inputs, row, num_rows, packed, panel * PANEL, ahead, &to);
        }
    }
}
