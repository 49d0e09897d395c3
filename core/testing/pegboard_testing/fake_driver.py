"""A fake of the drivers' libraries that reserve addresses and map memory, on the GPU of `fake_gpu`,
and of the pools of torch's allocator. For tests of platforms of GPUs.

    with FakeGPU() as gpu:
        library = install_driver(monkeypatch, gpu)

It refuses what drivers refuse: sizes and addresses that are not multiples of the granularity, a
second mapping, addresses without memory, memory without access, and more memory than there is. It
also refuses to release memory that is mapped, which drivers put off. New memory has garbage in it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard_testing.fake_gpu import FakeGPU

GRANULARITY = 2 << 20
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
GARBAGE = 0xA5
LARGE = 1 << 20
"""torch cuts smaller tensors from segments of GRANULARITY."""
ALIGNMENT = 512


@dataclass
class Range:
    """Reserved addresses. handle: of the memory that is mapped to them. is_open: the device may use
    it."""

    address: int
    size: int
    pages: mmap.mmap
    handle: int | None = None
    is_open: bool = False
    is_host: bool = False


class FakeFunction:
    """A function of the library. It takes what its `argtypes` allow, and returns a status."""

    argtypes: Any = None
    restype: Any = None

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, *arguments: Any) -> int:
        assert self.argtypes is not None and len(arguments) == len(self.argtypes)
        for argument, kind in zip(arguments, self.argtypes, strict=True):
            kind.from_param(argument)
        return int(self.run(*arguments) or 0)


class FakeText:
    """HIP's function that describes a status."""

    restype: Any = None

    def __call__(self, status: Any) -> bytes:
        assert self.restype is ctypes.c_char_p, "ctypes would cut the pointer"
        return b"out of memory" if status.value == OUT_OF_MEMORY else b"invalid argument"


class FakeLibrary:
    """CUDA's driver and HIP at once. gpu: whose memory it gives. calls: CUDA's names of the
    functions that were called, without the prefix. failures: what the next call of a function
    returns."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu
        self.ranges: dict[int, Range] = {}
        self.handles: dict[int, int] = {}
        self.calls: list[str] = []
        self.failures: dict[str, int] = {}
        self.last_handle = 0
        self.freed: list[Range] = []  # so that no other memory gets these addresses
        gpu.is_mapped = self.is_mapped
        self.cuGetErrorString = self._describe
        self.hipGetErrorString = FakeText()
        names = [name for name in dir(self) if name.startswith("do_")]
        for name in names:
            plain = name.removeprefix("do_")
            setattr(self, f"cu{plain}", FakeFunction(self._watched(name)))
            plain = plain.removesuffix("_v2").replace("Ctx", "Device")
            plain = {"MemHostAlloc": "HostMalloc", "MemFreeHost": "HostFree"}.get(plain, plain)
            setattr(self, f"hip{plain}", FakeFunction(self._watched(name)))

    def _watched(self, name: str) -> Any:
        function = getattr(self, name)

        def call(*arguments: Any) -> int:
            self.calls.append(name.removeprefix("do_"))
            return self.failures.pop(name.removeprefix("do_"), 0) or function(*arguments)

        return call

    def _describe(self, status: Any, text: Any) -> int:
        texts = {INVALID_VALUE: b"invalid argument", OUT_OF_MEMORY: b"out of memory"}
        text._obj.value = texts.get(status.value, b"unknown error")
        return 0

    # --- what the device sees ---------------------------------------------------------------------

    def range_of(self, address: int) -> Range | None:
        for each in self.ranges.values():
            if each.address <= address < each.address + each.size:
                return each
        return None

    def is_mapped(self, address: int) -> bool:
        """Return whether the device may use an address. Those that were never reserved are other
        memory."""
        place = self.range_of(address)
        return place is None or place.is_open

    def bytes_at(self, address: int, size: int) -> Tensor:
        """Return the memory behind addresses as uint8 [size]."""
        place = self.range_of(address)
        assert place is not None and place.is_open
        assert address + size <= place.address + place.size
        first = _address_of(place.pages)
        return torch.frombuffer(place.pages, dtype=torch.uint8, count=size, offset=address - first)

    # --- functions --------------------------------------------------------------------------------

    def do_MemGetAllocationGranularity(self, size: Any, properties: Any, option: int) -> int:
        assert properties._obj.type == properties._obj.location.type == 1
        size._obj.value = GRANULARITY
        return 0

    def do_MemAddressReserve(
        self, address: Any, size: int, alignment: int, wish: int, flags: int
    ) -> int:
        if size <= 0 or size % GRANULARITY or flags:
            return INVALID_VALUE
        pages = mmap.mmap(-1, size + GRANULARITY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = -(-_address_of(pages) // GRANULARITY) * GRANULARITY
        self.ranges[start] = Range(start, size, pages)
        address._obj.value = start
        return 0

    def do_MemAddressFree(self, address: int, size: int) -> int:
        place = self.ranges.get(address)
        if place is None or place.size != size or place.handle is not None or place.is_host:
            return INVALID_VALUE
        self.freed.append(self.ranges.pop(address))
        return 0

    def do_MemCreate(self, handle: Any, size: int, properties: Any, flags: int) -> int:
        if size <= 0 or size % GRANULARITY or flags or properties._obj.location.id:
            return INVALID_VALUE
        if self.gpu.used_bytes + size > self.gpu.total_bytes:
            return OUT_OF_MEMORY
        self.gpu.used_bytes += size
        self.gpu.peak_bytes = max(self.gpu.peak_bytes, self.gpu.used_bytes)
        self.last_handle += 1
        self.handles[self.last_handle] = size
        handle._obj.value = self.last_handle
        return 0

    def do_MemRelease(self, handle: int) -> int:
        is_mapped = any(place.handle == handle for place in self.ranges.values())
        if handle not in self.handles or is_mapped:
            return INVALID_VALUE
        self.gpu.used_bytes -= self.handles.pop(handle)
        return 0

    def do_MemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:
        place = self.ranges.get(address)
        if place is None or place.handle is not None or place.size != size or offset or flags:
            return INVALID_VALUE
        if self.handles.get(handle) != size:
            return INVALID_VALUE
        place.handle = handle
        return 0

    def do_MemSetAccess(self, address: int, size: int, access: Any, count: int) -> int:
        place = self.ranges.get(address)
        if place is None or place.handle is None or place.size != size or count != 1:
            return INVALID_VALUE
        if (access._obj.location.type, access._obj.flags) != (1, 3):
            return INVALID_VALUE
        place.is_open = True
        ctypes.memset(address, GARBAGE, size)
        return 0

    def do_MemUnmap(self, address: int, size: int) -> int:
        place = self.ranges.get(address)
        if place is None or place.handle is None or place.size != size:
            return INVALID_VALUE
        ctypes.memset(address, GARBAGE, size)
        place.handle = None
        place.is_open = False
        return 0

    def do_MemHostAlloc(self, address: Any, size: int, flags: int) -> int:
        if size <= 0 or flags != 3:
            return INVALID_VALUE
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = _address_of(pages)
        self.ranges[start] = Range(start, size, pages, is_open=True, is_host=True)
        address._obj.value = start
        return 0

    def do_MemFreeHost(self, address: int) -> int:
        place = self.ranges.get(address)
        if place is None or not place.is_host:
            return INVALID_VALUE
        self.freed.append(self.ranges.pop(address))
        return 0

    def do_MemcpyDtoH_v2(self, host: int, address: int, size: int) -> int:
        if not self._can_use(address, size):
            return INVALID_VALUE
        ctypes.memmove(host, address, size)
        return 0

    def do_MemcpyHtoD_v2(self, address: int, host: int, size: int) -> int:
        if not self._can_use(address, size):
            return INVALID_VALUE
        ctypes.memmove(address, host, size)
        return 0

    def do_MemsetD8_v2(self, address: int, value: int, size: int) -> int:
        if not self._can_use(address, size):
            return INVALID_VALUE
        ctypes.memset(address, value, size)
        return 0

    def do_CtxSynchronize(self) -> int:
        return 0

    def _can_use(self, address: int, size: int) -> bool:
        place = self.range_of(address)
        return place is not None and place.is_open and address + size <= place.address + place.size


class FakePool:
    """A pool of torch's allocator. It takes segments from functions at the two addresses of
    `allocator`, gives parts of them to tensors, and keeps them until it ends."""

    def __init__(self, allocator: tuple[int, int]) -> None:
        take = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        give = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
        )
        self._take = take(allocator[0])
        self._give = give(allocator[1])
        self.segments: dict[int, int] = {}
        self._next = 0
        self._end = 0

    def allocate(self, size: int) -> int:
        """Return the address of memory for a tensor, or 0."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        if size > LARGE:
            return self._segment(-(-size // GRANULARITY) * GRANULARITY)
        if self._next + size > self._end:
            self._next = self._segment(GRANULARITY)
            self._end = self._next + GRANULARITY if self._next else 0
        address = self._next
        self._next += size if address else 0
        return address

    def _segment(self, size: int) -> int:
        address = self._take(size, 0, None) or 0
        if address:
            self.segments[address] = size
        return address

    def __del__(self) -> None:
        for address, size in self.segments.items():
            self._give(address, size, 0, None)


def install_driver(monkeypatch: pytest.MonkeyPatch, gpu: FakeGPU) -> FakeLibrary:
    """Replace the drivers' libraries and the pools of torch.cuda. New tensors of the device are in
    the pool that is in use."""
    library = FakeLibrary(gpu)
    load = ctypes.CDLL

    def load_fake(name: Any, *more: Any, **settings: Any) -> Any:
        is_driver = name is not None and ("libcuda." in str(name) or "libamdhip64" in str(name))
        return library if is_driver else load(name, *more, **settings)

    monkeypatch.setattr(ctypes, "CDLL", load_fake)

    @contextmanager
    def use(pool: FakePool) -> Iterator[None]:
        def place(size: int) -> Tensor | None:
            address = pool.allocate(size)
            return library.bytes_at(address, size) if address else None

        assert gpu.place is None, "pools are not nested"
        gpu.place = place
        try:
            yield
        finally:
            gpu.place = None

    monkeypatch.setattr(
        torch._C, "_cuda_customAllocator", lambda take, give: (take, give), raising=False
    )
    monkeypatch.setattr(torch.cuda, "MemPool", FakePool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    return library


def _address_of(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))
