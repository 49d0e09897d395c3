/* Integer dot products of a group of 16 weight rows with some tokens, over one part of 32 columns.
 *
 * The codes of a part form eight quads of columns, and a quad has one byte per row and column: byte 4·row + i is column 4·quad + i.
 * Activations are int8 in column order, so four columns of a token are one 32-bit word, which is multiplied with all rows at once.
 * Codes of 8 bits are stored as these bytes, 64 per quad. Codes of fewer bits are stored as planes: 4 bits (4 x 64 bytes), then 2
 * bits (2 x 64 bytes), then 1 bit (64 bytes), each if the number of bits includes it: 6 = 4 + 2. The first plane has the lowest bits
 * of the codes. Byte n of its vectors has bits of byte n of several quads, see `quad_of`.
 */
#ifndef PEGBOARD_LINEAR_BLOCKS_H
#define PEGBOARD_LINEAR_BLOCKS_H

#include "common.h"

#define ROWS 16
#define PART 32 /* columns */
#define QUADS 8
#define BYTES_PER_BIT (PART * ROWS / 8) /* of a part */
#define VECTORS (ROWS / LANES)
/* WIDTH: vectors of rows that are computed at a time. One lets all numbers of a tile stay in NEON's registers. */
#if defined(__ARM_NEON)
#define WIDTH 1
#else
#define WIDTH VECTORS
#endif
#if LANES == 16
#define TOKENS 12
#elif defined(__AVXVNNI__)
#define TOKENS 3
#elif LANES == 8
#define TOKENS 5
#elif defined(__ARM_FEATURE_DOTPROD)
#define TOKENS 6
#elif defined(__ARM_NEON)
#define TOKENS 3
#else
#define TOKENS 2
#endif

typedef struct {
    vfloat scale[WIDTH], minimum[WIDTH]; /* of the rows that are computed at a time */
} Scales;

INLINE int32_t quad(const int8_t *x) {
    int32_t word;
    memcpy(&word, x, 4);
    return word;
}

INLINE vint load_int(const uint8_t *p) { return *(const vint *)p; }

/* Move bits within every byte, from bit `from` on to bit `to` on. mask: the bits to keep of the result. */
INLINE vint moved(vint bytes, int from, int to, int mask) {
    return (from > to ? bytes >> (from - to) : bytes << (to - from)) & mask * 0x01010101;
}

/* Return the bytes of a quad for LANES rows, from row v * LANES on. */
INLINE vint quad_of(const uint8_t *part, int bits, int q, int v) {
    const uint8_t *p = part + v * 4 * LANES;
    if (bits == 8) return load_int(p + 64 * q);
    vint bytes = {0};
    if (bits & 4) bytes = moved(load_int(p + 64 * (q % 4)), q / 4 * 4, 0, 15), p += 256;
    if (bits & 2) bytes |= moved(load_int(p + 64 * (q % 2)), q / 2 * 2, bits & 4, 3 << (bits & 4)), p += 128;
    if (bits & 1) bytes |= moved(load_int(p), q, bits & 6, 1 << (bits & 6));
    return bytes;
}

/* How the products read the codes of a part: 4 bits and 8 bits as they are stored, all others as bytes that `spread_codes` made from
 * up to 4 bits (LOW) or up to 7 bits (HIGH). */
enum { LOW = 1, NIBBLES = 4, HIGH = 7, SIGNED = 8 };

INLINE vint bytes_of(const uint8_t *part, int form, int q, int v) { return quad_of(part, form == NIBBLES ? 4 : 8, q, v); }

INLINE void spread(const uint8_t *part, int bits, int vector, uint8_t *to) {
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; q++)
        for (int v = vector; v < vector + WIDTH; v++) *(vint *)(to + 64 * q + 4 * LANES * v) = quad_of(part, bits, q, v);
}

/* Unpack the codes of a part to one byte each, [quads][64]: those of WIDTH vectors of rows. */
static void spread_codes(const uint8_t *part, int bits, int vector, uint8_t *to) {
    switch (bits) {
    case 1: spread(part, 1, vector, to); break;
    case 2: spread(part, 2, vector, to); break;
    case 3: spread(part, 3, vector, to); break;
    case 4: spread(part, 4, vector, to); break;
    case 5: spread(part, 5, vector, to); break;
    case 6: spread(part, 6, vector, to); break;
    case 7: spread(part, 7, vector, to); break;
    default: spread(part, 8, vector, to);
    }
}

/* Return the i-th of `quads` quads, of which the first is `first`. If it is a whole part, quads that share bytes follow each other. */
INLINE int nth_quad(int i, int first, int quads) { return quads == QUADS ? i % 2 * 4 + i / 2 : first + i; }

/* The compiler must keep the order of sums. Otherwise it adds in trees, or unpacks codes before it needs them, and runs out of
 * registers. */
#ifndef KEEP
#if defined(__aarch64__)
#define KEEP(x) __asm__("" : "+w"(x))
#else
#define KEEP(x) __asm__("" : "+v"(x))
#endif
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

#define SIGNED_OFFSET 128 /* 8-bit codes are multiplied as code + 128; the minimum corrects this */

#if LANES == 16
#define ADD_PRODUCTS(sum, w, x) (vint) _mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(w), (__m512i)(x))
#define SPLAT32(x) (vint) _mm512_set1_epi32(x)
#else
#define ADD_PRODUCTS(sum, w, x) (vint) _mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(w), (__m256i)(x))
#define SPLAT32(x) (vint) _mm256_set1_epi32(x)
#endif

/* dots: for `quads` quads of the part, the first of which is `first`, and WIDTH vectors of rows, the first of which is `vector`. x: the
 * tokens' codes for the part. stride: from token to token. */
INLINE void dots_of(const uint8_t *part, int form, int first, int quads, int vector, const int8_t *x, int64_t stride, int tokens,
                    vint dots[TOKENS][WIDTH]) {
    const vint flip = (vint){0} + (int32_t)0x80808080;
    vint sums[TOKENS][WIDTH];
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < WIDTH; v++) sums[t][v] = (vint){0};
#pragma GCC unroll 8
    for (int i = 0; i < quads; i++) {
        int q = nth_quad(i, first, quads);
        vint w[WIDTH];
        for (int v = 0; v < WIDTH; v++) {
            w[v] = bytes_of(part, form, q, vector + v);
            if (form == SIGNED) w[v] ^= flip;
        }
        for (int t = 0; t < tokens; t++) {
            vint b = SPLAT32(quad(x + t * stride + 4 * q));
            for (int v = 0; v < WIDTH; v++) {
                sums[t][v] = ADD_PRODUCTS(sums[t][v], w[v], b);
                if (LANES == 8) KEEP(sums[t][v]);
            }
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < WIDTH; v++) dots[t][v] = sums[t][v];
}

#elif defined(__AVX2__)

#define SIGNED_OFFSET 0

/* Products of unsigned and signed bytes are added in pairs to 16 bits. For up to 4 bits, eight sums of 2 · 15 · 127 stay below 2^15.
 * For more bits, one sum of 2 · 127 · 127 does. Codes of 8 bits are split into magnitude and sign, and the sign is applied to the
 * activation. */
#if LANES == 16
typedef __m512i wide;
#define ZERO _mm512_setzero_si512()
#define SPLAT32(x) _mm512_set1_epi32(x)
#define MULTIPLY(a, b) _mm512_maddubs_epi16(a, b)
#define ADD16(a, b) _mm512_add_epi16(a, b)
#define ADD32(a, b) _mm512_add_epi32(a, b)
#define WIDEN(a) _mm512_madd_epi16(a, _mm512_set1_epi16(1))
#define MAGNITUDE(a) _mm512_abs_epi8(a)
#define WITH_SIGN(x, a) _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(a), ZERO, x)
#else
typedef __m256i wide;
#define ZERO _mm256_setzero_si256()
#define SPLAT32(x) _mm256_set1_epi32(x)
#define MULTIPLY(a, b) _mm256_maddubs_epi16(a, b)
#define ADD16(a, b) _mm256_add_epi16(a, b)
#define ADD32(a, b) _mm256_add_epi32(a, b)
#define WIDEN(a) _mm256_madd_epi16(a, _mm256_set1_epi16(1))
#define MAGNITUDE(a) _mm256_abs_epi8(a)
#define WITH_SIGN(x, a) _mm256_sign_epi8(x, a)
#endif

INLINE void dots_of(const uint8_t *part, int form, int first, int quads, int vector, const int8_t *x, int64_t stride, int tokens,
                    vint dots[TOKENS][WIDTH]) {
    wide sums[TOKENS][WIDTH];
    const int is_narrow = form <= NIBBLES; /* all quads are added in 16 bits */
#pragma GCC unroll 8
    for (int i = 0; i < quads; i++) {
        const int q = nth_quad(i, first, quads);
        wide w[WIDTH], size[WIDTH];
        for (int v = 0; v < WIDTH; v++) {
            w[v] = (wide)bytes_of(part, form, q, vector + v);
            size[v] = form == SIGNED ? MAGNITUDE(w[v]) : w[v];
        }
        for (int t = 0; t < tokens; t++) {
            wide b = SPLAT32(quad(x + t * stride + 4 * q));
            for (int v = 0; v < WIDTH; v++) {
                wide product = MULTIPLY(size[v], form == SIGNED ? WITH_SIGN(b, w[v]) : b);
                if (!is_narrow) product = WIDEN(product);
                sums[t][v] = !i ? product : is_narrow ? ADD16(sums[t][v], product) : ADD32(sums[t][v], product);
                KEEP(sums[t][v]);
            }
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < WIDTH; v++) dots[t][v] = (vint)(is_narrow ? WIDEN(sums[t][v]) : sums[t][v]);
}

#elif defined(__ARM_FEATURE_DOTPROD)

#define SIGNED_OFFSET 0

/* Return the low or the high halves of bytes. */
INLINE int8x16_t half_of(int8x16_t bytes, int is_high) {
    uint8x16_t codes = vreinterpretq_u8_s8(bytes);
    return vreinterpretq_s8_u8(is_high ? vshrq_n_u8(codes, 4) : vandq_u8(codes, vdupq_n_u8(15)));
}

INLINE int8x16_t codes_of(const uint8_t *part, int form, int q, int v) {
    return form == NIBBLES ? half_of((int8x16_t)bytes_of(part, SIGNED, q % 4, v), q > 3) : (int8x16_t)bytes_of(part, form, q, v);
}

INLINE void dots_of_each(const uint8_t *part, int form, int first, int quads, int vector, const int8_t *x, int64_t stride, int tokens,
                         vint dots[TOKENS][WIDTH]) {
    int8x16_t words[2][TOKENS]; /* of each token, four quads at a time */
    int32x4_t sums[TOKENS];
    for (int half = first / 4; half < (first + quads) / 4; half++)
        for (int t = 0; t < tokens; t++) words[half][t] = vld1q_s8(x + t * stride + 16 * half);
    for (int t = 0; t < tokens; t++) sums[t] = vdupq_n_s32(0);
#define ADD_QUAD(lane)                                                                                                           \
    for (int half = first / 4; half < (first + quads) / 4; half++) {                                                             \
        int8x16_t w = codes_of(part, form, 4 * half + lane, vector);                                                             \
        for (int t = 0; t < tokens; t++) {                                                                                       \
            sums[t] = vdotq_laneq_s32(sums[t], w, words[half][t], lane);                                                         \
            KEEP(sums[t]);                                                                                                       \
        }                                                                                                                        \
    }
    ADD_QUAD(0)
    ADD_QUAD(1)
    ADD_QUAD(2)
    ADD_QUAD(3)
    for (int t = 0; t < tokens; t++) dots[t][0] = (vint)sums[t];
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
/* An instruction multiplies two rows with two tokens, over the eight columns of two quads. */
INLINE void dots_of_pairs(const uint8_t *part, int form, int first, int quads, int vector, const int8_t *x, int64_t stride, int tokens,
                          vint dots[TOKENS][WIDTH]) {
    int32x4_t sums[TOKENS / 2][2]; /* of the first two rows, and of the last two */
    for (int t = 0; t < tokens / 2; t++) sums[t][0] = sums[t][1] = vdupq_n_s32(0);
#pragma GCC unroll 4
    for (int n = 0; n < quads / 2; n++) {
        /* In a whole part, quads that share bytes follow each other. */
        const int i = quads == QUADS ? n % 2 * 2 + n / 2 : first / 2 + n, q = form == NIBBLES ? 2 * i % 4 : 2 * i;
        int32x4_t even = (int32x4_t)bytes_of(part, SIGNED, q, vector), odd = (int32x4_t)bytes_of(part, SIGNED, q + 1, vector);
        int8x16_t rows[2] = {vreinterpretq_s8_s32(vzip1q_s32(even, odd)), vreinterpretq_s8_s32(vzip2q_s32(even, odd))};
        for (int two = 0; two < 2 && form == NIBBLES; two++) rows[two] = half_of(rows[two], i > 1);
        for (int t = 0; t < tokens / 2; t++) {
            const int8_t *from = x + 2 * t * stride + 8 * i;
            int8x16_t words = vcombine_s8(vld1_s8(from), vld1_s8(from + stride));
            for (int two = 0; two < 2; two++) {
                sums[t][two] = vmmlaq_s32(sums[t][two], rows[two], words);
                KEEP(sums[t][two]);
            }
        }
    }
    for (int t = 0; t < tokens / 2; t++) {
        dots[2 * t][0] = (vint)vuzp1q_s32(sums[t][0], sums[t][1]);
        dots[2 * t + 1][0] = (vint)vuzp2q_s32(sums[t][0], sums[t][1]);
    }
}
#endif

INLINE void dots_of(const uint8_t *part, int form, int first, int quads, int vector, const int8_t *x, int64_t stride, int tokens,
                    vint dots[TOKENS][WIDTH]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if (tokens % 2 == 0) {
        dots_of_pairs(part, form, first, quads, vector, x, stride, tokens, dots);
        return;
    }
#endif
    dots_of_each(part, form, first, quads, vector, x, stride, tokens, dots);
}

#elif defined(__ARM_NEON)

#define SIGNED_OFFSET 0

/* Products of bytes are added in 16 bits: of all quads for codes of up to 4 bits, because eight of at most 15 · 127 stay below 2^15,
 * and of two quads for more bits, because two of at most 128 · 127 do. */
INLINE void dots_of(const uint8_t *part, int form, int first, int quads, int vector, const int8_t *x, int64_t stride, int tokens,
                    vint dots[TOKENS][WIDTH]) {
    const int run = form <= NIBBLES ? quads : 2;
    int32x4_t sums[TOKENS][2]; /* of the first two rows and of the last two, each in two halves */
    for (int t = 0; t < tokens; t++) sums[t][0] = sums[t][1] = vdupq_n_s32(0);
#pragma GCC unroll 4
    for (int start = 0; start < quads; start += run) {
        int16x8_t words[TOKENS][2];
#pragma GCC unroll 8
        for (int i = start; i < start + run; i++) {
            const int q = nth_quad(i, first, quads);
            int8x16_t w = (int8x16_t)bytes_of(part, form, q, vector);
            for (int t = 0; t < tokens; t++) {
                int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(quad(x + t * stride + 4 * q)));
                int8x8_t w_low = vget_low_s8(w), low = vget_low_s8(b);
                words[t][0] = i == start ? vmull_s8(w_low, low) : vmlal_s8(words[t][0], w_low, low);
                words[t][1] = i == start ? vmull_high_s8(w, b) : vmlal_high_s8(words[t][1], w, b);
            }
        }
        for (int t = 0; t < tokens; t++)
            for (int two = 0; two < 2; two++) sums[t][two] = vpadalq_s16(sums[t][two], words[t][two]);
    }
    for (int t = 0; t < tokens; t++) dots[t][0] = (vint)vpaddq_s32(sums[t][0], sums[t][1]);
}

#else

#define SIGNED_OFFSET 0

INLINE void dots_of(const uint8_t *part, int form, int first, int quads, int vector, const int8_t *x, int64_t stride, int tokens,
                    vint dots[TOKENS][WIDTH]) {
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < WIDTH; v++) {
            vint sum = {0};
            for (int q = first; q < first + quads; q++) {
                vint w = bytes_of(part, form, q, vector + v);
                for (int i = 0; i < 4; i++) sum += (w << (24 - 8 * i) >> 24) * x[t * stride + 4 * q + i];
            }
            dots[t][v] = sum;
        }
}

#endif
#endif
