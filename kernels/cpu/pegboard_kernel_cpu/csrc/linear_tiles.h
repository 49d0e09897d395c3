/* The same products for 16 tokens at a time, with the matrix tiles of AMX. A tile of activations [16 tokens][block] times a tile
 * of codes [block / 4 quads][16 rows x 4] gives 16 x 16 sums. The scales are then applied as for a single token.
 */
#ifndef PEGBOARD_LINEAR_TILES_H
#define PEGBOARD_LINEAR_TILES_H

#include "linear_blocks.h"

#define TILE_TOKENS 16

#if defined(__AMX_INT8__)

#include <sys/syscall.h>
#include <unistd.h>

#define X_TILE 0 /* the intrinsics need literal numbers */
#define CODE_TILE 1
#define DOT_TILE 2

/* The compiler does not know that tile loads read memory. */
#define WRITTEN(p) __asm__ volatile("" : : "r"(p) : "memory")

/* Ask the system for permission to use the tile registers (arch_prctl ARCH_REQ_XCOMP_PERM, Linux 5.16). Without it, a process
 * cannot use them. */
EXPORT int32_t allow_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

/* Set the shapes of a thread's tiles for blocks of this number of columns. They are valid until release_tiles. */
INLINE void configure_tiles(int block_size) {
    ALIGNED struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    shapes.rows[X_TILE] = TILE_TOKENS, shapes.row_bytes[X_TILE] = (uint16_t)block_size;
    shapes.rows[CODE_TILE] = (uint8_t)(block_size / 4), shapes.row_bytes[CODE_TILE] = 4 * ROWS;
    shapes.rows[DOT_TILE] = TILE_TOKENS, shapes.row_bytes[DOT_TILE] = 4 * ROWS;
    WRITTEN(&shapes);
    _tile_loadconfig(&shapes);
}

INLINE void release_tiles(void) { _tile_release(); }

/* Unpack 4-bit codes to one byte each, as a tile needs them: the quads of the low halves, then those of the high halves. */
INLINE void spread_codes(const uint8_t *codes, uint8_t spread[8][64]) {
    const __m512i mask = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; j++) {
        __m512i w = _mm512_loadu_si512(codes + 64 * j), low = _mm512_and_si512(w, mask);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(w, 4), mask);
        memcpy(spread[j], &low, 64);
        memcpy(spread[4 + j], &high, 64);
    }
}

/* Load the block's codes into the tile that the next calls of `tile_dots` use. */
INLINE void load_codes(const uint8_t *codes, int bits) {
    ALIGNED uint8_t spread[8][64];
    if (bits == 4) spread_codes(codes, spread);
    WRITTEN(spread);
    _tile_loadd(CODE_TILE, bits == 4 ? spread[0] : codes, 64);
}

/* dots: [16 tokens][16 rows]. */
INLINE void tile_dots(const int8_t *x, int64_t stride, vint *dots) {
    _tile_zero(DOT_TILE);
    _tile_loadd(X_TILE, x, stride);
    _tile_dpbssd(DOT_TILE, X_TILE, CODE_TILE);
    _tile_stored(DOT_TILE, dots, 64);
}

#else

INLINE void configure_tiles(int block_size) { (void)block_size; }
INLINE void release_tiles(void) {}

#endif
#endif
