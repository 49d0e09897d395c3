/* Paged attention: what its kernels share. The structures are mirrored in attention_structs.py.
 *
 * Layout of a cache block, per KV head: keys [head_dim][block_size], so that the scores of neighboring keys are products of one
 * query value with neighboring memory; values [block_size][head_dim]; scales of an int8 cache [block_size] for each of both.
 */
#ifndef PEGBOARD_ATTENTION_H
#define PEGBOARD_ATTENTION_H

#include "quantize.h"

#include <stdatomic.h>

#define TILE 48 /* most query rows (tokens times heads of a group) that read the cache together */
#define CHUNK 128 /* keys between two updates of the running softmax */
#define MAX_DIM 256
#define KEY_STEP 32 /* tasks start at a multiple of this many keys */

enum { FLOAT32, BFLOAT16, INT8, FLOAT16, NUM_TYPES };

/* Query tokens [first, first + count) of a row against keys [key_first, key_stop), one of num_splits such ranges whose results
 * are merged by whoever finishes last.
 *
 * Rows that decode behind the same blocks share the ranges of these: an item then stands for one token of each of its members,
 * and every member has one range more, its own, as a last split. */
typedef struct {
    int32_t row, first, count, key_first, key_stop;
    int32_t split, num_splits;
    int32_t partial; /* place of the first split's partial result */
    int32_t merge; /* which counter of finished pieces */
    int32_t pieces; /* of the merge: num_splits, or more where members have a range of their own */
    int32_t members, num_members; /* where in the plan's list, how many; num_members 0 = a row by itself */
    int32_t member; /* whose own range this is; -1 = the range of all */
    float work;
} Item;

/* One step as a KV group sees it; one per group, at an address that stays. */
typedef struct {
    int64_t num_rows, num_items, block_size;
    Item *items; /* longest first */
    int32_t *members; /* rows that share blocks */
    const int32_t *query_start_loc, *seq_lens, *block_table;
    int64_t table_stride;
    const int64_t *slot_mapping; /* -1 = do not store */
    float *partials; /* [partial][KV head][row of the tile][head_dim + 2] */
    int64_t partial_stride; /* floats per partial and KV head */
    atomic_int *finished; /* [merge][KV head], zero between steps */
} Plan;

/* The cache of one layer. Strides are bytes from block to block. */
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
    int32_t pairs; /* 1: channel 2i turns with 2i + 1; 0: i with i + rotary_pairs */
    int32_t stores; /* 0: a layer that reads another's cache */
} StoreArguments;

typedef struct {
    const float *q;
    float *out; /* [T][heads][head_dim]; NULL = only the quantized result is wanted */
    int64_t q_stride, out_stride;
    const Plan *plan;
    const float *slopes, *sinks; /* per head, NULL = none */
    Cache cache;
    int32_t num_heads, window; /* window 0 = none; it counts the token itself */
    float scale, soft_cap; /* soft_cap 0 = none */
    Quantized to; /* only where the channels of a group's heads are a multiple of 32 */
} AttendArguments;

INLINE int minimum(int a, int b) { return a < b ? a : b; }
INLINE int maximum(int a, int b) { return a > b ? a : b; }

#endif
