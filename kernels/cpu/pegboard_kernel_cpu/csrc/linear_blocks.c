/* y = x Wᵀ + b, where W consists of small integers. Each row has a scale per block of columns and, in some formats, a minimum or
 * a zero point.
 *
 * The activations are also quantized, to int8 with one scale per token and 32 columns. The inner products are therefore sums of
 * integers and exact. The scales are applied to them in float32. Packed W consists of groups of 16 rows. A group has one record
 * per block of columns: 16 scales, 16 minimums or zero points if the format has them, and the codes. The codes are stored in parts
 * of 32 columns (or 16, if the block has no more), each as described in linear_blocks.h.
 */
#include "linear_tiles.h"
#include "quantize.h"

#define TOKEN_BLOCK 96

enum { NO_SHIFT, MINIMUMS, ZEROS };

typedef struct {
    int32_t bits, block_size; /* a multiple of 32, or 16 with 8 bits and no zero points */
    int32_t is_wide; /* scales and minimums are float32 instead of float16 */
    int32_t shift; /* NO_SHIFT, MINIMUMS, or ZEROS: int8 zero points */
    int32_t zero; /* subtracted from every code if the format has neither minimums nor zero points */
    int32_t record_bytes;
} Format;

typedef struct {
    const int8_t *x; /* [tokens][columns] codes of the activations */
    const float *x_scales; /* [tokens][columns / 32] */
    const float *x_sums; /* [tokens][columns / 32][2], see quantize.h */
    float *out; /* [tokens][rows] */
    int64_t out_stride;
    const uint8_t *weight; /* packed */
    const float *bias; /* [rows] or NULL */
    int64_t rows, columns;
    Format format;
} LinearBlocks;

EXPORT void quantize(const Step *step, Worker *worker, const void *arguments) {
    const Quantize *a = arguments;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        const float *x = a->x + t * a->x_stride;
        if (a->order) quantize_in_order(x, &a->to, a->columns, t, a->order);
        else quantize_row(x, &a->to, a->columns, t);
    }
}

INLINE int shift_bytes(int is_wide, int shift) { return shift == MINIMUMS ? (is_wide ? 64 : 32) : shift == ZEROS ? ROWS : 0; }

typedef struct {
    vfloat scale[VECTORS], minimum[VECTORS]; /* for the 16 rows of a block */
} Scales;

INLINE vfloat scale_vector(const uint8_t *p, int is_wide, int v) {
    return is_wide ? load((const float *)p + v * LANES) : load_half((const uint16_t *)p + v * LANES);
}

/* Read the scales of a record and return its codes. The products use codes that are too high by the zero point and, for 8 bits, by
 * `offset`. The minimum corrects this. */
INLINE const uint8_t *read_scales(const uint8_t *record, int is_wide, int shift, int zero, int offset, Scales *to) {
    int bytes = is_wide ? 64 : 32;
    for (int v = 0; v < VECTORS; v++) {
        to->scale[v] = scale_vector(record, is_wide, v);
        if (shift == NO_SHIFT) to->minimum[v] = to->scale[v] * -(float)(zero + offset);
        else if (shift == MINIMUMS) to->minimum[v] = scale_vector(record + bytes, is_wide, v);
        else to->minimum[v] = to->scale[v] * -(load_int8((const int8_t *)record + bytes + v * LANES) + (float)offset);
        if (shift == MINIMUMS && offset) to->minimum[v] -= to->scale[v] * (float)offset;
    }
    return record + bytes + shift_bytes(is_wide, shift);
}

/* Add one part of 16 or 32 columns to the sums of a token. x_scales, x_sums: those of the token. halves: number of halves in a
 * part. has_offset: the minimums are not zero. */
INLINE void add_part(vfloat *sums, const vint *dots, const Scales *scales, const float *x_scales, const float *x_sums, int64_t part,
                      int halves, int has_offset) {
    vfloat x_scale = splat(x_scales[part * halves / 2]);
    for (int v = 0; v < VECTORS; v++) sums[v] += __builtin_convertvector(dots[v], vfloat) * (scales->scale[v] * x_scale);
    if (!has_offset) return;
    const float *of = x_sums + part * halves / 2 * 2;
    vfloat x_sum = splat(halves == 2 ? of[0] : part % 2 ? of[0] - of[1] : of[1]);
    for (int v = 0; v < VECTORS; v++) sums[v] += scales->minimum[v] * x_sum;
}

INLINE void put_results(const LinearBlocks *a, int64_t token, int64_t row, const vfloat *sums) {
    int64_t width = a->rows - row < ROWS ? a->rows - row : ROWS;
    float *out = a->out + token * a->out_stride + row, edge[ROWS] ALIGNED;
    float *target = width == ROWS ? out : edge;
    for (int v = 0; v < VECTORS; v++) store(target + v * LANES, sums[v]);
    if (width < ROWS) memcpy(out, edge, width * sizeof(float));
    if (a->bias)
        for (int64_t r = 0; r < width; r++) out[r] += a->bias[row + r];
}

/* Compute `tokens` x 16 results. The properties of the format are separate arguments, so that the compiler specializes every
 * combination. width: columns of a part. parts: parts of a block. */
INLINE void tile(const LinearBlocks *a, int tokens, int64_t token, int64_t row, const uint8_t *record, int bits, int width,
                 int64_t parts, int is_wide, int shift) {
    const int64_t columns = a->columns, halves = columns / X_HALF;
    const int8_t *x = a->x + token * columns;
    const float *x_scales = a->x_scales + token * (halves / 2), *x_sums = a->x_sums + token * halves;
    const int offset = bits == 8 ? SIGNED_OFFSET : 0;
    vfloat sums[TOKENS][VECTORS];
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < VECTORS; v++) sums[t][v] = splat(0);
    for (int64_t first = 0; first < columns / width; first += parts) {
        Scales scales;
        record = read_scales(record, is_wide, shift, a->format.zero, offset, &scales);
        for (int64_t part = first; part < first + parts; part++) {
            vint dots[TOKENS][VECTORS];
            if (bits == 4) dots_4bit(record, x, columns, tokens, dots);
            else dots_8bit(record, x, columns, width / 4, tokens, dots);
            record += width * bits * ROWS / 8;
            x += width;
            for (int t = 0; t < tokens; t++)
                add_part(sums[t], dots[t], &scales, x_scales + t * (halves / 2), x_sums + t * halves, part, width / X_HALF,
                         bits == 4 || shift != NO_SHIFT || offset);
        }
    }
    for (int t = 0; t < tokens; t++) put_results(a, token + t, row, sums[t]);
}

#if defined(__AMX_INT8__)
/* The same for `groups` times 16 tokens, whose sums are in memory and fit the first-level cache. */
INLINE void wide_tile(const LinearBlocks *a, int groups, int64_t token, int64_t row, const uint8_t *record, int bits, int width,
                      int64_t parts, int is_wide, int shift) {
    const int64_t columns = a->columns, halves = columns / X_HALF;
    ALIGNED vfloat sums[TOKEN_BLOCK] = {0};
    for (int64_t first = 0; first < columns / width; first += parts) {
        Scales scales;
        record = read_scales(record, is_wide, shift, a->format.zero, 0, &scales);
        for (int64_t part = first; part < first + parts; part++) {
            load_codes(record, bits);
            record += width * bits * ROWS / 8;
            for (int t = 0; t < groups * TILE_TOKENS; t += TILE_TOKENS) {
                ALIGNED vint dots[TILE_TOKENS];
                tile_dots(a->x + (token + t) * columns + part * width, columns, dots);
                for (int i = 0; i < TILE_TOKENS; i++) {
                    int64_t of = token + t + i;
                    add_part(&sums[t + i], &dots[i], &scales, a->x_scales + of * (halves / 2), a->x_sums + of * halves, part,
                             width / X_HALF, bits == 4 || shift != NO_SHIFT);
                }
            }
        }
    }
    for (int t = 0; t < groups * TILE_TOKENS; t++) put_results(a, token + t, row, &sums[t]);
}
#endif

INLINE void tiles(const LinearBlocks *a, int64_t token, int64_t end, int64_t row, const uint8_t *record, int bits, int width,
                  int64_t parts, int is_wide, int shift) {
#if defined(__AMX_INT8__)
    int groups = (int)((end - token) / TILE_TOKENS);
    if (groups) wide_tile(a, groups, token, row, record, bits, width, parts, is_wide, shift);
    token += groups * TILE_TOKENS;
#endif
    for (; token + TOKENS <= end; token += TOKENS) tile(a, TOKENS, token, row, record, bits, width, parts, is_wide, shift);
#if TOKENS > 4
    for (; token + 4 <= end; token += 4) tile(a, 4, token, row, record, bits, width, parts, is_wide, shift);
#endif
#if TOKENS > 2
    for (; token + 2 <= end; token += 2) tile(a, 2, token, row, record, bits, width, parts, is_wide, shift);
#endif
    for (; token < end; token++) tile(a, 1, token, row, record, bits, width, parts, is_wide, shift);
}

/* Return one code of the packed matrix. `at` points to the codes of its record. */
INLINE int32_t code_at(const uint8_t *at, int bits, int row, int64_t column) {
    if (bits == 8) return (int8_t)at[column / 4 * 64 + row * 4 + column % 4];
    uint8_t byte = at[column / 32 * 256 + column % 16 / 4 * 64 + row * 4 + column % 4];
    return column % 32 < 16 ? byte & 15 : byte >> 4;
}

INLINE void put_code(uint8_t *at, int bits, int row, int64_t column, uint8_t code) {
    if (bits == 8) {
        at[column / 4 * 64 + row * 4 + column % 4] = code;
        return;
    }
    uint8_t *byte = at + column / 32 * 256 + column % 16 / 4 * 64 + row * 4 + column % 4;
    *byte = column % 32 < 16 ? (uint8_t)((*byte & 0xf0) | code) : (uint8_t)((*byte & 15) | code << 4);
}

/* Pack rows [start, start + count) of the matrix from codes [count][columns], one per byte, and from scales and minimums or zero
 * points [count][columns / block_size]. */
EXPORT void pack_blocks(const uint8_t *codes, const uint8_t *scales, const uint8_t *shifts, int64_t start, int64_t count,
                        int64_t columns, const Format *f, uint8_t *packed) {
    int64_t blocks = columns / f->block_size, scale_size = f->is_wide ? 4 : 2;
    int64_t shift_size = shift_bytes(f->is_wide, f->shift) / ROWS;
    for (int64_t r = 0; r < count; r++) {
        int64_t row = start + r, lane = row % ROWS;
        uint8_t *record = packed + row / ROWS * blocks * f->record_bytes;
        for (int64_t b = 0; b < blocks; b++, record += f->record_bytes) {
            uint8_t *at = record;
            memcpy(at + lane * scale_size, scales + (r * blocks + b) * scale_size, scale_size);
            at += ROWS * scale_size;
            if (shift_size) memcpy(at + lane * shift_size, shifts + (r * blocks + b) * shift_size, shift_size);
            at += ROWS * shift_size;
            for (int64_t c = 0; c < f->block_size; c++)
                put_code(at, f->bits, (int)lane, c, codes[r * columns + b * f->block_size + c]);
        }
    }
}

INLINE float scale_at(const uint8_t *p, int is_wide, int64_t lane) {
    return is_wide ? ((const float *)p)[lane] : half_to_float(((const uint16_t *)p)[lane]);
}

/* Unpack one row of the matrix as floats. */
static void unpack_row(const uint8_t *packed, const Format *f, int64_t row, int64_t columns, float *out) {
    int64_t blocks = columns / f->block_size, lane = row % ROWS, scale_bytes = ROWS * (f->is_wide ? 4 : 2);
    const uint8_t *record = packed + row / ROWS * blocks * f->record_bytes;
    for (int64_t b = 0; b < blocks; b++, record += f->record_bytes, out += f->block_size) {
        float scale = scale_at(record, f->is_wide, lane);
        float minimum = f->shift == MINIMUMS ? scale_at(record + scale_bytes, f->is_wide, lane) : 0;
        int32_t zero = f->shift == ZEROS ? (int8_t)record[scale_bytes + lane] : f->zero;
        const uint8_t *codes = record + scale_bytes + shift_bytes(f->is_wide, f->shift);
        for (int64_t c = 0; c < f->block_size; c++)
            out[c] = scale * (float)(code_at(codes, f->bits, (int)lane, c) - zero) + minimum;
    }
}

typedef struct {
    const int64_t *ids; /* [tokens] */
    float *out; /* [tokens][columns] */
    int64_t out_stride;
    const uint8_t *weight;
    int64_t rows, columns;
    Format format;
} Lookup;

EXPORT void lookup_blocks(const Step *step, Worker *worker, const void *arguments) {
    const Lookup *a = arguments;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        float *out = a->out + t * a->out_stride;
        if (a->ids[t] < a->rows) unpack_row(a->weight, &a->format, a->ids[t], a->columns, out);
        else memset(out, 0, a->columns * sizeof(float)); /* rows that pad the table */
    }
}

typedef void (*Tiles)(const LinearBlocks *, int64_t, int64_t, int64_t, const uint8_t *);

#define VARIANT(name, bits, width, parts, is_wide, shift)                                                                        \
    static void tiles_##name(const LinearBlocks *a, int64_t token, int64_t end, int64_t row, const uint8_t *record) {            \
        tiles(a, token, end, row, record, bits, width, parts, is_wide, shift);                                                   \
    }

VARIANT(4, 4, 32, 1, 0, NO_SHIFT)
VARIANT(4_minimums, 4, 32, 1, 0, MINIMUMS)
VARIANT(4_wide, 4, 32, 1, 1, NO_SHIFT)
VARIANT(4_wide_minimums, 4, 32, 1, 1, MINIMUMS)
VARIANT(8, 8, 32, 1, 0, NO_SHIFT)
VARIANT(8_minimums, 8, 32, 1, 0, MINIMUMS)
VARIANT(8_wide, 8, 32, 1, 1, NO_SHIFT)
VARIANT(8_wide_minimums, 8, 32, 1, 1, MINIMUMS)
VARIANT(8_half_blocks, 8, 16, 1, 1, NO_SHIFT)
/* Longer blocks, or zero points: what the scales need is decided once per block. */
VARIANT(4_long, 4, 32, a->format.block_size / 32, a->format.is_wide, a->format.shift)
VARIANT(8_long, 8, 32, a->format.block_size / 32, a->format.is_wide, a->format.shift)

static Tiles variant_of(const Format *f) {
    static const Tiles by_format[2][2][2] = {{{tiles_4, tiles_4_minimums}, {tiles_4_wide, tiles_4_wide_minimums}},
                                             {{tiles_8, tiles_8_minimums}, {tiles_8_wide, tiles_8_wide_minimums}}};
    if (f->block_size == 16) return tiles_8_half_blocks;
    if (f->block_size != 32 || f->shift == ZEROS) return f->bits == 4 ? tiles_4_long : tiles_8_long;
    return by_format[f->bits == 8][f->is_wide][f->shift];
}

EXPORT void linear_blocks(const Step *step, Worker *worker, const void *arguments) {
    const LinearBlocks *a = arguments;
    Tiles multiply = variant_of(&a->format);
    int64_t tokens = step->num_tokens, groups = (a->rows + ROWS - 1) / ROWS;
    int64_t group_bytes = a->columns / a->format.block_size * a->format.record_bytes;
    int64_t blocks = (tokens + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    int64_t share = groups * blocks / (worker->num_threads * 8);
    int64_t per_task = share < 1 ? 1 : share > 16 ? 16 : share;
    int64_t pieces = (groups + per_task - 1) / per_task;
    if (tokens >= TILE_TOKENS) configure_tiles(a->format.block_size < 32 ? a->format.block_size : 32);
    for (int64_t task; (task = next_task(worker, pieces * blocks)) < pieces * blocks;) {
        int64_t start = task / pieces * TOKEN_BLOCK, end = start + TOKEN_BLOCK < tokens ? start + TOKEN_BLOCK : tokens;
        int64_t group = task % pieces * per_task, stop = group + per_task < groups ? group + per_task : groups;
        for (int64_t g = group; g < stop; g++) multiply(a, start, end, g * ROWS, a->weight + g * group_bytes);
    }
    if (tokens >= TILE_TOKENS) release_tiles();
}
