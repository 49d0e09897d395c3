/* y = x Wᵀ + b, where W consists of small integers. Each row has a scale per block of columns and, in some formats, a minimum or
 * a zero point.
 *
 * The activations are also quantized, to int8 with one scale per token and 32 columns. The inner products are therefore sums of
 * integers and exact. The scales are applied to them in float32. Packed W consists of groups of 16 rows. A group has one record
 * per block of columns: 16 scales, 16 minimums or zero points if the format has them, and the codes. Two blocks of 16 columns share
 * a record, which has the scales of both and then the codes. The codes are stored in parts of 32 columns, see linear_blocks.h.
 */
#include "linear_tiles.h"
#include "quantize.h"

#define TOKEN_BLOCK 96
#define GROUPS 16 /* most groups of rows of a task */

enum { NO_SHIFT, MINIMUMS, ZEROS };

typedef struct {
    int32_t bits, block_size; /* from 1 to 8; a multiple of 32, or 16 */
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

INLINE vfloat scale_vector(const uint8_t *p, int is_wide, int v) {
    return is_wide ? load((const float *)p + v * LANES) : load_half((const uint16_t *)p + v * LANES);
}

/* Read a set of scales and return what follows it. The products use codes that are too high by the zero point and, for 8 bits, by
 * `offset`. The minimum corrects this. */
INLINE const uint8_t *read_scales(const uint8_t *record, int is_wide, int shift, int zero, int offset, Scales *to) {
    int bytes = is_wide ? 64 : 32;
    for (int v = 0; v < VECTORS; v++) {
        to->scale[v] = scale_vector(record, is_wide, v);
        if (shift == NO_SHIFT) to->minimum[v] = to->scale[v] * -(float)(zero + offset);
        else if (shift == MINIMUMS) to->minimum[v] = scale_vector(record + bytes, is_wide, v);
        else to->minimum[v] = to->scale[v] * -(load_int8((const int8_t *)record + bytes + v * LANES) + (float)offset);
        if (shift == MINIMUMS && zero + offset) to->minimum[v] -= to->scale[v] * (float)(zero + offset);
    }
    return record + bytes + shift_bytes(is_wide, shift);
}

/* Return the number of scales per row of a record. */
INLINE int sets_of(const Format *f) { return f->block_size == X_HALF ? 2 : 1; }

/* Return the sum of a token's activations in a part, or, if the part has two sets of scales, in the half that set s is for. x_sums: of
 * the part. */
INLINE float x_sum_of(const float *x_sums, int sets, int s) {
    return sets == 1 ? x_sums[0] : s ? x_sums[0] - x_sums[1] : x_sums[1];
}

/* Add the dot products of a part to the sums of a token. has_offset: the minimums are not zero. */
INLINE void add_dots(vfloat *sums, const vint *dots, const Scales *scales, float x_scale, float x_sum, int has_offset) {
    for (int v = 0; v < VECTORS; v++)
        sums[v] += __builtin_convertvector(dots[v], vfloat) * (scales->scale[v] * splat(x_scale));
    if (!has_offset) return;
    for (int v = 0; v < VECTORS; v++) sums[v] += scales->minimum[v] * splat(x_sum);
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
 * combination. sets: scales per row of a record. parts: parts of a record. */
INLINE void tile(const LinearBlocks *a, int tokens, int64_t token, int64_t row, const uint8_t *record, int form, int sets,
                 int64_t parts, int is_wide, int shift) {
    const int64_t columns = a->columns, num_parts = columns / PART;
    const int8_t *x = a->x + token * columns;
    const float *x_scales = a->x_scales + token * num_parts, *x_sums = a->x_sums + token * num_parts * 2;
    const int offset = form == SIGNED ? SIGNED_OFFSET : 0, is_stored = form == NIBBLES || form == SIGNED;
    const int has_offset = form != SIGNED || shift != NO_SHIFT || offset || a->format.zero;
    const int part_bytes = BYTES_PER_BIT * (is_stored ? form : a->format.bits);
    ALIGNED uint8_t bytes[QUADS * 64];
    vfloat sums[TOKENS][VECTORS];
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < VECTORS; v++) sums[t][v] = splat(0);
    for (int64_t first = 0; first < num_parts; first += parts) {
        Scales scales[2];
        for (int s = 0; s < sets; s++) record = read_scales(record, is_wide, shift, a->format.zero, offset, &scales[s]);
        for (int64_t part = first; part < first + parts; part++, record += part_bytes) {
            const uint8_t *codes = is_stored ? record : bytes;
            if (!is_stored) spread_codes(record, a->format.bits, bytes);
#pragma GCC unroll 2
            for (int s = 0; s < sets; s++) {
                vint dots[TOKENS][VECTORS];
                dots_of(codes, form, s * QUADS / 2, QUADS / sets, x + part * PART, columns, tokens, dots);
                for (int t = 0; t < tokens; t++)
                    add_dots(sums[t], dots[t], &scales[s], x_scales[t * num_parts + part],
                             x_sum_of(x_sums + (t * num_parts + part) * 2, sets, s), has_offset);
            }
        }
    }
    for (int t = 0; t < tokens; t++) put_results(a, token + t, row, sums[t]);
}

#if defined(__AMX_INT8__)
#define TOKEN_TILES (TOKEN_BLOCK / TILE_TOKENS)

/* Activations of a token block over some parts, in the order in which tiles of 16 tokens need them. A part whose weights have two
 * sets of scales has two scales and sums. */
typedef struct {
    int8_t codes[TOKEN_TILES][PIECE_PARTS][PART * TILE_TOKENS];
    float scales[TOKEN_TILES][2 * PIECE_PARTS][TILE_TOKENS], sums[TOKEN_TILES][2 * PIECE_PARTS][TILE_TOKENS];
} Activations;

INLINE void gather(const LinearBlocks *a, int64_t token, int tiles, int64_t first, int count, int sets, Activations *to) {
    const int64_t num_parts = a->columns / PART, width = PART / sets;
    for (int64_t t = 0; t < tiles * TILE_TOKENS; t++) {
        const int8_t *codes = a->x + (token + t) * a->columns + first * PART;
        const float *scales = a->x_scales + (token + t) * num_parts + first, *sums = a->x_sums + ((token + t) * num_parts + first) * 2;
        int64_t tile = t / TILE_TOKENS, lane = t % TILE_TOKENS;
        for (int i = 0; i < count * sets; i++) {
            memcpy(to->codes[tile][0] + (i * TILE_TOKENS + lane) * width, codes + i * width, width);
            to->scales[tile][i][lane] = scales[i / sets];
            to->sums[tile][i][lane] = x_sum_of(sums + i / sets * 2, sets, i % sets);
        }
    }
}

/* Add the products of a tile of 16 tokens with `total` parts, or half parts, to their sums. */
INLINE void add_parts(const Activations *x, int tile, const Piece *piece, int total, int sets, int has_offset, vfloat *sums) {
    ALIGNED vint dots[2][2][TILE_TOKENS]; /* while two are added, the next two are computed */
    vfloat held[TILE_TOKENS];
    for (int t = 0; t < TILE_TOKENS; t++) held[t] = sums[t];
    tile_dots(x->codes[tile][0], piece, sets, 0, total, dots[0]);
    for (int n = 0; n < total; n++) {
        if (n % 2 == 0 && n + 2 < total) tile_dots(x->codes[tile][0], piece, sets, n + 2, total, dots[n / 2 % 2 ^ 1]);
        const vint *of = dots[n / 2 % 2][n % 2];
        const float *x_scales = x->scales[tile][n], *x_sums = x->sums[tile][n];
#pragma GCC unroll 16
        for (int t = 0; t < TILE_TOKENS; t++) add_dots(&held[t], &of[t], &piece->scales[n], x_scales[t], x_sums[t], has_offset);
    }
    for (int t = 0; t < TILE_TOKENS; t++) sums[t] = held[t];
}

/* Unpack `count` parts of a group. */
static void unpack_piece(const Format *f, const uint8_t *group, int64_t first, int count, Piece *to) {
    const int sets = sets_of(f), per_record = sets == 2 ? 1 : f->block_size / PART;
    const int64_t part_bytes = BYTES_PER_BIT * f->bits, set_bytes = f->record_bytes - per_record * part_bytes;
    for (int i = 0; i < count; i++) {
        const uint8_t *record = group + (first + i) / per_record * f->record_bytes, *set = record;
        for (int s = 0; s < sets; s++) set = read_scales(set, f->is_wide, f->shift, f->zero, 0, &to->scales[i * sets + s]);
        spread_codes(record + set_bytes + (first + i) % per_record * part_bytes, f->bits, to->codes[i]);
    }
    WRITTEN(to);
}

/* Compute the results of `tiles` times 16 tokens for the groups [group, stop). */
INLINE void wide_tiles(const LinearBlocks *a, int64_t token, int tiles, int64_t group, int64_t stop, int64_t group_bytes, int sets,
                       int has_offset) {
    const int64_t num_parts = a->columns / PART;
    ALIGNED vfloat sums[GROUPS][TOKEN_BLOCK];
    ALIGNED Activations x;
    ALIGNED Piece piece;
    memset(sums, 0, (stop - group) * sizeof sums[0]);
    for (int64_t first = 0; first < num_parts; first += PIECE_PARTS) {
        int count = num_parts - first < PIECE_PARTS ? (int)(num_parts - first) : PIECE_PARTS;
        gather(a, token, tiles, first, count, sets, &x);
        for (int64_t g = group; g < stop; g++) {
            unpack_piece(&a->format, a->weight + g * group_bytes, first, count, &piece);
            for (int tile = 0; tile < tiles; tile++)
                add_parts(&x, tile, &piece, count * sets, sets, has_offset, &sums[g - group][tile * TILE_TOKENS]);
        }
    }
    for (int64_t g = group; g < stop; g++)
        for (int t = 0; t < tiles * TILE_TOKENS; t++) put_results(a, token + t, g * ROWS, &sums[g - group][t]);
}

static void wide(const LinearBlocks *a, int64_t token, int tiles, int64_t group, int64_t stop, int64_t group_bytes) {
    const Format *f = &a->format;
    if (sets_of(f) == 2) wide_tiles(a, token, tiles, group, stop, group_bytes, 2, 1);
    else if (f->bits == 8 && f->shift == NO_SHIFT && !f->zero) wide_tiles(a, token, tiles, group, stop, group_bytes, 1, 0);
    else wide_tiles(a, token, tiles, group, stop, group_bytes, 1, 1);
}
#endif

INLINE void tiles(const LinearBlocks *a, int64_t token, int64_t end, int64_t row, const uint8_t *record, int form, int sets,
                  int64_t parts, int is_wide, int shift) {
    for (; token + TOKENS <= end; token += TOKENS) tile(a, TOKENS, token, row, record, form, sets, parts, is_wide, shift);
#if TOKENS > 4
    for (; token + 4 <= end; token += 4) tile(a, 4, token, row, record, form, sets, parts, is_wide, shift);
#endif
#if TOKENS > 2
    for (; token + 2 <= end; token += 2) tile(a, 2, token, row, record, form, sets, parts, is_wide, shift);
#endif
    for (; token < end; token++) tile(a, 1, token, row, record, form, sets, parts, is_wide, shift);
}

/* Return one code of a packed part: of a quad and one of its columns. */
INLINE int32_t code_at(const uint8_t *part, int bits, int64_t row, int q, int column) {
    int code = 0;
    const uint8_t *at = part + row * 4 + column;
    if (bits == 8) return (int8_t)at[64 * q];
    if (bits & 4) code = at[64 * (q % 4)] >> q / 4 * 4 & 15, at += 256;
    if (bits & 2) code |= (at[64 * (q % 2)] >> q / 2 * 2 & 3) << (bits & 4), at += 128;
    if (bits & 1) code |= (*at >> q & 1) << (bits & 6);
    return code;
}

/* Write the codes of one row, which are one per byte, to a packed part. */
INLINE void put_part(uint8_t *part, int bits, int64_t row, const uint8_t *codes) {
    for (int i = 0; i < 4; i++) {
        uint8_t *at = part + row * 4 + i;
        const uint8_t *of = codes + i; /* one code per quad */
        if (bits == 8) {
            for (int q = 0; q < QUADS; q++) at[64 * q] = of[4 * q];
            continue;
        }
        if (bits & 4) {
            for (int k = 0; k < 4; k++) at[64 * k] = (uint8_t)((of[4 * k] & 15) | of[4 * (k + 4)] << 4);
            at += 256;
        }
        if (bits & 2) {
            for (int k = 0; k < 2; k++) {
                int byte = 0;
                for (int m = 0; m < 4; m++) byte |= (of[4 * (2 * m + k)] >> (bits & 4) & 3) << 2 * m;
                at[64 * k] = (uint8_t)byte;
            }
            at += 128;
        }
        if (bits & 1) {
            int byte = 0;
            for (int q = 0; q < QUADS; q++) byte |= (of[4 * q] >> (bits & 6) & 1) << q;
            *at = (uint8_t)byte;
        }
    }
}

/* Pack rows [start, start + count) of the matrix from codes [count][columns], one per byte, and from scales and minimums or zero
 * points [count][columns / block_size]. */
EXPORT void pack_blocks(const uint8_t *codes, const uint8_t *scales, const uint8_t *shifts, int64_t start, int64_t count,
                        int64_t columns, const Format *f, uint8_t *packed) {
    const int64_t scale_size = f->is_wide ? 4 : 2, shift_size = shift_bytes(f->is_wide, f->shift) / ROWS;
    const int64_t width = f->block_size * sets_of(f);
    for (int64_t row = start; row < start + count; row++) {
        int64_t lane = row % ROWS;
        uint8_t *record = packed + row / ROWS * (columns / width) * f->record_bytes;
        for (int64_t first = 0; first < columns; first += width, record += f->record_bytes) {
            uint8_t *at = record;
            for (int s = 0; s < sets_of(f); s++, scales += scale_size, shifts += shift_size) {
                memcpy(at + lane * scale_size, scales, scale_size);
                at += ROWS * scale_size;
                if (shift_size) memcpy(at + lane * shift_size, shifts, shift_size);
                at += ROWS * shift_size;
            }
            for (int64_t c = 0; c < width; c += PART, codes += PART, at += BYTES_PER_BIT * f->bits) put_part(at, f->bits, lane, codes);
        }
    }
}

INLINE float scale_at(const uint8_t *p, int is_wide, int64_t lane) {
    return is_wide ? ((const float *)p)[lane] : half_to_float(((const uint16_t *)p)[lane]);
}

/* Unpack one row of the matrix as floats. */
INLINE void unpack_row(const uint8_t *packed, const Format *f, int bits, int64_t row, int64_t columns, float *out) {
    const int64_t lane = row % ROWS, scale_bytes = ROWS * (f->is_wide ? 4 : 2), size = f->block_size, width = size * sets_of(f);
    const uint8_t *set = packed + row / ROWS * (columns / width) * f->record_bytes;
    for (int64_t first = 0; first < columns; first += width) {
        const uint8_t *codes = set + sets_of(f) * (scale_bytes + shift_bytes(f->is_wide, f->shift));
        for (int64_t start = 0; start < width; start += size, set += scale_bytes + shift_bytes(f->is_wide, f->shift)) {
            float scale = scale_at(set, f->is_wide, lane);
            float minimum = f->shift == MINIMUMS ? scale_at(set + scale_bytes, f->is_wide, lane) : 0;
            int32_t zero = f->shift == ZEROS ? (int8_t)set[scale_bytes + lane] : f->zero;
            for (int64_t c = start; c < start + size; c += X_HALF, out += X_HALF) {
                const uint8_t *part = codes + c / PART * (BYTES_PER_BIT * bits);
#pragma GCC unroll 16
                for (int i = 0; i < X_HALF; i++)
                    out[i] = scale * (float)(code_at(part, bits, lane, (int)(c % PART / 4) + i / 4, i % 4) - zero) + minimum;
            }
        }
        set = codes + width * ROWS * bits / 8;
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
        if (a->ids[t] >= a->rows) memset(out, 0, a->columns * sizeof(float)); /* rows that pad the table */
        else if (a->format.bits == 8) unpack_row(a->weight, &a->format, 8, a->ids[t], a->columns, out);
        else if (a->format.bits == 4) unpack_row(a->weight, &a->format, 4, a->ids[t], a->columns, out);
        else unpack_row(a->weight, &a->format, a->format.bits, a->ids[t], a->columns, out);
    }
}

typedef void (*Tiles)(const LinearBlocks *, int64_t, int64_t, int64_t, const uint8_t *);

#define VARIANT(name, form, sets, parts, is_wide, shift)                                                                         \
    static void tiles_##name(const LinearBlocks *a, int64_t token, int64_t end, int64_t row, const uint8_t *record) {            \
        tiles(a, token, end, row, record, form, sets, parts, is_wide, shift);                                                    \
    }

VARIANT(4, NIBBLES, 1, 1, 0, NO_SHIFT)
VARIANT(4_minimums, NIBBLES, 1, 1, 0, MINIMUMS)
VARIANT(4_wide, NIBBLES, 1, 1, 1, NO_SHIFT)
VARIANT(4_wide_minimums, NIBBLES, 1, 1, 1, MINIMUMS)
VARIANT(8, SIGNED, 1, 1, 0, NO_SHIFT)
VARIANT(8_minimums, SIGNED, 1, 1, 0, MINIMUMS)
VARIANT(8_wide, SIGNED, 1, 1, 1, NO_SHIFT)
VARIANT(8_wide_minimums, SIGNED, 1, 1, 1, MINIMUMS)
/* In all other formats, what the scales need is decided once per record. */
VARIANT(4_any, NIBBLES, 1, a->format.block_size / PART, a->format.is_wide, a->format.shift)
VARIANT(8_any, SIGNED, 1, a->format.block_size / PART, a->format.is_wide, a->format.shift)
VARIANT(low, LOW, 1, a->format.block_size / PART, a->format.is_wide, a->format.shift)
VARIANT(high, HIGH, 1, a->format.block_size / PART, a->format.is_wide, a->format.shift)
VARIANT(8_short, SIGNED, 2, 1, a->format.is_wide, a->format.shift)
VARIANT(low_short, LOW, 2, 1, a->format.is_wide, a->format.shift)
VARIANT(high_short, HIGH, 2, 1, a->format.is_wide, a->format.shift)

static Tiles variant_of(const Format *f) {
    static const Tiles by_format[2][2][2] = {{{tiles_4, tiles_4_minimums}, {tiles_4_wide, tiles_4_wide_minimums}},
                                             {{tiles_8, tiles_8_minimums}, {tiles_8_wide, tiles_8_wide_minimums}}};
    if (f->block_size < PART) return f->bits == 8 ? tiles_8_short : f->bits > 4 ? tiles_high_short : tiles_low_short;
    if (f->bits % 4) return f->bits > 4 ? tiles_high : tiles_low;
    if (f->block_size > PART || f->shift == ZEROS) return f->bits == 4 ? tiles_4_any : tiles_8_any;
    return by_format[f->bits == 8][f->is_wide][f->shift];
}

EXPORT void linear_blocks(const Step *step, Worker *worker, const void *arguments) {
    const LinearBlocks *a = arguments;
    Tiles multiply = variant_of(&a->format);
    int64_t tokens = step->num_tokens, groups = (a->rows + ROWS - 1) / ROWS;
    int64_t group_bytes = a->columns / (a->format.block_size * sets_of(&a->format)) * a->format.record_bytes;
    int64_t blocks = (tokens + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    int64_t share = groups * blocks / (worker->num_threads * 8);
    int64_t per_task = share < 1 ? 1 : share > GROUPS ? GROUPS : share;
    int64_t pieces = (groups + per_task - 1) / per_task;
    if (tokens >= TILE_TOKENS) configure_tiles(PART / sets_of(&a->format));
    for (int64_t task; (task = next_task(worker, pieces * blocks)) < pieces * blocks;) {
        int64_t start = task / pieces * TOKEN_BLOCK, end = start + TOKEN_BLOCK < tokens ? start + TOKEN_BLOCK : tokens;
        int64_t group = task % pieces * per_task, stop = group + per_task < groups ? group + per_task : groups;
#if defined(__AMX_INT8__)
        int full = (int)((end - start) / TILE_TOKENS);
        if (full) wide(a, start, full, group, stop, group_bytes);
        start += full * TILE_TOKENS;
        if (start == end) continue;
#endif
        for (int64_t g = group; g < stop; g++) multiply(a, start, end, g * ROWS, a->weight + g * group_bytes);
    }
    if (tokens >= TILE_TOKENS) release_tiles();
}
