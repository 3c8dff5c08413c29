/* What attention of rows is in every precision: its reads, and how threads take them. The source that includes this names `number`,
   its precision, before, and defines `attend` and `attend_backward`. */

#pragma once

#include <stdint.h>

#define QUERIES 64 /* of a tile */
#define KEYS 128   /* of a tile */
#define READ 5     /* numbers of a read: first query, queries, first key, keys, whether it is a row's own */

extern int omp_get_thread_num(void); /* of torch's copy of OpenMP */

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

typedef struct {
    const number *first; /* (heads, tokens, dim) with these strides */
    int64_t head, token;
} Heads;

INLINE const number *at(Heads of, int64_t head, int64_t token) { return of.first + head * of.head + token * of.token; }

typedef struct {
    Heads queries, keys, values, out, to_out;
    const float *normalizers;                /* (heads, tokens) */
    float *of_queries, *of_keys, *of_values; /* (heads, tokens, dim), (kv_heads, tokens, dim) twice */
    int64_t num_tokens, dim, group;
    float scale;
} Backward;

/* One read of one query head. scratch: what strop_attend_scratch says. */
static void attend(const int64_t *read, int64_t dim, Heads queries, int64_t head, Heads keys, Heads values, int64_t kv_head,
                   float scale, float *out, int64_t out_row, float *normalizers, void *scratch);

/* One read of the query heads that share one key head. scratch: what strop_attend_backward_scratch says. */
static void attend_backward(const int64_t *read, const Backward *of, int64_t kv_head, void *scratch);

/* out (tokens, heads, dim) and normalizers (heads, tokens), float32: what queries read, and the logarithms of the sums over keys of
   exp(scale * query . key). The reads of a wave are reads[waves[w]] .. reads[waves[w + 1]]. dim: a multiple of 32 in
   bfloat16, of 8 in float32. */
void strop_attend_rows(int64_t num_threads, int64_t num_waves, const int64_t *waves, const int64_t *reads, int64_t num_tokens,
                       int64_t num_heads, int64_t num_kv_heads, int64_t dim, const number *queries, const int64_t *query_strides,
                       const number *keys, const int64_t *key_strides, const number *values, const int64_t *value_strides, float scale,
                       float *out, float *normalizers, char *scratch, int64_t scratch_bytes) {
    const Heads of_queries = {queries, query_strides[0], query_strides[1]}, of_keys = {keys, key_strides[0], key_strides[1]};
    const Heads of_values = {values, value_strides[0], value_strides[1]};
    for (int64_t wave = 0; wave < num_waves; wave++) {
        const int64_t *first = reads + waves[wave] * READ, num_reads = waves[wave + 1] - waves[wave];
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
        for (int64_t item = 0; item < num_reads * num_heads; item++) {
            const int64_t head = item % num_heads, *read = first + item / num_heads * READ;
            attend(read, dim, of_queries, head, of_keys, of_values, head / (num_heads / num_kv_heads), scale, out, num_heads * dim,
                   normalizers + head * num_tokens, scratch + omp_get_thread_num() * scratch_bytes);
        }
    }
}

/* Gradients of what strop_attend_rows gave; `out` and `to_out`, its gradient, in the precision of the heads. A row's own read
   comes before all others of its tokens and sets what they add to. */
void strop_attend_rows_backward(int64_t num_threads, int64_t num_waves, const int64_t *waves, const int64_t *reads, int64_t num_tokens,
                                int64_t num_heads, int64_t num_kv_heads, int64_t dim, const number *queries,
                                const int64_t *query_strides, const number *keys, const int64_t *key_strides, const number *values,
                                const int64_t *value_strides, const number *out, const int64_t *out_strides, const number *to_out,
                                const int64_t *to_out_strides, const float *normalizers, float scale, float *of_queries,
                                float *of_keys, float *of_values, char *scratch, int64_t scratch_bytes) {
    const Backward of = {{queries, query_strides[0], query_strides[1]}, {keys, key_strides[0], key_strides[1]},
                         {values, value_strides[0], value_strides[1]},  {out, out_strides[0], out_strides[1]},
                         {to_out, to_out_strides[0], to_out_strides[1]}, normalizers, of_queries, of_keys, of_values,
                         num_tokens, dim, num_heads / num_kv_heads, scale};
    for (int64_t wave = 0; wave < num_waves; wave++) {
        const int64_t *first = reads + waves[wave] * READ, num_reads = waves[wave + 1] - waves[wave];
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
        for (int64_t item = 0; item < num_reads * num_kv_heads; item++)
            attend_backward(first + item / num_kv_heads * READ, &of, item % num_kv_heads,
                            scratch + omp_get_thread_num() * scratch_bytes);
    }
}
