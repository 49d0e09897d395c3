"""What the type of the KV cache costs in decode attention: one token of one layer of `cpu_native`
after 4,096 others.

    python tests/bench/kv_types.py [level …]

Prints the best CPU time of one thread in milliseconds, and how many times as fast as float32 that
is. Levels: see `pegboard_kernel_cpu.build`; default: the highest of this machine. Takes about 10
seconds per level.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from pegboard_kernel_cpu import build
from pegboard_kernel_cpu.attention import NativeAttention
from pegboard_kernel_cpu.attention_structs import CACHE_TYPES
from pegboard_kernel_cpu.library import using

from pegboard.env import cpu_flags
from pegboard.interfaces.attention import AttentionLayer, AttentionSetup, KVCacheSpec
from pegboard_testing.contract_attention import AttentionContract, Piece, Trial, with_scales

LENGTH = 4096
SHAPES = {"9 heads, 3 KV heads of 64": (9, 3, 64), "32 heads, 8 KV heads of 128": (32, 8, 128)}
ROUNDS = 8
CALLS = 10


@dataclass
class Stored(AttentionContract):
    """Trials of `cpu_native` with a cache of this type."""

    dtype: str

    def backend(self, setup: AttentionSetup) -> NativeAttention:
        stored = self.dtype

        class Backend(NativeAttention):
            @staticmethod
            def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
                return NativeAttention.kv_spec(layer, stored)

        return Backend(None, setup)


def measure(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, float]:
    """Return the milliseconds of a call by type. Types take turns, so that other work on the
    machine slows all of them."""
    layer = AttentionLayer(
        layer_index=0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
    )
    last = Piece(0, LENGTH - 1, LENGTH)
    runs = {}
    for dtype in CACHE_TYPES:
        trial = Trial(Stored(dtype), with_scales([layer], dtype, 0), 32, [LENGTH], 0)
        # the cache holds random numbers, which take as long as any others
        trial.backend.plan(trial.inputs([last]))
        runs[dtype] = trial
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for dtype, trial in runs.items():
            for _ in range(CALLS):
                started = time.thread_time()
                trial.calls[0](trial.q[0][0][-1:], None, None)
                best[dtype] = min(best[dtype], (time.thread_time() - started) * 1e3)
    return best


def main() -> None:
    levels = sys.argv[1:] or build.levels_of(cpu_flags())[:1]
    print(f"| level | layer | {' | '.join(CACHE_TYPES)} |\n|---|---|{'---|' * len(CACHE_TYPES)}")
    for level in levels:
        with using(level, 1):
            for name, shape in SHAPES.items():
                found = measure(*shape)
                shown = (f"{ms:.2f} ({found['float32'] / ms:.2f})" for ms in found.values())
                print(f"| {level} | {name} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
