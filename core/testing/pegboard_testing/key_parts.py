"""Steps of ranks that share out the tokens of the KV cache, and what they give together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.attention import AttentionInputs


@dataclass(frozen=True)
class Share:
    """Every `size * run` tokens, rank `rank` has `run`."""

    rank: int
    size: int
    run: int

    def num_stored(self, num_tokens: int) -> int:
        """Return how many of the first tokens the rank has."""
        return sum(token // self.run % self.size == self.rank for token in range(num_tokens))

    def of(self, inputs: AttentionInputs, block_size: int) -> AttentionInputs:
        """Return a step as this rank computes it. inputs: of a rank that has all tokens."""
        starts = inputs.query_start_loc_cpu
        lengths = inputs.seq_lens_cpu.tolist()
        num_keys = []
        slots = []
        for row, length in enumerate(lengths):
            for position in range(length - int(starts[row + 1] - starts[row]), length):
                before = self.num_stored(position)
                seen = position + 1
                if inputs.num_keys_cpu is not None:
                    seen = int(inputs.num_keys_cpu[len(num_keys)])
                num_keys.append(self.num_stored(seen))
                block = int(inputs.block_table_cpu[row, before // block_size])
                slots.append(
                    block * block_size + before % block_size
                    if self.num_stored(position + 1) > before
                    else -1
                )
        seq_lens = np.array([self.num_stored(length) for length in lengths], np.int32)
        visible = np.array(num_keys, np.int32)
        device = inputs.seq_lens.device
        return replace(
            inputs,
            seq_lens=torch.from_numpy(seq_lens).to(device),
            seq_lens_cpu=seq_lens,
            slot_mapping=torch.tensor(slots, device=device),
            num_keys=torch.from_numpy(visible).to(device),
            num_keys_cpu=visible,
        )


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the attention to all keys, [T, H, Dv]. parts: (out, lse) of every rank."""
    for out, lse in parts:
        assert lse.dtype == torch.float32 and lse.shape == out.shape[:2], (
            f"lse is {lse.dtype} {list(lse.shape)}; it must be float32 {list(out.shape[:2])}"
        )
        assert bool((out[lse.isneginf()] == 0).all()), "without keys, out must be 0"
    weights = torch.stack([lse for _, lse in parts]).softmax(0).unsqueeze(-1)
    return (torch.stack([out.float() for out, _ in parts]) * weights).sum(0)
