/* Attention of rows that are laid end to end, norms, gates and log-probs, and their gradients, in float32.

   The functions of kernels.c under the same names, which says what they are; in plain C that a compiler turns into AVX2
   instructions. */

#include "float32.h"

typedef float number;

#include "rows.h"

/* sums (rows, columns of registers) = or += left right. `left` has its number k of row r at r * left_row + k * left_step. */
INLINE void multiply_tile(int rows, int columns, int is_new, int64_t depth, const float *left, int64_t left_row, int64_t left_step,
                          const float *right, int64_t right_step, float *sums, int64_t sums_row) {
    vec of[4][3];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) of[r][c] = is_new ? (vec){0.0f} : *(const vec *)(sums + r * sums_row + c * LANES);
    for (int64_t k = 0; k < depth; k++) {
        vec factors[3];
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) factors[c] = *(const vec *)(right + k * right_step + c * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const float one = left[r * left_row + k * left_step];
#pragma GCC unroll 3
            for (int c = 0; c < columns; c++) of[r][c] += one * factors[c];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int c = 0; c < columns; c++) *(vec *)(sums + r * sums_row + c * LANES) = of[r][c];
}

#define TILE(rows, columns) \
    multiply_tile(rows, columns, is_new, depth, left_here, left_row, left_step, right_here, right_step, here, sums_row)

#define TILES(columns)                   \
    switch (least(4, num_rows - row)) {  \
        case 1: TILE(1, columns); break; \
        case 2: TILE(2, columns); break; \
        case 3: TILE(3, columns); break; \
        default: TILE(4, columns);       \
    }

/* As multiply_tile, of any number of rows and 8, 16, 24 ... columns. */
static void multiply(int64_t num_rows, int64_t num_columns, int is_new, int64_t depth, const float *left, int64_t left_row,
                     int64_t left_step, const float *right, int64_t right_step, float *sums, int64_t sums_row) {
    for (int64_t column = 0; column < num_columns; column += 3 * LANES)
        for (int64_t row = 0; row < num_rows; row += 4) {
            const float *left_here = left + row * left_row, *right_here = right + column;
            float *here = sums + row * sums_row + column;
            switch ((num_columns - column) / LANES) {
                case 1: TILES(1); break;
                case 2: TILES(2); break;
                default: TILES(3);
            }
        }
}

/* out (dim, width): each row of `from` becomes a column; zeros fill the columns up to a multiple of 8. */
static void turn_rows(const float *from, int64_t stride, int64_t num_rows, int64_t dim, float *out, int64_t width) {
    for (int64_t i = 0; i < dim; i++) {
        float *to = out + i * width;
        for (int64_t row = 0; row < num_rows; row++) to[row] = from[row * stride + i];
        for (int64_t row = num_rows; row < rounded_up(num_rows, LANES); row++) to[row] = 0.0f;
    }
}

/* A row of scores becomes weights; its largest score and the sum of weights go on in `top` and `total`. Returns what earlier sums
   are to be multiplied with. */
INLINE float weigh(float *scores, int64_t num_seen, int64_t num_all, float scale, float *top, float *total) {
    float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t c = 0; c < num_seen; c++) largest = scores[c] > largest ? scores[c] : largest;
    const float before = *top, now = fmaxf(before, largest * scale);
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < num_seen; c++) sum += scores[c] = exponential(scores[c] * scale - now);
    for (int64_t c = num_seen; c < num_all; c++) scores[c] = 0.0f;
    const float kept = before == -INFINITY ? 0.0f : expf(before - now);
    *top = now, *total = *total * kept + sum;
    return kept;
}

/* Puts what the queries of a tile read next to what they read before: out (queries, dim), normalizers (queries,). */
INLINE void merge(int is_first, int64_t num_queries, int64_t dim, const float *sums, const float *top, const float *total,
                  float *out, int64_t out_row, float *normalizers) {
    for (int64_t i = 0; i < num_queries; i++) {
        const float here = top[i] + logf(total[i]), *from = sums + i * dim;
        float *to = out + i * out_row, share = 1.0f / total[i];
        if (is_first) {
            normalizers[i] = here;
            for (int64_t c = 0; c < dim; c++) to[c] = from[c] * share;
        } else {
            const float old = normalizers[i], most = fmaxf(old, here), both = most + log1pf(expf(fminf(old, here) - most));
            const float before = expf(old - both);
            share *= expf(here - both);
            normalizers[i] = both;
            for (int64_t c = 0; c < dim; c++) to[c] = to[c] * before + from[c] * share;
        }
    }
}

static void attend(const int64_t *read, int64_t dim, Heads queries, int64_t head, Heads keys, Heads values, int64_t kv_head,
                   float scale, float *out, int64_t out_row, float *normalizers, void *scratch) {
    const int64_t num_queries = read[1], num_keys = read[3], is_own = read[4], width = rounded_up(num_keys, LANES);
    float *turned = scratch, *scores = turned + width * dim, *sums = scores + QUERIES * KEYS, top[QUERIES], total[QUERIES];
    turn_rows(at(keys, kv_head, read[2]), keys.token, num_keys, dim, turned, width);
    for (int64_t query = 0; query < num_queries; query += QUERIES) {
        const int64_t rows = least(QUERIES, num_queries - query), end = is_own ? least(num_keys, query + rows) : num_keys;
        for (int64_t i = 0; i < rows; i++) top[i] = -INFINITY, total[i] = 0.0f;
        for (int64_t key = 0; key < end; key += KEYS) {
            const int64_t columns = least(KEYS, end - key), all = rounded_up(columns, LANES);
            multiply(rows, all, 1, dim, at(queries, head, read[0] + query), queries.token, 1, turned + key, width, scores, KEYS);
            for (int64_t i = 0; i < rows; i++) {
                const int64_t seen = is_own ? least(columns, query + i - key + 1) : columns;
                const float kept = weigh(scores + i * KEYS, seen, columns, scale, top + i, total + i);
                if (key)
                    for (int64_t c = 0; c < dim; c++) sums[i * dim + c] *= kept;
            }
            multiply(rows, dim, key == 0, columns, scores, KEYS, 1, at(values, kv_head, read[2] + key), values.token, sums, dim);
        }
        merge(is_own, rows, dim, sums, top, total, out + (read[0] + query) * out_row + head * dim, out_row, normalizers + read[0] + query);
    }
}

int64_t strop_attend_scratch(int64_t dim, int64_t most_keys) {
    return 4 * (rounded_up(most_keys, LANES) * dim + QUERIES * KEYS + QUERIES * dim);
}

static void attend_backward(const int64_t *read, const Backward *of, int64_t kv_head, void *scratch) {
    const int64_t num_queries = read[1], num_keys = read[3], is_own = read[4], dim = of->dim;
    float *turned = scratch, *to_turned = turned + dim * QUERIES, *weights = to_turned + dim * QUERIES;
    float *to_weights = weights + KEYS * QUERIES, inner[QUERIES];
    float *of_keys = of->of_keys + (kv_head * of->num_tokens + read[2]) * dim;
    float *of_values = of->of_values + (kv_head * of->num_tokens + read[2]) * dim;
    if (is_own) {
        memset(of_keys, 0, (size_t)(4 * num_keys * dim));
        memset(of_values, 0, (size_t)(4 * num_keys * dim));
    }
    for (int64_t head = kv_head * of->group; head < (kv_head + 1) * of->group; head++)
        for (int64_t query = 0; query < num_queries; query += QUERIES) {
            const int64_t columns = least(QUERIES, num_queries - query), all = rounded_up(columns, LANES), token = read[0] + query;
            const int64_t end = is_own ? least(num_keys, query + columns) : num_keys;
            const float *own = at(of->queries, head, token), *to_out = at(of->to_out, head, token);
            const float *normalizers = of->normalizers + head * of->num_tokens + token;
            float *of_queries = of->of_queries + (head * of->num_tokens + token) * dim;
            turn_rows(own, of->queries.token, columns, dim, turned, QUERIES);
            turn_rows(to_out, of->to_out.token, columns, dim, to_turned, QUERIES);
            for (int64_t i = 0; i < columns; i++) inner[i] = inner_product(at(of->out, head, token + i), at(of->to_out, head, token + i), dim);
            for (int64_t key = 0; key < end; key += KEYS) {
                const int64_t rows = least(KEYS, end - key);
                const float *keys = at(of->keys, kv_head, read[2] + key), *values = at(of->values, kv_head, read[2] + key);
                multiply(rows, all, 1, dim, keys, of->keys.token, 1, turned, QUERIES, weights, QUERIES);
                multiply(rows, all, 1, dim, values, of->values.token, 1, to_turned, QUERIES, to_weights, QUERIES);
                for (int64_t j = 0; j < rows; j++) {
                    const int64_t unseen = is_own ? least(columns, key + j > query ? key + j - query : 0) : 0;
                    float *weight = weights + j * QUERIES, *to_weight = to_weights + j * QUERIES;
                    for (int64_t i = 0; i < unseen; i++) weight[i] = to_weight[i] = 0.0f; /* queries before the key */
#pragma omp simd
                    for (int64_t i = unseen; i < columns; i++) {
                        weight[i] = exponential(weight[i] * of->scale - normalizers[i]);
                        to_weight[i] = weight[i] * of->scale * (to_weight[i] - inner[i]);
                    }
                }
                multiply(rows, dim, 0, columns, weights, QUERIES, 1, to_out, of->to_out.token, of_values + key * dim, dim);
                multiply(rows, dim, 0, columns, to_weights, QUERIES, 1, own, of->queries.token, of_keys + key * dim, dim);
                multiply(columns, dim, is_own && key == 0, rows, to_weights, 1, QUERIES, keys, of->keys.token, of_queries, dim);
            }
        }
}

int64_t strop_attend_backward_scratch(int64_t dim, int64_t most_keys) {
    (void)most_keys;
    return 4 * 2 * (dim * QUERIES + KEYS * QUERIES);
}

#define ROWS_AT_ONCE 64 /* whose shares of a norm's weight are added up one after the other */

void strop_norm_rows(int64_t num_threads, int64_t num_rows, int64_t width, const float *x, const float *weight, float eps, float *out,
                     float *scales) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *from = x + row * width, scale = 1.0f / sqrtf(inner_product(from, from, width) / (float)width + eps);
        float *to = out + row * width;
        scales[row] = scale;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = from[i] * scale * weight[i];
    }
}

void strop_norm_rows_backward(int64_t num_threads, int64_t num_rows, int64_t width, const float *x, const float *weight,
                              const float *scales, const float *to_out, float *of_x, float *of_weight) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t first = 0; first < num_rows; first += ROWS_AT_ONCE) {
        float *sums = of_weight + first / ROWS_AT_ONCE * width;
        memset(sums, 0, (size_t)(4 * width));
        for (int64_t row = first; row < least(num_rows, first + ROWS_AT_ONCE); row++) {
            const float *from = x + row * width, *to = to_out + row * width, scale = scales[row];
            float *of_row = of_x + row * width, dots = 0.0f;
#pragma omp simd reduction(+ : dots)
            for (int64_t i = 0; i < width; i++) {
                const float product = from[i] * scale * to[i];
                dots += product * weight[i];
                sums[i] += product;
            }
            const float mean = dots / (float)width * scale;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) of_row[i] = (to[i] * weight[i] - from[i] * mean) * scale;
        }
    }
}

INLINE float sigmoid(float x) {
    const float e = exponential(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

void strop_gate(int64_t num_threads, int64_t count, const float *gate, const float *up, float *out) {
#pragma omp parallel for simd schedule(static) num_threads(num_threads)
    for (int64_t i = 0; i < count; i++) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

void strop_gate_backward(int64_t num_threads, int64_t count, const float *gate, const float *up, const float *to_out, float *of_gate,
                         float *of_up) {
#pragma omp parallel for simd schedule(static) num_threads(num_threads)
    for (int64_t i = 0; i < count; i++) {
        const float x = gate[i], s = sigmoid(x), g = to_out[i];
        of_up[i] = g * x * s;
        of_gate[i] = g * up[i] * s * (x * (1.0f - s) + 1.0f);
    }
}

void strop_head(int64_t num_threads, int64_t num_rows, int64_t num_logits, const float *logits, float temperature, const int64_t *targets,
                float *logprobs, float *entropies, float *normalizers) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *of = logits + row * num_logits, factor = 1.0f / temperature;
        float top = -INFINITY, sum = 0.0f, dot = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < num_logits; i++) top = of[i] > top ? of[i] : top; /* taken off first: what is left of it is 0 */
#pragma omp simd reduction(+ : sum, dot)
        for (int64_t i = 0; i < num_logits; i++) {
            const float x = (of[i] - top) * factor, e = exponential(x);
            sum += e, dot += x * e;
        }
        const float entropy = logf(sum) - dot / sum;
        normalizers[row] = top / temperature + logf(sum);
        logprobs[row] = (of[targets[row]] - top) / temperature - logf(sum);
        entropies[row] = entropy < 0.0f ? 0.0f : entropy; /* nan stays nan */
    }
}

void strop_head_backward(int64_t num_threads, int64_t num_rows, int64_t num_logits, float *logits, float temperature,
                         const int64_t *targets, const float *normalizers, const float *entropies, const float *of_logprobs,
                         const float *of_entropies) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        float *of = logits + row * num_logits;
        const float share = of_logprobs[row] + of_entropies[row] * entropies[row], slope = of_entropies[row];
#pragma omp simd
        for (int64_t i = 0; i < num_logits; i++) {
            const float log_p = of[i] * (1.0f / temperature) - normalizers[row];
            of[i] = exponential(log_p) * (log_p * slope + share);
        }
        of[targets[row]] -= of_logprobs[row];
    }
}
