"""How much memory of the device is left for the KV cache, and what helps where there is too
little."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pegboard.config.schema import EngineConfig
from pegboard.errors import ConfigError
from pegboard.interfaces.platform import Platform, Recording, Replay, Trait
from pegboard.log import get_logger
from pegboard.worker.loaded_model import LoadedModel
from pegboard.worker.parts import WorkerSetup

log = get_logger(__name__)

WEIGHTS = (
    "the weights do",
    "raise tensor_parallel_size or cpu_offload_gb, or set quantization to one of fewer bits",
)
STEPS = "a step does", "lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization"


@contextmanager
def explained(platform: Platform, what: str, advice: str) -> Iterator[None]:
    """An error of torch's allocator becomes a ConfigError with the numbers and the settings that
    help. what, advice: see `MemoryNumbers.shortage`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        size = re.search(r"allocate ([\d.]+ \w+)", str(error))
        asked = size[1] if size is not None else "unknown size"
        raise ConfigError(platform.memory().shortage(what, asked, advice)) from error


class Ends:
    """A Replay that records the largest and then the smallest size of every trait only. free_bytes:
    returns how much memory is free."""

    def __init__(self, replay: Replay, free_bytes: Callable[[], int]) -> None:
        self._replay = replay
        self._free_bytes = free_bytes
        self.pads = replay.pads
        self.outside = getattr(replay, "outside", None)
        self._others_bytes = self._num_others = self._last_bytes = 0

    def sizes(self, trait: Trait, largest: int) -> Sequence[int]:
        """See `Replay`."""
        self._others_bytes = self.others_bytes()
        self._last_bytes = 0
        sizes = self._replay.sizes(trait, largest)
        self._num_others = max(0, len(sizes) - 2)
        return sorted({*sizes[:1], *sizes[-1:]})

    def others_bytes(self) -> int:
        """Return what the sizes that were not recorded will take: each of them as much as the
        smallest one of its trait."""
        return self._others_bytes + self._num_others * max(0, self._last_bytes)

    def record(self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Recording:
        """See `Replay`."""
        before = self._free_bytes()
        recording = self._replay.record(run, inputs)
        self._last_bytes = before - self._free_bytes()
        return recording

    def reset(self) -> None:
        """See `Replay`."""
        self._replay.reset()


def models_to_record(models: Sequence[LoadedModel], config: EngineConfig) -> Sequence[LoadedModel]:
    """Return the models whose steps are recorded."""
    if config.enforce_eager:
        return ()
    return models[:1] if config.spec_enforce_eager else models


def left_for_cache(setup: WorkerSetup, models: Sequence[LoadedModel], kept_bytes: int) -> int:
    """Return the bytes that are left of the device's share after the largest step was run.
    kept_bytes: what requests hold outside the cache."""
    numbers = setup.platform.memory(reset_peak=True)
    others = numbers.total_bytes - numbers.free_bytes - numbers.used_bytes
    share = int(numbers.total_bytes * setup.config.gpu_memory_utilization)
    recordings = recordings_bytes(setup, models_to_record(models, setup.config))
    return max(0, share - others - numbers.peak_bytes - kept_bytes - recordings)


def recordings_bytes(setup: WorkerSetup, models: Sequence[LoadedModel]) -> int:
    """Return the bytes that recordings of padded steps will take. They share memory, so the largest
    ones need most of it."""
    replay = setup.platform.replay(setup.kernels.replay) if models else None
    if replay is None or not replay.pads:
        return 0
    memory = setup.platform.memory
    ends = Ends(replay, lambda: memory().free_bytes)
    before = memory(reset_peak=True).free_bytes
    for model in models:
        model.record(ends)
    needed = before - memory().free_bytes + ends.others_bytes()
    replay.reset()
    log.info("recorded steps need %.2f GiB", needed / 2**30)
    return needed
