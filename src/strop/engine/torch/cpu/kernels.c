/* What a decode step in bfloat16 does besides its matrix products, for processors with AVX-512 BF16.

   Compiled where strop runs, by whatever C compiler is there (compiled.py). A token's result depends on nothing but its own
   query, its own columns and their number: not on the other tokens of a step, nor on which thread computes it. */

#include "avx512.h"
#include "draw.h"

#define TILE 128  /* columns between two looks at the largest score */
#define MAX_GROUP 16 /* query heads that share a key head */
#define HEADS_AT_ONCE 3 /* of a group: their sums fit into the registers */

/* In each quarter of the result: what is left to add up of a, b, c and d. */
INLINE __m512 fold(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}

INLINE __m512 fold_quarters(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* scores[c] = scale * query . keys[c] of `width` columns, the first `cut` of them (a multiple of 16) of `lent`; -inf up to the
   next 16. */
INLINE void score(int dim, const bf16 *query, const bf16 *lent, const bf16 *own, int cut, int width, float scale, float *scores) {
    __m512bh q[MAX_DIM / PAIRED];
    for (int i = 0; i < dim / PAIRED; i++) q[i] = load_pairs(query + i * PAIRED);
    for (int column = 0; column < width; column += LANES) {
        const bf16 *keys = column < cut ? lent : own;
        __m512 quads[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __m512 sums[4];
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) {
                sums[n] = _mm512_setzero_ps();
                for (int i = 0; i < dim / PAIRED; i++)
                    sums[n] = _mm512_dpbf16_ps(sums[n], q[i], load_pairs(keys + (column + 4 * j + n) * dim + i * PAIRED));
            }
            quads[j] = fold(sums[0], sums[1], sums[2], sums[3]);
        }
        __m512 found = fold_quarters(fold_quarters(quads[0], quads[1]), fold_quarters(quads[2], quads[3]));
        int left = width - column;
        __mmask16 real = left < LANES ? (__mmask16)((1u << left) - 1) : (__mmask16)0xffff;
        found = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), real, found, _mm512_set1_ps(scale));
        _mm512_store_ps(scores + column, found);
    }
}

/* low, high += weights[h] . values of the columns `from` to `to`, both even, of `count` heads and 32 dimensions. */
INLINE void add_columns(int dim, int count, uint32_t (*weights)[TILE / 2], const bf16 *values, int from, int to, __m512 *low,
                        __m512 *high) {
    for (int column = from; column < to; column += 2) {
        const bf16 *value = values + column * dim;
        __m512i a = _mm512_loadu_si512(value), b = _mm512_loadu_si512(value + dim);
        __m512bh first = (__m512bh)_mm512_unpacklo_epi16(a, b), second = (__m512bh)_mm512_unpackhi_epi16(a, b);
        for (int h = 0; h < count; h++) {
            __m512bh weight = (__m512bh)_mm512_set1_epi32((int)weights[h][column / 2]);
            low[h] = _mm512_dpbf16_ps(low[h], first, weight);
            high[h] = _mm512_dpbf16_ps(high[h], second, weight);
        }
    }
}

/* sums[h] += weights[h] . values of `width` columns, of `count` heads; weights are bfloat16, two columns to a word. */
INLINE void weigh(int dim, int count, uint32_t (*weights)[TILE / 2], const bf16 *lent, const bf16 *own, int cut, int width,
                  float (*sums)[MAX_DIM]) {
    for (int i = 0; i < dim; i += PAIRED) {
        __m512 low[HEADS_AT_ONCE], high[HEADS_AT_ONCE];
        for (int h = 0; h < count; h++) low[h] = _mm512_load_ps(sums[h] + i), high[h] = _mm512_load_ps(sums[h] + i + LANES);
        add_columns(dim, count, weights, lent + i, 0, cut, low, high);
        add_columns(dim, count, weights, own + i, cut, width, low, high);
        for (int h = 0; h < count; h++) _mm512_store_ps(sums[h] + i, low[h]), _mm512_store_ps(sums[h] + i + LANES, high[h]);
    }
}

/* One key head of one layer's cache, and how to walk over it. */
typedef struct {
    const bf16 *keys, *values;           /* of the token's own slot */
    const bf16 *lent_keys, *lent_values; /* of the slot that holds the same first columns */
    int64_t lent;                        /* how many of them, a multiple of 16 */
    int64_t length;                      /* of all columns */
    int64_t block, block_stride;
} Columns;

/* One token and the query heads that share one key head: softmax(scale * query keys^T) values, tile by tile. Where columns are
   read from changes no bit. */
INLINE void attend_one(int dim, int group, const bf16 *query, Columns of, float scale, bf16 *out) {
    float scores[TILE] __attribute__((aligned(64)));
    uint32_t weights[MAX_GROUP][TILE / 2] __attribute__((aligned(64)));
    float sums[MAX_GROUP][MAX_DIM] __attribute__((aligned(64)));
    float top[MAX_GROUP], total[MAX_GROUP];
    for (int h = 0; h < group; h++) {
        top[h] = -INFINITY, total[h] = 0.0f;
        for (int i = 0; i < dim; i += LANES) _mm512_store_ps(sums[h] + i, _mm512_setzero_ps());
    }
    for (int64_t start = 0; start < of.length; start += TILE) {
        const int64_t offset = start / of.block * of.block_stride + start % of.block * dim;
        const int width = of.length - start < TILE ? (int)(of.length - start) : TILE;
        const int cut = of.lent <= start ? 0 : of.lent - start < width ? (int)(of.lent - start) : width & ~(LANES - 1);
        const bf16 *keys = of.keys + offset, *values = of.values + offset;
        const bf16 *lent_keys = of.lent_keys + offset, *lent_values = of.lent_values + offset;
        for (int h = 0; h < group; h++) {
            score(dim, query + h * dim, lent_keys, keys, cut, width, scale, scores);
            __m512 largest = _mm512_set1_ps(top[h]);
            for (int c = 0; c < width; c += LANES) largest = _mm512_max_ps(largest, _mm512_load_ps(scores + c));
            const float now = _mm512_reduce_max_ps(largest);
            __m512 sum = _mm512_setzero_ps();
            for (int c = 0; c < width; c += LANES) {
                __m512 found = _mm512_load_ps(scores + c);
                __mmask16 real = _mm512_cmp_ps_mask(found, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ); /* nan stays nan */
                found = _mm512_maskz_mov_ps(real, exponential(_mm512_sub_ps(found, _mm512_set1_ps(now))));
                sum = _mm512_add_ps(sum, found);
                _mm256_store_si256((__m256i *)(weights[h] + c / 2), (__m256i)_mm512_cvtneps_pbh(found));
            }
            const float kept = start ? expf(top[h] - now) : 0.0f;
            total[h] = total[h] * kept + _mm512_reduce_add_ps(sum);
            top[h] = now;
            if (start)
                for (int i = 0; i < dim; i += LANES)
                    _mm512_store_ps(sums[h] + i, _mm512_mul_ps(_mm512_load_ps(sums[h] + i), _mm512_set1_ps(kept)));
        }
        int h = 0;
        for (; h + HEADS_AT_ONCE <= group; h += HEADS_AT_ONCE)
            weigh(dim, HEADS_AT_ONCE, weights + h, lent_values, values, cut, width, sums + h);
        if (group - h == 2) weigh(dim, 2, weights + h, lent_values, values, cut, width, sums + h);
        if (group - h == 1) weigh(dim, 1, weights + h, lent_values, values, cut, width, sums + h);
    }
    /* The sums are in the order in which two columns interleave: each half of a register's quarters lies apart. */
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int h = 0; h < group; h++) {
        const __m512 share = _mm512_set1_ps(1.0f / total[h]);
        for (int i = 0; i < dim; i += PAIRED) {
            __m512 low = _mm512_mul_ps(_mm512_load_ps(sums[h] + i), share);
            __m512 high = _mm512_mul_ps(_mm512_load_ps(sums[h] + i + LANES), share);
            store(out + h * dim + i, _mm512_permutex2var_ps(low, first, high));
            store(out + h * dim + i + LANES, _mm512_permutex2var_ps(low, second, high));
        }
    }
}

/* out (tokens, heads * dim) = what each token's queries read of the first `lengths[t]` columns of slot `slots[t]`, of which the
   first `lent[t]` are read in slot `lenders[t]`, where they are the same.

   queries: (tokens, query_stride), the query heads first. keys, values: the cache of one layer, (blocks, slots, kv_heads,
   block, dim). dim: 64, 128 or another multiple of 32, at most 256; block: a multiple of 128. */
void strop_attend(int64_t num_threads, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t block,
                  int64_t block_stride, int64_t query_stride, const bf16 *queries, const bf16 *keys, const bf16 *values,
                  const int64_t *slots, const int64_t *lengths, const int64_t *lenders, const int64_t *lent, float scale,
                  bf16 *out) {
    const int group = (int)(num_heads / num_kv_heads);
    /* Neighbours read the same columns, tokens of a chunk and rollouts of a prompt: with heads as the outer loop they find them
       in the processor's cache. */
#pragma omp parallel for schedule(dynamic, 8) num_threads(num_threads)
    for (int64_t item = 0; item < num_tokens * num_kv_heads; item++) {
        const int64_t token = item % num_tokens, head = item / num_tokens;
        const int64_t own = (slots[token] * num_kv_heads + head) * block * dim;
        const int64_t lender = (lenders[token] * num_kv_heads + head) * block * dim;
        const Columns of = {keys + own,    values + own, keys + lender, values + lender, lent[token] & ~(int64_t)(LANES - 1),
                            lengths[token], block,        block_stride};
        const bf16 *query = queries + token * query_stride + head * group * dim;
        bf16 *target = out + (token * num_heads + head * group) * dim;
        if (dim == 64)
            attend_one(64, group, query, of, scale, target);
        else if (dim == 128)
            attend_one(128, group, query, of, scale, target);
        else
            attend_one((int)dim, group, query, of, scale, target);
    }
}

INLINE float root_mean_square(const bf16 *x, int64_t width, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += LANES) {
        __m512 part = load(x + i);
        squares = _mm512_fmadd_ps(part, part, squares);
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)width + eps);
}

INLINE void norm_one(const bf16 *x, const bf16 *weight, int64_t width, float eps, bf16 *out) {
    const __m512 factor = _mm512_set1_ps(root_mean_square(x, width, eps));
    for (int64_t i = 0; i < width; i += LANES)
        store(out + i, _mm512_mul_ps(rounded(_mm512_mul_ps(load(x + i), factor)), load(weight + i)));
}

/* RMSNorm of (rows, width), rounded before the weight and after it; width: a multiple of 16. */
void strop_norm(int64_t num_threads, int64_t num_rows, int64_t width, const bf16 *x, const bf16 *weight, float eps, bf16 *out) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) norm_one(x + row * width, weight, width, eps, out + row * width);
}

INLINE void turn(bf16 *head, const bf16 *cosines, const bf16 *sines, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        __m512 low = load(head + i), high = load(head + half + i);
        __m512 turned = _mm512_fmadd_ps(high, load(sines + i), _mm512_mul_ps(low, load(cosines + i)));
        __m512 other = _mm512_fmadd_ps(low, load(sines + half + i), _mm512_mul_ps(high, load(cosines + half + i)));
        store(head + i, turned);
        store(head + half + i, other);
    }
}

/* Norm (where there are weights) and turn the queries and keys of each token in place, and put its keys and values into the cache.

   qkv: (tokens, (heads + 2 kv_heads) * dim). cosines, sines: (positions, dim), the first half of the sines negated. */
void strop_place(int64_t num_threads, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t block,
                 int64_t block_stride, bf16 *qkv, const bf16 *cosines, const bf16 *sines, const bf16 *q_norm, const bf16 *k_norm,
                 float eps, const int64_t *slots, const int64_t *positions, bf16 *keys, bf16 *values) {
    const int64_t stride = (num_heads + 2 * num_kv_heads) * dim;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t token = 0; token < num_tokens; token++) {
        const int64_t position = positions[token];
        const bf16 *cosine = cosines + position * dim, *sine = sines + position * dim;
        bf16 *own = qkv + token * stride;
        for (int64_t head = 0; head < num_heads + num_kv_heads; head++) {
            const bf16 *weight = head < num_heads ? q_norm : k_norm;
            if (weight) norm_one(own + head * dim, weight, dim, eps, own + head * dim);
            turn(own + head * dim, cosine, sine, dim);
        }
        const bf16 *key = own + num_heads * dim, *value = key + num_kv_heads * dim;
        for (int64_t head = 0; head < num_kv_heads; head++) {
            const int64_t place = position / block * block_stride + ((slots[token] * num_kv_heads + head) * block + position % block) * dim;
            for (int64_t i = 0; i < dim; i += PAIRED) {
                _mm512_storeu_si512(keys + place + i, _mm512_loadu_si512(key + head * dim + i));
                _mm512_storeu_si512(values + place + i, _mm512_loadu_si512(value + head * dim + i));
            }
        }
    }
}

/* LANES logits of a row, of which `left` are there: less its largest one, over the temperature, in `scaled`; and their exponentials.
   Both are 0 where the exponential is too small to be drawn. */
INLINE __m512 exponentials(const bf16 *logits, int64_t left, __m512 top, __m512 factor, __m512 *scaled) {
    const __mmask16 real = lanes_below(left);
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(widened(_mm256_maskz_loadu_epi16(real, logits)), top), factor);
    const __mmask16 counts = _mm512_mask_cmp_ps_mask(real, x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ); /* nan counts */
    *scaled = _mm512_maskz_mov_ps(counts, x);
    return _mm512_maskz_mov_ps(counts, exponential(x));
}

/* drawn (3, rows): of each row of logits the id at which the cumulative probability passes the row's uniform number, or the likeliest
   one at temperature 0; its log-prob; and the entropy. */
void strop_draw(int64_t num_threads, int64_t num_rows, int64_t num_logits, const bf16 *logits, const float *temperatures,
                const double *uniforms, double *drawn) {
    const int64_t num_blocks = (num_logits + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        const bf16 *of = logits + row * num_logits;
        const int is_greedy = temperatures[row] == 0.0f;
        const float factor = is_greedy ? 1.0f : 1.0f / temperatures[row];
        __m512 largest = _mm512_set1_ps(-INFINITY), dots = _mm512_setzero_ps(), scaled;
        for (int64_t i = 0; i < num_logits; i += LANES) {
            const __mmask16 real = lanes_below(num_logits - i);
            largest = _mm512_mask_max_ps(largest, real, largest, widened(_mm256_maskz_loadu_epi16(real, of + i)));
        }
        const float top = _mm512_reduce_max_ps(largest);
        float sums[num_blocks], parts[BLOCK] __attribute__((aligned(64)));
        double total = 0.0, before = 0.0;
        for (int64_t block = 0; block < num_blocks; block++) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = block * BLOCK; i < num_logits && i < (block + 1) * BLOCK; i += LANES) {
                const __m512 e = exponentials(of + i, num_logits - i, _mm512_set1_ps(top), _mm512_set1_ps(factor), &scaled);
                sum = _mm512_add_ps(sum, e), dots = _mm512_fmadd_ps(scaled, e, dots);
            }
            total += sums[block] = _mm512_reduce_add_ps(sum);
        }
        int64_t id = 0;
        if (is_greedy)
            while (id < num_logits - 1 && single(of[id]) != top) id++;
        else {
            const double threshold = uniforms[row] * total;
            const int64_t start = BLOCK * passed_at(threshold, sums, num_blocks, &before);
            const int64_t left = num_logits - start < BLOCK ? num_logits - start : BLOCK;
            for (int64_t i = 0; i < left; i += LANES)
                _mm512_store_ps(parts + i, exponentials(of + start + i, left - i, _mm512_set1_ps(top), _mm512_set1_ps(factor), &scaled));
            id = start + passed_within(threshold - before, parts, left);
        }
        const float log_total = logf((float)total), entropy = log_total - _mm512_reduce_add_ps(dots) / (float)total;
        drawn[row] = (double)id;
        drawn[num_rows + row] = (single(of[id]) - top) * factor - log_total;
        drawn[2 * num_rows + row] = entropy < 0.0f ? 0.0f : entropy; /* nan stays nan */
    }
}
