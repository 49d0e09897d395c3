"""How long the host works for one decode step, without any device: the scheduler, the inputs, the
sampler and the update.

    python tests/gpu/host_time.py

The model, the kernel that samples and the copies do nothing, so what remains is what a GPU would
wait for. Launches are not in it: a recorded step is one launch, and a copy takes the driver a few
microseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from pegboard_draft_eagle.proposer import EagleProposer
from pegboard_sampler_torch.sampler import TorchSampler
from torch import Tensor

from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.attention import KVCacheSpec, KVPlan
from pegboard.interfaces.draft import DraftSetup, Forwards
from pegboard.interfaces.sampler import SamplerSetup
from pegboard.worker.model_runner import ModelRunner
from pegboard.worker.runner_parts import RunnerParts
from pegboard_testing.bound_model import BoundModel
from pegboard_testing.fake_engine import FakeEngine

VOCAB = 32
NUM_DRAFTS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    "seeded with penalties": {"temperature": 0.8, "seed": 5, "presence_penalty": 0.5},
    f"greedy, {NUM_DRAFTS} drafts of a head": {"temperature": 0, "drafts": NUM_DRAFTS},
}


class NoModel:
    """Computes nothing."""

    def start(self, hidden: Tensor) -> Tensor:
        return hidden

    def embed(self, ids: Tensor, *given: Tensor) -> Tensor:
        return torch.zeros(len(ids), 1)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), VOCAB)


class NoHead(BoundModel):
    """A head of EAGLE that computes nothing."""

    def __init__(self, plan: KVPlan, most_tokens: int) -> None:
        super().__init__(NoModel())
        self.specs = {layer: group.spec for group in plan.groups for layer in group.layers}
        self.build.dtype = "float32"
        self.build.declared.given = 1
        self.setup.device = SimpleNamespace(name="cpu")
        self.given = torch.zeros(most_tokens, 1)

    def kv_specs(self) -> dict[int, KVCacheSpec]:
        return self.specs


class DeviceSampler(TorchSampler):
    """Verifies drafts as on a device."""

    def __init__(self, options: None, setup: SamplerSetup) -> None:
        super().__init__(options, setup)
        self.is_host = False

    def draw_drafts(self, logits: Tensor, rows: np.ndarray) -> tuple[Tensor, None]:
        return torch.zeros(len(rows), dtype=torch.int64), None


class NoCopies:
    """Copies of host memory. See `pegboard.interfaces.platform.Copies`."""

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def upload(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def download(self, source: Tensor) -> Callable[[], Tensor]:
        return lambda: source

    def mark(self) -> Callable[[], None]:
        return lambda: None


class NoReplay:
    """Returns the results of the first call. See `pegboard.interfaces.platform.Replay`."""

    pads = True

    def sizes(self, trait: str, largest: int) -> Sequence[int]:
        return () if trait == "forward" else (largest,)

    def record(
        self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> NoRecording:
        return NoRecording(run(*inputs), len(inputs[0]))

    def reset(self) -> None: ...


class NoRecording:
    def __init__(self, outputs: tuple[Tensor, ...], size: int) -> None:
        self.outputs = outputs
        self.size = size

    def __call__(self, num_rows: int) -> tuple[Tensor, ...]:
        return tuple(output[:num_rows] for output in self.outputs)


def host_step(rows: int, steps: int, drafts: int = 0, **params: Any) -> dict[str, float]:
    """Decode `rows` requests for this number of steps. Returns the median and the 90th percentile
    of the host's time per step, in ms, and the median of its part in the worker."""
    fake = FakeEngine(
        max_num_seqs=rows,
        max_model_len=steps + 64,
        max_num_batched_tokens=16 * rows,
        block_size=16,
        vocab_size=VOCAB,
        num_blocks=rows * (steps // 16 + 6),
        max_drafts=drafts,
        stored_drafts=drafts,
        drafts_ahead=drafts > 0,
        max_in_flight=2 if drafts else 1,
    )
    chosen = torch.full((rows * (1 + drafts),), 7)
    setup = SamplerSetup(
        fake.limits,
        "cpu",
        0,
        kernels={"sample_tokens": lambda logits, *cuts: chosen[: len(logits)]},
        copies=NoCopies(),
    )
    sampler = (DeviceSampler if drafts else TorchSampler)(None, setup)

    def proposer(forwards: Forwards | None) -> EagleProposer:
        draw = getattr(sampler, "draw_drafts", None)
        return EagleProposer(None, DraftSetup(fake.limits, False, forwards=forwards, draw=draw))

    runner = ModelRunner(
        RunnerParts(
            BoundModel(NoModel()),
            fake.plan,
            {},
            sampler,
            "cpu",
            fake.limits,
            copies=NoCopies(),
            proposer=proposer if drafts else None,
            draft=NoHead(fake.plan, 32 * rows) if drafts else None,
            drafts_ahead=drafts > 0,
        )
    )
    runner.parts.loaded.record(NoReplay())
    inside: list[float] = []

    def run(batch: Any, masks: Any) -> Callable[[], Any]:
        started = time.perf_counter()
        wait = runner.run(batch, masks)
        inside.append(time.perf_counter() - started)
        return wait

    fake.executor.worker.run = run  # type: ignore[method-assign]
    for index in range(rows):
        fake.add(
            str(index),
            [3, 4, index % VOCAB, 5],
            SamplingParams(max_tokens=steps + 40, ignore_eos=True, **params),
        )
    for _ in range(3):
        fake.engine.step()
    times = []
    inside.clear()
    for _ in range(steps):
        started = time.perf_counter()
        deltas = fake.engine.step()
        times.append(time.perf_counter() - started)
        assert len(deltas) == rows, "every request gets a token in every step"
    times.sort()
    inside.sort()
    return {
        "median_ms": round(1e3 * times[steps // 2], 3),
        "p90_ms": round(1e3 * times[steps * 9 // 10], 3),
        "worker_ms": round(1e3 * inside[steps // 2], 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the host's time per decode step.")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, params in SETTINGS.items():
        print(name, json.dumps(host_step(options.rows, options.steps, **params)))
