/* What a decode step in float32 does besides its matrix products, in plain C that a compiler turns into AVX2 instructions.

   The functions of kernels.c under the same names, for caches in float32. A token's result depends on nothing but its own query,
   its own columns and their number: not on the other tokens of a step, nor on which thread computes it. */

#include "draw.h"
#include "float32.h"

#define TILE 128     /* columns between two looks at the largest score */
#define MAX_GROUP 16 /* query heads that share a key head */

/* scores[c] = scale * query . keys[c] of `width` columns. */
INLINE void score(int dim, const float *query, const float *keys, int width, float scale, float *scores) {
    for (int column = 0; column < width; column++) scores[column] = inner_product(query, keys + column * dim, dim) * scale;
}

/* sums += weights[c] * values[c] of `width` columns. */
INLINE void weigh(int dim, const float *weights, const float *values, int width, float *sums) {
    for (int column = 0; column < width; column++) {
        const float *value = values + column * dim, weight = weights[column];
#pragma omp simd
        for (int i = 0; i < dim; i++) sums[i] += weight * value[i];
    }
}

/* One token and the query heads that share one key head: softmax(scale * query keys^T) values of `length` columns, tile by tile. */
INLINE void attend_one(int dim, int group, const float *query, const float *keys, const float *values, int64_t length, int64_t block,
                       int64_t block_stride, float scale, float *out) {
    float sums[MAX_GROUP][MAX_DIM], top[MAX_GROUP], total[MAX_GROUP];
    for (int h = 0; h < group; h++) {
        top[h] = -INFINITY, total[h] = 0.0f;
        for (int i = 0; i < dim; i++) sums[h][i] = 0.0f;
    }
    for (int64_t start = 0; start < length; start += TILE) {
        const int64_t offset = start / block * block_stride + start % block * dim;
        const int width = length - start < TILE ? (int)(length - start) : TILE;
        for (int h = 0; h < group; h++) {
            float scores[TILE], now = top[h], sum = 0.0f;
            score(dim, query + h * dim, keys + offset, width, scale, scores);
            for (int c = 0; c < width; c++) now = scores[c] > now ? scores[c] : now;
#pragma omp simd reduction(+ : sum)
            for (int c = 0; c < width; c++) sum += scores[c] = exponential(scores[c] - now);
            if (start) {
                const float kept = expf(top[h] - now);
                for (int i = 0; i < dim; i++) sums[h][i] *= kept;
                total[h] *= kept;
            }
            total[h] += sum;
            top[h] = now;
            weigh(dim, scores, values + offset, width, sums[h]);
        }
    }
    for (int h = 0; h < group; h++) {
        const float share = 1.0f / total[h];
        for (int i = 0; i < dim; i++) out[h * dim + i] = sums[h][i] * share;
    }
}

/* out (tokens, heads * dim) = what each token's queries read of the first `lengths[t]` columns of slot `slots[t]`. That the first
   `lent[t]` are the same in slot `lenders[t]` is not used.

   queries: (tokens, query_stride), the query heads first. keys, values: the cache of one layer, (blocks, slots, kv_heads,
   block, dim). dim: at most 256; block: a multiple of 128. */
void strop_attend(int64_t num_threads, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t block,
                  int64_t block_stride, int64_t query_stride, const float *queries, const float *keys, const float *values,
                  const int64_t *slots, const int64_t *lengths, const int64_t *lenders, const int64_t *lent, float scale,
                  float *out) {
    const int group = (int)(num_heads / num_kv_heads);
    (void)lenders, (void)lent;
#pragma omp parallel for schedule(dynamic, 8) num_threads(num_threads)
    for (int64_t item = 0; item < num_tokens * num_kv_heads; item++) {
        const int64_t token = item % num_tokens, head = item / num_tokens, length = lengths[token];
        const int64_t own = (slots[token] * num_kv_heads + head) * block * dim;
        const float *query = queries + token * query_stride + head * group * dim;
        float *target = out + (token * num_heads + head * group) * dim;
        if (dim == 64)
            attend_one(64, group, query, keys + own, values + own, length, block, block_stride, scale, target);
        else if (dim == 128)
            attend_one(128, group, query, keys + own, values + own, length, block, block_stride, scale, target);
        else
            attend_one((int)dim, group, query, keys + own, values + own, length, block, block_stride, scale, target);
    }
}

INLINE void norm_one(const float *x, const float *weight, int64_t width, float eps, float *out) {
    const float factor = 1.0f / sqrtf(inner_product(x, x, width) / (float)width + eps);
    for (int64_t i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
}

/* RMSNorm of (rows, width). */
void strop_norm(int64_t num_threads, int64_t num_rows, int64_t width, const float *x, const float *weight, float eps, float *out) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) norm_one(x + row * width, weight, width, eps, out + row * width);
}

INLINE void turn(float *head, const float *cosines, const float *sines, int64_t dim) {
    float *high = head + dim / 2;
    for (int64_t i = 0; i < dim / 2; i++) {
        const float a = head[i], b = high[i];
        head[i] = a * cosines[i] + b * sines[i];
        high[i] = b * cosines[dim / 2 + i] + a * sines[dim / 2 + i];
    }
}

/* Norm (where there are weights) and turn the queries and keys of each token in place, and put its keys and values into the cache.

   qkv: (tokens, (heads + 2 kv_heads) * dim). cosines, sines: (positions, dim), the first half of the sines negated. */
void strop_place(int64_t num_threads, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t block,
                 int64_t block_stride, float *qkv, const float *cosines, const float *sines, const float *q_norm,
                 const float *k_norm, float eps, const int64_t *slots, const int64_t *positions, float *keys, float *values) {
    const int64_t stride = (num_heads + 2 * num_kv_heads) * dim;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t token = 0; token < num_tokens; token++) {
        const int64_t position = positions[token];
        float *own = qkv + token * stride;
        for (int64_t head = 0; head < num_heads + num_kv_heads; head++) {
            const float *weight = head < num_heads ? q_norm : k_norm;
            if (weight) norm_one(own + head * dim, weight, dim, eps, own + head * dim);
            turn(own + head * dim, cosines + position * dim, sines + position * dim, dim);
        }
        const float *key = own + num_heads * dim, *value = key + num_kv_heads * dim;
        for (int64_t head = 0; head < num_kv_heads; head++) {
            const int64_t place = position / block * block_stride + ((slots[token] * num_kv_heads + head) * block + position % block) * dim;
            memcpy(keys + place, key + head * dim, (size_t)dim * sizeof(float));
            memcpy(values + place, value + head * dim, (size_t)dim * sizeof(float));
        }
    }
}

/* drawn (3, rows): of each row of logits the id at which the cumulative probability passes the row's uniform number, or the likeliest
   one at temperature 0; its log-prob; and the entropy. */
void strop_draw(int64_t num_threads, int64_t num_rows, int64_t num_logits, const float *logits, const float *temperatures,
                const double *uniforms, double *drawn) {
    const int64_t num_blocks = (num_logits + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *of = logits + row * num_logits;
        const int is_greedy = temperatures[row] == 0.0f;
        const float factor = is_greedy ? 1.0f : 1.0f / temperatures[row];
        float top = -INFINITY, dot = 0.0f, sums[num_blocks], parts[BLOCK];
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < num_logits; i++) top = of[i] > top ? of[i] : top;
        double total = 0.0, before = 0.0;
        for (int64_t block = 0; block < num_blocks; block++) {
            const int64_t end = num_logits < (block + 1) * BLOCK ? num_logits : (block + 1) * BLOCK;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum, dot)
            for (int64_t i = block * BLOCK; i < end; i++) {
                const float x = (of[i] - top) * factor, e = exponential(x);
                sum += e, dot += x < -87.0f ? 0.0f : x * e;
            }
            total += sums[block] = sum;
        }
        int64_t id = 0;
        if (is_greedy)
            while (id < num_logits - 1 && of[id] != top) id++;
        else {
            const double threshold = uniforms[row] * total;
            const int64_t start = BLOCK * passed_at(threshold, sums, num_blocks, &before);
            const int64_t left = num_logits - start < BLOCK ? num_logits - start : BLOCK;
            for (int64_t i = 0; i < left; i++) parts[i] = exponential((of[start + i] - top) * factor);
            id = start + passed_within(threshold - before, parts, left);
        }
        const float log_total = logf((float)total), entropy = log_total - dot / (float)total;
        drawn[row] = (double)id;
        drawn[num_rows + row] = (of[id] - top) * factor - log_total;
        drawn[2 * num_rows + row] = entropy < 0.0f ? 0.0f : entropy; /* nan stays nan */
    }
}
