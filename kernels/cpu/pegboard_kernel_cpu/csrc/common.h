/* Shared by all kernels of this package: the vectors of the level that they are compiled for, and the team of threads that runs
 * them.
 *
 * The same sources are compiled once per level (see build.py), so no level is chosen at run time. A kernel is a function that all
 * threads of a team call. Each thread takes tasks with `next_task` until none are left. The next kernel starts when all tasks are
 * done, so it sees everything that the previous one wrote.
 */
#ifndef PEGBOARD_COMMON_H
#define PEGBOARD_COMMON_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

/* REGISTERS: number of vectors that a CPU holds. CONVERTS_HALVES: whether it has instructions for halves. */
#if defined(__AVX512F__) || defined(__ARM_NEON)
#define REGISTERS 32
#define CONVERTS_HALVES 1
#else
#define REGISTERS 16
#if defined(__F16C__)
#define CONVERTS_HALVES 1
#else
#define CONVERTS_HALVES 0
#endif
#endif

typedef float vfloat __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vint __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t vbyte __attribute__((vector_size(LANES), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define ALIGNED __attribute__((aligned(64)))

/* A step. All kernels of a program get the same one. */
typedef struct {
    int64_t num_tokens; /* rows of the activations */
} Step;

typedef struct Team Team;

/* Independent tasks that run beside those of a kernel. */
typedef struct {
    int64_t count;
    void (*run)(const void *arguments, int64_t task);
    const void *arguments;
} Tasks;

/* A thread that runs a kernel. */
typedef struct {
    Team *team;
    int thread, num_threads;
    uint64_t kernel; /* number of the kernel */
    int has_task;
    const Tasks *beside; /* NULL = none */
} Worker;

typedef void (*Kernel)(const Step *step, Worker *worker, const void *arguments);

typedef struct {
    Kernel kernel;
    const void *arguments;
} Instruction;

/* Return the next of `total` tasks, or `total` if none are left. The call also marks the caller's previous task as done. Every
 * kernel calls this until no task is left, with the same total on all threads. */
int64_t next_task(Worker *worker, int64_t total);

/* Let the other threads of this core work for a moment. */
INLINE void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#define LINE 64 /* bytes that a cache loads at once */
#define AHEAD 4096 /* bytes */

/* Fetch weights that are read AHEAD bytes later. This makes steps of 8 to 32 tokens up to half as fast again
 * (docs/decisions/2026-11-27-fetching-ahead.md). */
INLINE void fetch(const void *weights, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch((const uint8_t *)weights + AHEAD + i);
}

INLINE vfloat splat(float x) { return x - (vfloat){}; }
INLINE vfloat load(const float *p) { return *(const vfloat *)p; }
INLINE void store(float *p, vfloat x) { *(vfloat *)p = x; }

INLINE vfloat choose(vint mask, vfloat yes, vfloat no) { return (vfloat)((mask & (vint)yes) | (~mask & (vint)no)); }

INLINE vfloat vmax(vfloat a, vfloat b) {
#if LANES == 16
    return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vfloat)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE vfloat vmin(vfloat a, vfloat b) {
#if LANES == 16
    return (vfloat)_mm512_min_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vfloat)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return choose(a < b, a, b);
#endif
}

INLINE float sum_of(vfloat x) { /* in halves, because in a chain of LANES additions each one waits for the previous one */
#if LANES == 16
    return _mm512_reduce_add_ps((__m512)x);
#elif LANES == 8
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

INLINE float max_of(vfloat x) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)x);
#elif LANES == 8
    __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#else
    float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
#endif
}

/* IEEE half to float. */
INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#elif defined(__ARM_NEON)
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    union { uint32_t bits; float value; } u;
    if (exponent == 31) u.bits = sign | 0x7f800000 | mantissa << 13;
    else if (exponent) u.bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else { u.value = (float)mantissa * 0x1p-24f; u.bits |= sign; }
    return u.value;
#endif
}

INLINE uint16_t to_half(float x) { /* round to nearest even; overflow gives infinity, a NaN stays a NaN */
#if defined(__F16C__)
    return (uint16_t)_cvtss_sh(x, 0);
#elif defined(__ARM_NEON)
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0);
#else
    union { float value; uint32_t bits; } u = {x};
    uint16_t sign = (uint16_t)(u.bits >> 16 & 0x8000);
    u.bits &= 0x7fffffff;
    if (u.bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (u.bits >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (u.bits < 0x38800000) { /* denormal half: adding 1/2 moves the bits that are kept to the end of the mantissa */
        u.value += 0.5f;
        return (uint16_t)(sign | (uint16_t)(u.bits - 0x3f000000));
    }
    u.bits += 0xc8000fff + (u.bits >> 13 & 1);
    return (uint16_t)(sign | (uint16_t)(u.bits >> 13));
#endif
}

#if !CONVERTS_HALVES
/* The same for a vector of halves in 32-bit integers. */
INLINE vfloat halves_to_floats(vint halves) {
    vint sign = (halves & 0x8000) << 16, magnitude = (halves & 0x7fff) << 13;
    vint normal = magnitude + (112 << 23) + ((magnitude >= 31 << 23) & 112 << 23); /* twice for infinity and NaN */
    vfloat denormal = (vfloat)(magnitude + (113 << 23)) - 0x1p-14f;
    return (vfloat)((vint)choose(magnitude < 1 << 23, denormal, (vfloat)normal) | sign);
}
#endif

INLINE vfloat load_half(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && LANES == 8
    return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__ARM_NEON)
    return (vfloat)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    return halves_to_floats(__builtin_convertvector(*(const vhalf *)p, vint));
#endif
}

/* What the compiler generates for widening small integers takes three times as many instructions. */
INLINE vfloat load_bfloat16(const uint16_t *p) {
#if LANES == 16
    return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif LANES == 8
    return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#elif defined(__ARM_NEON)
    return (vfloat)vshll_n_u16(vld1_u16(p), 16);
#else
    return (vfloat)(__builtin_convertvector(*(const vhalf *)p, vint) << 16);
#endif
}

#if defined(__AVX512BF16__)
/* Join two vectors of floats, of neighboring columns, to pairs of bfloat16 numbers. */
INLINE vint pairs_of(vfloat even, vfloat odd) {
    static const ALIGNED uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    return (vint)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), both);
}
#endif

INLINE float bfloat16_to_float(uint16_t b) {
    union { uint32_t bits; float value; } u = {(uint32_t)b << 16};
    return u.value;
}

INLINE uint16_t to_bfloat16(float x) { /* round to nearest even; a NaN stays a NaN */
    union { float value; uint32_t bits; } u = {x};
    if (x != x) return (uint16_t)(u.bits >> 16 | 64);
    return (uint16_t)((u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16);
}

#if defined(__ARM_NEON)
INLINE int16x8_t load_words(const void *p) { /* four signed bytes, twice */
    int32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes)));
}
#endif

INLINE vint load_bytes(const void *p) { /* signed */
#if LANES == 16
    return (vint)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif LANES == 8
    return (vint)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#elif defined(__ARM_NEON)
    return (vint)vmovl_s16(vget_low_s16(load_words(p)));
#elif defined(__SSE2__)
    int32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    __m128i pairs = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_cvtsi32_si128(bytes));
    return (vint)_mm_srai_epi32(_mm_unpacklo_epi16(_mm_setzero_si128(), pairs), 24);
#else
    return __builtin_convertvector(*(const vbyte *)p, vint);
#endif
}

INLINE vfloat load_int8(const int8_t *p) { return __builtin_convertvector(load_bytes(p), vfloat); }

/* Floats of 8 bits (Micikevicius et al. 2022). E5M2 is the high byte of a half. E4M3 has the bits of a half's magnitude without its
 * highest exponent bit and its lowest mantissa bits, so the half is the value divided by E4M3_UNIT. */
#define E4M3_UNIT 256.0f
#define E4M3_LARGEST 448.0f
#define E5M2_LARGEST 57344.0f

INLINE uint16_t e4m3_to_half(uint8_t code) { return (uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7); }

INLINE vfloat load_e4m3(const uint8_t *p) { /* divided by E4M3_UNIT */
#if defined(__AVX512F__)
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return (vfloat)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80)));
#elif defined(__F16C__) && LANES == 8
    __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
    return (vfloat)_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((short)0xbf80)));
#elif defined(__ARM_NEON)
    uint16x4_t wide = vreinterpret_u16_s16(vget_low_s16(load_words(p)));
    return (vfloat)vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(vshl_n_u16(wide, 7), vdup_n_u16(0xbf80))));
#else
    return halves_to_floats(load_bytes(p) << 7 & 0xbf80);
#endif
}

INLINE vfloat load_e5m2(const uint8_t *p) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8));
#elif defined(__F16C__) && LANES == 8
    return (vfloat)_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p)), 8));
#elif defined(__ARM_NEON)
    uint16x4_t wide = vreinterpret_u16_s16(vget_low_s16(load_words(p)));
    return (vfloat)vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(wide, 8)));
#else
    return halves_to_floats(load_bytes(p) << 8 & 0xff00);
#endif
}

/* Round to the nearest float of 8 bits, ties to even. What is larger than `largest` becomes `largest`; a NaN stays a NaN. */
INLINE uint8_t to_float8(float x, int mantissa, int bias, float largest) {
    union { float value; uint32_t bits; } u = {fabsf(x)}, least = {.bits = (uint32_t)(128 - bias) << 23};
    uint8_t sign = signbit(x) ? 0x80 : 0;
    if (x != x) return (uint8_t)(sign | 0x7f);
    if (u.value > largest) u.value = largest;
    if (u.value < least.value) { /* denormal: a multiple of the smallest number */
        union { uint32_t bits; float value; } inverse = {(uint32_t)(126 + bias + mantissa) << 23};
        return (uint8_t)(sign | (uint8_t)lrintf(u.value * inverse.value));
    }
    int dropped = 23 - mantissa;
    u.bits += (1u << (dropped - 1)) - 1 + (u.bits >> dropped & 1);
    return (uint8_t)(sign | (uint8_t)((u.bits >> dropped) - ((uint32_t)(127 - bias) << mantissa)));
}

INLINE uint8_t to_e4m3(float x) { return to_float8(x, 3, 7, E4M3_LARGEST); }
INLINE uint8_t to_e5m2(float x) { return to_float8(x, 2, 15, E5M2_LARGEST); }

/* exp(x) for x <= 0 and slightly above; 0 for very small x. It is 2^n times a polynomial on [-ln2/2, ln2/2] (Cody & Waite
 * reduction, minimax coefficients of degree 5; relative error below 2e-7). */
INLINE vfloat exp_of(vfloat x) {
    x = vmax(x, splat(-87.0f));
    vfloat scaled = x * 1.44269504088896341f;
    vfloat whole = scaled + 12582912.0f - 12582912.0f; /* to the nearest integer: 1.5 * 2^23 leaves no room for a fraction */
    vint n = __builtin_convertvector(whole, vint);
    vfloat r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vfloat y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return y * (vfloat)((n + 127) << 23);
}

#define LOG2E 1.44269504088896341f
#define LEAST (-120.0f) /* smaller powers are set to 0, so that no product gets a denormal number */

/* 2^x for x <= 0; 0 below LEAST. It is 2^n times a polynomial on [-1/2, 1/2] (minimax, degree 5; relative error below 2e-7). */
INLINE vfloat power_of_two(vfloat x) {
    vfloat shifted = x + 12582912.0f, r = x - (shifted - 12582912.0f); /* 1.5 * 2^23 leaves no room for a fraction */
    vfloat y = splat(0.00132647273f);
    y = y * r + 0.00967151299f;
    y = y * r + 0.0555073359f;
    y = y * r + 0.240222424f;
    y = y * r + 0.693147004f;
    y = y * r + 1.0f;
    vint bits = (vint)y + ((vint)shifted << 23);
    return (vfloat)(bits & (x > LEAST));
}

#endif
