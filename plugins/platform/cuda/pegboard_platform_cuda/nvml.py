"""The driver's management library (NVML). It creates no context on a device."""

from __future__ import annotations

import ctypes
from types import TracebackType

LIBRARY = "libnvidia-ml.so.1"
TEXT_BYTES = 96


class Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class NVMLError(Exception):
    """A function of NVML failed. The message is NVML's."""


class NVML:
    """The library between init and shutdown. A handle is a GPU, or a part of a GPU (MIG).

    Every method raises NVMLError if the library refuses. The constructor raises OSError if the
    library is missing."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(LIBRARY)

    def __enter__(self) -> NVML:
        self._call("nvmlInit_v2")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.library.nvmlShutdown()

    def gpus(self) -> list[ctypes.c_void_p]:
        """Return the handles of all GPUs, sorted by PCI bus id."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        handles = [ctypes.c_void_p() for _ in range(count.value)]
        for index, handle in enumerate(handles):
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handles

    def by_uuid(self, uuid: str) -> ctypes.c_void_p:
        """Return the handle of the GPU or part with this whole UUID."""
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return handle

    def whole(self, part: ctypes.c_void_p) -> ctypes.c_void_p:
        """Return the GPU that a part belongs to."""
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part, ctypes.byref(handle))
        return handle

    def is_divided(self, gpu: ctypes.c_void_p) -> bool:
        """Whether a GPU is divided into parts. Most kinds of GPU cannot be."""
        current = ctypes.c_uint()
        pending = ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMigMode", gpu, ctypes.byref(current), ctypes.byref(pending))
        except NVMLError:
            return False
        return current.value == 1

    def uuid(self, gpu: ctypes.c_void_p) -> str:
        return self._text("nvmlDeviceGetUUID", gpu)

    def name(self, device: ctypes.c_void_p) -> str:
        return self._text("nvmlDeviceGetName", device)

    def memory_gib(self, device: ctypes.c_void_p) -> float:
        memory = Memory()
        self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        return round(memory.total / 2**30, 1)

    def capability(self, gpu: ctypes.c_void_p) -> str:
        """Return the compute capability, such as "9.0"."""
        major = ctypes.c_int()
        minor = ctypes.c_int()
        numbers = ctypes.byref(major), ctypes.byref(minor)
        self._call("nvmlDeviceGetCudaComputeCapability", gpu, *numbers)
        return f"{major.value}.{minor.value}"

    def driver(self) -> str:
        return self._text("nvmlSystemGetDriverVersion")

    def _text(self, name: str, *arguments: object) -> str:
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self._call(name, *arguments, text, ctypes.c_uint(TEXT_BYTES))
        return text.value.decode()

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self.library, name)
        except AttributeError as error:
            raise NVMLError(f"this driver has no {name}") from error
        status = function(*arguments)
        if status:
            self.library.nvmlErrorString.restype = ctypes.c_char_p
            raise NVMLError(f"{name}: {self.library.nvmlErrorString(status).decode()}")
