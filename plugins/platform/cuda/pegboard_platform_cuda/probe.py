"""Whether there is an NVIDIA GPU that can be used. The probe asks the driver's management library
(NVML), which creates no context on a device. It imports no torch."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

from pegboard.interfaces.spec import Absent, Broken, Ok, ProbeFacts, Verdict

DRIVER = Path("/proc/driver/nvidia/version")
LIBRARY = "libnvidia-ml.so.1"


class Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class NVMLError(Exception):
    """A function of NVML failed. The message is NVML's."""


def probe(facts: ProbeFacts) -> Verdict:
    """Return Ok with facts of the first GPU, Absent without a GPU, and Broken if a driver or a GPU
    cannot be used."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError as error:
        if DRIVER.exists():
            return Broken(f"the NVIDIA driver is loaded, but {LIBRARY} is not usable: {error}")
        return Absent("no NVIDIA driver is installed")
    try:
        driver = describe(nvml)
    except NVMLError as error:
        if not DRIVER.exists():
            return Absent(f"no NVIDIA GPU: {error}")
        return Broken(f"the NVIDIA driver does not answer: {error}")
    if not driver["devices"]:
        return Absent("the NVIDIA driver finds no GPU")
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "none", "NoDevFiles"):
        return Absent("CUDA_VISIBLE_DEVICES hides all GPUs")
    if (reason := torch_reason()) is not None:
        return Broken(f"there is an NVIDIA GPU ({driver['name']}), but {reason}")
    return Ok(driver)


def describe(nvml: ctypes.CDLL) -> dict[str, object]:
    """Return the number of devices, and the first one's name, memory in GiB, compute capability and
    driver."""

    def call(name: str, *arguments: object) -> None:
        status = getattr(nvml, name)(*arguments)
        if status:
            nvml.nvmlErrorString.restype = ctypes.c_char_p
            raise NVMLError(f"{name}: {nvml.nvmlErrorString(status).decode()}")

    call("nvmlInit_v2")
    try:
        count = ctypes.c_uint()
        device = ctypes.c_void_p()
        memory = Memory()
        text = ctypes.create_string_buffer(96)
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        if not count.value:
            return {"devices": 0}
        call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(0), ctypes.byref(device))
        call("nvmlDeviceGetName", device, text, ctypes.c_uint(len(text)))
        name = text.value.decode()
        call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        major = ctypes.c_int()
        minor = ctypes.c_int()
        call("nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
        call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        return {
            "devices": count.value,
            "name": name,
            "memory_gib": round(memory.total / 2**30, 1),
            "capability": f"{major.value}.{minor.value}",
            "driver": text.value.decode(),
        }
    finally:
        nvml.nvmlShutdown()


def torch_reason() -> str | None:
    """Return why the installed torch cannot use a GPU, or None. torch's own file says for which
    CUDA it was built."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "torch is not installed: pip install torch"
    version = Path(spec.submodule_search_locations[0], "version.py")
    lines = version.read_text("utf-8").splitlines() if version.is_file() else []
    if any(line.startswith("cuda") and line.endswith("= None") for line in lines):
        return (
            "the installed torch was built without CUDA: install a torch for CUDA, or choose "
            "--device cpu"
        )
    return None
