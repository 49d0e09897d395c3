/* y = x Wᵀ + b in float32.
 *
 * W is packed in groups of 16 rows as packed[group][column][16]. The last group is padded with zeros. See float_tiles.h for how the
 * products are computed.
 */
#include "float_tiles.h"
#include "sorted_rows.h"

EXPORT void pack_linear_float(const float *restrict weight, int64_t rows, int64_t columns, float *restrict packed) {
    for (int64_t group = 0; group * ROWS < rows; group++)
        for (int r = 0; r < ROWS; r++) {
            int64_t row = group * ROWS + r;
            float *target = packed + group * ROWS * columns + r;
            for (int64_t c = 0; c < columns; c++) target[c * ROWS] = row < rows ? weight[row * columns + c] : 0;
        }
}

EXPORT void unpack_linear_float(const float *restrict packed, int64_t rows, int64_t columns, float *restrict weight) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < columns; c++)
            weight[row * columns + c] = packed[(row / ROWS * columns + c) * ROWS + row % ROWS];
}

INLINE void float_task(const LinearFloat *a, int64_t start, int64_t end, int64_t group, int64_t stop, int64_t step_columns) {
    for (int64_t first = 0; first < a->columns; first += step_columns) {
        int64_t last = first + step_columns < a->columns ? first + step_columns : a->columns;
        for (int64_t g = group; g < stop; g++)
            tiles(a, start, end, g * ROWS, a->weight + (g * a->columns + first) * ROWS, first, last);
    }
}

EXPORT void linear_float(const Step *step, Worker *worker, const void *arguments) {
    const LinearFloat *a = arguments;
    int64_t tokens = step->num_tokens, groups = (a->rows + ROWS - 1) / ROWS;
    int64_t blocks = (tokens + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    int64_t share = groups * blocks / (worker->num_threads * 8);
    int64_t per_task = share < 1 ? 1 : share > 8 ? 8 : share;
    int64_t pieces = (groups + per_task - 1) / per_task;
    int64_t step_columns = tokens <= TOKENS ? a->columns : COLUMNS;
    for (int64_t task; (task = next_task(worker, pieces * blocks)) < pieces * blocks;) {
        int64_t start = task / pieces * TOKEN_BLOCK, end = start + TOKEN_BLOCK < tokens ? start + TOKEN_BLOCK : tokens;
        int64_t group = task % pieces * per_task, stop = group + per_task < groups ? group + per_task : groups;
        float_task(a, start, end, group, stop, step_columns);
    }
}

/* The product of experts, whose matrices have the same shape. */
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
    SortedRows rows = sorted_rows(e->starts, e->num_experts, (a.rows + ROWS - 1) / ROWS, 8, TOKEN_BLOCK, worker->num_threads);
    while (next_rows(&rows, worker)) {
        a.weight = e->experts[rows.expert].weight;
        a.bias = e->experts[rows.expert].bias;
        float_task(&a, rows.start, rows.end, rows.group, rows.stop, rows.end - rows.start <= TOKENS ? a.columns : COLUMNS);
    }
}
