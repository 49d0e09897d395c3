/* Structures, products and the stored forms of latent attention. latent.py has the same structures for ctypes. */
#ifndef PEGBOARD_LATENT_H
#define PEGBOARD_LATENT_H

#include "attention.h"

#define MAX_LATENT 1024 /* channels of a key */
#define CHUNK_STRIDE (CHUNK + 16)
#define TOKENS 32 /* of a task */
#define FP8_DS_MLA NUM_TYPES /* one more type of the cache, see pack_latent */
#define SCALED 128 /* codes with one scale */

/* Sums in registers: ROWS * KEYS scores, or ROWS * VECTORS vectors of values. A single row needs more vectors, because each sum has
 * to wait for its previous addition. */
#if REGISTERS == 32
#define ROWS 8
#else
#define ROWS 4
#endif
#define KEYS 3
#define VECTORS 2
#define WIDE 8

/* The cache of one layer: [block][slot][rank + rope]. stride: bytes from block to block. */
typedef struct {
    char *latents;
    int64_t stride;
    int32_t rank, rope, block_size, type;
} LatentCache;

/* What a layer with an index also stores: [block][slot][size]. */
typedef struct {
    char *keys; /* NULL = no index */
    int64_t stride;
    int32_t size, block_size, type;
} IndexCache;

/* weight: [heads][rows][columns] of `type`. Strides in floats from token to token; x_head, out_head: from head to head. */
typedef struct {
    const float *x;
    float *out;
    int64_t x_stride, out_stride;
    int64_t x_head, out_head;
    const void *weight;
    int64_t rows, columns;
    int32_t num_heads, type;
} HeadProducts;

typedef struct {
    HeadProducts absorbed; /* out: [T][heads][rank + rope] */
    const float *q_rope; /* [T][heads][rope]; q_rope_head: floats from head to head */
    const float *latent, *k_rope; /* [T][rank] and [T][rope] */
    int64_t q_rope_stride, q_rope_head, latent_stride, k_rope_stride;
    const float *cos, *sin; /* [T][rope / 2], NULL = no rotation */
    int64_t cos_stride, sin_stride;
    const Plan *plan;
    LatentCache cache;
    const float *index; /* [T][size] */
    int64_t index_stride;
    IndexCache index_cache;
    int32_t pairs; /* see StoreArguments */
} LatentStore;

typedef struct {
    const float *q; /* [T][heads][rank + rope] */
    float *out; /* [T][heads][rank] */
    int64_t q_stride, out_stride;
    const Plan *plan;
    LatentCache cache;
    float *lse; /* see AttendArguments */
    const int32_t *chosen; /* [T][top_k], see latent_index.c; NULL = a query attends to all keys */
    int64_t chosen_stride;
    int32_t num_heads, top_k;
    float scale;
} LatentArguments;

INLINE int64_t num_scales(const LatentCache *cache) { return (cache->rank + SCALED - 1) / SCALED; }

/* Bytes of a token. */
INLINE int64_t latent_bytes(const LatentCache *cache) {
    if (cache->type == FP8_DS_MLA) return cache->rank + num_scales(cache) * 4 + cache->rope * 2;
    return (int64_t)(cache->rank + cache->rope) * bytes_of(cache->type);
}

INLINE void store_floats(int type, const float *from, int count, char *to) {
    if (type == FLOAT32) memcpy(to, from, count * sizeof(float));
    else if (type == BFLOAT16) for (int d = 0; d < count; d++) ((uint16_t *)to)[d] = to_bfloat16(from[d]);
    else for (int d = 0; d < count; d++) ((uint16_t *)to)[d] = to_half(from[d]);
}

/* Store a key. FP8_DS_MLA is vLLM's layout for DeepSeek: the latent as codes of E4M3, a scale for each 128 of them, and the rotated
 * part in bfloat16. */
INLINE void pack_latent(const LatentCache *cache, const float *key, char *to) {
    const int rank = cache->rank, dim = rank + cache->rope;
    if (cache->type != FP8_DS_MLA) {
        store_floats(cache->type, key, dim, to);
        return;
    }
    for (int first = 0; first < rank; first += SCALED) {
        float largest = 0;
        const int stop = minimum(first + SCALED, rank);
        for (int d = first; d < stop; d++) largest = fmaxf(largest, fabsf(key[d]));
        const float scale = fmaxf(largest / E4M3_LARGEST, 0x1p-126f);
        for (int d = first; d < stop; d++) ((uint8_t *)to)[d] = to_e4m3(key[d] / scale);
        memcpy(to + rank + first / SCALED * 4, &scale, sizeof scale);
    }
    for (int d = rank; d < dim; d++) {
        uint16_t rounded = to_bfloat16(key[d]);
        memcpy(to + rank + num_scales(cache) * 4 + (d - rank) * 2, &rounded, sizeof rounded);
    }
}

/* The inverse, for FP8_DS_MLA. */
INLINE void unpack_latent(const LatentCache *cache, const char *from, float *to) {
    const int rank = cache->rank;
    for (int first = 0; first < rank; first += SCALED) {
        float scale;
        memcpy(&scale, from + rank + first / SCALED * 4, sizeof scale);
        scale *= E4M3_UNIT;
        const int stop = minimum(first + SCALED, rank);
        int d = first;
        for (; d + LANES <= stop; d += LANES) store(to + d, load_e4m3((const uint8_t *)from + d) * scale);
        for (; d < stop; d++) to[d] = half_to_float(e4m3_to_half((uint8_t)from[d])) * scale;
    }
    for (int d = 0; d < cache->rope; d++) {
        uint16_t rounded;
        memcpy(&rounded, from + rank + num_scales(cache) * 4 + d * 2, sizeof rounded);
        to[rank + d] = bfloat16_to_float(rounded);
    }
}

INLINE float element(int type, const char *p, int64_t index) {
    if (type == FLOAT32) return ((const float *)p)[index];
    return type == BFLOAT16 ? bfloat16_to_float(((const uint16_t *)p)[index]) : half_to_float(((const uint16_t *)p)[index]);
}

/* scores [rows][CHUNK_STRIDE] = q [rows][dim] times KEYS keys. */
INLINE void dot_products(const int type, const int rows, const float *q, int64_t dim, const char *const *keys, float *scores) {
    vfloat sum[ROWS][KEYS];
    int64_t d = 0;
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < KEYS; j++) sum[i][j] = (vfloat){};
    for (; d + LANES <= dim; d += LANES)
#pragma GCC unroll 3
        for (int j = 0; j < KEYS; j++) {
            vfloat key = load_as(type, keys[j] + d * bytes_of(type));
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) sum[i][j] += load(q + i * dim + d) * key;
        }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < KEYS; j++) {
            float score = sum_of(sum[i][j]);
            for (int64_t rest = d; rest < dim; rest++) score += q[i * dim + rest] * element(type, keys[j], rest);
            scores[i * CHUNK_STRIDE + j] = score;
        }
}

/* The same for a type and a number of rows, ROWS or 1, that are not known when this is compiled. */
INLINE void dot_products_of(int type, int rows, const float *q, int64_t dim, const char *const *keys, float *scores) {
    if (type == FLOAT32) rows == 1 ? dot_products(FLOAT32, 1, q, dim, keys, scores) : dot_products(FLOAT32, ROWS, q, dim, keys, scores);
    else if (type == BFLOAT16) rows == 1 ? dot_products(BFLOAT16, 1, q, dim, keys, scores) : dot_products(BFLOAT16, ROWS, q, dim, keys, scores);
    else rows == 1 ? dot_products(FLOAT16, 1, q, dim, keys, scores) : dot_products(FLOAT16, ROWS, q, dim, keys, scores);
}

#if defined(__AVX512BF16__)
/* The products with keys of bfloat16 numbers, whose other factor is rounded to them. A word of 32 bits holds two numbers. */
#define WORD 32 /* channels of a vector: keys and latents have a multiple of this number */

/* As dot_products. q: [rows][dim]. */
INLINE void dot_pairs(const int rows, const uint16_t *q, int64_t dim, const char *const *keys, float *scores) {
    vfloat sum[ROWS][KEYS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < KEYS; j++) sum[i][j] = (vfloat){};
    for (int64_t d = 0; d < dim; d += WORD)
#pragma GCC unroll 3
        for (int j = 0; j < KEYS; j++) {
            vint key = *(const vint *)(keys[j] + 2 * d);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) sum[i][j] = add_pairs(sum[i][j], *(const vint *)(q + i * dim + d), key);
        }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < KEYS; j++) scores[i * CHUNK_STRIDE + j] = sum_of(sum[i][j]);
}

/* out [rows][width] = out * factor + weights [rows][count] times latents. Keys are multiplied in pairs: if count is odd, one more is
 * read, whose weights are 0. Of each 32 channels, out has those with even numbers first. */
INLINE void combine_pairs(const int rows, const uint16_t *weights, const char *const *keys, int64_t count, const float *factor, float *out,
                          int64_t width) {
    for (int64_t c = 0; c < width; c += WORD) {
        vfloat even[ROWS], odd[ROWS];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            even[i] = load(out + i * width + c) * splat(factor[i]);
            odd[i] = load(out + i * width + c + LANES) * splat(factor[i]);
        }
        for (int64_t k = 0; k < count; k += 2) {
            const vint a = *(const vint *)(keys[k] + 2 * c), b = *(const vint *)(keys[k + 1] + 2 * c);
            const vint low = (a & 0xffff) | b << 16, high = (a >> 16 & 0xffff) | (b & (int32_t)0xffff0000);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                int32_t both;
                memcpy(&both, weights + i * CHUNK_STRIDE + k, sizeof both);
                const vint pair = both - (vint){};
                even[i] = add_pairs(even[i], pair, low);
                odd[i] = add_pairs(odd[i], pair, high);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) store(out + i * width + c, even[i]), store(out + i * width + c + LANES, odd[i]);
    }
}

/* Put the channels of a row in order. */
INLINE void order_channels(const float *from, int64_t width, float *to) {
    for (int64_t c = 0; c < width; c += WORD)
        for (int i = 0; i < LANES; i++) to[c + 2 * i] = from[c + i], to[c + 2 * i + 1] = from[c + LANES + i];
}
#endif

/* out [rows][width] = out * factor + weights [rows][count] times the rows of a matrix. factor: NULL = 0. Strides in floats. */
typedef struct {
    const float *weights;
    int64_t weights_stride;
    const char *const *rows;
    int64_t count;
    const float *factor;
    float *out;
    int64_t out_stride, width;
} Combination;

INLINE void combine(const int type, const int rows, const int vectors, const Combination *c, int64_t column) {
    vfloat sum[ROWS][WIDE];
    const int64_t skip = column * bytes_of(type);
    float *out = c->out + column;
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            sum[i][j] = (vfloat){};
            if (c->factor) sum[i][j] = load(out + i * c->out_stride + j * LANES) * splat(c->factor[i]);
        }
    for (int64_t k = 0; k < c->count; k++) {
        const char *p = c->rows[k] + skip;
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            vfloat value = load_as(type, p + j * LANES * bytes_of(type));
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) sum[i][j] += splat(c->weights[i * c->weights_stride + k]) * value;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) store(out + i * c->out_stride + j * LANES, sum[i][j]);
}

/* Compute all columns. Those after the last whole vector are computed one by one, because nothing may be read after a row. */
INLINE void combine_rows(const int type, const int rows, const Combination *c) {
    const int vectors = rows == 1 ? WIDE : VECTORS;
    int64_t column = 0;
    for (; column + vectors * LANES <= c->width; column += vectors * LANES) combine(type, rows, vectors, c, column);
    for (; column + LANES <= c->width; column += LANES) combine(type, rows, 1, c, column);
    for (; column < c->width; column++)
        for (int i = 0; i < rows; i++) {
            float *out = c->out + i * c->out_stride + column, sum = c->factor ? *out * c->factor[i] : 0;
            for (int64_t k = 0; k < c->count; k++) sum += c->weights[i * c->weights_stride + k] * element(type, c->rows[k], column);
            *out = sum;
        }
}

#endif
