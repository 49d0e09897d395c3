"""Contract tests of the kind `platform`. A plugin's test file:

class TestMyPlatform(PlatformContract):
    def platform(self, setup: PlatformSetup) -> Platform:
        return MyPlatform(None, setup)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from pegboard.config.schema import EngineConfig, check_engine
from pegboard.errors import CannotRecord
from pegboard.interfaces.platform import Platform, PlatformSetup, SideCopies, Trait

NEEDED = {"dtype", "block_size", "max_num_seqs", "max_num_batched_tokens"}
"""Settings for which core has no default."""


class PlatformContract:
    """Every platform passes these on a machine that has the device. Override `platform`."""

    def platform(self, setup: PlatformSetup) -> Platform:
        """Return a new platform object."""
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

    def test_memory_of_the_cache_is_zero_and_on_the_device(self) -> None:
        platform, device = self.started()
        first = platform.zeros(4096)
        second = platform.zeros(64)
        assert (first.dtype, first.shape, second.shape) == (torch.uint8, (4096,), (64,))
        assert first.device == torch.zeros(1, device=device.name).device
        first += 1
        assert int(first.sum()) == 4096 and int(second.sum()) == 0

    def test_released_memory_comes_back_at_the_same_address(self) -> None:
        platform: Any
        platform, device = self.started()
        if not hasattr(platform, "release"):
            return
        with platform.releasable("weights"):
            weight = torch.arange(100_003, dtype=torch.float32, device=device.name)[3:]
        with platform.releasable("kv_cache"):
            cache = platform.zeros(1 << 20)
        before = weight.clone()
        address = weight.data_ptr()
        cache += 1
        restore = platform.release([weight], keep=True)
        drop = platform.release([cache], keep=False)
        restore(), drop()
        assert weight.data_ptr() == address and torch.equal(weight, before)
        assert not cache.any(), "the KV cache is zero"

    def test_defaults_are_engine_settings_with_valid_values(self) -> None:
        """Every checkpoint type gets a complete set of defaults, and the same set every time."""
        platform, device = self.started()
        known = set(EngineConfig.__struct_fields__)
        for dtype in ("float32", "float16", "bfloat16", None):
            defaults = dict(platform.defaults(dtype))
            assert defaults.keys() <= known, (
                f"no engine settings: {sorted(defaults.keys() - known)}"
            )
            assert defaults.keys() >= NEEDED, f"no default for {sorted(NEEDED - defaults.keys())}"
            check_engine(msgspec.structs.replace(EngineConfig(max_loras=1), **defaults))
            torch.ones(2, dtype=getattr(torch, str(defaults["dtype"])), device=device.name)
            memory = defaults.get("kv_cache_memory_bytes")
            assert memory is None or (
                isinstance(memory, int) and 0 < memory <= platform.memory().total_bytes
            )

    def test_copies_arrive_in_order(self) -> None:
        """On a device with its own memory, a computation uses the values that were uploaded before
        it."""
        platform, device = self.started()
        copies = platform.copies()
        if copies is None:
            assert torch.zeros(1, device=device.name).device.type == "cpu", (
                "the host reads this device's memory"
            )
            return
        source = copies.host((8,), torch.int64)
        target = torch.zeros(8, dtype=torch.int64, device=device.name)
        assert source.tolist() == [0] * 8
        for value in range(3):
            source.numpy()[:] = value
            copies.upload(source, target)
            wait = copies.download(target * 2)
            target.fill_(7)
            assert wait().tolist() == [2 * value] * 8
            copies.mark()()

    def test_rows_are_copied_beside_the_computation(self) -> None:
        """`SideCopies`, if the platform has them: what is loaded is what was stored before."""
        platform, device = self.started()
        copies = platform.copies()
        if copies is None or not isinstance(copies, SideCopies):
            return
        memory = copies.host((4, 6), torch.int64)
        for value in range(1, 4):
            rows = torch.full((2, 6), value, device=device.name) * torch.tensor(
                [[1], [10]], device=device.name
            )
            copies.store(rows, [memory[3], memory[0]])
            del rows
            torch.full((2, 6), 99, device=device.name)
            loaded = copies.load([memory[0], memory[3]])
            assert (loaded + 1).tolist() == [[10 * value + 1] * 6, [value + 1] * 6]

    def test_a_recording_computes_on_what_its_inputs_hold(self) -> None:
        """Every size of every trait is recorded. On a CPU, the test passes a replacement for the
        object that kernels record with."""
        platform, device = self.started()
        replay = platform.replay(None)
        if replay is None:
            calls: list[Any] = []
            assert platform.replay(lambda: calls.append("replay") or calls) is calls, (
                "kernels that record are used"
            )  # type: ignore
            return
        table = torch.arange(64.0, device=device.name).view(16, 4)
        for trait in get_args(Trait):
            sizes = replay.sizes(trait, 8)
            assert list(sizes) == sorted(set(sizes)) and all(0 < size <= 8 for size in sizes)
            ids = torch.zeros(8, dtype=torch.int64, device=device.name)
            recordings = [
                replay.record(lambda ids: (table[ids], table[ids] + 1), [ids[:size]])
                for size in sizes
            ]
            for recording in recordings:
                for number in (3, 15):
                    ids.fill_(number)
                    same, more = (out.float().sum().item() for out in recording(recording.size))
                    assert (same, more) == (
                        recording.size * (16.0 * number + 6),
                        recording.size * (16.0 * number + 10),
                    )
        replay.reset()

    def test_calls_outside_of_a_recording_see_the_rows_of_the_step(self) -> None:
        """`PiecewiseReplay`, if the platform has it."""
        platform, device = self.started()
        replay: Any = platform.replay(None)
        if not hasattr(replay, "outside"):
            return
        numbers: list[int] = []

        def sums(x: torch.Tensor, nothing: None, y: torch.Tensor) -> torch.Tensor:
            numbers.append(len(x))
            return (x + y).sum(1, keepdim=True).expand(-1, 3) + float(x[0, 0])

        call = replay.outside(sums, 3)

        def run(x: torch.Tensor) -> tuple[torch.Tensor]:
            first = call(x, None, x * 2)
            return (first + call(first, None, first) + x[:, :1],)

        buffer = torch.zeros(8, 2, device=device.name)
        sizes = list(reversed(replay.sizes("forward", 8)))
        recordings = [replay.record(run, [buffer[:size]]) for size in sizes]
        assert not numbers, "a call is not made to record"
        for recording, size in zip(recordings, sizes, strict=True):
            for num_rows in {1, size}:
                buffer.copy_(torch.arange(16.0).view(8, 2).add(num_rows).to(device.name))
                x = buffer[:num_rows]
                first = 3 * x.sum(1, keepdim=True) + x[0, 0]
                wanted = first + 6 * first + first[0, 0] + x[:, :1]
                (result,) = recording(num_rows)
                assert numbers[-2:] == [num_rows, num_rows]
                assert result.tolist() == wanted.expand(-1, 3).tolist()
        replay.reset()

    def test_what_the_host_reads_cannot_be_recorded(self) -> None:
        platform, device = self.started()
        replay = platform.replay(None)
        ids = torch.zeros(2, device=device.name)
        if replay is not None:
            with pytest.raises(CannotRecord):
                replay.record(lambda ids: (ids * float(ids.sum()),), [ids])
            with pytest.raises(ZeroDivisionError):  # an error of the model stays an error
                replay.record(lambda ids: (ids * (1 / 0),), [ids])

    def test_the_profiler_writes_below_its_folder(self, tmp_path: Path) -> None:
        platform, device = self.started()
        platform.profile(None)  # stopping a profile that is not running does nothing
        platform.profile(tmp_path / "profile")
        torch.ones(64, 64, device=device.name).matmul(torch.ones(64, 64, device=device.name))
        platform.profile(None)
        assert any(
            path.stat().st_size for path in (tmp_path / "profile").rglob("*") if path.is_file()
        )
