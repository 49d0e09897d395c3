/* y = x Wᵀ + b in float32, with W of floats, bfloat16 numbers or halves. See float_tiles.h for the layouts and for how the products are
 * computed. The last group is padded with zeros.
 */
#include "amx.h"
#include "float_tiles.h"
#include "sorted_rows.h"

enum { STRETCH = 64 }; /* columns that are packed at a time, so that what is written stays in the first-level cache */

enum { MOST_GROUPS = 16 }; /* of a task */

/* Copy words between a matrix [rows][width] and packed[group][width][16]. */
#define COPY_WORDS(name, word)                                                                                                   \
    static void name(word *matrix, int64_t rows, int64_t width, word *packed, int packs) {                                       \
        for (int64_t first = 0; first < rows; first += ROWS, packed += ROWS * width)                                             \
            for (int64_t start = 0; start < width; start += STRETCH)                                                             \
                for (int64_t r = 0; r < ROWS; r++) {                                                                             \
                    int64_t stop = start + STRETCH < width ? start + STRETCH : width;                                            \
                    word *row = matrix + (first + r) * width;                                                                    \
                    if (first + r >= rows)                                                                                       \
                        for (int64_t c = start; c < stop && packs; c++) packed[c * ROWS + r] = 0;                                \
                    else if (packs) for (int64_t c = start; c < stop; c++) packed[c * ROWS + r] = row[c];                        \
                    else for (int64_t c = start; c < stop; c++) row[c] = packed[c * ROWS + r];                                   \
                }                                                                                                                \
    }

COPY_WORDS(copy_words, uint32_t)
COPY_WORDS(copy_halves, uint16_t)

/* The same for an odd number of columns, of which pairs are packed. */
static void copy_odd_pairs(uint16_t *matrix, int64_t rows, int64_t columns, uint16_t *packed, int packs) {
    for (int64_t row = 0; row < (rows + ROWS - 1) / ROWS * ROWS; row++)
        for (int64_t c = 0; c < columns + 1; c++) {
            uint16_t *at = packed + (row / ROWS * (columns + 1) / 2 * ROWS + c / 2 * ROWS + row % ROWS) * 2 + c % 2;
            if (row >= rows || c == columns) { if (packs) *at = 0; }
            else if (packs) *at = matrix[row * columns + c];
            else matrix[row * columns + c] = *at;
        }
}

static void copy_matrix(void *matrix, int64_t rows, int64_t columns, int64_t type, void *packed, int packs) {
    if (type == FLOAT_WEIGHTS) copy_words(matrix, rows, columns, packed, packs);
    else if (type == HALF_WEIGHTS) copy_halves(matrix, rows, columns, packed, packs);
    else if (columns % 2) copy_odd_pairs(matrix, rows, columns, packed, packs);
    else copy_words(matrix, rows, columns / 2, packed, packs);
}

EXPORT void pack_linear_float(void *matrix, int64_t rows, int64_t columns, int64_t type, void *packed) {
    copy_matrix(matrix, rows, columns, type, packed, 1);
}

EXPORT void unpack_linear_float(void *packed, int64_t rows, int64_t columns, int64_t type, void *matrix) {
    copy_matrix(matrix, rows, columns, type, packed, 0);
}

/* Compute the results of the tokens [start, end), at most TOKEN_BLOCK, for the groups [group, stop). */
INLINE void groups_of(const LinearFloat *a, int type, int64_t start, int64_t end, int64_t group, int64_t stop) {
    float panel[PANEL] ALIGNED;
    const int64_t step = piece_columns(end - start, type);
    for (int64_t first = 0; first < a->columns; first += step) {
        int64_t last = first + step < a->columns ? first + step : a->columns, g = group;
        const Activations piece = copy_activations(a, type, start, end, first, last, panel);
        for (; g + GROUPS <= stop; g += GROUPS) {
            const void *weights[GROUPS];
            for (int i = 0; i < GROUPS; i++) weights[i] = weights_at(a->weight, a->columns, type, g + i, first);
            tiles(&piece, type, GROUPS, g * ROWS, weights, 1);
        }
        for (; g < stop; g++) {
            const void *weights[] = {weights_at(a->weight, a->columns, type, g, first)};
            tiles(&piece, type, 1, g * ROWS, weights, 1);
        }
    }
}

#if defined(__AMX_BF16__)
INLINE TileProduct tiles_of(const LinearFloat *a) {
    return (TileProduct){
        .x = a->x_words,
        .out = a->out,
        .out_stride = a->out_stride,
        .bias = a->bias,
        .rows = a->rows,
        .columns = a->columns,
        .weight = a->weight,
    };
}
#endif

static void float_task(const LinearFloat *a, int64_t start, int64_t end, int64_t group, int64_t stop) {
    if (a->type == BFLOAT16_WEIGHTS) groups_of(a, BFLOAT16_WEIGHTS, start, end, group, stop);
    else if (a->type == HALF_WEIGHTS) groups_of(a, HALF_WEIGHTS, start, end, group, stop);
    else groups_of(a, FLOAT_WEIGHTS, start, end, group, stop);
}

EXPORT void linear_float(const Step *step, Worker *worker, const void *arguments) {
    const LinearFloat *a = arguments;
    int64_t tokens = step->num_tokens, groups = (a->rows + ROWS - 1) / ROWS;
#if defined(__AMX_BF16__)
    if (a->x_words) {
        const TileProduct product = tiles_of(a);
        tile_product(&product, tokens, worker);
        return;
    }
#endif
    int64_t blocks = (tokens + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    int64_t share = groups * blocks / (worker->num_threads * 8) / GROUPS * GROUPS;
    int64_t per_task = share < GROUPS ? GROUPS : share > MOST_GROUPS ? MOST_GROUPS : share;
    int64_t pieces = (groups + per_task - 1) / per_task;
    for (int64_t task; (task = next_task(worker, pieces * blocks)) < pieces * blocks;) {
        int64_t start = task / pieces * TOKEN_BLOCK, end = start + TOKEN_BLOCK < tokens ? start + TOKEN_BLOCK : tokens;
        int64_t group = task % pieces * per_task, stop = group + per_task < groups ? group + per_task : groups;
        float_task(a, start, end, group, stop);
    }
}

/* The product of experts, whose matrices have the same shape and type. */
typedef struct {
    LinearFloat common; /* x and out, of all experts */
    const int32_t *starts;
    const LinearFloat *experts; /* the matrices and biases */
    int64_t num_experts;
} ExpertsFloat;

EXPORT void experts_float(const Step *step, Worker *worker, const void *arguments) {
    (void)step;
    const ExpertsFloat *e = arguments;
    LinearFloat a = e->common;
    SortedRows rows = sorted_rows(e->starts, e->num_experts, (a.rows + ROWS - 1) / ROWS, MOST_GROUPS, TOKEN_BLOCK, worker->num_threads);
    while (next_rows(&rows, worker)) {
        a.weight = e->experts[rows.expert].weight;
        a.bias = e->experts[rows.expert].bias;
#if defined(__AMX_BF16__)
        if (a.x_words) {
            const TileProduct product = tiles_of(&a);
            tile_task(&product, rows.start, rows.end, rows.group, rows.stop);
            continue;
        }
#endif
        float_task(&a, rows.start, rows.end, rows.group, rows.stop);
    }
}

typedef struct {
    const int64_t *ids; /* [tokens] */
    float *out; /* [tokens][columns] */
    int64_t out_stride;
    const void *weight; /* packed */
    int64_t columns;
    int64_t type; /* a WeightType */
} LookupPacked;

EXPORT void lookup_packed(const Step *step, Worker *worker, const void *arguments) {
    const LookupPacked *a = arguments;
    const int type = (int)a->type;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        float *out = a->out + t * a->out_stride;
        const int64_t lane = a->ids[t] % ROWS;
        const void *group = weights_at(a->weight, a->columns, type, a->ids[t] / ROWS, 0);
        for (int64_t c = 0; c < a->columns; c++) {
            if (type == FLOAT_WEIGHTS) out[c] = ((const float *)group)[c * ROWS + lane];
            else if (type == HALF_WEIGHTS) out[c] = half_to_float(((const uint16_t *)group)[c * ROWS + lane]);
            else out[c] = bfloat16_to_float(((const uint16_t *)group)[(c / 2 * ROWS + lane) * 2 + c % 2]);
        }
    }
}
