/* The same products for 16 tokens at a time, with the matrix tiles of AMX. A tile of activations [16 tokens][part] times a tile
 * of codes [quads][16 rows x 4] gives 16 x 16 sums. The scales are then applied as for a single token.
 */
#ifndef PEGBOARD_LINEAR_TILES_H
#define PEGBOARD_LINEAR_TILES_H

#include "amx.h"
#include "linear_blocks.h"

#if defined(__AMX_INT8__)

#include <sys/syscall.h>
#include <unistd.h>

#define PIECE_PARTS 16

/* Some parts of 16 rows: their codes, one per byte, and the scales of each part or half part. */
typedef struct {
    uint8_t codes[PIECE_PARTS][QUADS * 64];
    Scales scales[2 * PIECE_PARTS];
} Piece;

/* Ask the system for permission to use the tile registers (arch_prctl ARCH_REQ_XCOMP_PERM, Linux 5.16). Without it, a process
 * cannot use them. */
EXPORT int32_t allow_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

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

#endif
#endif
