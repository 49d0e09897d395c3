/* Low-rank adapters (Hu et al. 2021): y += B A x, where each token has the matrices of its slot.
 *
 * The tokens come grouped by slot, so that the matrices are read once per group of TOKENS tokens. `lora_shrink` computes A x in SPLITS
 * pieces of the columns, because a single token gives too little work for all threads otherwise. `lora_expand` adds the pieces in a
 * fixed order, so a token gets the same result in every batch. A is [columns][parts][width] and B is [rank][rows], so both are read as
 * they lie in memory, with no sums across lanes.
 */
#include "common.h"

#define TOKENS 4
#define GROUPS 4 /* groups of 16 ranks that are computed together */
#define RANKS 16
#define VECTORS (RANKS / LANES)
#define SPLITS 4
#define BLOCK 32  /* tokens of a task */
#define CHUNK 128 /* rows of a task of lora_expand */

enum { FLOAT32, BFLOAT16, FLOAT16 };

/* Which tokens use which slot. Slot 0 is the base model. */
typedef struct {
    const int32_t *order, *starts; /* [tokens], [slots + 2]: the tokens of slot s are order[starts[s]] … order[starts[s + 1] - 1] */
    const int32_t *ranks;          /* [slots], of slots 1 …; 0 = nothing to add */
    int64_t slots;
} Adapters;

typedef struct {
    const void *x; /* [tokens][columns] floats, or [tokens] row numbers (int64) of A if is_lookup */
    int64_t x_stride;
    float *out; /* [tokens][SPLITS][parts · width] */
    int64_t out_stride;
    const void *a; /* [slots][columns][parts · width] */
    Adapters adapters;
    int64_t columns, parts, width, kind, is_lookup;
} LoRAShrink;

typedef struct {
    const float *x; /* [tokens][SPLITS][width] */
    int64_t x_stride;
    float *out; /* [tokens][width]; only the columns that a token's slot has are written */
    int64_t out_stride;
    Adapters adapters;
    int64_t width;
} LoRAJoin;

typedef struct {
    const float *x; /* [tokens][turns][width]: rank r is in the place r % turns, at column r / turns of a part; with turns = 0, x is
                       [tokens][SPLITS][width], the pieces that are still to be added up */
    int64_t x_stride;
    float *out; /* [tokens][rows], added to */
    int64_t out_stride;
    const void *b; /* [slots][max_rank][rows] */
    Adapters adapters;
    const int64_t *bounds; /* [parts + 1], first row of each part */
    const int64_t *firsts; /* [parts], first column of each part in x */
    int64_t parts, width, turns, max_rank, kind;
} LoRAExpand;

INLINE vfloat load_as(const void *p, int64_t at, int kind) {
    if (kind == BFLOAT16) return load_bfloat16((const uint16_t *)p + at);
    if (kind == FLOAT16) return load_half((const uint16_t *)p + at);
    return load((const float *)p + at);
}

INLINE float value_as(const void *p, int64_t at, int kind) {
    if (kind == FLOAT32) return ((const float *)p)[at];
    if (kind == FLOAT16) return half_to_float(((const uint16_t *)p)[at]);
    union { uint32_t bits; float value; } u = {(uint32_t)((const uint16_t *)p)[at] << 16};
    return u.value;
}

/* Number of tasks if each slot's tokens are taken in blocks, and each block in `pieces`. */
static int64_t count_tasks(const Adapters *a, int64_t pieces) {
    int64_t total = 0;
    for (int64_t s = 1; s <= a->slots; s++)
        if (a->ranks[s - 1]) total += (a->starts[s + 1] - a->starts[s] + BLOCK - 1) / BLOCK;
    return total * pieces;
}

typedef struct {
    int64_t slot, first, last, piece; /* tokens order[first] … order[last - 1] */
} Task;

static Task task_of(const Adapters *a, int64_t pieces, int64_t task) {
    int64_t block = task / pieces;
    for (int64_t s = 1;; s++) {
        int64_t blocks = a->ranks[s - 1] ? (a->starts[s + 1] - a->starts[s] + BLOCK - 1) / BLOCK : 0;
        if (block < blocks) {
            int64_t first = a->starts[s] + block * BLOCK, last = first + BLOCK;
            return (Task){s, first, last < a->starts[s + 1] ? last : a->starts[s + 1], task % pieces};
        }
        block -= blocks;
    }
}

/* Multiply `tokens` rows with `groups` groups of 16 ranks, at offsets `at` of each column of A. */
INLINE void shrink_tile(const LoRAShrink *a, int tokens, int groups, const int64_t *at, const float *const *x, float *const *out,
                        const void *matrix, int64_t first, int64_t last, int kind) {
    vfloat sums[TOKENS][GROUPS][VECTORS];
    int64_t stride = a->parts * a->width;
    for (int t = 0; t < tokens; t++)
        for (int g = 0; g < groups; g++)
            for (int v = 0; v < VECTORS; v++) sums[t][g][v] = splat(0);
    for (int64_t c = first; c < last; c++) {
        for (int g = 0; g < groups; g++)
            for (int v = 0; v < VECTORS; v++) {
                vfloat w = load_as(matrix, c * stride + at[g] + v * LANES, kind);
                for (int t = 0; t < tokens; t++) sums[t][g][v] += splat(x[t][c]) * w;
            }
    }
    for (int t = 0; t < tokens; t++)
        for (int g = 0; g < groups; g++)
            for (int v = 0; v < VECTORS; v++) store(out[t] + at[g] + v * LANES, sums[t][g][v]);
}

INLINE void shrink_groups(const LoRAShrink *a, int tokens, int64_t count, const int64_t *at, const float *const *x, float *const *out,
                          const void *matrix, int64_t first, int64_t last, int kind) {
    int64_t g = 0;
    for (; g + GROUPS <= count; g += GROUPS) shrink_tile(a, tokens, GROUPS, at + g, x, out, matrix, first, last, kind);
    if (count - g == 3) shrink_tile(a, tokens, 3, at + g, x, out, matrix, first, last, kind);
    if (count - g == 2) shrink_tile(a, tokens, 2, at + g, x, out, matrix, first, last, kind);
    if (count - g == 1) shrink_tile(a, tokens, 1, at + g, x, out, matrix, first, last, kind);
}

INLINE void shrink_task(const LoRAShrink *a, Task task, int kind) {
    int64_t rank = a->adapters.ranks[task.slot - 1], stride = a->parts * a->width, count = 0;
    int64_t first = a->columns * task.piece / SPLITS, last = a->columns * (task.piece + 1) / SPLITS;
    int64_t bytes = kind == FLOAT32 ? 4 : 2;
    const char *matrix = (const char *)a->a + (task.slot - 1) * a->columns * stride * bytes;
    int64_t at[stride / RANKS];
    for (int64_t p = 0; p < a->parts; p++)
        for (int64_t r = 0; r < rank; r += RANKS) at[count++] = p * a->width + r;
    for (int64_t i = task.first; i < task.last;) {
        const float *x[TOKENS];
        float *out[TOKENS];
        int tokens = task.last - i < TOKENS ? 1 : TOKENS;
        for (int t = 0; t < tokens; t++) {
            int64_t token = a->adapters.order[i + t];
            x[t] = (const float *)a->x + token * a->x_stride;
            out[t] = a->out + token * a->out_stride + task.piece * stride;
        }
        if (tokens == TOKENS) shrink_groups(a, TOKENS, count, at, x, out, matrix, first, last, kind);
        else shrink_groups(a, 1, count, at, x, out, matrix, first, last, kind);
        i += tokens;
    }
}

/* A column of A for each token. Only the first piece has values. */
static void lookup_task(const LoRAShrink *a, Task task) {
    int64_t stride = a->parts * a->width;
    for (int64_t i = task.first; i < task.last; i++) {
        int64_t token = a->adapters.order[i];
        int64_t row = ((task.slot - 1) * a->columns + ((const int64_t *)a->x)[token * a->x_stride]) * stride;
        float *out = a->out + token * a->out_stride + task.piece * stride;
        for (int64_t r = 0; r < stride; r++) out[r] = task.piece ? 0 : value_as(a->a, row + r, (int)a->kind);
    }
}

EXPORT int64_t lora_shrink_count(const void *arguments) { return count_tasks(&((const LoRAShrink *)arguments)->adapters, SPLITS); }

EXPORT void lora_shrink_task(const void *arguments, int64_t n) {
    const LoRAShrink *a = arguments;
    Task task = task_of(&a->adapters, SPLITS, n);
    if (a->is_lookup) lookup_task(a, task);
    else if (a->kind == FLOAT32) shrink_task(a, task, FLOAT32);
    else if (a->kind == BFLOAT16) shrink_task(a, task, BFLOAT16);
    else shrink_task(a, task, FLOAT16);
}

EXPORT void lora_shrink(const Step *step, Worker *worker, const void *arguments) {
    (void)step;
    int64_t total = lora_shrink_count(arguments);
    for (int64_t n; (n = next_task(worker, total)) < total;) lora_shrink_task(arguments, n);
}

/* Add up the pieces of A x. */
EXPORT void lora_join(const Step *step, Worker *worker, const void *arguments) {
    (void)step;
    const LoRAJoin *a = arguments;
    int64_t total = count_tasks(&a->adapters, 1);
    for (int64_t n; (n = next_task(worker, total)) < total;) {
        Task task = task_of(&a->adapters, 1, n);
        int64_t columns = a->adapters.ranks[task.slot - 1];
        for (int64_t i = task.first; i < task.last; i++) {
            int64_t token = a->adapters.order[i];
            const float *x = a->x + token * a->x_stride;
            float *out = a->out + token * a->out_stride;
            for (int64_t c = 0; c < columns; c++) {
                float sum = x[c];
                for (int s = 1; s < SPLITS; s++) sum += x[s * a->width + c];
                out[c] = sum;
            }
        }
    }
}

/* Add `vectors` vectors of rows of `tokens` tokens. x: [tokens][rank]. */
INLINE void expand_tile(int tokens, int vectors, const float *x, int64_t rank, float *const *out, const void *matrix, int64_t row,
                        int64_t stride, int kind) {
    vfloat sums[TOKENS][4];
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < vectors; v++) sums[t][v] = splat(0);
    for (int64_t r = 0; r < rank; r++)
        for (int v = 0; v < vectors; v++) {
            vfloat w = load_as(matrix, r * stride + row + v * LANES, kind);
            for (int t = 0; t < tokens; t++) sums[t][v] += splat(x[t * rank + r]) * w;
        }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < vectors; v++) {
            float *target = out[t] + row + v * LANES;
            store(target, load(target) + sums[t][v]);
        }
}

INLINE void expand_rows(int tokens, const float *x, int64_t rank, float *const *out, const void *matrix, int64_t row, int64_t stop,
                        int64_t stride, int kind) {
    for (; row + 4 * LANES <= stop; row += 4 * LANES) expand_tile(tokens, 4, x, rank, out, matrix, row, stride, kind);
    for (; row + LANES <= stop; row += LANES) expand_tile(tokens, 1, x, rank, out, matrix, row, stride, kind);
    for (; row < stop; row++)
        for (int t = 0; t < tokens; t++) {
            float sum = 0;
            for (int64_t r = 0; r < rank; r++) sum += x[t * rank + r] * value_as(matrix, r * stride + row, kind);
            out[t][row] += sum;
        }
}

INLINE void expand_task(const LoRAExpand *a, Task task, int kind) {
    int64_t rank = a->adapters.ranks[task.slot - 1], rows = a->bounds[a->parts], part = 0, piece = task.piece;
    for (;; part++) {
        int64_t chunks = (a->bounds[part + 1] - a->bounds[part] + CHUNK - 1) / CHUNK;
        if (piece < chunks) break;
        piece -= chunks;
    }
    int64_t row = a->bounds[part] + piece * CHUNK, stop = row + CHUNK < a->bounds[part + 1] ? row + CHUNK : a->bounds[part + 1];
    const char *matrix = (const char *)a->b + (task.slot - 1) * a->max_rank * rows * (kind == FLOAT32 ? 4 : 2);
    float x[TOKENS * rank];
    for (int64_t i = task.first; i < task.last;) {
        float *out[TOKENS];
        int tokens = task.last - i < TOKENS ? 1 : TOKENS;
        for (int t = 0; t < tokens; t++) {
            int64_t token = a->adapters.order[i + t];
            const float *from = a->x + token * a->x_stride + a->firsts[part];
            out[t] = a->out + token * a->out_stride;
            for (int64_t turn = 0; turn < a->turns; turn++)
                for (int64_t r = turn, c = 0; r < rank; r += a->turns, c++) x[t * rank + r] = from[turn * a->width + c];
            for (int64_t r = 0; r < rank && !a->turns; r++) {
                float sum = from[r];
                for (int s = 1; s < SPLITS; s++) sum += from[s * a->width + r];
                x[t * rank + r] = sum;
            }
        }
        if (tokens == TOKENS) expand_rows(TOKENS, x, rank, out, matrix, row, stop, rows, kind);
        else expand_rows(1, x, rank, out, matrix, row, stop, rows, kind);
        i += tokens;
    }
}

EXPORT void lora_expand(const Step *step, Worker *worker, const void *arguments) {
    (void)step;
    const LoRAExpand *a = arguments;
    int64_t pieces = 0;
    for (int64_t p = 0; p < a->parts; p++) pieces += (a->bounds[p + 1] - a->bounds[p] + CHUNK - 1) / CHUNK;
    int64_t total = count_tasks(&a->adapters, pieces);
    for (int64_t n; (n = next_task(worker, total)) < total;) {
        Task task = task_of(&a->adapters, pieces, n);
        if (a->kind == FLOAT32) expand_task(a, task, FLOAT32);
        else if (a->kind == BFLOAT16) expand_task(a, task, BFLOAT16);
        else expand_task(a, task, FLOAT16);
    }
}
