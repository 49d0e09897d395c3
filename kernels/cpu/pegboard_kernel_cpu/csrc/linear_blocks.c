/* y = x Wᵀ + b, where W consists of small integers. Each row has a scale per block of columns and, in some formats, a minimum or
 * a zero point.
 *
 * The activations are also quantized, to int8 with one scale per token and 32 columns. The inner products are therefore sums of
 * integers and exact. The scales are applied to them in float32. Packed W consists of groups of 16 rows. A group has one record
 * per block of columns: 16 scales, 16 minimums or zero points if the format has them, and the codes. Two blocks of 16 columns share
 * a record, which has the scales of both and then the codes. The codes are stored in parts of 32 columns, see linear_blocks.h.
 *
 * Scales of two levels are small integers in the records. Every `outer` columns, the records are preceded by the factors of their
 * scales, and then of their minimums: 16 halves each.
 */
#include "amx.h"
#include "linear_blocks.h"
#include "quantize.h"
#include "sorted_rows.h"

#define TOKEN_BLOCK 96
#define GROUPS 16 /* most groups of rows of a task */
#define LEAST_TILES 40 /* tokens from which on tiles of AMX are faster */

/* Tokens of a step from which on activations and weights are rounded to bfloat16. */
#if defined(__AMX_BF16__)
EXPORT const int64_t blocks_rounded_from = LEAST_TILES;
#else
EXPORT const int64_t blocks_rounded_from = INT64_MAX;
#endif

enum { NO_SHIFT, MINIMUMS, ZEROS };
enum { HALVES, FLOATS, BYTES, PAIRS }; /* BYTES and PAIRS have a second level */

typedef struct {
    int32_t bits, block_size; /* from 1 to 8; a multiple of 32, or 16 */
    int32_t scale_type; /* of scales and minimums. PAIRS: a scale in the lower, and a minimum in the upper four bits */
    int32_t shift; /* NO_SHIFT, MINIMUMS, or ZEROS: int8 zero points */
    int32_t zero; /* subtracted from every code if the format has neither minimums nor zero points */
    int32_t record_bytes;
    int32_t outer; /* columns that share a scale of the second level; 0 = there is none */
} Format;

typedef struct {
    const int8_t *x; /* [tokens][columns] codes of the activations */
    const float *x_scales; /* [tokens][columns / 32] */
    const float *x_sums; /* [tokens][columns / 32][2], see quantize.h */
    const uint16_t *x_words; /* the same activations as bfloat16 numbers; NULL = tiles do not multiply them */
    float *out; /* [tokens][rows] */
    int64_t out_stride;
    const uint8_t *weight; /* packed */
    const float *bias; /* [rows] or NULL */
    int64_t rows, columns;
    Format format;
    int32_t is_whole; /* the scales of a token's activations are equal */
} LinearBlocks;

EXPORT void quantize(const Step *step, Worker *worker, const void *arguments) {
    const Quantize *a = arguments;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        const float *x = a->x + t * a->x_stride;
        if (a->group) quantize_as_asked(x, &a->to, a->columns, t, a->group, a->scale);
        else if (a->order) quantize_in_order(x, &a->to, a->columns, t, a->order);
        else quantize_row(x, &a->to, a->columns, t);
    }
}

INLINE int scale_bytes(int scale_type) { return scale_type == FLOATS ? 64 : scale_type == HALVES ? 32 : ROWS; }

INLINE int shift_bytes(int scale_type, int shift) {
    if (shift == ZEROS) return ROWS;
    return shift == NO_SHIFT || scale_type == PAIRS ? 0 : scale_bytes(scale_type);
}

INLINE vfloat scale_vector(const uint8_t *p, int scale_type, int v) {
    if (scale_type >= BYTES) return load_int8((const int8_t *)p + v * LANES);
    return scale_type == FLOATS ? load((const float *)p + v * LANES) : load_half((const uint16_t *)p + v * LANES);
}

/* Read a set of scales and return what follows it. The products use codes that are too high by the zero point and, for 8 bits, by
 * `offset`. The minimum corrects this. outer: of the second level, for types that have one. */
INLINE const uint8_t *read_scales(const uint8_t *record, int scale_type, int shift, int zero, int offset, int vector,
                                  const Scales *outer, Scales *to) {
    int bytes = scale_bytes(scale_type);
    for (int i = 0; i < WIDTH; i++) {
        const int v = vector + i;
        vfloat scale, minimum = {0};
        if (scale_type == PAIRS) {
            vint both = load_bytes(record + v * LANES);
            scale = __builtin_convertvector(both & 15, vfloat), minimum = __builtin_convertvector(both >> 4 & 15, vfloat);
        } else {
            scale = scale_vector(record, scale_type, v);
            if (shift == MINIMUMS) minimum = scale_vector(record + bytes, scale_type, v);
        }
        if (scale_type >= BYTES) scale *= outer->scale[i], minimum *= outer->minimum[i];
        to->scale[i] = scale;
        if (shift == NO_SHIFT) to->minimum[i] = scale * -(float)(zero + offset);
        else if (shift == MINIMUMS) to->minimum[i] = minimum;
        else to->minimum[i] = scale * -(load_int8((const int8_t *)record + bytes + v * LANES) + (float)offset);
        if (shift == MINIMUMS && zero + offset) to->minimum[i] -= scale * (float)(zero + offset);
    }
    return record + bytes + shift_bytes(scale_type, shift);
}

/* Read scales of the second level and return what follows them. */
INLINE const uint8_t *read_outer(const uint8_t *at, int shift, int vector, Scales *to) {
    for (int i = 0; i < WIDTH; i++) {
        to->scale[i] = scale_vector(at, HALVES, vector + i);
        to->minimum[i] = shift == MINIMUMS ? scale_vector(at + 32, HALVES, vector + i) : splat(0);
    }
    return at + 32 * (1 + (shift == MINIMUMS));
}

/* Return the number of scales per row of a record. */
INLINE int sets_of(const Format *f) { return f->block_size == X_HALF ? 2 : 1; }

/* Return the number of columns of a record. */
INLINE int64_t width_of(const Format *f) { return f->block_size * sets_of(f); }

INLINE int outer_bytes(const Format *f) { return f->outer ? 32 * (1 + (f->shift == MINIMUMS)) : 0; }

/* Return the number of bytes of a group's first records, with the scales of their second level. */
INLINE int64_t bytes_of_records(const Format *f, int64_t count) {
    if (!f->outer) return count * f->record_bytes;
    const int64_t per_outer = f->outer / (int)width_of(f);
    return count * f->record_bytes + (count + per_outer - 1) / per_outer * outer_bytes(f);
}

INLINE int64_t group_bytes_of(const Format *f, int64_t columns) { return bytes_of_records(f, columns / width_of(f)); }

/* Return the sum of a token's activations in a part, or, if the part has two sets of scales, in the half that set s is for. x_sums: of
 * the part. */
INLINE float x_sum_of(const float *x_sums, int sets, int s) {
    return sets == 1 ? x_sums[0] : s ? x_sums[0] - x_sums[1] : x_sums[1];
}

/* Add the dot products of a part to the sums of a token. has_offset: the minimums are not zero. */
INLINE void add_dots(vfloat *sums, const vint *dots, const Scales *scales, float x_scale, float x_sum, int has_offset) {
    for (int v = 0; v < WIDTH; v++)
        sums[v] += __builtin_convertvector(dots[v], vfloat) * (scales->scale[v] * splat(x_scale));
    if (!has_offset) return;
    for (int v = 0; v < WIDTH; v++) sums[v] += scales->minimum[v] * splat(x_sum);
}

/* Store results of a token, of WIDTH vectors of rows from `row` on. */
INLINE void put_results(const LinearBlocks *a, int64_t token, int64_t row, const vfloat *sums) {
    const int64_t most = WIDTH * LANES, left = a->rows - row, width = left < most ? left : most;
    float *out = a->out + token * a->out_stride + row, edge[WIDTH * LANES] ALIGNED;
    float *target = width == most ? out : edge;
    if (width <= 0) return;
    for (int v = 0; v < WIDTH; v++) store(target + v * LANES, sums[v]);
    if (width < most) memcpy(out, edge, width * sizeof(float));
    if (a->bias)
        for (int64_t r = 0; r < width; r++) out[r] += a->bias[row + r];
}

/* Compute the results of `tokens` tokens and of WIDTH vectors of rows, the first of which is `vector`. The properties of the format are
 * separate arguments, so that the compiler specializes every combination. sets: scales per row of a record. parts: parts of a record. */
INLINE void tile(const LinearBlocks *a, int tokens, int64_t token, int64_t row, int vector, const uint8_t *record, int form, int sets,
                 int64_t parts, int scale_type, int shift) {
    const int64_t columns = a->columns, num_parts = columns / PART, outer_parts = a->format.outer / PART;
    const int8_t *x = a->x + token * columns;
    const float *x_scales = a->x_scales + token * num_parts, *x_sums = a->x_sums + token * num_parts * 2;
    const int offset = form == SIGNED ? SIGNED_OFFSET : 0, is_stored = form == NIBBLES || form == SIGNED;
    const int has_offset = form != SIGNED || shift != NO_SHIFT || offset || a->format.zero;
    const int part_bytes = BYTES_PER_BIT * (is_stored ? form : a->format.bits);
    ALIGNED uint8_t bytes[QUADS * 64];
    vfloat sums[TOKENS][WIDTH];
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < WIDTH; v++) sums[t][v] = splat(0);
    Scales outer;
    for (int64_t first = 0, next = 0; first < num_parts; first += parts) {
        Scales scales[2];
        if (scale_type >= BYTES && first == next) record = read_outer(record, shift, vector, &outer), next += outer_parts;
        for (int s = 0; s < sets; s++)
            record = read_scales(record, scale_type, shift, a->format.zero, offset, vector, &outer, &scales[s]);
#pragma GCC unroll 4
        for (int64_t part = first; part < first + parts; part++, record += part_bytes) {
            const uint8_t *codes = is_stored ? record : bytes;
            if (!is_stored) spread_codes(record, a->format.bits, vector, bytes);
            if (!vector) fetch(record, part_bytes);
#pragma GCC unroll 2
            for (int s = 0; s < sets; s++) {
                vint dots[TOKENS][WIDTH];
                dots_of(codes, form, s * QUADS / 2, QUADS / sets, vector, x + part * PART, columns, tokens, dots);
                for (int t = 0; t < tokens; t++)
                    add_dots(sums[t], dots[t], &scales[s], x_scales[t * num_parts + part],
                             x_sum_of(x_sums + (t * num_parts + part) * 2, sets, s), has_offset);
            }
        }
    }
    for (int t = 0; t < tokens; t++) put_results(a, token + t, row + vector * LANES, sums[t]);
}

/* Most columns whose products of bytes fit a sum of 32 bits. */
#define MOST_WHOLE 65536

/* As `tile`, for codes of 8 bits that are multiplied with one scale per row, and with activations that have one per token: all sums
 * are integers. x_sums of all parts are added for the offset of the codes. */
INLINE void whole_tile(const LinearBlocks *a, int tokens, int64_t token, int64_t row, int vector, const uint8_t *record) {
    const int64_t columns = a->columns, num_parts = columns / PART;
    const int8_t *x = a->x + token * columns;
    const int zero = a->format.zero + SIGNED_OFFSET;
    Scales scales;
    vint totals[TOKENS][WIDTH];
    record = read_scales(record, a->format.scale_type & 1, NO_SHIFT, a->format.zero, SIGNED_OFFSET, vector, NULL, &scales);
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < WIDTH; v++) totals[t][v] = (vint){0};
    for (int64_t part = 0; part < num_parts; part++, record += BYTES_PER_BIT * 8) {
        vint dots[TOKENS][WIDTH];
        if (!vector) fetch(record, BYTES_PER_BIT * 8);
        dots_of(record, SIGNED, 0, QUADS, vector, x + part * PART, columns, tokens, dots);
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < WIDTH; v++) totals[t][v] += dots[t][v];
    }
    for (int t = 0; t < tokens; t++) {
        const int64_t first = (token + t) * num_parts;
        vfloat sums[WIDTH];
        float x_sum = 0;
        for (int64_t part = 0; part < num_parts && zero; part++) x_sum += a->x_sums[(first + part) * 2];
        for (int v = 0; v < WIDTH; v++) {
            sums[v] = __builtin_convertvector(totals[t][v], vfloat) * (scales.scale[v] * splat(a->x_scales[first]));
            sums[v] += scales.minimum[v] * splat(x_sum);
        }
        put_results(a, token + t, row + vector * LANES, sums);
    }
}

#if defined(__AMX_BF16__)

/* Write a part as bfloat16 numbers, [16 pairs of columns][16 rows][2]. bits: 4, or bytes that are signed (8) or not (7). sets: of scales. */
INLINE void expand_part(const uint8_t *part, int bits, int sets, const Scales *scales, uint16_t *to) {
    static const ALIGNED float values[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512 table = (__m512)load(values);
    vint *pairs = (vint *)to;
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; q++) {
        const Scales *of = &scales[sets == 2 && q >= QUADS / 2];
        const vint bytes = load_int(part + 64 * (bits == 4 ? q % 4 : q));
        vfloat column[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            /* The table is read with the lowest four bits. */
            if (bits == 4) column[i] = (vfloat)_mm512_permutexvar_ps((__m512i)(bytes >> (8 * i + q / 4 * 4)), table);
            else if (bits == 8) column[i] = __builtin_convertvector((vint)(bytes << (24 - 8 * i) >> 24), vfloat);
            else column[i] = __builtin_convertvector((vint)(bytes >> 8 * i & 255), vfloat);
            column[i] = column[i] * of->scale[0] + of->minimum[0];
        }
        pairs[2 * q] = pairs_of(column[0], column[1]);
        pairs[2 * q + 1] = pairs_of(column[2], column[3]);
    }
}

/* Write the columns [first, last) of a group as bfloat16 numbers. */
INLINE void expand_columns(const LinearBlocks *a, int64_t number, int64_t first, int64_t last, int bits, int sets, uint16_t *to) {
    const Format *f = &a->format;
    const int64_t per_record = width_of(f) / PART, part_bytes = BYTES_PER_BIT * f->bits, set_bytes = f->record_bytes - per_record * part_bytes;
    const uint8_t *group = a->weight + number * group_bytes_of(f, a->columns), *codes = NULL;
    ALIGNED uint8_t bytes[QUADS * 64];
    Scales outer, scales[2];
    for (int64_t part = first / PART, left = 0; part < last / PART; part++, left--, codes += part_bytes, to += PART * ROWS) {
        if (!left) {
            const int64_t n = part / per_record;
            const uint8_t *record = group + bytes_of_records(f, n);
            left = per_record - part % per_record;
            if (f->outer) {
                const int64_t start = n - n % (f->outer / width_of(f)); /* the first record of this second level */
                const uint8_t *after = read_outer(group + bytes_of_records(f, start), f->shift, 0, &outer);
                if (start == n) record = after;
            }
            codes = record + set_bytes + part % per_record * part_bytes;
            for (int s = 0; s < sets; s++) record = read_scales(record, f->scale_type, f->shift, f->zero, 0, 0, &outer, &scales[s]);
        }
        fetch(codes, part_bytes);
        if (bits % 4) spread_codes(codes, f->bits, 0, bytes);
        expand_part(bits % 4 ? bytes : codes, bits, sets, scales, to);
    }
}

#define EXPAND(name, bits, sets)                                                                                                 \
    static void expand_##name(const void *weight, int64_t group, int64_t first, int64_t last, uint16_t *to) {                    \
        expand_columns(weight, group, first, last, bits, sets, to);                                                              \
    }

EXPAND(4, 4, 1)
EXPAND(8, 8, 1)
EXPAND(bytes, 7, 1)
EXPAND(4_short, 4, 2)
EXPAND(8_short, 8, 2)
EXPAND(bytes_short, 7, 2)

static TileProduct tiles_of(const LinearBlocks *a) {
    const int bits = a->format.bits, is_short = sets_of(&a->format) == 2;
    return (TileProduct){
        .x = a->x_words,
        .out = a->out,
        .out_stride = a->out_stride,
        .bias = a->bias,
        .rows = a->rows,
        .columns = a->columns,
        .weight = a,
        .expand = is_short ? bits == 4 ? expand_4_short : bits == 8 ? expand_8_short : expand_bytes_short
                           : bits == 4 ? expand_4 : bits == 8 ? expand_8 : expand_bytes,
    };
}
#endif

/* Compute the results of the tokens [token, end) and of a group of rows. */
INLINE void tiles(const LinearBlocks *a, int64_t token, int64_t end, int64_t row, const uint8_t *record, int form, int sets,
                  int64_t parts, int scale_type, int shift) {
#define TILES(count)                                                                                                             \
    for (; token + count <= end; token += count)                                                                                 \
        for (int v = 0; v < VECTORS; v += WIDTH) tile(a, count, token, row, v, record, form, sets, parts, scale_type, shift);
    TILES(TOKENS)
#if TOKENS > 8
    TILES(8)
#endif
#if TOKENS > 4
    TILES(4)
#endif
#if TOKENS > 2
    TILES(2)
#endif
    TILES(1)
}

static void tiles_whole(const LinearBlocks *a, int64_t token, int64_t end, int64_t row, const uint8_t *record) {
#define WHOLE_TILES(count)                                                                                                       \
    for (; token + count <= end; token += count)                                                                                 \
        for (int v = 0; v < VECTORS; v += WIDTH) whole_tile(a, count, token, row, v, record);
    WHOLE_TILES(TOKENS)
#if TOKENS > 8
    WHOLE_TILES(8)
#endif
#if TOKENS > 4
    WHOLE_TILES(4)
#endif
#if TOKENS > 2
    WHOLE_TILES(2)
#endif
    WHOLE_TILES(1)
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

/* Pack rows [start, start + count) of the matrix from codes [count][columns], one per byte, from scales and minimums or zero points
 * [count][columns / block_size], and from scales of the second level, halves [1 or 2][count][columns / outer]. */
EXPORT void pack_blocks(const uint8_t *codes, const uint8_t *scales, const uint8_t *shifts, const uint16_t *outer, int64_t start,
                        int64_t count, int64_t columns, const Format *f, uint8_t *packed) {
    const int64_t scale_size = scale_bytes(f->scale_type) / ROWS, shift_size = shift_bytes(f->scale_type, f->shift) / ROWS;
    const int64_t width = width_of(f), group_bytes = group_bytes_of(f, columns), outers = f->outer ? columns / f->outer : 0;
    for (int64_t row = start; row < start + count; row++) {
        int64_t lane = row % ROWS;
        uint8_t *at = packed + row / ROWS * group_bytes;
        for (int64_t first = 0; first < columns; first += width) {
            if (f->outer && first % f->outer == 0) {
                const uint16_t *from = outer + (row - start) * outers + first / f->outer;
                for (int k = 0; k < outer_bytes(f) / 32; k++, at += 32) ((uint16_t *)at)[lane] = from[k * count * outers];
            }
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

INLINE float scale_at(const uint8_t *p, int scale_type, int64_t lane) {
    if (scale_type >= BYTES) return ((const int8_t *)p)[lane];
    return scale_type == FLOATS ? ((const float *)p)[lane] : half_to_float(((const uint16_t *)p)[lane]);
}

/* Unpack one row of the matrix as floats. */
INLINE void unpack_row(const uint8_t *packed, const Format *f, int bits, int64_t row, int64_t columns, float *out) {
    const int64_t lane = row % ROWS, size = f->block_size, width = width_of(f), first_bytes = scale_bytes(f->scale_type);
    const int64_t set_bytes = first_bytes + shift_bytes(f->scale_type, f->shift);
    const uint8_t *set = packed + row / ROWS * group_bytes_of(f, columns);
    float outer[2] = {1, 1};
    for (int64_t first = 0; first < columns; first += width) {
        if (f->outer && first % f->outer == 0)
            for (int k = 0; k < outer_bytes(f) / 32; k++, set += 32) outer[k] = scale_at(set, HALVES, lane);
        const uint8_t *codes = set + sets_of(f) * set_bytes;
        for (int64_t start = 0; start < width; start += size, set += set_bytes) {
            const int is_pair = f->scale_type == PAIRS;
            float scale = outer[0] * (is_pair ? (float)(set[lane] & 15) : scale_at(set, f->scale_type, lane)), minimum = 0;
            if (f->shift == MINIMUMS)
                minimum = outer[1] * (is_pair ? (float)(set[lane] >> 4) : scale_at(set + first_bytes, f->scale_type, lane));
            int32_t zero = f->shift == ZEROS ? (int8_t)set[first_bytes + lane] : f->zero;
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

#define VARIANT(name, form, sets, parts, scale_type, shift)                                                                         \
    static void tiles_##name(const LinearBlocks *a, int64_t token, int64_t end, int64_t row, const uint8_t *record) {            \
        tiles(a, token, end, row, record, form, sets, parts, scale_type, shift);                                                    \
    }

VARIANT(4, NIBBLES, 1, 1, HALVES, NO_SHIFT)
VARIANT(4_minimums, NIBBLES, 1, 1, HALVES, MINIMUMS)
VARIANT(4_floats, NIBBLES, 1, 1, FLOATS, NO_SHIFT)
VARIANT(4_floats_minimums, NIBBLES, 1, 1, FLOATS, MINIMUMS)
VARIANT(4_bytes_minimums, NIBBLES, 1, 1, BYTES, MINIMUMS)
VARIANT(8, SIGNED, 1, 1, HALVES, NO_SHIFT)
VARIANT(8_minimums, SIGNED, 1, 1, HALVES, MINIMUMS)
VARIANT(8_floats, SIGNED, 1, 1, FLOATS, NO_SHIFT)
VARIANT(8_floats_minimums, SIGNED, 1, 1, FLOATS, MINIMUMS)
/* The usual groups of AWQ and GPTQ. A fixed number of parts is unrolled, which makes them 15 % faster. */
VARIANT(4_group_64, NIBBLES, 1, 2, HALVES, a->format.shift)
VARIANT(4_group_128, NIBBLES, 1, 4, HALVES, a->format.shift)
/* In all other formats, what the scales need is decided once per record. */
#define ONE_LEVEL (a->format.scale_type & 1)
#define TWO_LEVELS (a->format.scale_type | BYTES)
#define FEW_VARIANTS(name, scale_type)                                                                                           \
    VARIANT(4_##name, NIBBLES, 1, a->format.block_size / PART, scale_type, a->format.shift)                                      \
    VARIANT(8_##name, SIGNED, 1, a->format.block_size / PART, scale_type, a->format.shift)                                       \
    VARIANT(low_##name, LOW, 1, a->format.block_size / PART, scale_type, a->format.shift)                                        \
    VARIANT(high_##name, HIGH, 1, a->format.block_size / PART, scale_type, a->format.shift)                                      \
    VARIANT(8_short_##name, SIGNED, 2, 1, scale_type, a->format.shift)                                                           \
    VARIANT(low_short_##name, LOW, 2, 1, scale_type, a->format.shift)                                                            \
    VARIANT(high_short_##name, HIGH, 2, 1, scale_type, a->format.shift)
FEW_VARIANTS(any, ONE_LEVEL)
FEW_VARIANTS(outer, TWO_LEVELS)

static Tiles variant_of(const Format *f) {
    static const Tiles by_format[2][2][2] = {{{tiles_4, tiles_4_minimums}, {tiles_4_floats, tiles_4_floats_minimums}},
                                             {{tiles_8, tiles_8_minimums}, {tiles_8_floats, tiles_8_floats_minimums}}};
    static const Tiles any[2][7] = {
        {tiles_4_any, tiles_8_any, tiles_low_any, tiles_high_any, tiles_low_short_any, tiles_high_short_any, tiles_8_short_any},
        {tiles_4_outer, tiles_8_outer, tiles_low_outer, tiles_high_outer, tiles_low_short_outer, tiles_high_short_outer,
         tiles_8_short_outer},
    };
    const int is_short = f->block_size < PART, is_part = f->block_size == PART;
    if (is_part && f->bits == 4 && f->scale_type == BYTES && f->shift == MINIMUMS) return tiles_4_bytes_minimums;
    if (is_part && f->bits % 4 == 0 && f->shift != ZEROS && !f->outer) return by_format[f->bits == 8][f->scale_type][f->shift];
    if (f->bits == 4 && f->scale_type == HALVES && f->block_size == 2 * PART) return tiles_4_group_64;
    if (f->bits == 4 && f->scale_type == HALVES && f->block_size == 4 * PART) return tiles_4_group_128;
    if (is_short) return any[f->outer != 0][f->bits == 8 ? 6 : f->bits > 4 ? 5 : 4];
    return any[f->outer != 0][f->bits % 4 ? 2 + (f->bits > 4) : f->bits == 8];
}

/* Compute the results of the tokens [start, end), at most TOKEN_BLOCK, for the groups [group, stop). */
INLINE void block_task(const LinearBlocks *a, int64_t start, int64_t end, int64_t group, int64_t stop) {
    const Format *f = &a->format;
    const int is_whole = a->is_whole && f->bits == 8 && f->block_size == a->columns && f->shift == NO_SHIFT && a->columns <= MOST_WHOLE;
    Tiles multiply = is_whole && !f->outer ? tiles_whole : variant_of(f);
    int64_t group_bytes = group_bytes_of(&a->format, a->columns);
    for (int64_t g = group; g < stop; g++) multiply(a, start, end, g * ROWS, a->weight + g * group_bytes);
}

EXPORT void linear_blocks(const Step *step, Worker *worker, const void *arguments) {
    const LinearBlocks *a = arguments;
    int64_t tokens = step->num_tokens, groups = (a->rows + ROWS - 1) / ROWS;
#if defined(__AMX_BF16__)
    if (tokens >= LEAST_TILES && a->x_words) {
        const TileProduct product = tiles_of(a);
        tile_product(&product, tokens, worker);
        return;
    }
#endif
    int64_t blocks = (tokens + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    int64_t share = groups * blocks / (worker->num_threads * 8);
    int64_t per_task = share < 1 ? 1 : share > GROUPS ? GROUPS : share;
    int64_t pieces = (groups + per_task - 1) / per_task;
    for (int64_t task; (task = next_task(worker, pieces * blocks)) < pieces * blocks;) {
        int64_t start = task / pieces * TOKEN_BLOCK, end = start + TOKEN_BLOCK < tokens ? start + TOKEN_BLOCK : tokens;
        int64_t group = task % pieces * per_task, stop = group + per_task < groups ? group + per_task : groups;
        block_task(a, start, end, group, stop);
    }
}

#if defined(__AMX_BF16__)
#define EXPERT_TOKENS TILE_BLOCK
#else
#define EXPERT_TOKENS TOKEN_BLOCK
#endif

/* The product of experts, whose matrices have the same shape and format. */
typedef struct {
    LinearBlocks common; /* x and out, of all experts */
    const int32_t *starts;
    const LinearBlocks *experts; /* the matrices and biases */
    int64_t num_experts;
} ExpertsBlocks;

EXPORT void experts_blocks(const Step *step, Worker *worker, const void *arguments) {
    (void)step;
    const ExpertsBlocks *e = arguments;
    LinearBlocks a = e->common;
    SortedRows rows = sorted_rows(e->starts, e->num_experts, (a.rows + ROWS - 1) / ROWS, GROUPS, EXPERT_TOKENS, worker->num_threads);
    while (next_rows(&rows, worker)) {
        a.weight = e->experts[rows.expert].weight;
        a.bias = e->experts[rows.expert].bias;
#if defined(__AMX_BF16__)
        if (rows.end - rows.start >= LEAST_TILES && a.x_words) {
            const TileProduct product = tiles_of(&a);
            tile_task(&product, rows.start, rows.end, rows.group, rows.stop);
            continue;
        }
#endif
        block_task(&a, rows.start, rows.end, rows.group, rows.stop);
    }
}
