/* The most products per second of one core: independent sums in registers, without any memory. Each function runs `count` rounds and
 * returns how many multiplications and additions that were, or 0 if the level has no such instruction.
 */
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
#if defined(__AVX512F__)
#define KEEP(x) __asm__ volatile("" : "+v"(x))
#elif defined(__x86_64__)
#define KEEP(x) __asm__ volatile("" : "+x"(x))
#else
#define KEEP(x) __asm__ volatile("" : "+w"(x))
#endif

#define SUMS 12
typedef float Floats __attribute__((vector_size(BYTES)));

/* Run `step` for each sum x of `count` rounds. */
#define ROUNDS(Type, step)                                                                              \
    Type sums[SUMS], one = {0};                                                                         \
    _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; i++) sums[i] = one;                              \
    KEEP(one);                                                                                          \
    for (int64_t n = 0; n < count; n++) {                                                               \
        _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; i++) {                                       \
            Type x = sums[i];                                                                           \
            step;                                                                                       \
            KEEP(x);                                                                                    \
            sums[i] = x;                                                                                \
        }                                                                                               \
    }

#define MULTIPLY_AND_ADD(bits)                                                                          \
    __m##bits##i product = _mm##bits##_maddubs_epi16(one, one);                                         \
    KEEP(product);                                                                                      \
    x = _mm##bits##_add_epi16(x, product)

#if defined(__AMX_BF16__)
static void configure(void) {
    uint8_t shape[64] = {1};
    for (int i = 0; i < 8; i++) shape[16 + 2 * i] = 64, shape[48 + i] = 16;
    _tile_loadconfig(shape);
    _tile_zero(6);
    _tile_zero(7);
}
#define TILE_ROUNDS(multiply)                                                                           \
    configure();                                                                                        \
    for (int64_t n = 0; n < count; n++) { multiply(0, 6, 7); multiply(1, 6, 7); multiply(2, 6, 7); multiply(3, 6, 7); } \
    _tile_release()
#endif

int64_t integers(int64_t count) {
#if defined(__AVX512VNNI__)
    ROUNDS(__m512i, x = _mm512_dpbusd_epi32(x, one, one))
    return count * SUMS * 64 * 2;
#elif defined(__AVXVNNI__)
    ROUNDS(__m256i, x = _mm256_dpbusd_avx_epi32(x, one, one))
    return count * SUMS * 32 * 2;
#elif defined(__AVX512F__)
    ROUNDS(__m512i, MULTIPLY_AND_ADD(512))
    return count * SUMS * 64 * 2;
#elif defined(__AVX2__)
    ROUNDS(__m256i, MULTIPLY_AND_ADD(256))
    return count * SUMS * 32 * 2;
#else
    (void)count;
    return 0;
#endif
}

int64_t bfloats(int64_t count) {
#if defined(__AMX_BF16__)
    TILE_ROUNDS(_tile_dpbf16ps);
    return count * 4 * 16 * 16 * 32 * 2;
#elif defined(__AVX512BF16__)
    ROUNDS(__m512, x = _mm512_dpbf16_ps(x, (__m512bh)one, (__m512bh)one))
    return count * SUMS * 32 * 2;
#else
    (void)count;
    return 0;
#endif
}

int64_t floats(int64_t count) {
    ROUNDS(Floats, x += one * one)
    return count * SUMS * BYTES / 4 * 2;
}
