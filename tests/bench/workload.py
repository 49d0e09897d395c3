"""The work for every side: seeded prompts of token ids, the same in every run."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

FIRST_ID = 1000
LAST_ID = 40000
"""Token ids are drawn from this range: plain words, no control tokens."""


@dataclass(frozen=True)
class Workload:
    """The requests of one measurement: prompts[i] gets exactly max_tokens[i] tokens."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)

    def job(self, kind: str) -> dict[str, Any]:
        """Returns the workload as a message to a side."""
        return {"job": kind, **asdict(self)}


def mixed(seed: int, quick: bool = False) -> Workload:
    """A batch: 32 prompts of 32 to 512 tokens, with outputs of 64 to 128 tokens. quick: 8 prompts
    of 16 to 64 tokens, with outputs of 8 to 16."""
    rng = random.Random(seed)
    count, inputs, outputs = (8, (16, 64), (8, 16)) if quick else (32, (32, 512), (64, 128))
    prompts = [_tokens(rng, rng.randint(*inputs)) for _ in range(count)]
    return Workload(prompts, [rng.randint(*outputs) for _ in range(count)])


def single(seed: int, quick: bool = False) -> Workload:
    """One prompt of 128 tokens, with an output of 128 tokens. quick: 32 and 16."""
    rng = random.Random(seed)
    return Workload([_tokens(rng, 32 if quick else 128)], [16 if quick else 128])


def shared_prefix(seed: int, quick: bool = False) -> tuple[Workload, Workload]:
    """Two times 16 requests over the same 1,500 tokens. Each request ends with 16 tokens of its own
    and gets an output of 16 tokens. All prompts differ. The first workload finds nothing in the
    cache. quick: 4 requests over 192 tokens."""
    rng = random.Random(seed)
    count, length = (4, 192) if quick else (16, 1500)
    prefix = _tokens(rng, length)
    cold, warm = (
        Workload([prefix + _tokens(rng, 16) for _ in range(count)], [16] * count) for _ in range(2)
    )
    return cold, warm


def steady(seed: int, batch_size: int = 32, quick: bool = False) -> Workload:
    """Short prompts that decode together."""
    rng = random.Random(seed)
    return Workload(
        [_tokens(rng, 16) for _ in range(batch_size)], [12 if quick else 40] * batch_size
    )


def ramp(seed: int, concurrency: int, quick: bool = False) -> Workload:
    """Three requests per client, at least 6, with prompts of 128 tokens and outputs of 64. quick:
    32 and 8."""
    rng = random.Random(seed)
    count = max(6, 3 * concurrency)
    inputs = 32 if quick else 128
    outputs = 8 if quick else 64
    return Workload([_tokens(rng, inputs) for _ in range(count)], [outputs] * count)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]
