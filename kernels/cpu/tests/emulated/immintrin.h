/* AVX-512, VNNI and AMX in plain C, for testing the kernels for CPUs that this machine does not have. Compile for AVX2 with this
 * folder first in the search path. Every instruction that the kernels use is implemented as the manual defines it ("Intel 64 and
 * IA-32 Architectures Software Developer's Manual", volume 2). Code that uses any other instruction does not compile. -DEMULATE=0
 * emulates AVX-VNNI alone, 1 AVX-512, 2 also VNNI, 3 also products of bfloat16, 4 also AMX.
 */
#ifndef EMULATED_IMMINTRIN_H
#define EMULATED_IMMINTRIN_H

#include_next <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if EMULATE == 0
#define __AVXVNNI__ 1

static inline __m256i emulated_dpbusd(__m256i to, __m256i a, __m256i b) {
    union { __m256i i; int32_t d[8]; uint8_t ub[32]; int8_t b[32]; } r = {to}, x = {a}, y = {b};
    for (int n = 0; n < 32; n++) r.d[n / 4] += x.ub[n] * y.b[n];
    return r.i;
}
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd

#else

#define __AVX512F__ 1
#if EMULATE >= 2
#define __AVX512VNNI__ 1
#endif
#if EMULATE >= 3
#define __AVX512BF16__ 1
#endif
#if EMULATE >= 4
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#endif

#define KEEP(x) ((void)0) /* the clobber list names registers that this CPU does not have */

#define EMULATED static inline __attribute__((always_inline))

typedef union {
    __m512i i;
    __m512 f;
    int8_t b[64];
    uint8_t ub[64];
    int16_t w[32];
    uint16_t uw[32];
    int32_t d[16];
    float s[16];
} Wide;

#define BYTES(expression) Wide r; for (int n = 0; n < 64; n++) r.b[n] = (int8_t)(expression); return r.i
#define WORDS(expression) Wide r; for (int n = 0; n < 32; n++) r.w[n] = (int16_t)(expression); return r.i
#define INTS(expression) Wide r; for (int n = 0; n < 16; n++) r.d[n] = (int32_t)(expression); return r.i
#define FLOATS(expression) Wide r; for (int n = 0; n < 16; n++) r.s[n] = (expression); return r.f

EMULATED int16_t saturated(int32_t x) { return x > 32767 ? 32767 : x < -32768 ? -32768 : (int16_t)x; }

EMULATED __m512i emulated_loadu(const void *p) { Wide r; memcpy(&r, p, 64); return r.i; }
EMULATED __m512i emulated_zero(void) { INTS(0); }
EMULATED __m512i emulated_set8(int8_t x) { BYTES(x); }
EMULATED __m512i emulated_set16(int16_t x) { WORDS(x); }
EMULATED __m512i emulated_set32(int32_t x) { INTS(x); }
EMULATED __m512i emulated_and(__m512i a, __m512i b) { Wide x = {a}, y = {b}; INTS(x.d[n] & y.d[n]); }
EMULATED __m512i emulated_xor(__m512i a, __m512i b) { Wide x = {a}, y = {b}; INTS(x.d[n] ^ y.d[n]); }
EMULATED __m512i emulated_add16(__m512i a, __m512i b) { Wide x = {a}, y = {b}; WORDS(x.w[n] + y.w[n]); }
EMULATED __m512i emulated_add32(__m512i a, __m512i b) { Wide x = {a}, y = {b}; INTS((uint32_t)x.d[n] + (uint32_t)y.d[n]); }
EMULATED __m512i emulated_srl16(__m512i a, unsigned count) { Wide x = {a}; WORDS(x.uw[n] >> count); }
EMULATED __m512i emulated_sll32(__m512i a, unsigned count) { Wide x = {a}; INTS((uint32_t)x.d[n] << count); }
EMULATED __m512i emulated_abs8(__m512i a) { Wide x = {a}; BYTES(x.b[n] < 0 ? -x.b[n] : x.b[n]); }
EMULATED __mmask64 emulated_sign8(__m512i a) {
    Wide x = {a};
    __mmask64 mask = 0;
    for (int n = 0; n < 64; n++) mask |= (__mmask64)(x.b[n] < 0) << n;
    return mask;
}
EMULATED __m512i emulated_mask_sub8(__m512i from, __mmask64 mask, __m512i a, __m512i b) {
    Wide f = {from}, x = {a}, y = {b};
    BYTES(mask >> n & 1 ? x.b[n] - y.b[n] : f.b[n]);
}
EMULATED __m512i emulated_maddubs(__m512i a, __m512i b) {
    Wide x = {a}, y = {b};
    WORDS(saturated(x.ub[2 * n] * y.b[2 * n] + x.ub[2 * n + 1] * y.b[2 * n + 1]));
}
EMULATED __m512i emulated_madd16(__m512i a, __m512i b) {
    Wide x = {a}, y = {b};
    INTS(x.w[2 * n] * y.w[2 * n] + x.w[2 * n + 1] * y.w[2 * n + 1]);
}
EMULATED __m512i emulated_dpbusd(__m512i to, __m512i a, __m512i b) {
    Wide r = {to}, x = {a}, y = {b};
    for (int n = 0; n < 64; n++) r.d[n / 4] += x.ub[n] * y.b[n];
    return r.i;
}
EMULATED __m512 emulated_max(__m512 a, __m512 b) { Wide x = {.f = a}, y = {.f = b}; FLOATS(x.s[n] > y.s[n] ? x.s[n] : y.s[n]); }
EMULATED __m512 emulated_min(__m512 a, __m512 b) { Wide x = {.f = a}, y = {.f = b}; FLOATS(x.s[n] < y.s[n] ? x.s[n] : y.s[n]); }
EMULATED float emulated_max_of(__m512 a) {
    Wide x = {.f = a};
    float r = x.s[0];
    for (int n = 1; n < 16; n++) r = x.s[n] > r ? x.s[n] : r;
    return r;
}
EMULATED float emulated_sum_of(__m512 a) { /* in halves */
    Wide x = {.f = a};
    for (int half = 8; half; half /= 2)
        for (int n = 0; n < half; n++) x.s[n] += x.s[n + half];
    return x.s[0];
}
EMULATED int32_t emulated_int_sum(__m512i a) {
    Wide x = {a};
    int32_t r = 0;
    for (int n = 0; n < 16; n++) r += x.d[n];
    return r;
}
EMULATED __m512i emulated_to_int(__m512 a) { Wide x = {.f = a}; INTS(lrintf(x.s[n])); }
EMULATED __m512 emulated_to_float(__m512i a) { Wide x = {a}; FLOATS((float)x.d[n]); }
EMULATED __m512 emulated_half_to_float(__m256i a) {
    uint16_t h[16];
    memcpy(h, &a, 32);
    FLOATS(_cvtsh_ss(h[n]));
}
EMULATED __m512i emulated_widen_words(__m256i a) {
    uint16_t w[16];
    memcpy(w, &a, 32);
    INTS(w[n]);
}
EMULATED __m512i emulated_widen_bytes(__m128i a) {
    int8_t b[16];
    memcpy(b, &a, 16);
    INTS(b[n]);
}
EMULATED __m512 emulated_permute(__m512i at, __m512 a) { Wide x = {at}, y = {.f = a}; FLOATS(y.s[x.d[n] & 15]); }
EMULATED __m512 emulated_gather(__m512i at, const void *p, int size) {
    Wide x = {at};
    if (size != 4) __builtin_trap();
    FLOATS(((const float *)p)[x.d[n]]);
}
EMULATED float bfloat(const void *p) {
    uint16_t word;
    memcpy(&word, p, 2);
    union { uint32_t bits; float value; } u = {(uint32_t)word << 16};
    return u.value;
}
EMULATED __m512 emulated_dpbf16(__m512 to, __m512i a, __m512i b) {
    Wide x = {a}, y = {b}, r = {.f = to};
    for (int n = 0; n < 16; n++) {
        r.s[n] += bfloat(&x.w[2 * n + 1]) * bfloat(&y.w[2 * n + 1]);
        r.s[n] += bfloat(&x.w[2 * n]) * bfloat(&y.w[2 * n]);
    }
    return r.f;
}
EMULATED __m256i emulated_to_bfloat(__m512 a) { /* round to nearest even */
    Wide x = {.f = a};
    uint16_t words[16];
    __m256i r;
    for (int n = 0; n < 16; n++) {
        uint32_t bits = (uint32_t)x.d[n];
        words[n] = x.s[n] != x.s[n] ? (uint16_t)(bits >> 16 | 64) : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    memcpy(&r, words, 32);
    return r;
}
EMULATED __m512i emulated_to_bfloats(__m512 high, __m512 low) {
    __m256i halves[2] = {emulated_to_bfloat(low), emulated_to_bfloat(high)};
    __m512i r;
    memcpy(&r, halves, 64);
    return r;
}
EMULATED __m512i emulated_permute_words(__m512i order, __m512i a) { Wide x = {a}, at = {order}; WORDS(x.w[at.uw[n] & 31]); }
EMULATED void emulated_storeu(void *p, __m512i a) { memcpy(p, &a, 64); }
EMULATED __m512 emulated_set_float(float x) { FLOATS(x); }
EMULATED __m128i emulated_narrow(__m512i a) {
    Wide x = {a};
    int8_t b[16];
    __m128i r;
    for (int n = 0; n < 16; n++) b[n] = (int8_t)x.d[n];
    memcpy(&r, b, 16);
    return r;
}

#define _mm512_loadu_si512 emulated_loadu
#define _mm512_storeu_si512 emulated_storeu
#define _mm512_setzero_si512 emulated_zero
#define _mm512_set1_epi8 emulated_set8
#define _mm512_set1_epi16 emulated_set16
#define _mm512_set1_epi32 emulated_set32
#define _mm512_and_si512 emulated_and
#define _mm512_xor_si512 emulated_xor
#define _mm512_add_epi16 emulated_add16
#define _mm512_add_epi32 emulated_add32
#define _mm512_srli_epi16 emulated_srl16
#define _mm512_slli_epi32 emulated_sll32
#define _mm512_abs_epi8 emulated_abs8
#define _mm512_movepi8_mask emulated_sign8
#define _mm512_mask_sub_epi8 emulated_mask_sub8
#define _mm512_maddubs_epi16 emulated_maddubs
#define _mm512_madd_epi16 emulated_madd16
#define _mm512_dpbusd_epi32 emulated_dpbusd
#define _mm512_max_ps emulated_max
#define _mm512_min_ps emulated_min
#define _mm512_reduce_max_ps emulated_max_of
#define _mm512_reduce_add_ps emulated_sum_of
#define _mm512_reduce_add_epi32 emulated_int_sum
#define _mm512_cvtps_epi32 emulated_to_int
#define _mm512_cvtepi32_ps emulated_to_float
#define _mm512_cvtph_ps emulated_half_to_float
#define _mm512_cvtepu16_epi32 emulated_widen_words
#define _mm512_cvtepi8_epi32 emulated_widen_bytes
#define _mm512_permutexvar_ps emulated_permute
#define _mm512_i32gather_ps emulated_gather
#define _mm512_cvtepi32_epi8 emulated_narrow
#define __m512bh __m512i
#define _mm512_dpbf16_ps emulated_dpbf16
#define _mm512_cvtneps_pbh emulated_to_bfloat
#define _mm512_cvtne2ps_pbh emulated_to_bfloats
#define _mm512_permutexvar_epi16 emulated_permute_words
#define _mm512_set1_ps emulated_set_float

/* Tiles. As on hardware, each thread has its own tiles, has none before it configures them, and cannot use rows or columns
 * outside the configured shape. */
#define NUM_TILES 8
static __thread struct {
    struct { int rows, bytes; } shape[NUM_TILES];
    uint8_t data[NUM_TILES][16][64];
} tiles_of_thread;

EMULATED void emulated_configure(const void *memory) {
    const uint8_t *config = memory;
    if (config[0] != 1) __builtin_trap(); /* the only palette that exists */
    for (int n = 0; n < NUM_TILES; n++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * n, 2);
        tiles_of_thread.shape[n].rows = config[48 + n], tiles_of_thread.shape[n].bytes = bytes;
        if (bytes > 64 || config[48 + n] > 16) __builtin_trap();
    }
    memset(tiles_of_thread.data, 0, sizeof tiles_of_thread.data);
}
EMULATED void emulated_tile_release(void) { memset(&tiles_of_thread, 0, sizeof tiles_of_thread); }
EMULATED void in_use(int tile) {
    if (!tiles_of_thread.shape[tile].rows || !tiles_of_thread.shape[tile].bytes) __builtin_trap();
}
EMULATED void emulated_tile_zero(int tile) { in_use(tile), memset(tiles_of_thread.data[tile], 0, sizeof tiles_of_thread.data[tile]); }
EMULATED void emulated_tile_load(int tile, const void *from, int64_t stride) {
    emulated_tile_zero(tile);
    for (int row = 0; row < tiles_of_thread.shape[tile].rows; row++)
        memcpy(tiles_of_thread.data[tile][row], (const char *)from + row * stride, tiles_of_thread.shape[tile].bytes);
}
EMULATED void emulated_tile_store(int tile, void *to, int64_t stride) {
    in_use(tile);
    for (int row = 0; row < tiles_of_thread.shape[tile].rows; row++)
        memcpy((char *)to + row * stride, tiles_of_thread.data[tile][row], tiles_of_thread.shape[tile].bytes);
}
EMULATED void emulated_bfloat_products(int to, int a, int b) { /* two neighbors in a row of a, two in a column of b */
    in_use(to), in_use(a), in_use(b);
    if (tiles_of_thread.shape[a].bytes != 4 * tiles_of_thread.shape[b].rows) __builtin_trap();
    if (tiles_of_thread.shape[a].rows != tiles_of_thread.shape[to].rows) __builtin_trap();
    if (tiles_of_thread.shape[b].bytes != tiles_of_thread.shape[to].bytes) __builtin_trap();
    for (int row = 0; row < tiles_of_thread.shape[to].rows; row++)
        for (int k = 0; k < tiles_of_thread.shape[b].rows; k++)
            for (int column = 0; column < tiles_of_thread.shape[to].bytes / 4; column++) {
                const uint8_t *x = tiles_of_thread.data[a][row] + 4 * k, *y = tiles_of_thread.data[b][k] + 4 * column;
                float sum;
                memcpy(&sum, tiles_of_thread.data[to][row] + 4 * column, 4);
                sum += bfloat(x) * bfloat(y);
                sum += bfloat(x + 2) * bfloat(y + 2);
                memcpy(tiles_of_thread.data[to][row] + 4 * column, &sum, 4);
            }
}

#define _tile_loadconfig emulated_configure
#define _tile_release emulated_tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_zero emulated_tile_zero
#define _tile_loadd emulated_tile_load
#define _tile_stored emulated_tile_store
#define _tile_dpbf16ps emulated_bfloat_products
#define syscall(...) 0L /* the request for permission to use tiles */

#endif
#endif
