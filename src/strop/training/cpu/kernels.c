/* Attention of rows that are laid end to end, norms, gates and log-probs, and their gradients: in bfloat16 with sums in float32, for
   processors with AVX-512 BF16; where they have AMX, too, attention multiplies by its tiles.

   Compiled where strop runs, by whatever C compiler is there (strop/engine/torch/cpu/compiled.py). A read is one stretch of queries that attends to
   one of keys: a row to itself, causally, or rows to all of what they share. Each thread takes a read and a head at a time; reads
   of one wave write to places that no other one of it does, so that sums have one order whatever the number of threads. */

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "avx512.h"

typedef bf16 number;
typedef uint32_t pair; /* two bfloat16 that are multiplied and added together */

#include "rows.h"

INLINE __m512i pairs_of(__m256i first, __m256i second) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

/* sums (rows, 16 columns) = or += left right: rows of pairs times columns of pairs. `left` has its pair k of row r at
   r * left_row + k. */
INLINE void multiply_tile(int rows, int columns, int is_new, int64_t depth, const pair *left, int64_t left_row,
                          const pair *right, int64_t right_step, float *sums, int64_t sums_row) {
    __m512 of[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
            of[r][c] = is_new ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * sums_row + c * LANES);
    for (int64_t k = 0; k < depth; k++) {
        __m512bh factors[4];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) factors[c] = (__m512bh)_mm512_loadu_si512(right + k * right_step + c * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512bh one = (__m512bh)_mm512_set1_epi32((int)left[r * left_row + k]);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) of[r][c] = _mm512_dpbf16_ps(of[r][c], one, factors[c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) _mm512_storeu_ps(sums + r * sums_row + c * LANES, of[r][c]);
}

#define TILE(rows, columns) \
    multiply_tile(rows, columns, is_new, depth, left_here, left_row, right_here, right_step, here, sums_row)

#define TILES(columns)                                                                     \
    switch (least(4, num_rows - row)) {                                                    \
        case 1: TILE(1, columns); break;                                                   \
        case 2: TILE(2, columns); break;                                                   \
        case 3: TILE(3, columns); break;                                                   \
        default: TILE(4, columns);                                                         \
    }

/* As multiply_tile, of any number of rows and 16, 32, 48 ... columns. */
static void multiply_by_registers(int64_t num_rows, int64_t num_columns, int is_new, int64_t depth, const pair *left, int64_t left_row,
                                  const pair *right, int64_t right_step, float *sums, int64_t sums_row) {
    for (int64_t column = 0; column < num_columns; column += 4 * LANES)
        for (int64_t row = 0; row < num_rows; row += 4) {
            const pair *left_here = left + row * left_row, *right_here = right + column;
            float *here = sums + row * sums_row + column;
            switch ((num_columns - column) / LANES) {
                case 1: TILES(1); break;
                case 2: TILES(2); break;
                case 3: TILES(3); break;
                default: TILES(4);
            }
        }
}

#ifdef __AMX_BF16__
static int has_tiles; /* the operating system lets this process use them */

__attribute__((constructor)) static void ask_for_tiles(void) {
    has_tiles = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
}

/* Eight tiles of 16 rows of 64 bytes, on the thread that calls. */
INLINE void begin_tiles(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64))) = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    if (has_tiles) _tile_loadconfig(&config);
}

INLINE void end_tiles(void) {
    if (has_tiles) _tile_release();
}

#define BEGIN_SUM(tile, r, c)                                                       \
    if (is_new) {                                                                   \
        _tile_zero(tile);                                                           \
    } else {                                                                        \
        _tile_loadd(tile, sums + r * LANES * sums_row + c * LANES, 4 * sums_row);   \
    }

#define END_SUM(tile, r, c) _tile_stored(tile, sums + r * LANES * sums_row + c * LANES, 4 * sums_row);

/* As multiply, of 32 rows and 32 columns, and of 16 and 16. depth: a multiple of 16. */
INLINE void multiply_4_tiles(int is_new, int64_t depth, const pair *left, int64_t left_row, const pair *right, int64_t right_step,
                             float *sums, int64_t sums_row) {
    BEGIN_SUM(0, 0, 0) BEGIN_SUM(1, 0, 1) BEGIN_SUM(2, 1, 0) BEGIN_SUM(3, 1, 1)
    for (int64_t k = 0; k < depth; k += LANES) {
        _tile_loadd(4, left + k, 4 * left_row);
        _tile_loadd(5, left + LANES * left_row + k, 4 * left_row);
        _tile_loadd(6, right + k * right_step, 4 * right_step);
        _tile_loadd(7, right + k * right_step + LANES, 4 * right_step);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    END_SUM(0, 0, 0) END_SUM(1, 0, 1) END_SUM(2, 1, 0) END_SUM(3, 1, 1)
}

INLINE void multiply_1_tile(int is_new, int64_t depth, const pair *left, int64_t left_row, const pair *right, int64_t right_step,
                            float *sums, int64_t sums_row) {
    BEGIN_SUM(0, 0, 0)
    for (int64_t k = 0; k < depth; k += LANES) {
        _tile_loadd(4, left + k, 4 * left_row);
        _tile_loadd(6, right + k * right_step, 4 * right_step);
        _tile_dpbf16ps(0, 4, 6);
    }
    END_SUM(0, 0, 0)
}

/* Blocks of 16 rows, columns and pairs by tiles, the rest by registers. */
static void multiply(int64_t num_rows, int64_t num_columns, int is_new, int64_t depth, const pair *left, int64_t left_row,
                     const pair *right, int64_t right_step, float *sums, int64_t sums_row) {
    const int64_t rows = has_tiles ? num_rows & ~(int64_t)(LANES - 1) : 0, whole = depth & ~(int64_t)(LANES - 1);
    if (rows && whole) {
        __asm__ volatile("" ::: "memory"); /* compilers do not know that loads of tiles read memory */
        for (int64_t column = 0; column < num_columns;) {
            const int64_t columns = num_columns - column >= 2 * LANES ? 2 * LANES : LANES;
            for (int64_t row = 0; row < rows;) {
                const int is_wide = columns == 2 * LANES && rows - row >= 2 * LANES;
                float *here = sums + row * sums_row + column;
                if (is_wide) {
                    multiply_4_tiles(is_new, whole, left + row * left_row, left_row, right + column, right_step, here, sums_row);
                } else {
                    for (int64_t c = 0; c < columns; c += LANES)
                        multiply_1_tile(is_new, whole, left + row * left_row, left_row, right + column + c, right_step, here + c, sums_row);
                }
                row += is_wide ? 2 * LANES : LANES;
            }
            column += columns;
        }
        if (depth > whole)
            multiply_by_registers(rows, num_columns, 0, depth - whole, left + whole, left_row, right + whole * right_step, right_step, sums, sums_row);
        num_rows -= rows, left += rows * left_row, sums += rows * sums_row;
    }
    if (num_rows) multiply_by_registers(num_rows, num_columns, is_new, depth, left, left_row, right, right_step, sums, sums_row);
}
#else
INLINE void begin_tiles(void) {}
INLINE void end_tiles(void) {}
#define multiply multiply_by_registers
#endif

/* out (pairs of a row, width): each row of `from` becomes a column; width is `num_rows` rounded up to 16, and zeros fill it. */
static void turn_rows(const bf16 *from, int64_t stride, int64_t num_rows, int64_t dim, pair *out, int64_t width) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    const __m512i high = _mm512_setr_epi32(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int64_t row = 0; row < num_rows; row += LANES)
        for (int64_t i = 0; i < dim / 2; i += LANES) {
            __m512i a[LANES], b[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                a[r] = row + r < num_rows ? _mm512_loadu_si512(from + (row + r) * stride + 2 * i) : _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int r = 0; r < LANES; r += 2)
                b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]), b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
#pragma GCC unroll 4
            for (int r = 0; r < LANES; r += 4) {
                a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]), a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
                a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]), a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
            }
            /* a[4 g + n] has, in its quarter q, column 4 q + n of rows 4 g .. 4 g + 3. */
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) {
                b[n] = _mm512_permutex2var_epi32(a[n], low, a[4 + n]), b[4 + n] = _mm512_permutex2var_epi32(a[n], high, a[4 + n]);
                b[8 + n] = _mm512_permutex2var_epi32(a[8 + n], low, a[12 + n]);
                b[12 + n] = _mm512_permutex2var_epi32(a[8 + n], high, a[12 + n]);
            }
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) {
                pair *to = out + (i + n) * width + row;
                _mm512_storeu_si512(to, _mm512_permutex2var_epi32(b[n], first, b[8 + n]));
                _mm512_storeu_si512(to + 4 * width, _mm512_permutex2var_epi32(b[4 + n], first, b[12 + n]));
                _mm512_storeu_si512(to + 8 * width, _mm512_permutex2var_epi32(b[n], second, b[8 + n]));
                _mm512_storeu_si512(to + 12 * width, _mm512_permutex2var_epi32(b[4 + n], second, b[12 + n]));
            }
        }
}

/* out (num_rows / 2 rounded up, dim): neighbouring rows of `from` as pairs, the last one of an odd number with zeros. */
static void pair_rows(const bf16 *from, int64_t stride, int64_t num_rows, int64_t dim, pair *out) {
    for (int64_t row = 0; row < num_rows; row += 2)
        for (int64_t i = 0; i < dim; i += LANES) {
            __m256i first = _mm256_loadu_si256((const __m256i *)(from + row * stride + i));
            __m256i second = row + 1 < num_rows ? _mm256_loadu_si256((const __m256i *)(from + (row + 1) * stride + i))
                                                : _mm256_setzero_si256();
            _mm512_storeu_si512(out + row / 2 * dim + i, pairs_of(first, second));
        }
}

/* Weights of a row of scores, in bfloat16 up to a multiple of 32; its largest score and the sum of weights go on in `top` and
   `total`. Returns what earlier sums are to be multiplied with. */
INLINE float weigh(const float *scores, int64_t num_seen, int64_t num_all, float scale, float *top, float *total, bf16 *weights) {
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (int64_t c = 0; c < num_seen; c += LANES)
        largest = _mm512_mask_max_ps(largest, lanes_below(num_seen - c), largest, _mm512_loadu_ps(scores + c));
    const float before = *top, now = fmaxf(before, _mm512_reduce_max_ps(largest) * scale);
    const __m512 shift = _mm512_set1_ps(now), factor = _mm512_set1_ps(scale);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t c = 0; c < num_all; c += LANES) {
        __m512 weight = _mm512_maskz_mov_ps(lanes_below(num_seen - c), exponential(_mm512_fmsub_ps(_mm512_loadu_ps(scores + c), factor, shift)));
        sum = _mm512_add_ps(sum, weight);
        store(weights + c, weight);
    }
    const float kept = before == -INFINITY ? 0.0f : expf(before - now);
    *top = now, *total = *total * kept + _mm512_reduce_add_ps(sum);
    return kept;
}

/* Puts what the queries of a tile read beside what they read before: out (queries, dim), normalizers (queries,). */
INLINE void merge(int is_first, int64_t num_queries, int64_t dim, const float *sums, const float *top, const float *total,
                  float *out, int64_t out_row, float *normalizers) {
    for (int64_t i = 0; i < num_queries; i++) {
        const float here = top[i] + logf(total[i]);
        float share = 1.0f / total[i], before = 0.0f;
        if (is_first) {
            normalizers[i] = here;
        } else {
            const float old = normalizers[i], most = fmaxf(old, here), both = most + log1pf(expf(fminf(old, here) - most));
            share *= expf(here - both), before = expf(old - both);
            normalizers[i] = both;
        }
        for (int64_t c = 0; c < dim; c += LANES) {
            float *to = out + i * out_row + c;
            __m512 part = _mm512_mul_ps(_mm512_loadu_ps(sums + i * dim + c), _mm512_set1_ps(share));
            if (!is_first) part = _mm512_fmadd_ps(_mm512_loadu_ps(to), _mm512_set1_ps(before), part);
            _mm512_storeu_ps(to, part);
        }
    }
}

static void attend(const int64_t *read, int64_t dim, Heads queries, int64_t head, Heads keys, Heads values, int64_t kv_head,
                   float scale, float *out, int64_t out_row, float *normalizers, void *scratch) {
    const int64_t num_queries = read[1], num_keys = read[3], is_own = read[4], width = rounded_up(num_keys, LANES);
    pair *turned = scratch, *paired = turned + width * dim / 2;
    float *scores = (float *)(paired + (num_keys + 1) / 2 * dim), *sums = scores + QUERIES * KEYS;
    bf16 *weights = (bf16 *)(sums + QUERIES * dim);
    float top[QUERIES], total[QUERIES];
    begin_tiles();
    turn_rows(at(keys, kv_head, read[2]), keys.token, num_keys, dim, turned, width);
    pair_rows(at(values, kv_head, read[2]), values.token, num_keys, dim, paired);
    for (int64_t query = 0; query < num_queries; query += QUERIES) {
        const int64_t rows = least(QUERIES, num_queries - query), end = is_own ? least(num_keys, query + rows) : num_keys;
        for (int64_t i = 0; i < rows; i++) top[i] = -INFINITY, total[i] = 0.0f;
        for (int64_t key = 0; key < end; key += KEYS) {
            const int64_t columns = least(KEYS, end - key), all = rounded_up(columns, LANES);
            multiply(rows, all, 1, dim / 2, (const pair *)at(queries, head, read[0] + query), queries.token / 2, turned + key,
                     width, scores, KEYS);
            for (int64_t i = 0; i < rows; i++) {
                const int64_t seen = is_own ? least(columns, query + i - key + 1) : columns;
                const float kept = weigh(scores + i * KEYS, seen, all, scale, top + i, total + i, weights + i * KEYS);
                if (key)
                    for (int64_t c = 0; c < dim; c += LANES)
                        _mm512_storeu_ps(sums + i * dim + c, _mm512_mul_ps(_mm512_loadu_ps(sums + i * dim + c), _mm512_set1_ps(kept)));
            }
            multiply(rows, dim, key == 0, (columns + 1) / 2, (const pair *)weights, KEYS / 2, paired + key / 2 * dim, dim, sums, dim);
        }
        merge(is_own, rows, dim, sums, top, total, out + (read[0] + query) * out_row + head * dim, out_row, normalizers + read[0] + query);
    }
    end_tiles();
}

/* Bytes that each thread needs, of reads of at most so many keys. */
int64_t strop_attend_scratch(int64_t dim, int64_t most_keys) {
    return 4 * (rounded_up(most_keys, LANES) * dim / 2 + (most_keys + 1) / 2 * dim + QUERIES * KEYS + QUERIES * dim) +
           2 * QUERIES * KEYS + 64;
}

/* Weights of a tile again, as `weights` (keys, queries), and in place of its scores. */
INLINE void weigh_again(int64_t num_keys, int64_t num_queries, int64_t diagonal, float scale, const float *normalizers, float *scores,
                        bf16 *weights) {
    const __m512 factor = _mm512_set1_ps(scale);
    for (int64_t c = 0; c < num_queries; c += LANES) {
        const __mmask16 real = lanes_below(num_queries - c);
        const __m512 shift = _mm512_maskz_loadu_ps(real, normalizers + c);
        for (int64_t j = 0; j < num_keys; j++) {
            const __mmask16 seen = real & (__mmask16)~lanes_below(j - diagonal - c); /* queries from their own key on */
            float *here = scores + j * QUERIES + c;
            __m512 weight = _mm512_maskz_mov_ps(seen, exponential(_mm512_fmsub_ps(_mm512_loadu_ps(here), factor, shift)));
            _mm512_storeu_ps(here, weight);
            store(weights + j * QUERIES + c, weight);
        }
    }
}

/* weights * (to_weights - inner) * scale, as rows of keys, and of each query as pairs of neighbouring keys. */
INLINE void to_scores(int64_t num_keys, int64_t num_queries, float scale, const float *inner, const float *weights,
                      const float *to_weights, bf16 *rows, pair *pairs) {
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512i places = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(KEYS / 2));
    for (int64_t c = 0; c < num_queries; c += LANES) {
        const __m512 less = _mm512_maskz_loadu_ps(lanes_below(num_queries - c), inner + c);
        for (int64_t j = 0; j < num_keys; j += 2) {
            __m256i both[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            for (int n = 0; n < 2 && j + n < num_keys; n++) {
                const int64_t here = (j + n) * QUERIES + c;
                const __m512 weight = _mm512_mul_ps(_mm512_loadu_ps(weights + here), factor);
                both[n] = narrowed(_mm512_mul_ps(weight, _mm512_sub_ps(_mm512_loadu_ps(to_weights + here), less)));
                _mm256_storeu_si256((__m256i *)(rows + here), both[n]);
            }
            _mm512_i32scatter_epi32(pairs + c * (KEYS / 2) + j / 2, places, pairs_of(both[0], both[1]), 4);
        }
    }
}

INLINE float inner_product(const bf16 *a, const bf16 *b, int64_t dim) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += LANES)
        sum = _mm512_fmadd_ps(load(a + i), load(b + i), sum);
    return _mm512_reduce_add_ps(sum);
}

static void attend_backward(const int64_t *read, const Backward *of, int64_t kv_head, void *scratch) {
    const int64_t num_queries = read[1], num_keys = read[3], is_own = read[4], dim = of->dim;
    pair *paired_keys = scratch, *turned = paired_keys + (num_keys + 1) / 2 * dim, *to_turned = turned + dim / 2 * QUERIES;
    pair *paired = to_turned + dim / 2 * QUERIES, *to_paired = paired + QUERIES / 2 * dim, *score_pairs = to_paired + QUERIES / 2 * dim;
    float *scores = (float *)(score_pairs + KEYS / 2 * QUERIES), *to_weights = scores + KEYS * QUERIES;
    bf16 *weights = (bf16 *)(to_weights + KEYS * QUERIES), *score_rows = weights + KEYS * QUERIES;
    float inner[QUERIES];
    float *of_keys = of->of_keys + (kv_head * of->num_tokens + read[2]) * dim;
    float *of_values = of->of_values + (kv_head * of->num_tokens + read[2]) * dim;
    begin_tiles();
    pair_rows(at(of->keys, kv_head, read[2]), of->keys.token, num_keys, dim, paired_keys);
    if (is_own) {
        memset(of_keys, 0, 4 * num_keys * dim);
        memset(of_values, 0, 4 * num_keys * dim);
    }
    for (int64_t head = kv_head * of->group; head < (kv_head + 1) * of->group; head++)
        for (int64_t query = 0; query < num_queries; query += QUERIES) {
            const int64_t columns = least(QUERIES, num_queries - query), all = rounded_up(columns, LANES), token = read[0] + query;
            const int64_t end = is_own ? least(num_keys, query + columns) : num_keys;
            float *of_queries = of->of_queries + (head * of->num_tokens + token) * dim;
            turn_rows(at(of->queries, head, token), of->queries.token, columns, dim, turned, QUERIES);
            turn_rows(at(of->to_out, head, token), of->to_out.token, columns, dim, to_turned, QUERIES);
            pair_rows(at(of->queries, head, token), of->queries.token, columns, dim, paired);
            pair_rows(at(of->to_out, head, token), of->to_out.token, columns, dim, to_paired);
            for (int64_t i = 0; i < columns; i++)
                inner[i] = inner_product(at(of->out, head, token + i), at(of->to_out, head, token + i), dim);
            for (int64_t key = 0; key < end; key += KEYS) {
                const int64_t rows = least(KEYS, end - key), depth = (columns + 1) / 2;
                const int64_t diagonal = is_own ? query - key : rows; /* of the keys before it, all queries see all */
                multiply(rows, all, 1, dim / 2, (const pair *)at(of->keys, kv_head, read[2] + key), of->keys.token / 2, turned,
                         QUERIES, scores, QUERIES);
                weigh_again(rows, columns, diagonal, of->scale, of->normalizers + head * of->num_tokens + token, scores, weights);
                multiply(rows, dim, 0, depth, (const pair *)weights, QUERIES / 2, to_paired, dim, of_values + key * dim, dim);
                multiply(rows, all, 1, dim / 2, (const pair *)at(of->values, kv_head, read[2] + key), of->values.token / 2, to_turned, QUERIES, to_weights, QUERIES);
                to_scores(rows, columns, of->scale, inner, scores, to_weights, score_rows, score_pairs);
                multiply(rows, dim, 0, depth, (const pair *)score_rows, QUERIES / 2, paired, dim, of_keys + key * dim, dim);
                multiply(columns, dim, is_own && key == 0, (rows + 1) / 2, score_pairs, KEYS / 2, paired_keys + key / 2 * dim, dim,
                         of_queries, dim);
            }
        }
    end_tiles();
}

/* Bytes that each thread needs, of reads of at most so many keys. */
int64_t strop_attend_backward_scratch(int64_t dim, int64_t most_keys) {
    return 4 * ((most_keys + 1) / 2 * dim + 2 * dim * QUERIES + KEYS / 2 * QUERIES + 2 * KEYS * QUERIES) + 4 * KEYS * QUERIES + 64;
}

#define ROWS_AT_ONCE 64 /* whose shares of a norm's weight are added up one after the other */

/* out = weight * (x / rms(x)), the second factor rounded, and scales = 1 / rms(x), of (rows, width); width: a multiple of 16. */
void strop_norm_rows(int64_t num_threads, int64_t num_rows, int64_t width, const bf16 *x, const bf16 *weight, float eps, bf16 *out,
                     float *scales) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        const bf16 *from = x + row * width;
        scales[row] = 1.0f / sqrtf(inner_product(from, from, width) / (float)width + eps);
        const __m512 scale = _mm512_set1_ps(scales[row]);
        for (int64_t i = 0; i < width; i += LANES)
            store(out + row * width + i, _mm512_mul_ps(rounded(_mm512_mul_ps(load(from + i), scale)), load(weight + i)));
    }
}

/* With u = x / rms(x) and g the gradient of weight * u: of_x = (weight g - u mean(u weight g)) / rms(x), and of_weight
   (rows / 64 rounded up, width) has the sums of g u over each 64 rows. */
void strop_norm_rows_backward(int64_t num_threads, int64_t num_rows, int64_t width, const bf16 *x, const bf16 *weight,
                              const float *scales, const bf16 *to_out, bf16 *of_x, float *of_weight) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t first = 0; first < num_rows; first += ROWS_AT_ONCE) {
        float *sums = of_weight + first / ROWS_AT_ONCE * width;
        memset(sums, 0, 4 * width);
        for (int64_t row = first; row < least(num_rows, first + ROWS_AT_ONCE); row++) {
            const bf16 *from = x + row * width, *to = to_out + row * width;
            const __m512 scale = _mm512_set1_ps(scales[row]);
            __m512 dots = _mm512_setzero_ps();
            for (int64_t i = 0; i < width; i += LANES) {
                __m512 product = _mm512_mul_ps(_mm512_mul_ps(load(from + i), scale), load(to + i));
                dots = _mm512_fmadd_ps(product, load(weight + i), dots);
                _mm512_storeu_ps(sums + i, _mm512_add_ps(_mm512_loadu_ps(sums + i), product));
            }
            const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(dots) / (float)width * scales[row]);
            for (int64_t i = 0; i < width; i += LANES) {
                __m512 of_unit = _mm512_mul_ps(load(to + i), load(weight + i));
                store(of_x + row * width + i, _mm512_mul_ps(_mm512_fnmadd_ps(load(from + i), mean, of_unit), scale));
            }
        }
    }
}

/* 1 / (1 + exp(-x)) */
INLINE __m512 sigmoid(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
    const __mmask16 is_negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_div_ps(_mm512_mask_mov_ps(one, is_negative, e), _mm512_add_ps(one, e));
}

/* out = silu(gate) * up, the first factor rounded; a multiple of 16 in all. */
void strop_gate(int64_t num_threads, int64_t count, const bf16 *gate, const bf16 *up, bf16 *out) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t i = 0; i < count; i += LANES) {
        const __m512 x = load(gate + i);
        store(out + i, _mm512_mul_ps(rounded(_mm512_mul_ps(x, sigmoid(x))), load(up + i)));
    }
}

/* With s = sigmoid(gate): of_up = to_out gate s and of_gate = to_out up s (1 + gate (1 - s)). */
void strop_gate_backward(int64_t num_threads, int64_t count, const bf16 *gate, const bf16 *up, const bf16 *to_out, bf16 *of_gate,
                         bf16 *of_up) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t i = 0; i < count; i += LANES) {
        const __m512 one = _mm512_set1_ps(1.0f), x = load(gate + i), s = sigmoid(x), g = load(to_out + i);
        const __m512 slope = _mm512_mul_ps(s, _mm512_fmadd_ps(x, _mm512_sub_ps(one, s), one));
        store(of_up + i, _mm512_mul_ps(g, rounded(_mm512_mul_ps(x, s))));
        store(of_gate + i, _mm512_mul_ps(_mm512_mul_ps(g, load(up + i)), slope));
    }
}

/* Of each row of logits, after division by the temperature: the log-prob of its target, the entropy, and the logarithm of the sum of
   exponentials. */
void strop_head(int64_t num_threads, int64_t num_rows, int64_t num_logits, const bf16 *logits, float temperature, const int64_t *targets,
                float *logprobs, float *entropies, float *normalizers) {
    const int64_t whole = num_logits & ~(int64_t)(LANES - 1);
    const __mmask16 rest = lanes_below(num_logits - whole);
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        const bf16 *of = logits + row * num_logits;
        const __m512 low = _mm512_set1_ps(-INFINITY), factor = _mm512_set1_ps(1.0f / temperature);
        const __m512 last = _mm512_mask_mov_ps(low, rest, widened(_mm256_maskz_loadu_epi16(rest, of + whole)));
        __m512 largest = last;
        for (int64_t i = 0; i < whole; i += LANES) largest = _mm512_max_ps(largest, load(of + i));
        const float top = _mm512_reduce_max_ps(largest); /* taken off first: what is left of it is exactly 0 */
        const __m512 shift = _mm512_set1_ps(top);
        __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, dots[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t i = 0; i < whole; i += LANES) {
            const int half = i / LANES & 1;
            const __m512 x = _mm512_mul_ps(_mm512_sub_ps(load(of + i), shift), factor), e = exponential(x);
            sums[half] = _mm512_add_ps(sums[half], e), dots[half] = _mm512_fmadd_ps(x, e, dots[half]);
        }
        const __m512 x = _mm512_maskz_mul_ps(rest, _mm512_sub_ps(last, shift), factor);
        const __m512 e = _mm512_maskz_mov_ps(rest, exponential(x));
        const float sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), e));
        const float dot = _mm512_reduce_add_ps(_mm512_fmadd_ps(x, e, _mm512_add_ps(dots[0], dots[1])));
        normalizers[row] = top / temperature + logf(sum);
        logprobs[row] = (single(of[targets[row]]) - top) / temperature - logf(sum);
        const float entropy = logf(sum) - dot / sum;
        entropies[row] = entropy < 0.0f ? 0.0f : entropy; /* nan stays nan */
    }
}

/* In place of each logit its gradient, with p its probability and H the entropy: p (of_logprob + of_entropy (log p + H)), less
   of_logprob where it is the target; the two factors of a row already have the -1 / temperature of both formulas. */
void strop_head_backward(int64_t num_threads, int64_t num_rows, int64_t num_logits, bf16 *logits, float temperature,
                         const int64_t *targets, const float *normalizers, const float *entropies, const float *of_logprobs,
                         const float *of_entropies) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        bf16 *of = logits + row * num_logits;
        const float first = of_logprobs[row] + of_entropies[row] * entropies[row];
        const __m512 factor = _mm512_set1_ps(1.0f / temperature), shift = _mm512_set1_ps(normalizers[row]);
        const __m512 share = _mm512_set1_ps(first), slope = _mm512_set1_ps(of_entropies[row]);
        for (int64_t i = 0; i < num_logits; i += LANES) {
            const __mmask16 real = lanes_below(num_logits - i);
            const __m512 log_p = _mm512_fmsub_ps(widened(_mm256_maskz_loadu_epi16(real, of + i)), factor, shift);
            __m512 gradient = _mm512_mul_ps(exponential(log_p), _mm512_fmadd_ps(log_p, slope, share));
            if (targets[row] - i >= 0 && targets[row] - i < LANES)
                gradient = _mm512_mask_sub_ps(gradient, (__mmask16)(1u << (targets[row] - i)), gradient, _mm512_set1_ps(of_logprobs[row]));
            _mm256_mask_storeu_epi16(of + i, real, narrowed(gradient));
        }
    }
}
