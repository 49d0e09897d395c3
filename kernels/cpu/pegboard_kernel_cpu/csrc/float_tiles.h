/* Float products of a group of 16 rows: a tile of TOKENS x 16 sums stays in registers while the kernel iterates over the columns (the
 * scheme of Goto & van de Geijn 2008). Columns are taken in pieces whose 16 rows fit the first-level cache, and tokens in blocks
 * whose activations fit the second-level cache.
 */
#ifndef PEGBOARD_FLOAT_TILES_H
#define PEGBOARD_FLOAT_TILES_H

#include "common.h"

#define ROWS 16
#define VECTORS (ROWS / LANES)
#if LANES == 16
#define TOKENS 12
#elif LANES == 8
#define TOKENS 6
#else
#define TOKENS 2
#endif
#define COLUMNS 256 /* number of columns of a piece, which has 16 KiB of weights */
#define TOKEN_BLOCK 96

typedef struct {
    const float *x; /* [tokens][columns] */
    int64_t x_stride;
    float *out; /* [tokens][rows] */
    int64_t out_stride;
    const float *weight; /* packed */
    const float *bias; /* [rows] or NULL */
    int64_t rows, columns;
} LinearFloat;

/* Compute `tokens` x 16 sums over the columns [first, last); add them to out unless this is the first piece. */
INLINE void tile(const LinearFloat *a, int tokens, int64_t token, int64_t row, const float *weight, int64_t first, int64_t last) {
    vfloat sums[TOKENS][VECTORS];
    const float *x = a->x + token * a->x_stride;
    float *out = a->out + token * a->out_stride + row;
    int64_t width = a->rows - row < ROWS ? a->rows - row : ROWS;
    float edge[TOKENS * ROWS] ALIGNED;
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < VECTORS; v++) sums[t][v] = splat(0);
    for (int64_t c = first; c < last; c++) {
        vfloat w[VECTORS];
        for (int v = 0; v < VECTORS; v++) w[v] = load(weight + (c - first) * ROWS + v * LANES);
        for (int t = 0; t < tokens; t++) {
            vfloat b = splat(x[t * a->x_stride + c]);
            for (int v = 0; v < VECTORS; v++) sums[t][v] += b * w[v];
        }
    }
    if (width == ROWS) {
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < VECTORS; v++) {
                float *target = out + t * a->out_stride + v * LANES;
                if (first) sums[t][v] += load(target);
                else if (a->bias) sums[t][v] += load(a->bias + row + v * LANES);
                store(target, sums[t][v]);
            }
        return;
    }
    for (int t = 0; t < tokens; t++) {
        for (int v = 0; v < VECTORS; v++) store(edge + t * ROWS + v * LANES, sums[t][v]);
        for (int64_t r = 0; r < width; r++) {
            float *target = out + t * a->out_stride + r;
            *target = edge[t * ROWS + r] + (first ? *target : a->bias ? a->bias[row + r] : 0);
        }
    }
}

static inline void tiles(const LinearFloat *a, int64_t token, int64_t end, int64_t row, const float *weight, int64_t first, int64_t last) {
    for (; token + TOKENS <= end; token += TOKENS) tile(a, TOKENS, token, row, weight, first, last);
#if TOKENS > 6
    for (; token + 6 <= end; token += 6) tile(a, 6, token, row, weight, first, last);
#endif
#if TOKENS > 3
    for (; token + 3 <= end; token += 3) tile(a, 3, token, row, weight, first, last);
#endif
    for (; token + 2 <= end; token += 2) tile(a, 2, token, row, weight, first, last);
    for (; token < end; token++) tile(a, 1, token, row, weight, first, last);
}

#endif
