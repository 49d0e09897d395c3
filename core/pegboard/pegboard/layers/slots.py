"""Where whole experts are that move from rank to rank."""

from __future__ import annotations

import numpy as np
import torch

from pegboard.layers.shards import Group

TURNS = 60
"""The tokens of a step take turns among the copies of an expert, and begin again after as many."""


class Slots:
    """The slots of one layer's experts, on all ranks. experts: [ranks, slots], the expert in each;
    every expert is in at least one. turns: int32 [turns, experts], the slot of this rank that
    computes a token, or -1 (see `held` of `ops.sort_by_expert`). counts: int32 [experts], the
    tokens of each expert, which the layer adds to. All of them keep their addresses."""

    def __init__(self, group: Group, num_experts: int, device: str) -> None:
        self.rank = group.rank
        self.first = np.array(group.slots(num_experts))
        num_turns = TURNS if group.redundant else 1
        self.turns = torch.zeros(num_turns, num_experts, dtype=torch.int32, device=device)
        self.counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
        self.place(self.first)

    def place(self, experts: np.ndarray) -> None:
        """Let the layer compute with these experts [ranks, slots]."""
        self.experts = experts
        num_turns, num_experts = self.turns.shape
        turns = np.full((num_turns, num_experts), -1, np.int32)
        for expert in range(num_experts):
            copies = np.argwhere(experts == expert)
            # experts begin at different copies, so that one token does not choose the same rank
            copy = copies[(np.arange(num_turns) + expert) % len(copies)]
            is_here = copy[:, 0] == self.rank
            turns[is_here, expert] = copy[is_here, 1]
        self.turns.copy_(torch.from_numpy(turns))
