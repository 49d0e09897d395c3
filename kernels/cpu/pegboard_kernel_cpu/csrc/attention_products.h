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
#else /* 16 registers: 12 sums, 1 key at a time, 3 queries */
#define VECTORS 4
#define ROWS 3
#endif

#define RUN 16 /* runs of this number of keys are always in one block */
#define PANEL (VECTORS * LANES)
#define RUNS (PANEL / RUN)

/* q: [dim][rows]; k: the first key of each run; stride: bytes from channel to channel; scores: [rows][CHUNK]. */
typedef void (*ScoreProduct)(const float *q, const char *const *k, int64_t stride, int dim, float *scores);

/* out [rows][out_stride] = out * factor + sum over keys [from, stop) of weights [rows][CHUNK] times v; v: the first key of each
 * run; the runs of a span are contiguous; stride: bytes from key to key; skip: bytes of the channels before the first one to
 * compute. */
typedef void (*ValueProduct)(const float *weights, const char *const *v, int64_t stride, int64_t skip, int span, int from,
                             int stop, const float *factor, float *out, int64_t out_stride);

INLINE void score_product(const int type, const int rows, const float *q, const char *const *k, int64_t stride, int dim,
                          float *scores) {
    vfloat sum[ROWS][VECTORS];
    const char *run[RUNS];
#pragma GCC unroll 4
    for (int r = 0; r < RUNS; r++) run[r] = k[r];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) sum[i][j] = (vfloat){};
    for (int64_t d = 0, at = 0; d < dim; d++, q += rows, at += stride) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            const int run_of = j * LANES / RUN, lane = j * LANES % RUN;
            vfloat key = load_as(type, run[run_of] + at + lane * bytes_of(type));
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) sum[i][j] += splat(q[i]) * key;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) store(scores + i * CHUNK + j * LANES, sum[i][j]);
}

INLINE void value_product(const int type, const int rows, const int vectors, const float *weights, const char *const *v,
                          int64_t stride, int64_t skip, int span, int from, int stop, const float *factor, float *out,
                          int64_t out_stride) {
    vfloat sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) sum[i][j] = load(out + i * out_stride + j * LANES) * splat(factor[i]);
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

#if defined(__AVX512BF16__)
/* The same with keys, values and their factors in bfloat16. q: words of two channels [dim / 2][rows]. */
INLINE void score_words(const int rows, const uint32_t *q, const char *const *k, int64_t stride, int dim, float *scores) {
    vfloat sum[ROWS][VECTORS];
    const char *run[RUNS];
#pragma GCC unroll 4
    for (int r = 0; r < RUNS; r++) run[r] = k[r];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) sum[i][j] = (vfloat){};
    for (int64_t d = 0, at = 0; d < dim; d += 2, q += rows, at += 2 * stride) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            vint keys = words_of(run[j] + at, run[j] + at + stride);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) sum[i][j] = add_pairs(sum[i][j], (int32_t)q[i] - (vint){}, keys);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) store(scores + i * CHUNK + j * LANES, sum[i][j]);
}

/* weights: [rows][CHUNK]. Keys are multiplied in pairs, from an even one on. */
INLINE void value_words(const int rows, const int vectors, const uint16_t *weights, const char *const *v, int64_t stride, int64_t skip,
                        int from, int stop, const float *factor, float *out, int64_t out_stride) {
    static const uint16_t nothing[2 * LANES];
    vfloat sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) sum[i][j] = load(out + i * out_stride + j * LANES) * splat(factor[i]);
    for (from &= ~1; from < stop; from += 2) {
        const char *p = v[(unsigned)from / RUN] + (unsigned)from % RUN * stride + skip;
        const char *next = from + 1 < stop ? p + stride : (const char *)nothing;
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            vint values = words_of(p + j * LANES * 2, next + j * LANES * 2);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                int32_t both;
                memcpy(&both, weights + i * CHUNK + from, sizeof both);
                sum[i][j] = add_pairs(sum[i][j], both - (vint){}, values);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) store(out + i * out_stride + j * LANES, sum[i][j]);
}

typedef void (*ScoreWords)(const uint32_t *q, const char *const *k, int64_t stride, int dim, float *scores);
typedef void (*ValueWords)(const uint16_t *weights, const char *const *v, int64_t stride, int64_t skip, int from, int stop,
                           const float *factor, float *out, int64_t out_stride);

#define WORDS(_, rows)                                                                                                          \
    static void score_words_##rows(const uint32_t *q, const char *const *k, int64_t stride, int dim, float *scores) {           \
        score_words(rows, q, k, stride, dim, scores);                                                                           \
    }                                                                                                                           \
    WORD_VALUES(rows, 1) WORD_VALUES(rows, 2)
#define WORD_VALUES(rows, vectors)                                                                                              \
    static void value_words_##rows##_##vectors(const uint16_t *weights, const char *const *v, int64_t stride, int64_t skip,     \
                                               int from, int stop, const float *factor, float *out, int64_t out_stride) {       \
        value_words(rows, vectors, weights, v, stride, skip, from, stop, factor, out, out_stride);                              \
    }
#define WORD_SCORE_NAMES(_, rows) score_words_##rows,
#define WORD_VALUE_NAMES(_, rows) {value_words_##rows##_1, value_words_##rows##_2},
#endif

#define SCORE(type, rows)                                                                                                       \
    static void score_##type##_##rows(const float *q, const char *const *k, int64_t stride, int dim, float *scores) {           \
        score_product(type, rows, q, k, stride, dim, scores);                                                                   \
    }
#define VALUE(type, rows, vectors)                                                                                              \
    static void value_##type##_##rows##_##vectors(const float *weights, const char *const *v, int64_t stride, int64_t skip,     \
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
#define EACH_ROWS(DO, ...) DO(__VA_ARGS__, 1) DO(__VA_ARGS__, 2) DO(__VA_ARGS__, 3)
#define VALUES(type, rows) VALUE(type, rows, 1) VALUE(type, rows, 2) VALUE(type, rows, 4)
#define VALUE_NAMES(type, rows) {value_##type##_##rows##_1, value_##type##_##rows##_2, value_##type##_##rows##_4},
#endif
#define SCORE_NAMES(type, rows) score_##type##_##rows,

EACH_ROWS(SCORE, FLOAT32) EACH_ROWS(SCORE, BFLOAT16) EACH_ROWS(SCORE, INT8) EACH_ROWS(SCORE, FLOAT16) EACH_ROWS(SCORE, E4M3)
EACH_ROWS(SCORE, E5M2)
EACH_ROWS(VALUES, FLOAT32) EACH_ROWS(VALUES, BFLOAT16) EACH_ROWS(VALUES, INT8) EACH_ROWS(VALUES, FLOAT16) EACH_ROWS(VALUES, E4M3)
EACH_ROWS(VALUES, E5M2)

/* [type][rows - 1], and for values [log2 of the vectors of channels]. */
static const ScoreProduct score_products[NUM_TYPES][ROWS] = {
    {EACH_ROWS(SCORE_NAMES, FLOAT32)}, {EACH_ROWS(SCORE_NAMES, BFLOAT16)}, {EACH_ROWS(SCORE_NAMES, INT8)},
    {EACH_ROWS(SCORE_NAMES, FLOAT16)}, {EACH_ROWS(SCORE_NAMES, E4M3)}, {EACH_ROWS(SCORE_NAMES, E5M2)}};
static const ValueProduct value_products[NUM_TYPES][ROWS][3] = {
    {EACH_ROWS(VALUE_NAMES, FLOAT32)}, {EACH_ROWS(VALUE_NAMES, BFLOAT16)}, {EACH_ROWS(VALUE_NAMES, INT8)},
    {EACH_ROWS(VALUE_NAMES, FLOAT16)}, {EACH_ROWS(VALUE_NAMES, E4M3)}, {EACH_ROWS(VALUE_NAMES, E5M2)}};

#if defined(__AVX512BF16__)
EACH_ROWS(WORDS, )
static const ScoreWords word_scores[ROWS] = {EACH_ROWS(WORD_SCORE_NAMES, )};
static const ValueWords word_values[ROWS][2] = {EACH_ROWS(WORD_VALUE_NAMES, )};
#endif

#endif
