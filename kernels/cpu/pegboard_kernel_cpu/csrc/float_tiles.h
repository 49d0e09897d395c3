/* Products of float activations with groups of 16 rows of weights: a tile of TOKENS x 16 · GROUPS sums stays in registers while the
 * kernel iterates over the columns (the scheme of Goto & van de Geijn 2008). Columns are taken in pieces, of which the activations
 * of a block of tokens are copied next to each other, so that no stride makes them compete for the same lines of a cache. A sum
 * goes on where the previous piece ended, so a token's results are the same bits in a step of any size.
 *
 * Weights are floats or halves, packed[group][column][16], or bfloat16 numbers in pairs of columns, packed[group][pair][16][2].
 * A level with dot products of bfloat16 rounds the activations of the latter to bfloat16; all others widen the weights.
 */
#ifndef PEGBOARD_FLOAT_TILES_H
#define PEGBOARD_FLOAT_TILES_H

#include "common.h"

#define ROWS 16
#define VECTORS (ROWS / LANES)
#if LANES == 16
#define TOKENS 12
#define GROUPS 2 /* groups of rows of a tile */
#elif LANES == 8 || REGISTERS == 32
#define TOKENS 6
#define GROUPS 1
#else
#define TOKENS 2
#define GROUPS 1
#endif
#define COLUMNS 256 /* a piece has a multiple of this number of columns */
#define TOKEN_BLOCK 96
#define GAP 16 /* floats between the activations of two tokens, so that they are not a power of two apart */
#define PANEL (TOKEN_BLOCK * (2 * COLUMNS + GAP)) /* words, of a piece of activations */

typedef enum { FLOAT_WEIGHTS, BFLOAT16_WEIGHTS, HALF_WEIGHTS } WeightType;

#if defined(__AVX512BF16__)
#define ROUNDS(type) ((type) == BFLOAT16_WEIGHTS)
#else
#define ROUNDS(type) 0
#endif

typedef struct {
    const float *x; /* [tokens][columns]; NULL = only x_words */
    int64_t x_stride;
    const uint16_t *x_words; /* the same as bfloat16 numbers (quantize.h), which matrix tiles multiply; NULL = they do not */
    float *out; /* [tokens][rows] */
    int64_t out_stride;
    const void *weight; /* packed */
    const float *bias; /* [rows] or NULL */
    int64_t rows, columns;
    int64_t type; /* a WeightType */
} LinearFloat;

/* A piece of columns of the activations of some tokens. Every second column is missing from floats of which pairs are rounded:
 * a word then holds two bfloat16 numbers. */
typedef struct {
    const LinearFloat *a;
    int64_t start, end; /* tokens */
    int64_t first, last; /* columns */
    int64_t stride; /* words from token to token */
    const float *x; /* [tokens][words] */
} Activations;

INLINE int64_t packed_columns(int64_t columns, int type) { return type == BFLOAT16_WEIGHTS ? (columns + 1) / 2 * 2 : columns; }

/* Return the packed weights of a group from a column on, which is even. */
INLINE const void *weights_at(const void *packed, int64_t columns, int type, int64_t group, int64_t column) {
    int64_t index = (group * packed_columns(columns, type) + column) * ROWS;
    return type == FLOAT_WEIGHTS ? (const void *)((const float *)packed + index) : (const void *)((const uint16_t *)packed + index);
}

/* Choose how many columns are copied at a time: as many as fit in a panel, because sums leave their registers after each piece. */
INLINE int64_t piece_columns(int64_t tokens, int type) {
    return (PANEL / tokens - GAP) * (ROUNDS(type) ? 2 : 1) / COLUMNS * COLUMNS;
}

INLINE Activations copy_activations(const LinearFloat *a, int type, int64_t start, int64_t end, int64_t first, int64_t last, float *to) {
    const int64_t count = last - first, words = ROUNDS(type) ? (count + 1) / 2 : count;
    const Activations copied = {a, start, end, first, last, words + GAP, to};
    for (int64_t t = start; t < end; t++, to += copied.stride) {
        const float *x = a->x + t * a->x_stride + first;
        if (!ROUNDS(type)) {
            memcpy(to, x, count * sizeof(float));
            continue;
        }
#if defined(__AVX512BF16__)
        uint16_t *rounded = (uint16_t *)to;
        int64_t c = 0;
        for (; c + LANES <= count; c += LANES)
            _mm256_storeu_si256((__m256i *)(rounded + c), (__m256i)_mm512_cvtneps_pbh((__m512)load(x + c)));
        for (; c < count; c++) rounded[c] = to_bfloat16(x[c]);
        if (count % 2) rounded[c] = 0;
#endif
    }
    return copied;
}

/* Load what the sums of a tile begin with: the bias, or the sums of the previous piece. */
INLINE void load_sums(const LinearFloat *a, int64_t token, int64_t row, int is_first, vfloat sums[VECTORS]) {
    const float *from = is_first ? a->bias ? a->bias + row : NULL : a->out + token * a->out_stride + row;
    int64_t width = a->rows - row;
    float edge[ROWS] ALIGNED = {0};
    if (from && width < ROWS) from = memcpy(edge, from, width * sizeof(float));
    for (int v = 0; v < VECTORS; v++) sums[v] = from ? load(from + v * LANES) : splat(0);
}

/* Store the sums, without those of rows that pad the last group. */
INLINE void store_sums(const LinearFloat *a, int64_t token, int64_t row, const vfloat sums[VECTORS]) {
    float *to = a->out + token * a->out_stride + row, edge[ROWS] ALIGNED;
    int64_t width = a->rows - row;
    for (int v = 0; v < VECTORS; v++) store((width < ROWS ? edge : to) + v * LANES, sums[v]);
    if (width < ROWS) memcpy(to, edge, width * sizeof(float));
}

/* Add the products of a piece to the sums of `tokens` tokens, of which `token` is the first, and `groups` groups from `row` on.
 * weights: of each group, from the piece's first column on. fetches: whether they come from memory, rather than from a cache. */
INLINE void tile(const Activations *p, int type, int tokens, int groups, int64_t token, int64_t row, const void *const *weights,
                 int fetches) {
    vfloat sums[TOKENS][GROUPS][VECTORS];
    const float *x = p->x + (token - p->start) * p->stride;
    const int64_t count = p->last - p->first, size = type == FLOAT_WEIGHTS ? sizeof(float) : sizeof(uint16_t);
    /* What is fetched ahead goes on with the next groups when the piece ends. */
    const int64_t turn = count - AHEAD / (ROWS * size), next = (groups * packed_columns(p->a->columns, type) - count) * ROWS * size;
    for (int t = 0; t < tokens; t++)
        for (int g = 0; g < groups; g++) __builtin_prefetch(p->a->out + (token + t) * p->a->out_stride + row + g * ROWS, 1);
    for (int t = 0; t < tokens; t++)
        for (int g = 0; g < groups; g++) load_sums(p->a, token + t, row + g * ROWS, p->first == 0, sums[t][g]);
    if (type == BFLOAT16_WEIGHTS) {
        for (int64_t pair = 0; pair < (count + 1) / 2; pair++) {
            const vint *words[GROUPS];
            for (int g = 0; g < groups; g++) {
                words[g] = (const vint *)((const uint32_t *)weights[g] + pair * ROWS);
                if (fetches) fetch((const uint8_t *)words[g] + (2 * pair < turn ? 0 : next), LINE);
            }
#if defined(__AVX512BF16__)
            for (int t = 0; t < tokens; t++) {
                __m512bh both = (__m512bh)_mm512_set1_ps(x[t * p->stride + pair]);
                for (int g = 0; g < groups; g++)
                    sums[t][g][0] = (vfloat)_mm512_dpbf16_ps((__m512)sums[t][g][0], (__m512bh)*words[g], both);
            }
#else
            for (int half = 0; half < (2 * pair + 1 < count ? 2 : 1); half++) {
                vfloat w[GROUPS][VECTORS];
                if (REGISTERS == 16) __asm__ volatile("" ::: "memory"); /* load the words again: all registers are taken */
                for (int g = 0; g < groups; g++)
                    for (int v = 0; v < VECTORS; v++)
                        w[g][v] = half ? (vfloat)(words[g][v] & (int32_t)0xffff0000) : (vfloat)(words[g][v] << 16);
                for (int t = 0; t < tokens; t++) {
                    vfloat b = splat(x[t * p->stride + 2 * pair + half]);
                    for (int g = 0; g < groups; g++)
                        for (int v = 0; v < VECTORS; v++) sums[t][g][v] += b * w[g][v];
                }
            }
#endif
        }
    } else {
        for (int64_t c = 0; c < count; c++) {
            vfloat w[GROUPS][VECTORS];
            for (int g = 0; g < groups; g++) {
                if (fetches) fetch((const uint8_t *)weights[g] + c * ROWS * size + (c < turn ? 0 : next), ROWS * size);
                for (int v = 0; v < VECTORS; v++) {
                    int64_t at = c * ROWS + v * LANES;
                    w[g][v] = type == HALF_WEIGHTS ? load_half((const uint16_t *)weights[g] + at) : load((const float *)weights[g] + at);
                }
            }
            for (int t = 0; t < tokens; t++) {
                vfloat b = splat(x[t * p->stride + c]);
                for (int g = 0; g < groups; g++)
                    for (int v = 0; v < VECTORS; v++) sums[t][g][v] += b * w[g][v];
            }
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int g = 0; g < groups; g++) store_sums(p->a, token + t, row + g * ROWS, sums[t][g]);
}

/* Add the products of a piece to the sums of all its tokens. */
INLINE void tiles(const Activations *p, int type, int groups, int64_t row, const void *const *weights, int fetches) {
    int64_t token = p->start, end = p->end;
    for (; token + TOKENS <= end; token += TOKENS) tile(p, type, TOKENS, groups, token, row, weights, fetches);
#if TOKENS > 8
    if (token + 8 <= end) tile(p, type, 8, groups, token, row, weights, fetches), token += 8;
#endif
#if TOKENS > 4
    if (token + 4 <= end) tile(p, type, 4, groups, token, row, weights, fetches), token += 4;
#endif
#if TOKENS > 2
    if (token + 2 <= end) tile(p, type, 2, groups, token, row, weights, fetches), token += 2;
#endif
    if (token < end) tile(p, type, 1, groups, token, row, weights, fetches);
}

#endif
