/* Quantize activations to int8: code = round(x / scale) with scale = max |x| / 127, per token and 32 columns. Matrix tiles read them
 * as bfloat16 numbers instead. A checkpoint may ask for other scales (pegboard.ops.rounding): `quantize_as_asked`.
 */
#ifndef PEGBOARD_QUANTIZE_H
#define PEGBOARD_QUANTIZE_H

#include "common.h"

#define X_BLOCK 32
#define X_HALF 16
#define WORDS_GAP 32 /* so that two tokens are not a power of two apart */

typedef struct {
    int8_t *codes; /* [tokens][columns]; NULL = not these */
    float *scales; /* [tokens][columns / 32] */
    float *sums; /* [tokens][columns / 32][2]: scale times the sum of the block's codes, and the same for its first half */
    uint16_t *words; /* [tokens][columns + WORDS_GAP]: the activations as bfloat16 numbers; NULL = not these */
} Quantized;

typedef struct {
    const float *x; /* [tokens][columns] */
    int64_t x_stride;
    Quantized to;
    int64_t columns; /* a multiple of 32 */
    const int64_t *order; /* the columns of x, in the order of the codes; NULL = in their order */
    int64_t group; /* columns that share a scale, as the checkpoint asks; 0 = X_BLOCK */
    float scale; /* of all columns; 0 = computed */
} Quantize;

INLINE int is_wanted(const Quantized *to) { return to->codes || to->words; }

/* Compute the codes of a block of columns and the sums of its two halves. */
#if LANES == 8
INLINE void put_codes(const float *x, vfloat inverse, int8_t *codes, int32_t sums[2]) {
    __m256i whole[4];
    for (int v = 0; v < 4; v++) whole[v] = _mm256_cvtps_epi32((__m256)(load(x + v * LANES) * inverse)); /* to the nearest */
    __m256i both = _mm256_hadd_epi32(_mm256_add_epi32(whole[0], whole[1]), _mm256_add_epi32(whole[2], whole[3]));
    both = _mm256_hadd_epi32(both, both);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    sums[0] = _mm_extract_epi32(sum, 0);
    sums[1] = _mm_extract_epi32(sum, 1);
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); /* pack instructions work on halves */
    _mm256_storeu_si256((__m256i *)codes, bytes);
}
#elif LANES == 16
INLINE void put_codes(const float *x, vfloat inverse, int8_t *codes, int32_t sums[2]) {
    for (int half = 0; half < 2; half++) {
        __m512i whole = _mm512_cvtps_epi32((__m512)(load(x + half * LANES) * inverse)); /* to the nearest */
        _mm_storeu_si128((__m128i *)(codes + half * LANES), _mm512_cvtepi32_epi8(whole));
        sums[half] = _mm512_reduce_add_epi32(whole);
    }
}
#else
INLINE void put_codes(const float *x, vfloat inverse, int8_t *codes, int32_t sums[2]) {
    for (int half = 0; half < 2; half++) {
        vint total = {0};
        for (int at = half * X_HALF; at < (half + 1) * X_HALF; at += LANES) {
            vfloat code = load(x + at) * inverse + 12582912.0f - 12582912.0f; /* to the nearest integer */
            vint whole = __builtin_convertvector(code, vint);
            *(vbyte *)(codes + at) = __builtin_convertvector(whole, vbyte);
            total += whole;
        }
        sums[half] = (total[0] + total[1]) + (total[2] + total[3]);
    }
}
#endif

/* Quantize the columns [first, first + count) of a token's row of `columns` columns. x: these columns. first and count are
 * multiples of 32. */
INLINE void quantize_part(const float *x, const Quantized *to, int64_t columns, int64_t token, int64_t first, int64_t count) {
#if defined(__AMX_BF16__)
    if (to->words) {
        uint16_t *words = to->words + token * (columns + WORDS_GAP) + first;
        for (int64_t c = 0; c < count; c += X_BLOCK)
            _mm512_storeu_si512(words + c, (__m512i)_mm512_cvtne2ps_pbh((__m512)load(x + c + LANES), (__m512)load(x + c)));
        if (!to->codes) return;
    }
#endif
    int64_t start = token * columns + first;
    int8_t *codes = to->codes + start;
    float *scales = to->scales + start / X_BLOCK, *sums = to->sums + start / X_HALF;
    for (int64_t block = 0; block < count / X_BLOCK; block++, x += X_BLOCK, codes += X_BLOCK) {
        vfloat largest = splat(0);
        for (int i = 0; i < X_BLOCK; i += LANES) {
            vfloat v = load(x + i);
            largest = vmax(largest, vmax(v, -v));
        }
        float scale = max_of(largest) / 127.0f;
        int32_t halves[2];
        put_codes(x, splat(scale > 0 ? 1.0f / scale : 0.0f), codes, halves);
        scales[block] = scale;
        sums[2 * block] = scale * (float)(halves[0] + halves[1]);
        sums[2 * block + 1] = scale * (float)halves[0];
    }
}

/* Quantize a row whose columns are taken in another order. */
INLINE void quantize_in_order(const float *x, const Quantized *to, int64_t columns, int64_t token, const int64_t *order) {
    float block[X_BLOCK] ALIGNED;
    for (int64_t first = 0; first < columns; first += X_BLOCK) {
        for (int i = 0; i < X_BLOCK; i++) block[i] = x[order[first + i]];
        quantize_part(block, to, columns, token, first, X_BLOCK);
    }
}

INLINE void quantize_row(const float *x, const Quantized *to, int64_t columns, int64_t token) {
    quantize_part(x, to, columns, token, 0, columns);
}

/* Quantize a row with a scale per `group` columns, or with the given one. Every block gets the scale of its group. */
INLINE void quantize_as_asked(const float *x, const Quantized *to, int64_t columns, int64_t token, int64_t group, float given) {
    const int64_t first_block = token * (columns / X_BLOCK);
    float block[X_BLOCK] ALIGNED;
    for (int64_t first = 0; first < columns; first += group) {
        const int64_t end = first + group < columns ? first + group : columns;
        vfloat largest = splat(0);
        for (int64_t c = first; c < end; c += LANES) {
            vfloat v = load(x + c);
            largest = vmax(largest, vmax(v, -v));
        }
        const float scale = given > 0 ? given : max_of(largest) / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
        const vfloat most = splat(127.0f * scale);
        for (int64_t c = first; c < end; c += X_BLOCK) {
            const int64_t number = first_block + c / X_BLOCK;
            int32_t halves[2];
            for (int i = 0; i < X_BLOCK; i += LANES) store(block + i, -vmax(-vmax(load(x + c + i), -most), -most));
            put_codes(block, splat(inverse), to->codes + token * columns + c, halves);
            to->scales[number] = scale;
            to->sums[2 * number] = scale * (float)(halves[0] + halves[1]);
            to->sums[2 * number + 1] = scale * (float)halves[0];
        }
    }
}

#endif
