/* Products of float activations and bfloat16 weights with the matrix tiles of AMX, for many tokens.
 *
 * AMX multiplies bfloat16 numbers and adds the products in float32. Activations are split into three bfloat16 numbers, their terms: the
 * float rounded to bfloat16, what is left rounded to bfloat16, and the rest. The sum of the terms is the float, so every product is
 * exact, as it is with float32 instructions. Infinite activations give NaN.
 */
#ifndef PEGBOARD_BFLOAT_TILES_H
#define PEGBOARD_BFLOAT_TILES_H

#include "amx.h"
#include "float_tiles.h"

#if defined(__AMX_BF16__)

#define TERMS 3
#define STEP 32 /* columns of a tile. Word pairs are columns i and i + 16, so that no vector has to be shuffled. */
#define STEPS (COLUMNS / STEP)
#define TILE (TILE_TOKENS * STEP) /* words */

/* Where weights come from, as tiles. */
typedef struct {
    const void *weight;
    /* Write the columns [first, last) of a group as tiles, [steps][16 word pairs][16 rows]. */
    void (*expand)(const void *weight, int64_t group, int64_t first, int64_t last, uint16_t *to);
    /* Write what the sums of a block of columns are to be multiplied with. */
    void (*scale)(const void *weight, int64_t group, int64_t block, vfloat *to);
    int64_t block_size; /* a multiple of 32 */
} Source;

/* Split floats into terms, each of which is the upper half of a word. */
INLINE void split(vfloat x, vint terms[TERMS]) {
    for (int i = 0; i < TERMS; i++) {
        terms[i] = ((vint)x + 0x8000) & (int32_t)0xffff0000; /* to the nearest */
        x -= (vfloat)terms[i];
    }
}

/* Join the upper halves of words. */
INLINE void put_pairs(uint16_t *to, vint low, vint high) { *(vint *)to = (low >> 16 & 0xffff) | high; }

/* Split the activations of `tokens` tokens to [tiles][steps][terms][16 tokens][STEP]. The tokens that fill the last tile are zero. */
static void split_activations(const LinearFloat *a, int64_t token, int64_t tokens, int64_t first, int64_t last, uint16_t *to) {
    for (int64_t t = 0; t < (tokens + TILE_TOKENS - 1) / TILE_TOKENS * TILE_TOKENS; t++) {
        uint16_t *row = to + t / TILE_TOKENS * (STEPS * TERMS * TILE) + t % TILE_TOKENS * STEP;
        const float *x = a->x + (token + t) * a->x_stride;
        for (int64_t c = first; c < last; c += STEP, row += TERMS * TILE) {
            vint low[TERMS] = {0}, high[TERMS] = {0};
            if (t < tokens) split(load(x + c), low), split(load(x + c + LANES), high);
            for (int i = 0; i < TERMS; i++) put_pairs(row + i * TILE, low[i], high[i]);
        }
    }
    WRITTEN(to);
}

/* Compute [1 or 2 tiles of tokens][1 or 2 groups][16 tokens] sums over some steps. */
INLINE void tile_sums(const uint16_t *x, int tiles, const uint16_t *w, int groups, int steps,
                      vfloat sums[2][2][TILE_TOKENS]) {
    const int64_t x_next = STEPS * TERMS * TILE, w_next = STEPS * TILE;
    _tile_zero(4);
    if (groups == 2) _tile_zero(5);
    if (tiles == 2) _tile_zero(6);
    if (tiles == 2 && groups == 2) _tile_zero(7);
    for (int step = 0; step < steps; step++, x += TERMS * TILE, w += TILE) {
        _tile_loadd(2, w, 64);
        if (groups == 2) _tile_loadd(3, w + w_next, 64);
        for (int i = 0; i < TERMS; i++) {
            _tile_loadd(0, x + i * TILE, 64);
            _tile_dpbf16ps(4, 0, 2);
            if (groups == 2) _tile_dpbf16ps(5, 0, 3);
            if (tiles == 1) continue;
            _tile_loadd(1, x + x_next + i * TILE, 64);
            _tile_dpbf16ps(6, 1, 2);
            if (groups == 2) _tile_dpbf16ps(7, 1, 3);
        }
    }
    _tile_stored(4, sums[0][0], 64);
    if (groups == 2) _tile_stored(5, sums[0][1], 64);
    if (tiles == 2) _tile_stored(6, sums[1][0], 64);
    if (tiles == 2 && groups == 2) _tile_stored(7, sums[1][1], 64);
}

/* Add the sums of `tokens` tokens to the results, or, for the first columns, write them. */
INLINE void add_sums(const LinearFloat *a, int64_t token, int64_t tokens, int64_t row, const vfloat *sums, vfloat scale, int is_first) {
    int64_t width = a->rows - row < ROWS ? a->rows - row : ROWS;
    float *out = a->out + token * a->out_stride + row, edge[ROWS] ALIGNED = {0};
    if (is_first && a->bias) memcpy(edge, a->bias + row, width * sizeof(float));
    const vfloat bias = load(edge);
    for (int64_t t = 0; t < tokens; t++, out += a->out_stride) {
        if (width == ROWS) {
            store(out, (is_first ? bias : load(out)) + sums[t] * scale);
            continue;
        }
        store(edge, bias + sums[t] * scale);
        for (int64_t r = 0; r < width; r++) out[r] = edge[r] + (is_first ? 0 : out[r]);
    }
}

/* Add the products of a piece of columns with one or two groups, of which `first_group` is the first. */
INLINE void add_piece(const LinearFloat *a, const Source *from, const uint16_t *x, int64_t start, int64_t end, int64_t first_group,
                      int groups, int64_t first, int64_t last, const uint16_t *w) {
    for (int64_t at = first; at < last;) {
        int64_t block = at / from->block_size, stop = (block + 1) * from->block_size < last ? (block + 1) * from->block_size : last;
        int64_t skip = (at - first) / STEP;
        int steps = (int)((stop - at) / STEP);
        vfloat scale[2];
        for (int g = 0; g < groups; g++) from->scale(from->weight, first_group + g, block, &scale[g]);
        for (int64_t token = start; token < end; token += 2 * TILE_TOKENS) {
            ALIGNED vfloat sums[2][2][TILE_TOKENS];
            const uint16_t *tile = x + (token - start) / TILE_TOKENS * (STEPS * TERMS * TILE) + skip * TERMS * TILE;
            const uint16_t *part = w + skip * TILE;
            int tiles = end - token > TILE_TOKENS ? 2 : 1;
            if (tiles == 2 && groups == 2) tile_sums(tile, 2, part, 2, steps, sums);
            else if (groups == 2) tile_sums(tile, 1, part, 2, steps, sums);
            else if (tiles == 2) tile_sums(tile, 2, part, 1, steps, sums);
            else tile_sums(tile, 1, part, 1, steps, sums);
            for (int i = 0; i < tiles; i++) {
                int64_t of = token + i * TILE_TOKENS, count = end - of < TILE_TOKENS ? end - of : TILE_TOKENS;
                for (int g = 0; g < groups; g++) add_sums(a, of, count, (first_group + g) * ROWS, sums[i][g], scale[g], at == 0);
            }
        }
        at = stop;
    }
}

/* Compute the results of the tokens [start, end), at most TOKEN_BLOCK, for the groups [group, stop). The number of columns is a
 * multiple of 32. */
static void bfloat_groups(const LinearFloat *a, const Source *from, int64_t start, int64_t end, int64_t group, int64_t stop) {
    ALIGNED uint16_t x[TOKEN_BLOCK / TILE_TOKENS * STEPS * TERMS * TILE], w[2 * STEPS * TILE];
    for (int64_t first = 0; first < a->columns; first += COLUMNS) {
        int64_t last = first + COLUMNS < a->columns ? first + COLUMNS : a->columns;
        split_activations(a, start, end - start, first, last, x);
        for (int64_t g = group; g < stop; g += 2) {
            int groups = stop - g > 1 ? 2 : 1;
            for (int i = 0; i < groups; i++) from->expand(from->weight, g + i, first, last, w + i * STEPS * TILE);
            WRITTEN(w);
            if (groups == 2) add_piece(a, from, x, start, end, g, 2, first, last, w);
            else add_piece(a, from, x, start, end, g, 1, first, last, w);
        }
    }
}

#endif
#endif
