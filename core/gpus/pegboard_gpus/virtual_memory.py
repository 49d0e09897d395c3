"""Memory of a device that can be given back while its addresses stay reserved.

torch's allocator takes its segments from here as long as a `torch.cuda.MemPool` is in use. A tensor
in such a pool is like any other, also for captured graphs.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ConfigError
from pegboard.log import get_logger
from pegboard_gpus.driver import OUT_OF_MEMORY, Driver, DriverError

log = get_logger(__name__)

CHUNK = 1 << 28
"""The largest number of bytes of one pinned tensor. torch rounds pinned memory up to a power of
two."""

TAKE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
GIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
"""What torch calls to allocate, and to free. Both get a stream last."""

Span = tuple[int, int]
"""The first address, and the address after the last one."""

CALLBACKS: list[Any] = []
"""torch may call these until the process ends."""


@dataclass(eq=False, slots=True)
class Segment:
    """A range of addresses. handle: of the device's memory that is mapped to it; None = nothing is.
    is_host: it is pinned memory of the host."""

    address: int
    num_bytes: int
    handle: int | None
    is_host: bool = False

    @property
    def span(self) -> Span:
        return self.address, self.address + self.num_bytes


class Segments:
    """The segments of one device, by address. allocator: torch takes them through it, and gives
    them back. host_bytes: of the next segments, so many bytes are in the host's memory. Raises
    DriverError if the device has no virtual memory."""

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self.granularity = driver.granularity(device)
        self.segments: dict[int, Segment] = {}
        self.host_bytes = 0
        callbacks = TAKE(self._take), GIVE(self._give)
        CALLBACKS.append(callbacks)
        addresses = [ctypes.cast(callback, ctypes.c_void_p).value for callback in callbacks]
        make_allocator: Any = torch._C._cuda_customAllocator
        self.allocator = make_allocator(*addresses)

    def allocate(self, num_bytes: int) -> int:
        """Return the address of a new segment. Raises DriverError."""
        size = -(-num_bytes // self.granularity) * self.granularity
        if size <= self.host_bytes:
            address = self.driver.host(size)
            self.segments[address] = Segment(address, size, None, is_host=True)
            self.host_bytes -= size
            return address
        address = self.driver.reserve(size)
        segment = Segment(address, size, None)
        try:
            self.map(segment)
        except DriverError:
            self.driver.free(address, size)
            raise
        self.segments[address] = segment
        return address

    def free(self, address: int) -> None:
        """Give a segment back, with its addresses. Raises DriverError."""
        segment = self.segments.pop(address)
        self.driver.synchronize()
        if segment.is_host:
            self.driver.free_host(address)
            return
        self.unmap(segment)
        self.driver.free(address, segment.num_bytes)

    def map(self, segment: Segment) -> None:
        """Put new memory behind a segment. Its contents are undefined. Raises DriverError."""
        handle = self.driver.create(segment.num_bytes, self.device)
        try:
            self.driver.map(segment.address, segment.num_bytes, handle, self.device)
        except DriverError:
            self.driver.release(handle)
            raise
        segment.handle = handle

    def unmap(self, segment: Segment) -> None:
        """Give the memory of a segment back, if it has some. Raises DriverError."""
        if segment.handle is not None:
            self.driver.unmap(segment.address, segment.num_bytes)
            self.driver.release(segment.handle)
            segment.handle = None

    def _take(self, num_bytes: int, device: int, stream: int | None) -> int:
        """Return 0 if there is no memory, which torch then reports."""
        try:
            with uncollected():
                return self.allocate(num_bytes)
        except DriverError as error:
            if error.status != OUT_OF_MEMORY:
                log.warning("the driver gives no memory: %s", error)
            return 0

    def _give(self, address: int, num_bytes: int, device: int, stream: int | None) -> None:
        try:
            with uncollected():
                self.free(address)
        except DriverError as error:
            log.warning("the driver takes no memory back: %s", error)


class VirtualMemory:
    """Pools of torch's allocator whose memory can be released. They end with this object. pinned:
    returns pinned host memory of a shape and type."""

    def __init__(
        self, segments: Segments, pinned: Callable[[tuple[int, ...], torch.dtype], Tensor]
    ) -> None:
        self.segments = segments
        self.driver = segments.driver
        self._pinned = pinned
        self._pools: dict[str, Any] = {}
        self._host_left: dict[str, int] = {}

    @contextmanager
    def pool(self, name: str, host_bytes: int = 0) -> Iterator[None]:
        """The memory that this thread allocates inside is in segments of this pool. host_bytes: of
        the pool, so many bytes are in the host's memory."""
        if name not in self._pools:
            self._pools[name] = torch.cuda.MemPool(self.segments.allocator)
            self._host_left[name] = host_bytes
        self.segments.host_bytes = self._host_left[name]
        try:
            with torch.cuda.use_mem_pool(self._pools[name]):
                yield
        finally:
            self._host_left[name] = self.segments.host_bytes
            self.segments.host_bytes = 0

    def release(self, tensors: Sequence[Tensor], *, keep: bool) -> Callable[[], None]:
        """See `pegboard.interfaces.platform.ReleasingPlatform`. Segments are given back as a whole.
        What else is in them is saved on the host, also without `keep`. Tensors outside of all
        segments stay where they are."""
        spans = merged(_span(tensor) for tensor in tensors)
        segments = [
            segment
            for segment in self.segments.segments.values()
            if segment.handle is not None and list(common(spans, segment.span))
        ]
        self.driver.synchronize()
        saved = self._save(
            span
            for segment in segments
            for span in (
                [segment.span] if keep else gaps(common(spans, segment.span), segment.span)
            )
        )
        for segment in segments:
            self.segments.unmap(segment)

        def restore() -> None:
            for segment in segments:
                if segment.handle is None and self._is_in_use(segment):
                    self._fill(segment)
            for address, part in saved:
                self.driver.upload(address, part.data_ptr(), len(part))
            self.driver.synchronize()
            saved.clear()
            segments.clear()

        return restore

    def _is_in_use(self, segment: Segment) -> bool:
        """Return whether torch has not given the segment back meanwhile."""
        return self.segments.segments.get(segment.address) is segment

    def _fill(self, segment: Segment) -> None:
        try:
            self.segments.map(segment)
        except DriverError as error:
            raise ConfigError(
                f"the memory of the sleeping engine cannot be taken again ({error}): free memory "
                "of the device, and wake the engine again"
            ) from error
        self.driver.clear(segment.address, segment.num_bytes)

    def _save(self, spans: Iterable[Span]) -> list[tuple[int, Tensor]]:
        """Copy memory to the host. Return it in parts, with their addresses."""
        remaining = list(spans)
        num_bytes = sum(stop - start for start, stop in remaining)
        left = num_bytes
        chunk = torch.empty(0, dtype=torch.uint8)
        saved: list[tuple[int, Tensor]] = []
        for first, stop in remaining:
            start = first
            while start < stop:
                if not len(chunk):
                    chunk = self._host(min(left, CHUNK), num_bytes)
                count = min(stop - start, len(chunk))
                self.driver.download(chunk.data_ptr(), start, count)
                saved.append((start, chunk[:count]))
                chunk = chunk[count:]
                start += count
                left -= count
        return saved

    def _host(self, size: int, num_bytes: int) -> Tensor:
        try:
            return self._pinned((size,), torch.uint8)
        except RuntimeError as error:
            raise ConfigError(
                f"{num_bytes / 2**20:.0f} MiB of the device cannot be saved, because the host has "
                "too little memory that can be pinned; use sleep level 2"
            ) from error


@contextmanager
def uncollected() -> Iterator[None]:
    """Python collects no garbage inside. torch's allocator calls from within its own work, and a
    tensor that is collected would call it again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the same addresses as spans in ascending order, none of which meet."""
    result: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        else:
            result.append((start, stop))
    return result


def common(spans: Iterable[Span], within: Span) -> Iterator[Span]:
    """Yield the parts of spans that are in another one."""
    for start, stop in spans:
        first = max(start, within[0])
        end = min(stop, within[1])
        if first < end:
            yield first, end


def gaps(spans: Iterable[Span], within: Span) -> Iterator[Span]:
    """Yield the parts of a span that are in none of `spans`, which ascend and lie inside it."""
    last, end = within
    for start, stop in spans:
        if last < start:
            yield last, start
        last = stop
    if last < end:
        yield last, end


def _span(tensor: Tensor) -> Span:
    storage: Any = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
