/* Structures shared by the kernels of paged attention. attention_structs.py has the same ones for ctypes.
 *
 * Layout of a cache block, per KV head: keys [head_dim][block_size], so that one query value is multiplied with the neighboring
 * values of neighboring keys; values [block_size][head_dim]. An int8 cache also has scales [block_size] for keys and for values.
 * A cache of 8-bit floats has a scale of the keys and one of the values per KV head, outside the blocks.
 */
#ifndef PEGBOARD_ATTENTION_H
#define PEGBOARD_ATTENTION_H

#include "quantize.h"

#include <stdatomic.h>

#define TILE 48 /* maximum number of query rows (tokens times heads of a group) that are computed together */
#define CHUNK 128 /* number of keys per update of the running softmax */
#define MAX_DIM 256
#define ENCODER -1 /* in place of the size of a chunk */
#define KEY_STEP 32 /* tasks start at a multiple of this number of keys */

/* WORDS is a type of products: keys and values are BFLOAT16, and the other factors are rounded to it. */
enum { FLOAT32, BFLOAT16, INT8, FLOAT16, E4M3, E5M2, WORDS, NUM_TYPES };

/* The attention of query tokens [first, first + count) of a row to the keys [key_first, key_stop), which are one of num_splits
 * ranges. The thread that finishes last merges the results of all ranges.
 *
 * Decoding rows that begin with the same blocks share the ranges of these blocks. A shared item has one token of each of its
 * members. Every member also has a range for itself, which is its last split. */
typedef struct {
    int32_t row, first, count, key_first, key_stop;
    int32_t split, num_splits;
    int32_t partial; /* index of the first split's partial result */
    int32_t merge; /* index of the counter of finished pieces */
    int32_t pieces; /* number of pieces to merge: num_splits, or more if each member also has a range for itself */
    int32_t members, num_members; /* start and length in the plan's list of members; num_members 0 = a single row */
    int32_t member; /* the member that the range belongs to; -1 = all members share it */
    float work;
} Item;

/* One step of one KV group. Each group has one plan, at a fixed address. */
typedef struct {
    int64_t num_rows, num_items, block_size;
    Item *items; /* longest first */
    int32_t *members; /* rows that share blocks */
    const int32_t *query_start_loc, *seq_lens, *block_table;
    int64_t table_stride;
    const int64_t *slot_mapping; /* -1 = do not store */
    const int32_t *num_keys; /* [T]: how many keys of its row each token attends to; NULL = those up to itself */
    float *partials; /* [partial][KV head][row of the tile][head_dim + 2] */
    int64_t partial_stride; /* floats per partial and KV head */
    atomic_int *finished; /* [merge][KV head], zero between steps */
} Plan;

/* The cache of one layer. Strides are bytes from block to block. Scales of 8-bit floats: [KV head]. */
typedef struct {
    char *k, *v;
    float *k_scale, *v_scale;
    int64_t k_stride, v_stride, k_scale_stride, v_scale_stride;
    int32_t num_kv_heads, head_dim, block_size, type;
} Cache;

typedef struct {
    float *q, *k, *v; /* [T][heads][head_dim]; strides in floats from token to token */
    int64_t q_stride, k_stride, v_stride;
    const float *cos, *sin; /* [T][rotary_pairs], NULL = no rotation */
    int64_t cos_stride, sin_stride;
    const Plan *plan;
    Cache cache;
    int32_t num_heads, rotary_pairs;
    int32_t pairs; /* 1: channel 2i is rotated with 2i + 1; 0: channel i with i + rotary_pairs */
    int32_t stores; /* 0: do not store, because the layer reads the cache of another layer */
} StoreArguments;

typedef struct {
    const float *q;
    float *out; /* [T][heads][head_dim]; NULL = only the quantized result is wanted */
    int64_t q_stride, out_stride;
    const Plan *plan;
    Cache cache;
    float *lse; /* [T][heads], the logarithm of the sum of exp(score); NULL = not wanted */
    const float *sinks; /* [heads], scores of a key whose value is zero; NULL = none */
    int32_t num_heads, window, chunk; /* 0 = none; a window includes the token itself, chunks start at multiples of their size;
                                         * chunk ENCODER: tokens attend to those after them, too, and a window is half before
                                         * and half after the token */
    float scale, soft_cap; /* soft_cap 0 = none */
    float value_unit; /* what the products read of the values is multiplied by it */
    Quantized to; /* used only if the channels of a group's heads are a multiple of 32 */
} AttendArguments;

INLINE int minimum(int a, int b) { return a < b ? a : b; }
INLINE int is_float8(int type) { return type == E4M3 || type == E5M2; }
INLINE int maximum(int a, int b) { return a > b ? a : b; }

/* Return the position of a token of a row. It means nothing if the cache has only a part of the row's keys. */
INLINE int position_in(const Plan *plan, int row, int64_t token) {
    return plan->seq_lens[row] - (int)(plan->query_start_loc[row + 1] - token);
}

/* Return the last of the row's keys that a token attends to. */
INLINE int last_key_in(const Plan *plan, int row, int64_t token) {
    return plan->num_keys ? plan->num_keys[token] - 1 : position_in(plan, row, token);
}

/* Return the first position that the token at `position` attends to. */
INLINE int first_key(int position, int window, int chunk) {
    if (chunk == ENCODER) return window ? maximum(position - window / 2, 0) : 0;
    if (chunk) return position / chunk * chunk;
    return window ? maximum(position + 1 - window, 0) : 0;
}

/* Return the position after the last one that a token attends to. last: see `last_key_in`. length: tokens of its request. */
INLINE int stop_key(int last, int window, int chunk, int length) {
    if (chunk != ENCODER) return last + 1;
    return window ? minimum(last + window / 2 + 1, length) : length;
}

INLINE int bytes_of(int type) { return type == FLOAT32 ? 4 : type == BFLOAT16 || type == FLOAT16 || type == WORDS ? 2 : 1; }

INLINE vfloat load_as(int type, const char *p) {
    if (type == FLOAT32) return load((const float *)p);
    if (type == BFLOAT16) return load_bfloat16((const uint16_t *)p);
    if (type == FLOAT16) return load_half((const uint16_t *)p);
    if (type == E4M3) return load_e4m3((const uint8_t *)p);
    if (type == E5M2) return load_e5m2((const uint8_t *)p);
    return load_int8((const int8_t *)p);
}

/* Rotate the first 2 n channels of a head in place (Su et al. 2021). */
INLINE void turn(float *head, const float *cos, const float *sin, int n, int pairs) {
    if (pairs) {
        for (int i = 0; i < n; i++) {
            float x = head[2 * i], y = head[2 * i + 1];
            head[2 * i] = x * cos[i] - y * sin[i];
            head[2 * i + 1] = y * cos[i] + x * sin[i];
        }
    } else {
        float *low = head, *high = head + n;
        int i = 0;
        for (; i + LANES <= n; i += LANES) {
            vfloat x = load(low + i), y = load(high + i), c = load(cos + i), s = load(sin + i);
            store(low + i, x * c - y * s);
            store(high + i, y * c + x * s);
        }
        for (; i < n; i++) {
            float x = low[i], y = high[i];
            low[i] = x * cos[i] - y * sin[i];
            high[i] = y * cos[i] + x * sin[i];
        }
    }
}

/* Merge the results of a row for num_splits ranges of keys, each [dim], followed by the maximum of its scores and the total of its
 * weights. They are `step` floats apart. Return the logarithm to base 2 of the sum of all weights. */
INLINE float merge_splits(const float *first, int64_t step, int num_splits, int dim, float unit, float *to) {
    float top = -INFINITY, total = 0;
    for (int split = 0; split < num_splits; split++) top = fmaxf(top, first[split * step + dim]);
    memset(to, 0, dim * sizeof(float));
    for (int split = 0; split < num_splits; split++) {
        const float *from = first + split * step;
        float weight = from[dim + 1] > 0 ? exp2f(from[dim] - top) : 0;
        total += from[dim + 1] * weight;
        for (int d = 0; d < dim; d++) to[d] += from[d] * weight;
    }
    if (total > 0)
        for (int d = 0; d < dim; d++) to[d] = to[d] / total * unit;
    return top + log2f(total);
}

#if defined(__AVX512BF16__)
/* Products of bfloat16 numbers, of which a word of 32 bits holds two. */
INLINE void round_row(const float *from, int64_t count, uint16_t *to) { /* count: a multiple of LANES */
    for (int64_t i = 0; i < count; i += LANES)
        _mm256_storeu_si256((__m256i *)(to + i), (__m256i)_mm512_cvtneps_pbh((__m512)load(from + i)));
}

INLINE vfloat add_pairs(vfloat sum, vint a, vint b) { return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

/* Return a vector of a word, which may be at any address. */
INLINE vint splat_word(const void *word) {
    int32_t bits;
    memcpy(&bits, word, sizeof bits);
    return bits - (vint){};
}

/* Return words of LANES numbers of two rows. */
INLINE vint words_of(const void *first, const void *second) {
    return (vint)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)first)) | (vint)load_bfloat16(second);
}
#endif

#endif
