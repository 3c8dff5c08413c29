/* inputs weight^T, of few rows or many, and its gradients: what both precisions share.

   A word is a float32, or two bfloat16 whose products are added one after the other. A weight is multiplied panel by panel: PANEL
   of its rows, packed so that a register holds the same word of LANES rows. A panel takes the place of its rows, so a weight is
   packed and unpacked where it lies. A product depends on nothing but its row of the inputs and its row of the weight: not on the
   other rows. Nothing depends on which thread computes it.

   Of more rows of inputs than TALL, each tile of TALL rows reads the panel from the processor's cache. Gradients add up more words
   than that cache holds of a panel and a tile: after each DEEP words their sums are written, and read again to go on.

   The file that includes this one defines `element`, IN_WORD of which are a word; `reg`, a register of LANES float32; TALL; and
   loaded, stored, exponentials, multiply_add and words_of, which takes the words of LANES columns from IN_WORD rows. */

#include <stdlib.h>

#define VECTORS 3 /* registers across a panel; with TALL rows of inputs their sums leave room for the panel and an input */
#define PANEL (VECTORS * LANES)
#define DEEP 1024 /* words */
#define BLOCK 48 /* rows of a weight's gradient that are computed with one copy of what they read */

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

/* Scratch that begins with a line of the processor's cache; to be freed. */
INLINE float *room_for(int64_t words) { return aligned_alloc(64, (size_t)(words + 15) / 16 * 64); }

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

INLINE int64_t num_panels(int64_t rows) { return (rows + PANEL - 1) / PANEL; }

INLINE int vectors_of(int64_t panel, int64_t rows) {
    const int64_t left = (rows - panel * PANEL) / LANES;
    return left < VECTORS ? (int)left : VECTORS;
}

/* weight: (rows, columns), rows and words of a row multiples of LANES. */
void strop_pack(int64_t num_threads, int64_t rows, int64_t columns, float *weight) {
    const int64_t words = columns / IN_WORD;
#pragma omp parallel num_threads(num_threads)
    {
        float *packed = room_for(PANEL * words);
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < num_panels(rows); panel++) {
            repack(1, vectors_of(panel, rows), words, weight + panel * PANEL * words, packed);
            memcpy(weight + panel * PANEL * words, packed, (size_t)(vectors_of(panel, rows) * LANES * words) * sizeof(float));
        }
        free(packed);
    }
}

void strop_unpack(int64_t num_threads, int64_t rows, int64_t columns, const float *weight, float *out) {
    const int64_t words = columns / IN_WORD;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t panel = 0; panel < num_panels(rows); panel++)
        repack(0, vectors_of(panel, rows), words, weight + panel * PANEL * words, out + panel * PANEL * words);
}

/* What a product writes, and what goes into it after the sums. */
typedef struct {
    int operation;
    const element *bias, *other; /* (rows of the weight,) or none; as large as `out`, or none */
    element *out;
    int64_t stride;      /* of `out` */
    const float *add_to; /* as large as `out`, or none: what the sums are added to */
    float *sums;         /* as large as `out`, or none: where they are written as they are, instead of `out` */
} Target;

INLINE void finish(reg sum, const Target *to, int64_t row, int64_t column) {
    const int64_t place = row * to->stride + column;
    if (to->add_to) sum += *(const anywhere *)(to->add_to + place);
    if (to->sums) {
        *(anywhere *)(to->sums + place) = sum;
        return;
    }
    if (to->bias) sum += loaded(to->bias + column);
    if (to->operation == ADD) sum += loaded(to->other + place);
    if (to->operation == TIMES) sum *= loaded(to->other + place);
    if (to->operation == SILU) sum /= 1.0f + exponentials(-sum);
    stored(to->out + place, sum);
}

/* Up to TALL rows of inputs, each with its words from one of `of` on, `step` apart, with a panel. Fetches what comes next. */
INLINE void tile(int vectors, int64_t words, const float *of[TALL], int64_t step, int num_rows, const float *panel, int64_t row,
                 int64_t column, const char *ahead, int64_t further, const Target *to) {
    reg sums[TALL][VECTORS];
    for (int r = 0; r < TALL; r++) {
        for (int v = 0; v < vectors; v++) {
            if (to->add_to) _mm_prefetch((const char *)(to->add_to + (row + r) * to->stride + column + v * LANES), _MM_HINT_T0);
            sums[r][v] = (reg){0};
        }
    }
    for (int64_t word = 0; word < words; word++) {
        reg weights[VECTORS];
        for (int v = 0; v < vectors; v++) weights[v] = *(const anywhere *)(panel + (word * vectors + v) * LANES);
        _mm_prefetch(ahead + word * further, _MM_HINT_T1);
#pragma GCC unroll 8
        for (int r = 0; r < TALL; r++) {
            const reg input = spread(of[r][word * step]);
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) sums[r][v] = multiply_add(sums[r][v], input, weights[v]);
        }
    }
    for (int r = 0; r < TALL && r < num_rows; r++)
        for (int v = 0; v < vectors; v++) finish(sums[r][v], to, row + r, column + v * LANES);
}

/* All rows of inputs, of `stride` words each, with one panel, whose first column is `column` of the result.

   If `step` is 1, a row's words lie one after the other; if it is TALL, tile by tile the same word of TALL rows does. */
INLINE void tiles(int vectors, int64_t words, const float *inputs, int64_t stride, int64_t step, int64_t num_rows, const float *panel,
                  int64_t column, const char *ahead, const Target *to) {
    const int64_t num_tiles = (num_rows + TALL - 1) / TALL;
    const int64_t further = (int64_t)sizeof(float) * PANEL / (num_tiles ? num_tiles : 1); /* bytes to what is fetched for the next word */
    for (int64_t row = 0; row < num_rows; row += TALL, ahead += further * words) {
        const int left = num_rows - row < TALL ? (int)(num_rows - row) : TALL;
        const float *of[TALL];
        for (int r = 0; r < TALL; r++) of[r] = inputs + row * stride + (r < left ? r : left - 1) * (step == 1 ? stride : 1);
        if (vectors == 3)
            tile(3, words, of, step, left, panel, row, column, ahead, further, to);
        else if (vectors == 2)
            tile(2, words, of, step, left, panel, row, column, ahead, further, to);
        else
            tile(1, words, of, step, left, panel, row, column, ahead, further, to);
    }
}

/* out (num_rows, rows) = inputs (num_rows, columns) weight^T (+ bias), then + other, * other or its silu. */
void strop_product(int64_t num_threads, int64_t num_rows, int64_t rows, int64_t columns, int64_t is_packed, int64_t operation,
                   const float *inputs, const float *weight, const element *bias, const element *other, element *out) {
    const Target to = {.operation = (int)operation, .bias = bias, .other = other, .out = out, .stride = rows};
    const int64_t words = columns / IN_WORD;
#pragma omp parallel num_threads(num_threads)
    {
        float *scratch = is_packed ? NULL : room_for(PANEL * words);
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < num_panels(rows); panel++) {
            const int vectors = vectors_of(panel, rows);
            const float *packed = weight + panel * PANEL * words;
            const char *ahead = (const char *)(packed + PANEL * words);
            if (!is_packed) repack(1, vectors, words, packed, scratch), packed = scratch;
            tiles(vectors, words, inputs, words, 1, num_rows, packed, panel * PANEL, ahead, &to);
        }
        free(scratch);
    }
}

/* The panel of `vectors` x LANES columns of `num_rows` rows, which are added up. */
INLINE void gather(int vectors, int64_t num_rows, const element *from, int64_t stride, float *panel) {
    for (int64_t row = 0; row < num_rows; row += IN_WORD, from += IN_WORD * stride)
        for (int v = 0; v < vectors; v++, panel += LANES)
            *(anywhere *)panel = words_of(from + v * LANES, row + 1 < num_rows ? stride : 0);
}

/* out (num_rows, columns) = of_outputs (num_rows, rows) weight. */
void strop_input_gradient(int64_t num_threads, int64_t num_rows, int64_t rows, int64_t columns, const float *of_outputs,
                          const element *weight, element *out) {
    const int64_t words = rows / IN_WORD;
    float *sums = words > DEEP ? room_for(num_rows * columns) : NULL;
#pragma omp parallel num_threads(num_threads)
    {
        float *packed = room_for(PANEL * DEEP);
        for (int64_t from = 0; from < words; from += DEEP) {
            const int64_t depth = words - from < DEEP ? words - from : DEEP;
            const Target to = {.out = out, .stride = columns, .add_to = from ? sums : NULL, .sums = from + depth < words ? sums : NULL};
#pragma omp for schedule(static) nowait /* a panel is the same thread's each time */
            for (int64_t panel = 0; panel < num_panels(columns); panel++) {
                const int vectors = vectors_of(panel, columns);
                gather(vectors, depth * IN_WORD, weight + from * IN_WORD * columns + panel * PANEL, columns, packed);
                tiles(vectors, depth, of_outputs + from, words, 1, num_rows, packed, panel * PANEL, (const char *)packed, &to);
            }
        }
        free(packed);
    }
    free(sums);
}

/* `height` columns of `num_rows` rows, which are added up, as `tiles` has inputs in tiles. */
INLINE void gather_tiles(int64_t height, int64_t num_rows, const element *from, int64_t stride, float *packed) {
    const int64_t words = (num_rows + IN_WORD - 1) / IN_WORD;
    for (int64_t word = 0; word < words; word++, from += IN_WORD * stride)
        for (int64_t row = 0; row < height; row += LANES) {
            const reg x = words_of(from + row, word * IN_WORD + 1 < num_rows ? stride : 0);
            for (int i = 0; i < LANES; i += TALL)
                memcpy(packed + (row + i) * words + word * TALL, (const float *)&x + i, TALL * sizeof(float));
        }
}

/* total (rows, columns) += of_outputs^T (num_rows, rows) inputs (num_rows, columns). */
void strop_weight_gradient(int64_t num_threads, int64_t num_rows, int64_t rows, int64_t columns, const element *of_outputs,
                           const element *inputs, float *total) {
    float *panels = room_for((num_rows < DEEP ? num_rows : DEEP) * columns);
#pragma omp parallel num_threads(num_threads)
    {
        float *packed = room_for(BLOCK * DEEP);
        for (int64_t from = 0; from < num_rows; from += DEEP * IN_WORD) {
            const int64_t deep = num_rows - from < DEEP * IN_WORD ? num_rows - from : DEEP * IN_WORD, words = (deep + IN_WORD - 1) / IN_WORD;
#pragma omp for schedule(static)
            for (int64_t panel = 0; panel < num_panels(columns); panel++)
                gather(vectors_of(panel, columns), deep, inputs + from * columns + panel * PANEL, columns, panels + panel * PANEL * words);
#pragma omp for schedule(static)
            for (int64_t block = 0; block < rows; block += BLOCK) {
                const int64_t height = rows - block < BLOCK ? rows - block : BLOCK;
                const Target to = {.stride = columns, .add_to = total + block * columns, .sums = total + block * columns};
                gather_tiles(height, deep, of_outputs + from * rows + block, rows, packed);
                for (int64_t panel = 0; panel < num_panels(columns); panel++) {
                    const float *of_panel = panels + panel * PANEL * words;
                    const char *ahead = (const char *)(of_panel + PANEL * words);
                    tiles(vectors_of(panel, columns), words, packed, words, TALL, height, of_panel, panel * PANEL, ahead, &to);
                }
            }
        }
        free(packed);
    }
    free(panels);
}
