/* Activations as int8: code = round(x / scale) with scale = max |x| / 127, per token and 32 columns. */
#ifndef PEGBOARD_QUANTIZE_H
#define PEGBOARD_QUANTIZE_H

#include "common.h"

#define X_BLOCK 32
#define X_HALF 16

typedef struct {
    int8_t *codes; /* [tokens][columns]; NULL = not wanted */
    float *scales; /* [tokens][columns / 32] */
    float *sums; /* [tokens][columns / 16] scale times the sum of codes */
} Quantized;

typedef struct {
    const float *x; /* [tokens][columns] */
    int64_t x_stride;
    Quantized to;
    int64_t columns; /* a multiple of 32 */
} Quantize;

/* x: columns [first, first + count) of a token's row of so many columns; first and count are multiples of 32. */
INLINE void quantize_part(const float *x, const Quantized *to, int64_t columns, int64_t token, int64_t first, int64_t count) {
    int64_t start = token * columns + first;
    int8_t *codes = to->codes + start;
    float *scales = to->scales + start / X_BLOCK, *sums = to->sums + start / X_HALF;
    for (int64_t block = 0; block < count / X_BLOCK; block++, x += X_BLOCK, codes += X_BLOCK) {
        vfloat largest = splat(0);
        for (int i = 0; i < X_BLOCK; i += LANES) {
            vfloat v = load(x + i);
            largest = vmax(largest, vmax(v, -v));
        }
        float scale = max_of(largest) / 127.0f;
        vfloat inverse = splat(scale > 0 ? 1.0f / scale : 0.0f);
        scales[block] = scale;
        for (int half = 0; half < 2; half++) {
            vint total = {0};
            int32_t sum = 0;
            for (int i = 0; i < X_HALF; i += LANES) {
                int at = half * X_HALF + i;
                vfloat code = load(x + at) * inverse + 12582912.0f - 12582912.0f; /* to the nearest integer */
                vint whole = __builtin_convertvector(code, vint);
                *(vbyte *)(codes + at) = __builtin_convertvector(whole, vbyte);
                total += whole;
            }
            for (int l = 0; l < LANES; l++) sum += total[l];
            sums[2 * block + half] = scale * (float)sum;
        }
    }
}

INLINE void quantize_row(const float *x, const Quantized *to, int64_t columns, int64_t token) {
    quantize_part(x, to, columns, token, 0, columns);
}

#endif
