/* NEON in plain C, for testing the kernels for Arm CPUs on other machines. Compile with this folder first in the search path and
 * with what a compiler for Arm defines: -D__ARM_NEON, -D__ARM_FEATURE_DOTPROD, -D__ARM_FEATURE_MATMUL_INT8. Every instruction that
 * the kernels use is implemented as Arm defines it ("Arm Architecture Reference Manual for A-profile architecture", DDI 0487). Code
 * that uses any other instruction does not compile.
 */
#ifndef EMULATED_ARM_NEON_H
#define EMULATED_ARM_NEON_H

#include <stdint.h>
#include <string.h>

#define KEEP(x) ((void)0) /* the registers of the constraint are others here */

#define EMULATED static inline __attribute__((always_inline))
#define VECTOR(type, lanes) __attribute__((vector_size(sizeof(type) * (lanes)))) type

typedef VECTOR(int8_t, 8) int8x8_t;
typedef VECTOR(int8_t, 16) int8x16_t;
typedef VECTOR(uint8_t, 16) uint8x16_t;
typedef VECTOR(int16_t, 4) int16x4_t;
typedef VECTOR(int16_t, 8) int16x8_t;
typedef VECTOR(uint16_t, 4) uint16x4_t;
typedef VECTOR(int32_t, 2) int32x2_t;
typedef VECTOR(int32_t, 4) int32x4_t;
typedef VECTOR(uint32_t, 4) uint32x4_t;
typedef VECTOR(float, 4) float32x4_t;
typedef struct { uint16x4_t bits; } float16x4_t;
typedef struct { uint8x16_t val[4]; } uint8x16x4_t;

#define EACH(result, lanes, expression)                                                                                          \
    result r;                                                                                                                    \
    for (int n = 0; n < lanes; n++) r[n] = (expression);                                                                         \
    return r

EMULATED int8x8_t vld1_s8(const int8_t *p) { EACH(int8x8_t, 8, p[n]); }
EMULATED int8x16_t vld1q_s8(const int8_t *p) { EACH(int8x16_t, 16, p[n]); }
EMULATED uint16x4_t vld1_u16(const uint16_t *p) { EACH(uint16x4_t, 4, p[n]); }
EMULATED uint16x4_t vdup_n_u16(uint16_t x) { EACH(uint16x4_t, 4, x); }
EMULATED uint8x16_t vdupq_n_u8(uint8_t x) { EACH(uint8x16_t, 16, x); }
EMULATED int32x2_t vdup_n_s32(int32_t x) { EACH(int32x2_t, 2, x); }
EMULATED int32x4_t vdupq_n_s32(int32_t x) { EACH(int32x4_t, 4, x); }
EMULATED float32x4_t vdupq_n_f32(float x) { EACH(float32x4_t, 4, x); }
EMULATED int8x8_t vreinterpret_s8_s32(int32x2_t x) { return (int8x8_t)x; }
EMULATED int8x16_t vreinterpretq_s8_s32(int32x4_t x) { return (int8x16_t)x; }
EMULATED int8x16_t vreinterpretq_s8_u8(uint8x16_t x) { return (int8x16_t)x; }
EMULATED uint8x16_t vreinterpretq_u8_s8(int8x16_t x) { return (uint8x16_t)x; }
EMULATED uint16x4_t vreinterpret_u16_s16(int16x4_t x) { return (uint16x4_t)x; }
EMULATED float16x4_t vreinterpret_f16_u16(uint16x4_t x) { return (float16x4_t){x}; }
EMULATED uint16x4_t vreinterpret_u16_f16(float16x4_t x) { return x.bits; }
EMULATED float vgetq_lane_f32(float32x4_t x, int lane) { return x[lane]; }
EMULATED uint16_t vget_lane_u16(uint16x4_t x, int lane) { return x[lane]; }
EMULATED int8x8_t vget_low_s8(int8x16_t x) { EACH(int8x8_t, 8, x[n]); }
EMULATED int16x4_t vget_low_s16(int16x8_t x) { EACH(int16x4_t, 4, x[n]); }
EMULATED int8x16_t vcombine_s8(int8x8_t low, int8x8_t high) { EACH(int8x16_t, 16, n < 8 ? low[n] : high[n - 8]); }
EMULATED int16x8_t vmovl_s8(int8x8_t x) { EACH(int16x8_t, 8, x[n]); }
EMULATED int32x4_t vmovl_s16(int16x4_t x) { EACH(int32x4_t, 4, x[n]); }
EMULATED uint32x4_t vshll_n_u16(uint16x4_t x, int count) { EACH(uint32x4_t, 4, (uint32_t)x[n] << count); }
EMULATED uint16x4_t vshl_n_u16(uint16x4_t x, int count) { EACH(uint16x4_t, 4, (uint16_t)(x[n] << count)); }
EMULATED uint8x16_t vshrq_n_u8(uint8x16_t x, int count) { EACH(uint8x16_t, 16, (uint8_t)(x[n] >> count)); }
EMULATED uint8x16_t vandq_u8(uint8x16_t a, uint8x16_t b) { return a & b; }
EMULATED uint16x4_t vand_u16(uint16x4_t a, uint16x4_t b) { return a & b; }
EMULATED int32x4_t vzip1q_s32(int32x4_t a, int32x4_t b) { return (int32x4_t){a[0], b[0], a[1], b[1]}; }
EMULATED int32x4_t vzip2q_s32(int32x4_t a, int32x4_t b) { return (int32x4_t){a[2], b[2], a[3], b[3]}; }
EMULATED int32x4_t vuzp1q_s32(int32x4_t a, int32x4_t b) { return (int32x4_t){a[0], a[2], b[0], b[2]}; }
EMULATED int32x4_t vuzp2q_s32(int32x4_t a, int32x4_t b) { return (int32x4_t){a[1], a[3], b[1], b[3]}; }
EMULATED int16x8_t vmull_s8(int8x8_t a, int8x8_t b) { EACH(int16x8_t, 8, (int16_t)(a[n] * b[n])); }
EMULATED int16x8_t vmull_high_s8(int8x16_t a, int8x16_t b) { EACH(int16x8_t, 8, (int16_t)(a[n + 8] * b[n + 8])); }
EMULATED int16x8_t vmlal_s8(int16x8_t to, int8x8_t a, int8x8_t b) { EACH(int16x8_t, 8, (int16_t)(to[n] + a[n] * b[n])); }
EMULATED int16x8_t vmlal_high_s8(int16x8_t to, int8x16_t a, int8x16_t b) {
    EACH(int16x8_t, 8, (int16_t)(to[n] + a[n + 8] * b[n + 8]));
}
EMULATED int32x4_t vpadalq_s16(int32x4_t to, int16x8_t x) { EACH(int32x4_t, 4, to[n] + x[2 * n] + x[2 * n + 1]); }
EMULATED int32x4_t vpaddq_s32(int32x4_t a, int32x4_t b) {
    EACH(int32x4_t, 4, n < 2 ? a[2 * n] + a[2 * n + 1] : b[2 * n - 4] + b[2 * n - 3]);
}
EMULATED int32x4_t vdotq_laneq_s32(int32x4_t to, int8x16_t a, int8x16_t b, int lane) {
    for (int n = 0; n < 16; n++) to[n / 4] += a[n] * b[4 * lane + n % 4];
    return to;
}
EMULATED int32x4_t vmmlaq_s32(int32x4_t to, int8x16_t a, int8x16_t b) { /* rows of a times rows of b */
    for (int n = 0; n < 4; n++)
        for (int k = 0; k < 8; k++) to[n] += a[n / 2 * 8 + k] * b[n % 2 * 8 + k];
    return to;
}
EMULATED uint8x16_t vqtbl4q_u8(uint8x16x4_t table, uint8x16_t at) {
    EACH(uint8x16_t, 16, at[n] < 64 ? table.val[at[n] / 16][at[n] % 16] : 0);
}
EMULATED float32x4_t vcvt_f32_f16(float16x4_t x) {
    float32x4_t r;
    for (int n = 0; n < 4; n++) {
        uint32_t h = x.bits[n], exponent = h >> 10 & 31, mantissa = h & 1023, bits = exponent + 112;
        float denormal = (float)mantissa * 0x1p-24f, value;
        bits = (exponent == 31 ? 255u : bits) << 23 | mantissa << 13;
        if (exponent == 31 && mantissa) bits |= 1 << 22; /* a quiet NaN */
        memcpy(&value, &bits, 4);
        if (!exponent) value = denormal;
        r[n] = h >> 15 ? -value : value;
    }
    return r;
}
EMULATED float16x4_t vcvt_f16_f32(float32x4_t x) { /* round to nearest even */
    float16x4_t r;
    for (int n = 0; n < 4; n++) {
        uint32_t bits, sign, magnitude, half;
        float value = x[n];
        memcpy(&bits, &value, 4);
        sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
        if (magnitude > 0x7f800000) half = 0x7e00 | magnitude >> 13;
        else if (magnitude >= 0x47800000) half = 0x7c00;
        else if (magnitude < 0x38800000) {
            float unit = 0.5f; /* adding it moves the bits that are kept to the end of the mantissa */
            memcpy(&value, &magnitude, 4);
            value += unit;
            memcpy(&half, &value, 4);
            half -= 0x3f000000;
        } else half = (magnitude + 0xc8000fff + (magnitude >> 13 & 1)) >> 13;
        r.bits[n] = (uint16_t)(sign | (half & 0x7fff));
    }
    return r;
}

#endif
