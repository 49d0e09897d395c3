/* The two matrix products of attention, blocked in registers: scores = q kT for PANEL keys, and out += weights v for some
 * channels.
 *
 * Both are compiled for every type of cache element and for every number of query rows that fits the level's registers. Tables
 * hold the variants. A panel's keys may be in several cache blocks, but runs of at least 16 keys are in the same block.
 */
#ifndef PEGBOARD_ATTENTION_PRODUCTS_H
#define PEGBOARD_ATTENTION_PRODUCTS_H

#include "attention.h"

#if LANES == 16 /* 32 registers: 16 sums, 2 keys, 1 query */
#define VECTORS 2
#define ROWS 8
#elif REGISTERS == 32 /* 24 sums, 1 key at a time, 6 queries */
#define VECTORS 4
#define ROWS 6
#else /* 16 registers: 12 sums, 1 key at a time, 3 queries */
#define VECTORS 4
#define ROWS 3
#endif

#define RUN 16 /* runs of this number of keys are always in one block */
#define PANEL (VECTORS * LANES)
#define RUNS (PANEL / RUN)

/* q: [dim][rows] floats, for WORDS [dim / 2][rows] words of two channels; k: the first key of each run; stride: bytes from channel to
 * channel; scores: [rows][CHUNK]. */
typedef void (*ScoreProduct)(const void *q, const char *const *k, int64_t stride, int dim, float *scores);

/* out [rows][out_stride] = out * factor + sum over keys [from, stop) of weights [rows][CHUNK] times v; weights: floats, for WORDS
 * bfloat16 numbers; v: the first key of each run; the runs of a span are contiguous; stride: bytes from key to key; skip: bytes of
 * the channels before the first one to compute. */
typedef void (*ValueProduct)(const void *weights, const char *const *v, int64_t stride, int64_t skip, int span, int from,
                             int stop, const float *factor, float *out, int64_t out_stride);

INLINE void score_product(const int type, const int rows, const void *queries, const char *const *k, int64_t stride, int dim,
                          float *scores) {
    const float *q = queries;
    vfloat sum[ROWS][VECTORS];
    const char *run[RUNS];
#pragma GCC unroll 4
    for (int r = 0; r < RUNS; r++) run[r] = k[r];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) sum[i][j] = (vfloat){};
    const int channels = type == WORDS ? 2 : 1; /* of a step */
    for (int64_t d = 0, at = 0; d < dim; d += channels, q += rows, at += channels * stride) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            const int run_of = j * LANES / RUN, lane = j * LANES % RUN;
            const char *p = run[run_of] + at + lane * bytes_of(type);
#if defined(__AVX512BF16__)
            if (type == WORDS) {
                vint keys = words_of(p, p + stride);
#pragma GCC unroll 8
                for (int i = 0; i < rows; i++) sum[i][j] = add_pairs(sum[i][j], splat_word(q + i), keys);
                continue;
            }
#endif
            vfloat key = load_as(type, p);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) sum[i][j] += splat(q[i]) * key;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) store(scores + i * CHUNK + j * LANES, sum[i][j]);
}

INLINE void value_product(const int type, const int rows, const int vectors, const void *factors, const char *const *v,
                          int64_t stride, int64_t skip, int span, int from, int stop, const float *factor, float *out,
                          int64_t out_stride) {
    vfloat sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) sum[i][j] = load(out + i * out_stride + j * LANES) * splat(factor[i]);
#if defined(__AVX512BF16__)
    if (type == WORDS) { /* pairs of keys, from an even one on; the weight of one before `from` is 0 */
        static const uint16_t nothing[VECTORS * LANES];
        for (from &= ~1; from < stop; from += 2) {
            const char *p = v[(unsigned)from / RUN] + (unsigned)from % RUN * stride + skip;
            const char *next = from + 1 < stop ? p + stride : (const char *)nothing;
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) {
                vint values = words_of(p + j * LANES * bytes_of(type), next + j * LANES * bytes_of(type));
#pragma GCC unroll 8
                for (int i = 0; i < rows; i++)
                    sum[i][j] = add_pairs(sum[i][j], splat_word((const uint16_t *)factors + i * CHUNK + from), values);
            }
        }
    }
#endif
    const float *weights = factors;
    while (from < stop) {
        const char *p = v[(unsigned)from / RUN] + (unsigned)from % RUN * stride + skip;
        int last = minimum(stop, (from | (span - 1)) + 1);
        for (; from < last; from++, p += stride) {
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) {
                vfloat value = load_as(type, p + j * LANES * bytes_of(type));
#pragma GCC unroll 8
                for (int i = 0; i < rows; i++) sum[i][j] += splat(weights[i * CHUNK + from]) * value;
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) store(out + i * out_stride + j * LANES, sum[i][j]);
}

#define SCORE(type, rows)                                                                                                       \
    static void score_##type##_##rows(const void *q, const char *const *k, int64_t stride, int dim, float *scores) {           \
        score_product(type, rows, q, k, stride, dim, scores);                                                                   \
    }
#define VALUE(type, rows, vectors)                                                                                              \
    static void value_##type##_##rows##_##vectors(const void *weights, const char *const *v, int64_t stride, int64_t skip,     \
                                                  int span, int from, int stop, const float *factor, float *out,                \
                                                  int64_t out_stride) {                                                         \
        value_product(type, rows, vectors, weights, v, stride, skip, span, from, stop, factor, out, out_stride);                \
    }

#if ROWS == 8
#define EACH_ROWS(DO, ...) DO(__VA_ARGS__, 1) DO(__VA_ARGS__, 2) DO(__VA_ARGS__, 3) DO(__VA_ARGS__, 4) DO(__VA_ARGS__, 5) \
    DO(__VA_ARGS__, 6) DO(__VA_ARGS__, 7) DO(__VA_ARGS__, 8)
#define VALUES(type, rows) VALUE(type, rows, 1) VALUE(type, rows, 2)
#define VALUE_NAMES(type, rows) {value_##type##_##rows##_1, value_##type##_##rows##_2},
#else
#if ROWS == 6
#define EACH_ROWS(DO, ...) DO(__VA_ARGS__, 1) DO(__VA_ARGS__, 2) DO(__VA_ARGS__, 3) DO(__VA_ARGS__, 4) DO(__VA_ARGS__, 5) \
    DO(__VA_ARGS__, 6)
#else
#define EACH_ROWS(DO, ...) DO(__VA_ARGS__, 1) DO(__VA_ARGS__, 2) DO(__VA_ARGS__, 3)
#endif
#define VALUES(type, rows) VALUE(type, rows, 1) VALUE(type, rows, 2) VALUE(type, rows, 4)
#define VALUE_NAMES(type, rows) {value_##type##_##rows##_1, value_##type##_##rows##_2, value_##type##_##rows##_4},
#endif
#define SCORE_NAMES(type, rows) score_##type##_##rows,

EACH_ROWS(SCORE, FLOAT32) EACH_ROWS(SCORE, BFLOAT16) EACH_ROWS(SCORE, INT8) EACH_ROWS(SCORE, FLOAT16) EACH_ROWS(SCORE, E4M3)
EACH_ROWS(SCORE, E5M2)
EACH_ROWS(VALUES, FLOAT32) EACH_ROWS(VALUES, BFLOAT16) EACH_ROWS(VALUES, INT8) EACH_ROWS(VALUES, FLOAT16) EACH_ROWS(VALUES, E4M3)
EACH_ROWS(VALUES, E5M2)
#if defined(__AVX512BF16__)
EACH_ROWS(SCORE, WORDS) EACH_ROWS(VALUES, WORDS)
#endif

/* [type][rows - 1], and for values [log2 of the vectors of channels]. */
static const ScoreProduct score_products[NUM_TYPES][ROWS] = {
    {EACH_ROWS(SCORE_NAMES, FLOAT32)}, {EACH_ROWS(SCORE_NAMES, BFLOAT16)}, {EACH_ROWS(SCORE_NAMES, INT8)},
    {EACH_ROWS(SCORE_NAMES, FLOAT16)}, {EACH_ROWS(SCORE_NAMES, E4M3)}, {EACH_ROWS(SCORE_NAMES, E5M2)},
#if defined(__AVX512BF16__)
    {EACH_ROWS(SCORE_NAMES, WORDS)},
#endif
};
static const ValueProduct value_products[NUM_TYPES][ROWS][3] = {
    {EACH_ROWS(VALUE_NAMES, FLOAT32)}, {EACH_ROWS(VALUE_NAMES, BFLOAT16)}, {EACH_ROWS(VALUE_NAMES, INT8)},
    {EACH_ROWS(VALUE_NAMES, FLOAT16)}, {EACH_ROWS(VALUE_NAMES, E4M3)}, {EACH_ROWS(VALUE_NAMES, E5M2)},
#if defined(__AVX512BF16__)
    {EACH_ROWS(VALUE_NAMES, WORDS)},
#endif
};

#endif
