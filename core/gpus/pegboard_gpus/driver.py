"""The functions of CUDA's driver that reserve addresses and map memory to them. AMD's runtime HIP
has the same functions."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_ushort
from pathlib import Path
from typing import Any, ClassVar

PINNED = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED: the only type of memory that can be created."""
ON_DEVICE = 1
"""CU_MEM_LOCATION_TYPE_DEVICE."""
READ_WRITE = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""
MINIMUM = 0
"""CU_MEM_ALLOC_GRANULARITY_MINIMUM."""
PORTABLE_MAPPED = 3
"""CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTALLOC_DEVICEMAP, and hipHostMalloc's names for them."""
OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY and hipErrorOutOfMemory."""


class Location(ctypes.Structure):
    """CUmemLocation. id: the number of the device."""

    _fields_ = (("type", c_int), ("id", c_int))


class Flags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags."""

    _fields_ = (
        ("compression", c_ubyte),
        ("rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class Properties(ctypes.Structure):
    """CUmemAllocationProp. HIP's has no `reserved` but is as large."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", Flags),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


ADDRESS = c_uint64
"""CUdeviceptr; a pointer in HIP."""
HANDLE = c_uint64
"""CUmemGenericAllocationHandle; a pointer in HIP."""
ARGUMENTS = {
    "MemGetAllocationGranularity": (POINTER(c_size_t), POINTER(Properties), c_int),
    "MemAddressReserve": (POINTER(ADDRESS), c_size_t, c_size_t, ADDRESS, c_ulonglong),
    "MemAddressFree": (ADDRESS, c_size_t),
    "MemCreate": (POINTER(HANDLE), c_size_t, POINTER(Properties), c_ulonglong),
    "MemRelease": (HANDLE,),
    "MemMap": (ADDRESS, c_size_t, c_size_t, HANDLE, c_ulonglong),
    "MemUnmap": (ADDRESS, c_size_t),
    "MemSetAccess": (ADDRESS, c_size_t, POINTER(Access), c_size_t),
    "MemcpyDtoH": (ctypes.c_void_p, ADDRESS, c_size_t),
    "MemcpyHtoD": (ADDRESS, ctypes.c_void_p, c_size_t),
    "MemsetD8": (ADDRESS, c_ubyte, c_size_t),
    "MemHostAlloc": (POINTER(ctypes.c_void_p), c_size_t, c_uint),
    "MemFreeHost": (ctypes.c_void_p,),
    "Synchronize": (),
}
"""What each function takes. All return a status, 0 = success."""


class DriverError(Exception):
    """A function of the driver has failed. status: its result."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Driver:
    """A driver's library. prefix: of its functions. names: those that are called otherwise than in
    ARGUMENTS. Sizes and addresses are in bytes."""

    prefix: ClassVar[str]
    names: ClassVar[dict[str, str]]

    def __init__(self, library: Any) -> None:
        self.library = library
        self.functions: dict[str, Any] = {}
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, self.prefix + self.names.get(name, name))
            function.argtypes = arguments
            function.restype = c_int
            self.functions[name] = function

    @classmethod
    def load(cls) -> Driver:
        """Return the driver of this process. Raises OSError."""
        raise AssertionError("a subclass says which library")

    def message(self, status: int) -> str:
        """Return what a status means."""
        raise AssertionError("a subclass calls its library")

    def _call(self, name: str, *arguments: Any) -> None:
        status = self.functions[name](*arguments)
        if status:
            called = self.prefix + self.names.get(name, name)
            raise DriverError(f"{called}: {self.message(status)}", status)

    def granularity(self, device: int) -> int:
        """Return what sizes and addresses of this device's memory are multiples of."""
        size = c_size_t()
        self._call("MemGetAllocationGranularity", byref(size), byref(_properties(device)), MINIMUM)
        return size.value

    def reserve(self, num_bytes: int) -> int:
        """Reserve so many addresses and return the first. No memory is mapped to them."""
        address = ADDRESS()
        self._call("MemAddressReserve", byref(address), num_bytes, 0, 0, 0)
        return address.value

    def free(self, address: int, num_bytes: int) -> None:
        """Give addresses back."""
        self._call("MemAddressFree", address, num_bytes)

    def create(self, num_bytes: int, device: int) -> int:
        """Return the handle of new memory, whose contents are undefined."""
        handle = HANDLE()
        self._call("MemCreate", byref(handle), num_bytes, byref(_properties(device)), 0)
        return handle.value

    def release(self, handle: int) -> None:
        """Give memory back. Nothing may be mapped to it."""
        self._call("MemRelease", handle)

    def map(self, address: int, num_bytes: int, handle: int, device: int) -> None:
        """Put memory behind reserved addresses, which this device may then read and write."""
        self._call("MemMap", address, num_bytes, 0, handle, 0)
        access = Access(Location(ON_DEVICE, device), READ_WRITE)
        try:
            self._call("MemSetAccess", address, num_bytes, byref(access), 1)
        except DriverError:
            self.unmap(address, num_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        """Take the memory from behind addresses. The device may not use them meanwhile."""
        self._call("MemUnmap", address, num_bytes)

    def host(self, num_bytes: int) -> int:
        """Return the address of pinned host memory, which the device uses at the same address."""
        address = ctypes.c_void_p()
        self._call("MemHostAlloc", byref(address), num_bytes, PORTABLE_MAPPED)
        return address.value or 0

    def free_host(self, address: int) -> None:
        """Give pinned host memory back."""
        self._call("MemFreeHost", address)

    def download(self, host: int, address: int, num_bytes: int) -> None:
        """Copy from the device to an address of the host."""
        self._call("MemcpyDtoH", host, address, num_bytes)

    def upload(self, address: int, host: int, num_bytes: int) -> None:
        """Copy from an address of the host to the device."""
        self._call("MemcpyHtoD", address, host, num_bytes)

    def clear(self, address: int, num_bytes: int) -> None:
        """Set memory of the device to zero."""
        self._call("MemsetD8", address, 0, num_bytes)

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        self._call("Synchronize")


class CUDADriver(Driver):
    """NVIDIA's driver."""

    prefix = "cu"
    names: ClassVar[dict[str, str]] = {
        "MemcpyDtoH": "MemcpyDtoH_v2",
        "MemcpyHtoD": "MemcpyHtoD_v2",
        "MemsetD8": "MemsetD8_v2",
        "Synchronize": "CtxSynchronize",
    }

    @classmethod
    def load(cls) -> Driver:
        return cls(ctypes.CDLL("libcuda.so.1"))

    def message(self, status: int) -> str:
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(c_int(status), byref(text))
        return (text.value or b"").decode() or f"error {status}"


class HIPDriver(Driver):
    """AMD's runtime, the one that torch has loaded: a second copy would know nothing of torch's
    memory."""

    prefix = "hip"
    names: ClassVar[dict[str, str]] = {
        "Synchronize": "DeviceSynchronize",
        "MemHostAlloc": "HostMalloc",
        "MemFreeHost": "HostFree",
    }

    @classmethod
    def load(cls) -> Driver:
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = [line.split()[-1] for line in lines if "libamdhip64.so" in line]
        return cls(ctypes.CDLL(paths[0] if paths else "libamdhip64.so"))

    def message(self, status: int) -> str:
        describe = self.library.hipGetErrorString
        describe.restype = ctypes.c_char_p
        return (describe(c_int(status)) or b"").decode() or f"error {status}"


def _properties(device: int) -> Properties:
    return Properties(type=PINNED, location=Location(ON_DEVICE, device))
