/* The same products for 16 tokens at a time, with the matrix tiles of AMX. A tile of activations [16 tokens][part] times a tile
 * of codes [quads][16 rows x 4] gives 16 x 16 sums. The scales are then applied as for a single token.
 */
#ifndef PEGBOARD_LINEAR_TILES_H
#define PEGBOARD_LINEAR_TILES_H

#include "linear_blocks.h"

#define TILE_TOKENS 16

#if defined(__AMX_INT8__)

#include <sys/syscall.h>
#include <unistd.h>

#define PIECE_PARTS 16

/* Some parts of 16 rows: their codes, one per byte, and the scales of each part or half part. */
typedef struct {
    uint8_t codes[PIECE_PARTS][QUADS * 64];
    Scales scales[2 * PIECE_PARTS];
} Piece;

/* The compiler does not know that tile loads read memory. */
#define WRITTEN(p) __asm__ volatile("" : : "r"(p) : "memory")

/* Ask the system for permission to use the tile registers (arch_prctl ARCH_REQ_XCOMP_PERM, Linux 5.16). Without it, a process
 * cannot use them. */
EXPORT int32_t allow_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

/* Set the shapes of a thread's tiles for products over this number of columns: 0 and 1 are activations, 2 and 3 codes, 4 and 5 their
 * products. They are valid until release_tiles. */
INLINE void configure_tiles(int columns) {
    ALIGNED struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int i = 0; i < 2; i++) {
        shapes.rows[i] = TILE_TOKENS, shapes.row_bytes[i] = (uint16_t)columns;
        shapes.rows[2 + i] = (uint8_t)(columns / 4), shapes.row_bytes[2 + i] = 4 * ROWS;
        shapes.rows[4 + i] = TILE_TOKENS, shapes.row_bytes[4 + i] = 4 * ROWS;
    }
    WRITTEN(&shapes);
    _tile_loadconfig(&shapes);
}

INLINE void release_tiles(void) { _tile_release(); }

/* Multiply 16 tokens with the n-th and the next part of a piece, or half part if a part has two sets of scales. total: number of
 * parts or half parts. x: of the first part, [parts][16 tokens][columns]. dots: [2][16 tokens][16 rows]. */
INLINE void tile_dots(const int8_t *x, const Piece *piece, int sets, int n, int total, vint dots[2][TILE_TOKENS]) {
    const int width = PART / sets;
    const uint8_t *codes = piece->codes[0];
    _tile_zero(4);
    _tile_loadd(0, x + n * (width * TILE_TOKENS), width);
    _tile_loadd(2, codes + n * (width * ROWS), 64);
    _tile_dpbssd(4, 0, 2);
    if (n + 1 < total) {
        _tile_zero(5);
        _tile_loadd(1, x + (n + 1) * (width * TILE_TOKENS), width);
        _tile_loadd(3, codes + (n + 1) * (width * ROWS), 64);
        _tile_dpbssd(5, 1, 3);
        _tile_stored(5, dots[1], 64);
    }
    _tile_stored(4, dots[0], 64);
}

#else

INLINE void configure_tiles(int block_size) { (void)block_size; }
INLINE void release_tiles(void) {}

#endif
#endif
