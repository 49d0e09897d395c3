"""Whether there is an NVIDIA GPU that can be used. The probe asks the driver's management library.
It imports no torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from pegboard.interfaces.spec import Absent, Broken, Ok, ProbeFacts, Verdict
from pegboard_gpus.torch_build import torch_reason
from pegboard_platform_cuda.nvml import LIBRARY, NVML, NVMLError
from pegboard_platform_cuda.visible import part_of_gpu, visible_gpus

DRIVER = Path("/proc/driver/nvidia/version")
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


def probe(facts: ProbeFacts) -> Verdict:
    """Return Ok with facts of the first visible GPU, Absent without a GPU, and Broken if a driver
    or a GPU cannot be used."""
    try:
        nvml = NVML()
    except OSError as error:
        if DRIVER.exists():
            return Broken(f"the NVIDIA driver is loaded, but {LIBRARY} is not usable: {error}")
        return Absent("no NVIDIA driver is installed")
    try:
        with nvml:
            if not (gpus := nvml.gpus()):
                return Absent("the NVIDIA driver finds no GPU")
            description = describe(nvml, gpus)
    except NVMLError as error:
        if not DRIVER.exists():
            return Absent(f"no NVIDIA GPU: {error}")
        return Broken(f"the NVIDIA driver does not answer: {error}")
    if description is None:
        return Absent(f"{VISIBLE}={os.environ.get(VISIBLE)} hides all GPUs")
    if (reason := torch_reason("cuda", "CUDA")) is not None:
        return Broken(f"there is an NVIDIA GPU ({description['name']}), but {reason}")
    return Ok(description)


def describe(nvml: NVML, gpus: Sequence[ctypes.c_void_p]) -> dict[str, object] | None:
    """Return the number of visible devices, and the first one's name, memory in GiB and compute
    capability, and the driver. None = no device is visible.

    NVML sorts GPUs by PCI bus id, and CUDA by speed unless CUDA_DEVICE_ORDER says otherwise. If
    the first device is chosen by an index and the GPUs differ, only what all of them have in common
    is stated, with all names and a note."""
    variable = os.environ.get(VISIBLE)
    driver = {"driver": nvml.driver()}
    if (uuid := part_of_gpu(variable)) is not None:
        return {"devices": 1, **part_facts(nvml, uuid), **driver}
    places = visible_gpus(variable, [nvml.uuid(gpu) for gpu in gpus])
    if not places:
        return None
    count = {"devices": len(places)}
    by_bus = os.environ.get(ORDER) == "PCI_BUS_ID" or (variable or "").strip().startswith("GPU-")
    candidates = [gpus[places[0]]] if by_bus else gpus
    rows = [gpu_facts(nvml, gpu) for gpu in candidates]
    if all(row == rows[0] for row in rows):
        return {**count, **rows[0], **driver}
    common = {key: value for key, value in rows[0].items() if all_have(rows, key, value)}
    names = " or ".join(dict.fromkeys(str(row["name"]) for row in rows))
    note = f"CUDA's order of these GPUs may differ from the driver's: {ORDER} is not PCI_BUS_ID"
    return {**count, **common, "name": names, "note": note, **driver}


def all_have(rows: Sequence[dict[str, object]], key: str, value: object) -> bool:
    return all(row.get(key) == value for row in rows)


def gpu_facts(nvml: NVML, gpu: ctypes.c_void_p) -> dict[str, object]:
    """Of a GPU that is divided (MIG), CUDA uses one part, so its memory is not stated."""
    name = {"name": nvml.name(gpu)}
    capability = {"capability": nvml.capability(gpu)}
    if nvml.is_divided(gpu):
        return {**name, **capability, "part": "CUDA uses one part (MIG) of this GPU"}
    return {**name, "memory_gib": nvml.memory_gib(gpu), **capability}


def part_facts(nvml: NVML, uuid: str) -> dict[str, object]:
    """Return what NVML tells of a part of a GPU. It knows whole UUIDs only."""
    try:
        part = nvml.by_uuid(uuid)
        return {
            "name": nvml.name(part),
            "memory_gib": nvml.memory_gib(part),
            "capability": nvml.capability(nvml.whole(part)),
            "part": uuid,
        }
    except NVMLError as error:
        return {"name": uuid, "part": f"the driver does not describe this part: {error}"}
