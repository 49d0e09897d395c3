/* Products of bfloat16 numbers with the matrix tiles of AMX, which add them in float32.
 *
 * A thread has eight tiles. Tiles 0 and 1 hold activations, [tokens][32 columns], 2 and 3 weights, [16 pairs of columns][16 rows][2],
 * and 4 to 7 sums, [tokens][16 rows]. Two tiles of tokens times two groups of rows let every load serve two products, and four sums
 * take as long as one product waits for its predecessor. The intrinsics need literal numbers.
 *
 * Weights that are stored in another form are written as bfloat16 numbers once per block of tokens, some columns of two groups at a
 * time, to a panel that fits in the caches of a core.
 */
#ifndef PEGBOARD_AMX_H
#define PEGBOARD_AMX_H

#include "quantize.h"

#if defined(__AMX_BF16__)

#define TILE_TOKENS 16
#define TILE_COLUMNS 32
#define TILE_WORDS (16 * TILE_COLUMNS) /* of weights */
#define GROUP_ROWS 16
#define TILE_BLOCK 256 /* most tokens of a task */
#define PIECE 1024 /* most columns of weights that are expanded at a time */

/* The compiler does not know that tile loads read memory. */
#define WRITTEN(p) __asm__ volatile("" : : "r"(p) : "memory")

typedef struct {
    const uint16_t *x; /* [tokens][columns + WORDS_GAP], see quantize.h */
    float *out; /* [tokens][out_stride] */
    const float *bias; /* [rows] or NULL */
    int64_t out_stride, rows, columns; /* columns: a multiple of 32 */
    const void *weight;
    /* Write the columns [first, last) of a group of 16 rows, [pair of columns][16 rows][2]. Both are multiples of 32. NULL = the weight
     * is stored like this, group by group. */
    void (*expand)(const void *weight, int64_t group, int64_t first, int64_t last, uint16_t *to);
} TileProduct;

/* Set the shapes of this thread's tiles, for so many tokens in each of the two tiles. They are valid until _tile_release. */
INLINE void configure_tiles(int first, int second) {
    ALIGNED struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.rows[i] = 16, shapes.row_bytes[i] = 64;
    shapes.rows[0] = shapes.rows[4] = shapes.rows[5] = (uint8_t)first;
    shapes.rows[1] = shapes.rows[6] = shapes.rows[7] = (uint8_t)(second ? second : TILE_TOKENS);
    WRITTEN(&shapes);
    _tile_loadconfig(&shapes);
}

/* Load what the sums of a tile begin with. stride: bytes from token to token; 0 = the same for all. */
#define LOAD_SUMS(tile, from, stride) \
    if (from) _tile_loadd(tile, from, stride); \
    else _tile_zero(tile)

/* Add the products of one or two tiles of tokens with one or two groups to `out`. x, w, sums, out: of each tile or group, or of the
 * tile's two groups. sums: NULL = begin with zero. The strides are bytes. */
INLINE void multiply(const uint16_t *const x[2], int64_t x_stride, int tiles, const uint16_t *const w[2], int groups, int64_t steps,
                     const float *const sums[2][2], int64_t sums_stride, float *const out[2][2], int64_t out_stride, int fetches) {
    LOAD_SUMS(4, sums[0][0], sums_stride);
    if (groups == 2) { LOAD_SUMS(5, sums[0][1], sums_stride); }
    if (tiles == 2) { LOAD_SUMS(6, sums[1][0], sums_stride); }
    if (tiles == 2 && groups == 2) { LOAD_SUMS(7, sums[1][1], sums_stride); }
    for (int64_t step = 0; step < steps; step++) {
        const int64_t column = step * TILE_COLUMNS, word = step * TILE_WORDS;
        _tile_loadd(0, x[0] + column, x_stride);
        _tile_loadd(2, w[0] + word, 64);
        if (fetches) fetch(w[0] + word, 2 * TILE_WORDS);
        _tile_dpbf16ps(4, 0, 2);
        if (groups == 2) {
            _tile_loadd(3, w[1] + word, 64);
            if (fetches) fetch(w[1] + word, 2 * TILE_WORDS);
            _tile_dpbf16ps(5, 0, 3);
        }
        if (tiles == 2) {
            _tile_loadd(1, x[1] + column, x_stride);
            _tile_dpbf16ps(6, 1, 2);
            if (groups == 2) _tile_dpbf16ps(7, 1, 3);
        }
    }
    _tile_stored(4, out[0][0], out_stride);
    if (groups == 2) _tile_stored(5, out[0][1], out_stride);
    if (tiles == 2) _tile_stored(6, out[1][0], out_stride);
    if (tiles == 2 && groups == 2) _tile_stored(7, out[1][1], out_stride);
}

/* Multiply the columns [first, last) of `tokens` tokens, at most 32, with one or two groups, of which the first is `group`. fetches:
 * whether the weights come from memory, rather than from a cache. */
static void multiply_groups(const TileProduct *p, int64_t token, int tokens, int64_t group, int groups, const uint16_t *const w[2],
                            int64_t first, int64_t last, int fetches) {
    const int64_t row = group * GROUP_ROWS, width = p->rows - row;
    const int is_edge = width < groups * GROUP_ROWS, tiles = tokens > TILE_TOKENS ? 2 : 1;
    ALIGNED float edge[2 * TILE_TOKENS * 2 * GROUP_ROWS], bias[2 * GROUP_ROWS];
    float *at = is_edge ? edge : p->out + token * p->out_stride + row;
    const int64_t stride = is_edge ? 2 * GROUP_ROWS : p->out_stride;
    const int64_t x_stride = p->columns + WORDS_GAP, steps = (last - first) / TILE_COLUMNS;
    const uint16_t *x = p->x + token * x_stride + first, *const of[2] = {x, x + TILE_TOKENS * x_stride};
    float *const out[2][2] = {{at, at + GROUP_ROWS}, {at + TILE_TOKENS * stride, at + TILE_TOKENS * stride + GROUP_ROWS}};
    const float *sums[2][2] = {{out[0][0], out[0][1]}, {out[1][0], out[1][1]}};
    int64_t sums_stride = stride * sizeof(float);
    /* The results are not in a cache. They are fetched while the products are computed. */
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < groups; i++) __builtin_prefetch(at + t * stride + i * GROUP_ROWS, 1);
    if (!first) {
        const float *from = p->bias ? p->bias + row : NULL;
        if (from && is_edge) from = memcpy(bias, from, width * sizeof(float));
        for (int i = 0; i < 2; i++) sums[i][0] = from, sums[i][1] = from ? from + GROUP_ROWS : NULL;
        sums_stride = 0;
    } else if (is_edge) {
        for (int t = 0; t < tokens; t++) memcpy(edge + t * stride, p->out + (token + t) * p->out_stride + row, width * sizeof(float));
    }
    WRITTEN(edge);
    const int64_t x_bytes = x_stride * sizeof(uint16_t), out_bytes = stride * sizeof(float);
    if (tiles == 2 && groups == 2) multiply(of, x_bytes, 2, w, 2, steps, sums, sums_stride, out, out_bytes, fetches);
    else if (tiles == 2) multiply(of, x_bytes, 2, w, 1, steps, sums, sums_stride, out, out_bytes, fetches);
    else if (groups == 2) multiply(of, x_bytes, 1, w, 2, steps, sums, sums_stride, out, out_bytes, fetches);
    else multiply(of, x_bytes, 1, w, 1, steps, sums, sums_stride, out, out_bytes, fetches);
    WRITTEN(edge);
    if (is_edge)
        for (int t = 0; t < tokens; t++) memcpy(p->out + (token + t) * p->out_stride + row, edge + t * stride, width * sizeof(float));
}

/* Compute the results of the tokens [start, end), at most TILE_BLOCK, for the groups [group, stop). */
static void tile_task(const TileProduct *p, int64_t start, int64_t end, int64_t group, int64_t stop) {
    ALIGNED uint16_t panel[2][PIECE * GROUP_ROWS];
    const int64_t pieces = p->expand ? (p->columns + PIECE - 1) / PIECE : 1;
    const int64_t step = (p->columns / TILE_COLUMNS + pieces - 1) / pieces * TILE_COLUMNS;
    int configured = 0;
    for (int64_t first = 0; first < p->columns; first += step) {
        const int64_t last = first + step < p->columns ? first + step : p->columns;
        for (int64_t g = group; g < stop; g += 2) {
            const int groups = stop - g > 1 ? 2 : 1;
            const uint16_t *w[2] = {panel[0], panel[1]};
            for (int i = 0; i < groups; i++) {
                if (p->expand) p->expand(p->weight, g + i, first, last, panel[i]);
                else w[i] = (const uint16_t *)p->weight + (g + i) * p->columns * GROUP_ROWS;
            }
            WRITTEN(panel);
            for (int64_t token = start; token < end; token += 2 * TILE_TOKENS) {
                const int tokens = end - token < 2 * TILE_TOKENS ? (int)(end - token) : 2 * TILE_TOKENS;
                if (tokens != configured)
                    configure_tiles(tokens < TILE_TOKENS ? tokens : TILE_TOKENS, tokens > TILE_TOKENS ? tokens - TILE_TOKENS : 0);
                configured = tokens;
                multiply_groups(p, token, tokens, g, groups, w, first, last, !p->expand && token == start);
            }
        }
    }
    _tile_release();
}

/* Compute all results. */
static void tile_product(const TileProduct *p, int64_t tokens, Worker *worker) {
    const int64_t groups = (p->rows + GROUP_ROWS - 1) / GROUP_ROWS, tasks = 8 * worker->num_threads;
    int64_t blocks = (tokens + TILE_BLOCK - 1) / TILE_BLOCK;
    while (groups * blocks < 2 * tasks && tokens / blocks > 4 * TILE_TOKENS) blocks *= 2;
    const int64_t block = ((tokens + blocks - 1) / blocks + 2 * TILE_TOKENS - 1) / (2 * TILE_TOKENS) * (2 * TILE_TOKENS);
    blocks = (tokens + block - 1) / block;
    const int64_t share = groups * blocks / tasks / 2 * 2;
    const int64_t per_task = share < 2 ? 2 : share > 64 ? 64 : share;
    const int64_t pieces = (groups + per_task - 1) / per_task;
    for (int64_t task; (task = next_task(worker, pieces * blocks)) < pieces * blocks;) {
        int64_t start = task / pieces * block, end = start + block < tokens ? start + block : tokens;
        int64_t group = task % pieces * per_task, stop = group + per_task < groups ? group + per_task : groups;
        tile_task(p, start, end, group, stop);
    }
}

#endif
#endif
