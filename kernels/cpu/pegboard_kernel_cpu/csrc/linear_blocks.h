/* Integer dot products of a group of 16 weight rows with some tokens, over one block of columns.
 *
 * The codes of a block are stored by quads of columns, and within a quad by rows. With 8 bits, a quad has 64 bytes, and byte
 * 4·row + i is column 4·quad + i. With 4 bits the order is the same: the low halves of the bytes hold the first 16 columns of the
 * block, and the high halves the last 16. Activations are int8 in column order, so four columns of a token are one 32-bit word,
 * which is multiplied with all rows at once.
 */
#ifndef PEGBOARD_LINEAR_BLOCKS_H
#define PEGBOARD_LINEAR_BLOCKS_H

#include "common.h"

#define ROWS 16
#define VECTORS (ROWS / LANES)
#if LANES == 16
#define TOKENS 12
#elif LANES == 8
#define TOKENS 5
#else
#define TOKENS 2
#endif

INLINE int32_t quad(const int8_t *x) {
    int32_t word;
    memcpy(&word, x, 4);
    return word;
}

#if defined(__AVX512VNNI__)

#define SIGNED_OFFSET 128 /* 8-bit codes are multiplied as code + 128; the minimum corrects this */

INLINE void dots_4bit(const uint8_t *codes, const int8_t *x, int64_t stride, int tokens, vint dots[TOKENS][VECTORS]) {
    __m512i sums[TOKENS], mask = _mm512_set1_epi8(15);
    for (int t = 0; t < tokens; t++) sums[t] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i w = _mm512_loadu_si512(codes + 64 * j);
        __m512i low = _mm512_and_si512(w, mask), high = _mm512_and_si512(_mm512_srli_epi16(w, 4), mask);
        for (int t = 0; t < tokens; t++) {
            sums[t] = _mm512_dpbusd_epi32(sums[t], low, _mm512_set1_epi32(quad(x + t * stride + 4 * j)));
            sums[t] = _mm512_dpbusd_epi32(sums[t], high, _mm512_set1_epi32(quad(x + t * stride + 16 + 4 * j)));
        }
    }
    for (int t = 0; t < tokens; t++) dots[t][0] = (vint)sums[t];
}

INLINE void dots_8bit(const uint8_t *codes, const int8_t *x, int64_t stride, int quads, int tokens, vint dots[TOKENS][VECTORS]) {
    __m512i sums[TOKENS], flip = _mm512_set1_epi8((char)128);
    for (int t = 0; t < tokens; t++) sums[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = 0; j < quads; j++) {
        __m512i w = _mm512_xor_si512(_mm512_loadu_si512(codes + 64 * j), flip);
        for (int t = 0; t < tokens; t++)
            sums[t] = _mm512_dpbusd_epi32(sums[t], w, _mm512_set1_epi32(quad(x + t * stride + 4 * j)));
    }
    for (int t = 0; t < tokens; t++) dots[t][0] = (vint)sums[t];
}

#elif defined(__AVX2__)

#define SIGNED_OFFSET 0

/* Products of unsigned and signed bytes are added in pairs to 16 bits. For 4 bits, eight sums of 2 · 15 · 127 stay below 2^15.
 * For 8 bits, one sum of 2 · 127 · 127 does, so 8-bit codes are split into magnitude and sign, and the sign is applied to the
 * activation. */
#if LANES == 16
typedef __m512i wide;
#define LOAD(p) _mm512_loadu_si512(p)
#define ZERO _mm512_setzero_si512()
#define SPLAT8(x) _mm512_set1_epi8(x)
#define SPLAT32(x) _mm512_set1_epi32(x)
#define AND(a, b) _mm512_and_si512(a, b)
#define SHIFT4(a) _mm512_srli_epi16(a, 4)
#define MULTIPLY(a, b) _mm512_maddubs_epi16(a, b)
#define ADD16(a, b) _mm512_add_epi16(a, b)
#define ADD32(a, b) _mm512_add_epi32(a, b)
#define WIDEN(a) _mm512_madd_epi16(a, _mm512_set1_epi16(1))
#define MAGNITUDE(a) _mm512_abs_epi8(a)
#define WITH_SIGN(x, a) _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(a), ZERO, x)
#else
typedef __m256i wide;
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define ZERO _mm256_setzero_si256()
#define SPLAT8(x) _mm256_set1_epi8(x)
#define SPLAT32(x) _mm256_set1_epi32(x)
#define AND(a, b) _mm256_and_si256(a, b)
#define SHIFT4(a) _mm256_srli_epi16(a, 4)
#define MULTIPLY(a, b) _mm256_maddubs_epi16(a, b)
#define ADD16(a, b) _mm256_add_epi16(a, b)
#define ADD32(a, b) _mm256_add_epi32(a, b)
#define WIDEN(a) _mm256_madd_epi16(a, _mm256_set1_epi16(1))
#define MAGNITUDE(a) _mm256_abs_epi8(a)
#define WITH_SIGN(x, a) _mm256_sign_epi8(x, a)
#endif

/* The compiler must keep this order. Otherwise it adds in trees, which need more registers than there are. */
#ifndef KEEP
#define KEEP(x) __asm__("" : "+v"(x))
#endif

INLINE void dots_4bit(const uint8_t *codes, const int8_t *x, int64_t stride, int tokens, vint dots[TOKENS][VECTORS]) {
    wide sums[TOKENS][VECTORS], mask = SPLAT8(15);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            wide w[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                w[v] = LOAD(codes + 64 * j + 4 * LANES * v);
                w[v] = AND(half ? SHIFT4(w[v]) : w[v], mask);
            }
            for (int t = 0; t < tokens; t++) {
                wide b = SPLAT32(quad(x + t * stride + 16 * half + 4 * j));
                for (int v = 0; v < VECTORS; v++) {
                    wide product = MULTIPLY(w[v], b);
                    sums[t][v] = j || half ? ADD16(sums[t][v], product) : product;
                    KEEP(sums[t][v]);
                }
            }
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < VECTORS; v++) dots[t][v] = (vint)WIDEN(sums[t][v]);
}

INLINE void dots_8bit(const uint8_t *codes, const int8_t *x, int64_t stride, int quads, int tokens, vint dots[TOKENS][VECTORS]) {
    wide sums[TOKENS][VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < quads; j++) {
        wide w[VECTORS], size[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            w[v] = LOAD(codes + 64 * j + 4 * LANES * v);
            size[v] = MAGNITUDE(w[v]);
        }
        for (int t = 0; t < tokens; t++) {
            wide b = SPLAT32(quad(x + t * stride + 4 * j));
            for (int v = 0; v < VECTORS; v++) {
                wide product = WIDEN(MULTIPLY(size[v], WITH_SIGN(b, w[v])));
                sums[t][v] = j ? ADD32(sums[t][v], product) : product;
                KEEP(sums[t][v]);
            }
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < VECTORS; v++) dots[t][v] = (vint)sums[t][v];
}

#else

#define SIGNED_OFFSET 0

INLINE vint load_int(const uint8_t *p) { return *(const vint *)p; }

INLINE void dots_4bit(const uint8_t *codes, const int8_t *x, int64_t stride, int tokens, vint dots[TOKENS][VECTORS]) {
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < VECTORS; v++) {
            vint sum = {0};
            for (int j = 0; j < 4; j++) {
                vint w = load_int(codes + 64 * j + 4 * LANES * v);
                for (int i = 0; i < 4; i++) {
                    sum += (w >> 8 * i & 15) * x[t * stride + 4 * j + i];
                    sum += (w >> (8 * i + 4) & 15) * x[t * stride + 16 + 4 * j + i];
                }
            }
            dots[t][v] = sum;
        }
}

INLINE void dots_8bit(const uint8_t *codes, const int8_t *x, int64_t stride, int quads, int tokens, vint dots[TOKENS][VECTORS]) {
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < VECTORS; v++) {
            vint sum = {0};
            for (int j = 0; j < quads; j++) {
                vint w = load_int(codes + 64 * j + 4 * LANES * v);
                for (int i = 0; i < 4; i++) sum += (w << (24 - 8 * i) >> 24) * x[t * stride + 4 * j + i];
            }
            dots[t][v] = sum;
        }
}

#endif
#endif
