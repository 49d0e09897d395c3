/* What the kernels of paged attention share. attention_structs.py mirrors the structures.
 *
 * Layout of a cache block, per KV head: keys [head_dim][block_size], so that one query value is multiplied with neighboring
 * memory to score neighboring keys; values [block_size][head_dim]; for an int8 cache, scales [block_size] for keys and for
 * values.
 */
#ifndef PEGBOARD_ATTENTION_H
#define PEGBOARD_ATTENTION_H

#include "quantize.h"

#include <stdatomic.h>

#define TILE 48 /* maximum number of query rows (tokens times heads of a group) that read the cache together */
#define CHUNK 128 /* keys between two updates of the running softmax */
#define MAX_DIM 256
#define KEY_STEP 32 /* tasks start at a multiple of this many keys */

enum { FLOAT32, BFLOAT16, INT8, FLOAT16, NUM_TYPES };

/* Query tokens [first, first + count) of a row against keys [key_first, key_stop), one of num_splits such ranges. The thread that
 * finishes last merges their results.
 *
 * Rows that decode and begin with the same blocks share the ranges of these blocks. Such an item stands for one token of each of
 * its members, and every member has one more range of its own as its last split. */
typedef struct {
    int32_t row, first, count, key_first, key_stop;
    int32_t split, num_splits;
    int32_t partial; /* index of the first split's partial result */
    int32_t merge; /* index of the counter of finished pieces */
    int32_t pieces; /* number of pieces to merge: num_splits, or more when members have ranges of their own */
    int32_t members, num_members; /* start and length in the plan's list of members; num_members 0 = a single row */
    int32_t member; /* the member that owns this range; -1 = a range that all share */
    float work;
} Item;

/* One step as a KV group sees it. There is one per group, at a fixed address. */
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
    int32_t pairs; /* 1: channel 2i is rotated with 2i + 1; 0: channel i with i + rotary_pairs */
    int32_t stores; /* 0: the layer reads the cache of another layer */
} StoreArguments;

typedef struct {
    const float *q;
    float *out; /* [T][heads][head_dim]; NULL = only the quantized result is wanted */
    int64_t q_stride, out_stride;
    const Plan *plan;
    const float *slopes, *sinks; /* per head, NULL = none */
    Cache cache;
    int32_t num_heads, window; /* window 0 = none; a window includes the token itself */
    float scale, soft_cap; /* soft_cap 0 = none */
    Quantized to; /* used only if the channels of a group's heads are a multiple of 32 */
} AttendArguments;

INLINE int minimum(int a, int b) { return a < b ? a : b; }
INLINE int maximum(int a, int b) { return a > b ? a : b; }

#endif
