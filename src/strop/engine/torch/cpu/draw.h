/* Where a cumulative sum passes a threshold, for the draw of a token. */

#pragma once

#include <stdint.h>

#define BLOCK 256 /* ids whose probabilities are added up first */

/* Returns the part in which the sum passes the threshold, and adds the parts before it to `before`. */
static inline int64_t passed_at(double threshold, const float *parts, int64_t count, double *before) {
    int64_t place = 0;
    while (place < count - 1 && *before + parts[place] <= threshold) *before += parts[place++];
    return place;
}

/* The same where the threshold may lie a little outside of what the parts add up to, since their sum was rounded; never in a part
   that is 0. */
static inline int64_t passed_within(double threshold, const float *parts, int64_t count) {
    double total = 0.0, before = 0.0;
    for (int64_t i = 0; i < count; i++) total += parts[i];
    if (threshold >= total) threshold = total * (1.0 - 0x1p-52);
    return passed_at(threshold < 0.0 ? 0.0 : threshold, parts, count, &before);
}
