/* The matrix tiles of AMX, of which each thread has eight. Tiles 0 and 1 hold activations [16 tokens][bytes], 2 and 3 weights
 * [bytes / 4][16 rows x 4 bytes], and 4 to 7 sums [16 tokens][16 rows]. The intrinsics need literal numbers.
 */
#ifndef PEGBOARD_AMX_H
#define PEGBOARD_AMX_H

#include "common.h"

#define TILE_TOKENS 16

#if defined(__AMX_TILE__)

/* The compiler does not know that tile loads read memory. */
#define WRITTEN(p) __asm__ volatile("" : : "r"(p) : "memory")

/* Set the shapes of a thread's tiles. They are valid until release_tiles. */
INLINE void configure_tiles(int bytes) {
    ALIGNED struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.rows[i] = 16, shapes.row_bytes[i] = 64;
    shapes.row_bytes[0] = shapes.row_bytes[1] = (uint16_t)bytes;
    shapes.rows[2] = shapes.rows[3] = (uint8_t)(bytes / 4);
    WRITTEN(&shapes);
    _tile_loadconfig(&shapes);
}

INLINE void release_tiles(void) { _tile_release(); }

#else

INLINE void configure_tiles(int bytes) { (void)bytes; }
INLINE void release_tiles(void) {}

#endif
#endif
