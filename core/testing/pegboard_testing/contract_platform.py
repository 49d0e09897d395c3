"""Contract tests of the kind `platform`. A plugin's test file:

class TestMyPlatform(PlatformContract):
    def platform(self, setup: PlatformSetup) -> Platform:
        return MyPlatform(None, setup)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from pegboard.config.schema import EngineConfig, check_engine
from pegboard.interfaces.platform import ModelFacts, Platform, PlatformSetup, StepShape

NEEDED = {"dtype", "block_size", "max_num_seqs", "max_num_batched_tokens"}
"""Settings for which core has no default."""


class PlatformContract:
    """Every platform passes these on a machine that has the device. Override `platform`."""

    def platform(self, setup: PlatformSetup) -> Platform:
        """A new platform object of this process."""
        raise AssertionError("override PlatformContract.platform")

    def started(self) -> tuple[Platform, Any]:
        platform = self.platform(PlatformSetup())
        return platform, platform.start(0)

    def test_the_device_computes(self) -> None:
        _, device = self.started()
        assert float(torch.ones(8, device=device.name).sum()) == 8
        assert device.num_threads >= 1

    def test_a_second_engine_with_the_same_settings_shares_the_device(self) -> None:
        assert self.started()[1] == self.started()[1]

    def test_memory_numbers_fit_together(self) -> None:
        platform, _ = self.started()
        for reset_peak in (False, True, False):
            numbers = platform.memory(reset_peak=reset_peak)
            assert 0 < numbers.free_bytes <= numbers.total_bytes
            assert 0 <= numbers.used_bytes <= numbers.peak_bytes
            assert numbers.used_bytes <= numbers.total_bytes

    def test_pools_nest_and_hold_what_is_made_inside(self) -> None:
        platform, device = self.started()
        with platform.pool("weights"):
            weights = torch.full((1000,), 3.0, device=device.name)
            with platform.pool("work"):
                work = weights * 2
        with platform.pool("kv"):
            cache = torch.zeros(1000, device=device.name)
        assert float(weights.sum() + work.sum() + cache.sum()) == 9000

    def test_defaults_are_engine_settings_with_valid_values(self) -> None:
        """Every checkpoint type gets a complete set of defaults, and the same set every time."""
        platform, device = self.started()
        known = set(EngineConfig.__struct_fields__)
        for dtype in ("float32", "float16", "bfloat16", None):
            facts = ModelFacts(dtype, "LlamaForCausalLM", num_layers=2, hidden_size=64)
            defaults = dict(platform.defaults(facts))
            assert defaults.keys() <= known, f"no engine settings: {sorted(defaults.keys() - known)}"
            assert defaults.keys() >= NEEDED, f"no default for {sorted(NEEDED - defaults.keys())}"
            check_engine(msgspec.structs.replace(EngineConfig(), **defaults))
            torch.ones(2, dtype=getattr(torch, str(defaults["dtype"])), device=device.name)
            memory = defaults.get("kv_cache_memory_bytes")
            assert memory is None or (isinstance(memory, int) and 0 < memory <= platform.memory().total_bytes)

    def test_recording_is_offered_or_declined_with_a_reason(self) -> None:
        platform, device = self.started()
        runner = platform.graph_runner()
        ladder = runner.ladder(256, 16)
        shape = StepShape(num_tokens=8, num_rows=8)
        assert runner.find(shape) is None, "nothing is captured yet"
        if not ladder:
            assert runner.capture(shape, lambda: torch.zeros(8, 4, device=device.name)), "say why it cannot record"
            assert runner.find(shape) is None
            runner.reset()
            return
        assert all(0 < rung.num_rows <= 16 and 0 < rung.num_tokens <= 256 for rung in ladder)
        buffer = torch.zeros(ladder[0].num_tokens, 4, device=device.name)
        assert runner.capture(ladder[0], lambda: buffer + 1) is None
        buffer.fill_(2)
        assert float(runner.replay(ladder[0]).max()) == 3, "a replay must read the current content of the buffers"
        assert runner.find(ladder[0]) == ladder[0]
        runner.reset()
        assert runner.find(ladder[0]) is None

    def test_the_profiler_writes_below_its_folder(self, tmp_path: Path) -> None:
        platform, device = self.started()
        platform.profile(None)  # stopping a profile that does not run is harmless
        platform.profile(tmp_path / "profile")
        torch.ones(64, 64, device=device.name).matmul(torch.ones(64, 64, device=device.name))
        platform.profile(None)
        assert any(path.stat().st_size for path in (tmp_path / "profile").rglob("*") if path.is_file())
