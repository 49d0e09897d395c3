/* y = x Wᵀ + b, where W consists of codes of 8 or 4 bits that stand for floats, with a scale per row and block of columns.
 *
 * Codes are decoded in registers: float8 by shifting it into a half, 4 bits by a lookup in a table of 16 floats. For a few tokens the
 * decoded weights are used at once, as floats. For more tokens a piece of 16 rows is decoded to the first-level cache and multiplied
 * like any float matrix. A level with products of bfloat16 multiplies it as such a matrix, with AMX in tiles.
 *
 * Packed W consists of groups of 16 rows. A group has one record per block of columns: 16 scales, and then the codes. With 8 bits
 * these are [column][16 rows]. With 4 bits they are [column / 8][16 rows] words of 32 bits, whose lowest bits are the first column.
 * The last block of a row may have fewer columns. The numbers of columns are multiples of 16.
 *
 * Scales of two levels are bytes: numbers of steps, or positions in a table. Every `outer` records are preceded by 16 floats that
 * are multiplied with what the bytes stand for.
 */
#include "amx.h"
#include "float_tiles.h"
#include "sorted_rows.h"

/* MOST: tokens that are computed at once from decoded weights. FEW: number of tokens of a step up to which that is faster than decoding
 * to memory. */
#if LANES == 16
#define MOST 8
#if defined(__AVX512BF16__)
#define FEW(bits) 16
#else
#define FEW(bits) ((bits) == 8 ? INT64_MAX : 64)
#endif
#elif LANES == 8 || REGISTERS == 32
#define MOST 4
#define FEW(bits) 4
#endif
#define LEAST_TILES 16 /* tokens from which on tiles of AMX are faster */
#define CHAINS 4
#define MOST_GROUPS 16 /* of rows, of a task */

/* Tokens of a step from which on activations and weights are rounded to bfloat16. */
#if defined(__AMX_BF16__)
EXPORT const int64_t codes_rounded_from = LEAST_TILES;
#elif defined(__AVX512BF16__)
EXPORT const int64_t codes_rounded_from = FEW(8) + 1;
#else
EXPORT const int64_t codes_rounded_from = INT64_MAX;
#endif

enum { TABLE, E4M3, E5M2 };
enum { FLOAT_SCALES, HALF_SCALES, STEP_SCALES, TABLE_SCALES, E4M3_SCALES, E8M0_SCALES };
#define OUTER_BYTES (4 * ROWS)

typedef struct {
    int32_t bits, kind; /* kind: how 8-bit codes are decoded. 4-bit codes have a table. */
    int32_t scale_kind, block_size;
    int32_t outer;       /* records that share a float of the second level; 0 = there is none */
    const float *factor; /* of all scales, and what is added before if they have two levels. A reload may change both. */
    const float *values; /* what the 16 or 256 codes stand for; for E4M3, 2^-8 of that */
    const float *scales; /* what the 256 codes of TABLE_SCALES stand for; for STEP_SCALES, the first number and the step */
} CodeFormat;

typedef struct {
    const float *x; /* [tokens][columns] */
    int64_t x_stride;
    const uint16_t *x_words; /* the same as bfloat16 numbers (quantize.h) for matrix tiles, or NULL */
    float *out; /* [tokens][rows] */
    int64_t out_stride;
    const uint8_t *weight; /* packed */
    const float *bias;     /* [rows] or NULL */
    int64_t rows, columns;
    int64_t is_invariant; /* 1: the sums of a token have one order, in a step of any size */
    CodeFormat format;
} LinearCodes;

typedef struct {
    vfloat part[16 / LANES];
} Table;

INLINE Table load_table(const float *values) {
    Table table;
    for (int i = 0; i < 16 / LANES; i++) table.part[i] = load(values + i * LANES);
    return table;
}

INLINE int64_t scale_bytes(const CodeFormat *f) {
    return f->scale_kind == FLOAT_SCALES ? 4 * ROWS : f->scale_kind == HALF_SCALES ? 2 * ROWS : ROWS;
}

INLINE int64_t group_bytes(const CodeFormat *f, int64_t columns) {
    int64_t blocks = (columns + f->block_size - 1) / f->block_size;
    return (f->outer ? blocks / f->outer * OUTER_BYTES : 0) + blocks * scale_bytes(f) + columns * ROWS * f->bits / 8;
}

/* A block of columns: its record, and the 16 floats of the second level, if there is one. */
typedef struct {
    const uint8_t *record;
    const float *outer;
} Block;

INLINE Block block_at(const CodeFormat *f, const uint8_t *group, int64_t number) {
    const int64_t bytes = scale_bytes(f) + f->block_size * ROWS * f->bits / 8;
    if (!f->outer) return (Block){group + number * bytes, NULL};
    const uint8_t *outer = group + number / f->outer * (OUTER_BYTES + f->outer * bytes);
    return (Block){outer + OUTER_BYTES + number % f->outer * bytes, (const float *)outer};
}

/* 2^(code - 127). */
INLINE vfloat load_e8m0(const uint8_t *p) {
    vint bits;
#if LANES == 16
    bits = (vint)_mm512_cvtepu16_epi32(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p))) << 23;
#else
    for (int i = 0; i < LANES; i++) bits[i] = (int32_t)((uint32_t)p[i] << 23);
#endif
    return (vfloat)(bits | ((bits == 0) & 0x400000)); /* 2^-127 is denormal */
}

/* Return the values of LANES 4-bit codes: those at bit `shift` of the words. */
INLINE vfloat look_up(vint words, int shift, const Table *table) {
#if LANES == 16
    return (vfloat)_mm512_permutexvar_ps((__m512i)(words >> shift), (__m512)table->part[0]); /* uses the lowest 4 bits */
#elif LANES == 8
    __m256i at = (__m256i)(words >> shift); /* the lookups use the lowest 3 bits, and the choice between them the fourth */
    __m256 low = _mm256_permutevar8x32_ps((__m256)table->part[0], at);
    __m256 high = _mm256_permutevar8x32_ps((__m256)table->part[1], at);
    return (vfloat)_mm256_blendv_ps(low, high, (__m256)(words << (28 - shift)));
#elif defined(__ARM_NEON)
    vint at = (words >> shift & 15) * 0x04040404 + 0x03020100; /* of the four bytes of a float */
    return (vfloat)vqtbl4q_u8(*(const uint8x16x4_t *)table, (uint8x16_t)at);
#else
    vfloat x;
    for (int i = 0; i < LANES; i++) {
        int code = words[i] >> shift & 15;
        x[i] = table->part[code / LANES][code % LANES];
    }
    return x;
#endif
}

/* Return LANES rows of a column, from row v * LANES on. */
INLINE vfloat decode(const uint8_t *codes, int bits, int kind, int64_t column, int v, const Table *table, const float *values) {
    if (bits == 4) {
        const uint8_t *words = codes + column / 8 * (4 * ROWS) + v * (4 * LANES);
        return look_up(*(const vint *)words, (int)(column % 8 * 4), table);
    }
    const uint8_t *p = codes + column * ROWS + v * LANES;
    if (CONVERTS_HALVES && kind == E4M3) return load_e4m3(p);
    if (CONVERTS_HALVES && kind == E5M2) return load_e5m2(p);
    vfloat x;
    for (int i = 0; i < LANES; i++) x[i] = values[p[i]];
    return x;
}

/* Return what LANES codes of scales stand for. */
INLINE vfloat decode_scales(const uint8_t *codes, int kind, const float *scales) {
    if (kind == STEP_SCALES) return __builtin_convertvector(load_bytes(codes) & 0xff, vfloat) * scales[1] + scales[0];
#if LANES == 16
    return (vfloat)_mm512_i32gather_ps((__m512i)(load_bytes(codes) & 0xff), scales, 4);
#else
    vfloat x;
    for (int i = 0; i < LANES; i++) x[i] = scales[codes[i]];
    return x;
#endif
}

/* Read the scales of a block without the factor. */
INLINE void read_stored_scales(Block block, const CodeFormat *f, vfloat scale[VECTORS]) {
    const uint8_t *record = block.record;
    for (int v = 0; v < VECTORS; v++) {
        if (f->scale_kind == FLOAT_SCALES) scale[v] = load((const float *)record + v * LANES);
        else if (f->scale_kind == HALF_SCALES) scale[v] = load_half((const uint16_t *)record + v * LANES);
        else if (f->scale_kind == E4M3_SCALES) scale[v] = load_e4m3(record + v * LANES);
        else if (f->scale_kind == E8M0_SCALES) scale[v] = load_e8m0(record + v * LANES);
        else scale[v] = decode_scales(record + v * LANES, f->scale_kind, f->scales) * load(block.outer + v * LANES) + f->factor[1];
    }
}

INLINE void read_scales(Block block, const CodeFormat *f, vfloat scale[VECTORS]) {
    read_stored_scales(block, f, scale);
    for (int v = 0; v < VECTORS; v++) scale[v] *= f->factor[0];
}

#if defined(FEW)
/* Compute `tokens` x 16 results. Each is the sum of several chains of additions, which need not wait for each other. */
INLINE void few(const LinearCodes *a, int tokens, int64_t token, int64_t row, const uint8_t *group, int bits, int kind) {
    const CodeFormat *f = &a->format;
    const Table table = bits == 4 ? load_table(f->values) : (Table){0};
    const float *x = a->x + token * a->x_stride;
    const int chains = tokens < CHAINS ? CHAINS / tokens : 1;
    vfloat sums[MOST][VECTORS];
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < VECTORS; v++) sums[t][v] = splat(0);
    for (int64_t first = 0, number = 0; first < a->columns; first += f->block_size, number++) {
        int64_t count = a->columns - first < f->block_size ? a->columns - first : f->block_size;
        const Block block = block_at(f, group, number);
        const uint8_t *codes = block.record + scale_bytes(f);
        vfloat part[MOST][CHAINS][VECTORS], scale[VECTORS];
        for (int t = 0; t < tokens; t++)
            for (int i = 0; i < chains; i++)
                for (int v = 0; v < VECTORS; v++) part[t][i][v] = splat(0);
        for (int64_t c = 0; c < count; c += 8) {
            fetch(codes + c * ROWS * bits / 8, ROWS * bits);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                for (int v = 0; v < VECTORS; v++) {
                    vfloat w = decode(codes + c * ROWS * bits / 8, bits, kind, j, v, &table, f->values);
                    for (int t = 0; t < tokens; t++) part[t][j % chains][v] += splat(x[t * a->x_stride + first + c + j]) * w;
                }
        }
        read_scales(block, f, scale);
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < VECTORS; v++) {
                for (int i = 1; i < chains; i++) part[t][0][v] += part[t][i][v];
                sums[t][v] += part[t][0][v] * scale[v];
            }
    }
    int64_t width = a->rows - row < ROWS ? a->rows - row : ROWS;
    for (int t = 0; t < tokens; t++) {
        float *out = a->out + (token + t) * a->out_stride + row, edge[ROWS] ALIGNED;
        for (int v = 0; v < VECTORS; v++) store((width == ROWS ? out : edge) + v * LANES, sums[t][v]);
        if (width < ROWS) memcpy(out, edge, width * sizeof(float));
        if (a->bias)
            for (int64_t r = 0; r < width; r++) out[r] += a->bias[row + r];
    }
}
#endif

#if defined(__AVX512BF16__)
#define EXPANDED BFLOAT16_WEIGHTS

/* Decode the columns [first, last) of a group to bfloat16 numbers, [pairs of columns][16][2]. Both are multiples of 16. */
INLINE void expand(const LinearCodes *a, int64_t number, int64_t first, int64_t last, int bits, int kind, void *to) {
    const CodeFormat *f = &a->format;
    const Table table = bits == 4 ? load_table(f->values) : (Table){0};
    const uint8_t *group = a->weight + number * group_bytes(f, a->columns), *codes = NULL;
    vfloat scale = splat(1);
    vint *pairs = to;
    for (int64_t c = first, left = 0; c < last; c += 16, left -= 16, codes += 16 * ROWS * bits / 8) {
        if (!left) {
            const Block block = block_at(f, group, c / f->block_size);
            left = f->block_size - c % f->block_size;
            codes = block.record + scale_bytes(f) + c % f->block_size * ROWS * bits / 8;
            read_scales(block, f, &scale);
        }
        fetch(codes, 16 * ROWS * bits / 8);
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2, pairs++)
            *pairs = pairs_of(decode(codes, bits, kind, i, 0, &table, f->values) * scale,
                              decode(codes, bits, kind, i + 1, 0, &table, f->values) * scale);
    }
}

#else
#define EXPANDED FLOAT_WEIGHTS

/* Decode the columns [first, last) of a group to [last - first][16]. Both are multiples of 16. */
INLINE void expand(const LinearCodes *a, int64_t number, int64_t first, int64_t last, int bits, int kind, void *to) {
    const CodeFormat *f = &a->format;
    const uint8_t *group = a->weight + number * group_bytes(f, a->columns);
    float *floats = to;
    const Table table = bits == 4 ? load_table(f->values) : (Table){0};
    while (first < last) {
        int64_t offset = first % f->block_size, count = f->block_size - offset < last - first ? f->block_size - offset : last - first;
        const Block block = block_at(f, group, first / f->block_size);
        const uint8_t *codes = block.record + scale_bytes(f) + offset * ROWS * bits / 8;
        vfloat scale[VECTORS];
        read_scales(block, f, scale);
        for (int64_t c = 0; c < count; c += 8) {
            fetch(codes + c * ROWS * bits / 8, ROWS * bits);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++, floats += ROWS)
                for (int v = 0; v < VECTORS; v++) {
                    vfloat w = decode(codes + c * ROWS * bits / 8, bits, kind, j, v, &table, f->values);
                    store(floats + v * LANES, w * scale[v]);
                }
        }
        first += count;
    }
}
#endif

#if defined(__AMX_BF16__)
#define EXPAND(name, bits, kind)                                                                                                 \
    static void expand_##name(const void *weight, int64_t group, int64_t first, int64_t last, uint16_t *to) {                    \
        expand(weight, group, first, last, bits, kind, to);                                                                      \
    }

EXPAND(4_bits, 4, TABLE)
EXPAND(e4m3, 8, E4M3)
EXPAND(e5m2, 8, E5M2)
EXPAND(table, 8, TABLE)

static TileProduct tiles_of(const LinearCodes *a) {
    const CodeFormat *f = &a->format;
    return (TileProduct){
        .x = a->x_words,
        .out = a->out,
        .out_stride = a->out_stride,
        .bias = a->bias,
        .rows = a->rows,
        .columns = a->columns,
        .weight = a,
        .expand = f->bits == 4 ? expand_4_bits : f->kind == E4M3 ? expand_e4m3 : f->kind == E5M2 ? expand_e5m2 : expand_table,
    };
}

/* Return whether tiles are faster for so many tokens. */
INLINE int has_tiles(const LinearCodes *a, int64_t tokens) { return tokens >= LEAST_TILES && a->x_words && !a->is_invariant; }
#endif

/* Compute the results of the tokens [start, end) of `tokens` for the groups [group, stop). */
INLINE void groups_of(const LinearCodes *a, int64_t tokens, int64_t start, int64_t end, int64_t group, int64_t stop, int bits,
                      int kind) {
    (void)tokens;
#if defined(FEW)
    if (tokens <= FEW(bits) && !a->is_invariant) {
        const int64_t bytes = group_bytes(&a->format, a->columns);
        for (int64_t g = group; g < stop; g++) {
            const uint8_t *packed = a->weight + g * bytes;
            int64_t t = start;
#if MOST == 8
            for (; t + 8 <= end; t += 8) few(a, 8, t, g * ROWS, packed, bits, kind);
#endif
            for (; t + 4 <= end; t += 4) few(a, 4, t, g * ROWS, packed, bits, kind);
            for (; t + 2 <= end; t += 2) few(a, 2, t, g * ROWS, packed, bits, kind);
            if (t < end) few(a, 1, t, g * ROWS, packed, bits, kind);
        }
        return;
    }
#endif
    const LinearFloat floats = {a->x, a->x_stride, NULL, a->out, a->out_stride, NULL, a->bias, a->rows, a->columns, EXPANDED};
    float expanded[GROUPS][COLUMNS * ROWS] ALIGNED, panel[PANEL] ALIGNED;
    const void *weights[GROUPS];
    for (int i = 0; i < GROUPS; i++) weights[i] = expanded[i];
    for (int64_t first = 0; first < a->columns; first += COLUMNS) {
        int64_t last = first + COLUMNS < a->columns ? first + COLUMNS : a->columns;
        const Activations piece = copy_activations(&floats, EXPANDED, start, end, first, last, panel);
        for (int64_t g = group; g < stop; g += GROUPS) {
            int groups = stop - g < GROUPS ? (int)(stop - g) : GROUPS;
            for (int i = 0; i < groups; i++) expand(a, g + i, first, last, bits, kind, expanded[i]);
            if (groups == GROUPS) tiles(&piece, EXPANDED, GROUPS, g * ROWS, weights, 0);
            else tiles(&piece, EXPANDED, 1, g * ROWS, weights, 0);
        }
    }
}

static void code_task(const LinearCodes *a, int64_t tokens, int64_t start, int64_t end, int64_t group, int64_t stop) {
    if (a->format.bits == 4) groups_of(a, tokens, start, end, group, stop, 4, TABLE);
    else if (CONVERTS_HALVES && a->format.kind == E4M3) groups_of(a, tokens, start, end, group, stop, 8, E4M3);
    else if (CONVERTS_HALVES && a->format.kind == E5M2) groups_of(a, tokens, start, end, group, stop, 8, E5M2);
    else groups_of(a, tokens, start, end, group, stop, 8, TABLE);
}

EXPORT void linear_codes(const Step *step, Worker *worker, const void *arguments) {
    const LinearCodes *a = arguments;
    int64_t tokens = step->num_tokens, groups = (a->rows + ROWS - 1) / ROWS;
#if defined(__AMX_BF16__)
    if (has_tiles(a, tokens)) {
        const TileProduct product = tiles_of(a);
        tile_product(&product, tokens, worker);
        return;
    }
#endif
    int64_t blocks = (tokens + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    int64_t share = groups * blocks / (worker->num_threads * 8);
    int64_t per_task = share < 1 ? 1 : share > MOST_GROUPS ? MOST_GROUPS : share;
    int64_t pieces = (groups + per_task - 1) / per_task;
    for (int64_t task; (task = next_task(worker, pieces * blocks)) < pieces * blocks;) {
        int64_t start = task / pieces * TOKEN_BLOCK, end = start + TOKEN_BLOCK < tokens ? start + TOKEN_BLOCK : tokens;
        int64_t group = task % pieces * per_task, stop = group + per_task < groups ? group + per_task : groups;
        code_task(a, tokens, start, end, group, stop);
    }
}

/* The product of experts, whose matrices have the same shape and format, except for its factor. */
typedef struct {
    LinearCodes common; /* x and out, of all experts */
    const int32_t *starts;
    const LinearCodes *experts; /* the matrices, their formats, and biases */
    int64_t num_experts;
} ExpertsCodes;

EXPORT void experts_codes(const Step *step, Worker *worker, const void *arguments) {
    (void)step;
    const ExpertsCodes *e = arguments;
    LinearCodes a = e->common;
    SortedRows rows = sorted_rows(e->starts, e->num_experts, (a.rows + ROWS - 1) / ROWS, MOST_GROUPS, TOKEN_BLOCK, worker->num_threads);
    while (next_rows(&rows, worker)) {
        a.weight = e->experts[rows.expert].weight;
        a.bias = e->experts[rows.expert].bias;
        a.format = e->experts[rows.expert].format;
        const int64_t tokens = e->starts[rows.expert + 1] - e->starts[rows.expert];
#if defined(__AMX_BF16__)
        if (has_tiles(&a, tokens)) {
            const TileProduct product = tiles_of(&a);
            tile_task(&product, rows.start, rows.end, rows.group, rows.stop);
            continue;
        }
#endif
        code_task(&a, tokens, rows.start, rows.end, rows.group, rows.stop);
    }
}

/* Pack rows [start, start + count) of the matrix from codes [count][columns], one per byte, and scales [count][blocks]. outer:
 * [count][blocks / f->outer], if there is a second level. */
EXPORT void pack_codes(const uint8_t *codes, const uint8_t *scales, const float *outer, int64_t start, int64_t count,
                       int64_t columns, const CodeFormat *f, uint8_t *packed) {
    int64_t size = scale_bytes(f) / ROWS;
    for (int64_t row = start; row < start + count; row++) {
        uint8_t *group = packed + row / ROWS * group_bytes(f, columns), lane = (uint8_t)(row % ROWS);
        for (int64_t first = 0, number = 0; first < columns; first += f->block_size, number++, scales += size) {
            int64_t width = columns - first < f->block_size ? columns - first : f->block_size;
            Block block = block_at(f, group, number);
            uint8_t *record = (uint8_t *)block.record + scale_bytes(f);
            if (f->outer && number % f->outer == 0) ((float *)block.outer)[lane] = *outer++;
            memcpy((uint8_t *)block.record + lane * size, scales, size);
            for (int64_t c = 0; c < width; c++, codes++) {
                uint8_t *at = f->bits == 8 ? record + c * ROWS + lane : record + c / 8 * (4 * ROWS) + lane * 4 + c % 8 / 2;
                if (f->bits == 8) *at = *codes;
                else *at = (uint8_t)(c % 2 ? (*at & 15) | *codes << 4 : (*at & 0xf0) | *codes);
            }
        }
    }
}

typedef struct {
    const int64_t *ids; /* [tokens] */
    float *out;         /* [tokens][columns] */
    int64_t out_stride;
    const uint8_t *weight;
    int64_t rows, columns;
    CodeFormat format;
} LookupCodes;

INLINE float scale_at(Block block, const CodeFormat *f, int64_t lane) {
    vfloat scale[VECTORS];
    read_scales(block, f, scale);
    return scale[lane / LANES][lane % LANES];
}

static void unpack_row(const LookupCodes *a, int64_t row, float *out) {
    const CodeFormat *f = &a->format;
    int64_t lane = row % ROWS;
    const uint8_t *group = a->weight + row / ROWS * group_bytes(f, a->columns);
    for (int64_t first = 0, number = 0; first < a->columns; first += f->block_size, number++) {
        int64_t width = a->columns - first < f->block_size ? a->columns - first : f->block_size;
        const Block block = block_at(f, group, number);
        const uint8_t *record = block.record + scale_bytes(f);
        float scale = scale_at(block, f, lane);
        for (int64_t c = 0; c < width; c++) {
            uint8_t code = f->bits == 8 ? record[c * ROWS + lane] : record[c / 8 * (4 * ROWS) + lane * 4 + c % 8 / 2] >> c % 2 * 4 & 15;
            *out++ = f->values[code] * scale;
        }
    }
}

EXPORT void lookup_codes(const Step *step, Worker *worker, const void *arguments) {
    const LookupCodes *a = arguments;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        float *out = a->out + t * a->out_stride;
        if (a->ids[t] < a->rows) unpack_row(a, a->ids[t], out);
        else memset(out, 0, a->columns * sizeof(float)); /* rows that pad the table */
    }
}
