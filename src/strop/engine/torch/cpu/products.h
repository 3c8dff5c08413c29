/* inputs weight^T, of few rows or many: what both precisions share.

   A word is a float32, or two bfloat16 of neighbouring columns. A weight is multiplied panel by panel: PANEL of its rows, packed so
   that a register holds the same word of LANES rows. A panel takes the place of its rows, so a weight is packed and unpacked where
   it lies. A result depends on nothing but its row of the inputs and its row of the weight: not on the other rows, nor on which
   thread computes it.

   Of more rows of inputs than TALL, each tile of TALL rows reads the panel from the processor's cache.

   The file that includes this one defines `element`, IN_WORD of which are a word; `reg`, a register of LANES float32; TALL; and
   loaded, stored, exponentials and multiply_add. */

#include <stdlib.h>

#define VECTORS 3 /* registers across a panel; with TALL rows of inputs their sums leave room for the panel and an input */
#define PANEL (VECTORS * LANES)

typedef reg anywhere __attribute__((aligned(4), may_alias)); /* in memory */

enum { PLAIN, ADD, TIMES, SILU };

#ifdef __AVX512F__
INLINE reg spread(float word) { return _mm512_set1_ps(word); }

INLINE void transpose(reg *x) {
    reg y[LANES];
    for (int i = 0; i < 16; i += 2) y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    for (int i = 0; i < 16; i++) x[i] = _mm512_shuffle_ps(y[(i & ~3) | (i >> 1 & 1)], y[(i & ~3) | (i >> 1 & 1) | 2], i & 1 ? 0xee : 0x44);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 16; j += 8) {
            y[i + j] = _mm512_shuffle_f32x4(x[i + j], x[i + j + 4], 0x88);
            y[i + j + 4] = _mm512_shuffle_f32x4(x[i + j], x[i + j + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) x[i] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0x88), x[i + 8] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0xdd);
}
#else
INLINE reg spread(float word) { return _mm256_set1_ps(word); }

INLINE void transpose(reg *x) {
    reg y[LANES];
    for (int i = 0; i < 8; i += 2) y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    for (int i = 0; i < 8; i++) x[i] = _mm256_shuffle_ps(y[(i & ~3) | (i >> 1 & 1)], y[(i & ~3) | (i >> 1 & 1) | 2], i & 1 ? 0xee : 0x44);
    for (int i = 0; i < 4; i++)
        y[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20), y[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
    for (int i = 0; i < 8; i++) x[i] = y[i];
}
#endif

/* Between `vectors` x LANES rows of `words` and their panel. */
INLINE void repack(int to_panel, int vectors, int64_t words, const float *from, float *to) {
    for (int v = 0; v < vectors; v++)
        for (int64_t word = 0; word < words; word += LANES) {
            const int64_t in_rows = v * LANES * words + word, in_panel = (word * vectors + v) * LANES, next_in_panel = vectors * LANES;
            reg x[LANES];
            for (int i = 0; i < LANES; i++)
                x[i] = *(const anywhere *)(from + (to_panel ? in_rows + i * words : in_panel + i * next_in_panel));
            transpose(x);
            for (int i = 0; i < LANES; i++)
                *(anywhere *)(to + (to_panel ? in_panel + i * next_in_panel : in_rows + i * words)) = x[i];
        }
}

INLINE int vectors_of(int64_t panel, int64_t rows) {
    const int64_t left = (rows - panel * PANEL) / LANES;
    return left < VECTORS ? (int)left : VECTORS;
}

/* weight: (rows, columns), rows and words of a row multiples of LANES. */
void strop_pack(int64_t num_threads, int64_t rows, int64_t columns, float *weight) {
    const int64_t words = columns / IN_WORD;
#pragma omp parallel num_threads(num_threads)
    {
        float *packed = malloc((size_t)(PANEL * words) * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < (rows + PANEL - 1) / PANEL; panel++) {
            repack(1, vectors_of(panel, rows), words, weight + panel * PANEL * words, packed);
            memcpy(weight + panel * PANEL * words, packed, (size_t)(vectors_of(panel, rows) * LANES * words) * sizeof(float));
        }
        free(packed);
    }
}

void strop_unpack(int64_t num_threads, int64_t rows, int64_t columns, const float *weight, float *out) {
    const int64_t words = columns / IN_WORD;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t panel = 0; panel < (rows + PANEL - 1) / PANEL; panel++)
        repack(0, vectors_of(panel, rows), words, weight + panel * PANEL * words, out + panel * PANEL * words);
}

/* What a product writes, and what goes into it after the sums. */
typedef struct {
    int operation;
    const element *bias, *other; /* (rows of the weight,) or none; as large as `out`, or none */
    element *out;
    int64_t stride; /* of `out` */
} Target;

INLINE void finish(reg sum, const Target *to, int64_t row, int64_t column) {
    const int64_t place = row * to->stride + column;
    if (to->bias) sum += loaded(to->bias + column);
    if (to->operation == ADD) sum += loaded(to->other + place);
    if (to->operation == TIMES) sum *= loaded(to->other + place);
    if (to->operation == SILU) sum /= 1.0f + exponentials(-sum);
    stored(to->out + place, sum);
}

/* Up to TALL rows of inputs with one panel, whose first column is `column` of the result. Meanwhile fetches what comes next. */
INLINE void tile(int vectors, int64_t words, const float *inputs, int64_t row, int64_t num_rows, const float *panel, int64_t column,
                 const char *ahead, int64_t step, const Target *to) {
    reg sums[TALL][VECTORS];
    const float *of[TALL];
    for (int r = 0; r < TALL; r++) {
        of[r] = inputs + (row + r < num_rows ? row + r : num_rows - 1) * words; /* the last row instead of none */
        for (int v = 0; v < vectors; v++) sums[r][v] = (reg){0};
    }
    for (int64_t word = 0; word < words; word++) {
        reg weights[VECTORS];
        for (int v = 0; v < vectors; v++) weights[v] = *(const anywhere *)(panel + (word * vectors + v) * LANES);
        _mm_prefetch(ahead + word * step, _MM_HINT_T1);
#pragma GCC unroll 8
        for (int r = 0; r < TALL; r++) {
            const reg input = spread(of[r][word]);
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) sums[r][v] = multiply_add(sums[r][v], input, weights[v]);
        }
    }
    for (int r = 0; r < TALL && row + r < num_rows; r++)
        for (int v = 0; v < vectors; v++) finish(sums[r][v], to, row + r, column + v * LANES);
}

/* out (num_rows, rows) = inputs (num_rows, columns) weight^T (+ bias), then + other, * other or its silu. */
void strop_product(int64_t num_threads, int64_t num_rows, int64_t rows, int64_t columns, int64_t is_packed, int64_t operation,
                   const float *inputs, const float *weight, const element *bias, const element *other, element *out) {
    const Target to = {(int)operation, bias, other, out, rows};
    const int64_t words = columns / IN_WORD, num_tiles = (num_rows + TALL - 1) / TALL;
    const int64_t step = (int64_t)sizeof(float) * PANEL / (num_tiles ? num_tiles : 1); /* bytes to what is fetched ahead for the next word */
#pragma omp parallel num_threads(num_threads)
    {
        float *scratch = is_packed ? NULL : malloc((size_t)(PANEL * words) * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < (rows + PANEL - 1) / PANEL; panel++) {
            const int vectors = vectors_of(panel, rows);
            const float *packed = weight + panel * PANEL * words;
            const char *ahead = (const char *)(packed + PANEL * words);
            if (!is_packed) repack(1, vectors, words, packed, scratch), packed = scratch;
            for (int64_t row = 0; row < num_rows; row += TALL, ahead += step * words) {
                if (vectors == 3)
                    tile(3, words, inputs, row, num_rows, packed, panel * PANEL, ahead, step, &to);
                else if (vectors == 2)
                    tile(2, words, inputs, row, num_rows, packed, panel * PANEL, ahead, step, &to);
                else
                    tile(1, words, inputs, row, num_rows, packed, panel * PANEL, ahead, step, &to);
            }
        }
        free(scratch);
    }
}
