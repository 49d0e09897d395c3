"""Whether there is an AMD GPU that can be used. The probe reads files of the kernel. It imports no
torch and opens no device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from grp import getgrgid
from pathlib import Path

from pegboard.interfaces.spec import Absent, Broken, Ok, ProbeFacts, Verdict
from pegboard_gpus.torch_build import torch_reason, torch_versions
from pegboard_platform_rocm.sysfs import GPU, driver_version, gpus_of
from pegboard_platform_rocm.visible import variables, visible_gpus

SYSTEM = Path("/sys")
DEVICES = Path("/dev")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SMALL = 4 * 2**30
"""Bytes. The graphics of a processor have less memory of their own."""


def probe(facts: ProbeFacts) -> Verdict:
    """Return Ok with facts of the first visible GPU, Absent without a GPU, and Broken if a GPU
    cannot be used."""
    known = gpus_of(SYSTEM)
    if not known:
        return Absent("the kernel has no AMD GPU that computes (/sys/class/kfd)")
    gpus = [gpu for gpu in known if all(device.exists() for device in devices_of(gpu))]
    if not gpus:
        missing = [device for device in devices_of(known[0]) if not device.exists()]
        return Absent(
            f"the kernel has an AMD GPU ({label(known[0])}), but {missing[0]} is not here; "
            f"docker run needs --device {DEVICES / 'kfd'} --device {DEVICES / 'dri'}"
        )
    shown = visible_gpus(gpus, os.environ)
    if not shown:
        values = " ".join(f"{name}={value}" for name, value in variables(os.environ).items())
        names = ", ".join(gpu.uuid or "one without UUID" for gpu in gpus)
        return Absent(f"{values} hides all AMD GPUs ({names})")
    if (reason := torch_reason("hip", "ROCm")) is not None:
        return without_torch(shown, reason)
    if (reason := access_reason(gpus)) is not None:
        return Broken(f"there is an AMD GPU ({label(shown[0])}), but {reason}")
    return Ok(describe(shown))


def describe(gpus: Sequence[GPU]) -> dict[str, object]:
    """Return the number of visible devices, and the first one's name, architecture, memory in GiB
    and driver, as far as the kernel knows them."""
    first = gpus[0]
    description: dict[str, object] = {
        "devices": len(gpus),
        "name": first.name or f"AMD {first.architecture}",
        "architecture": first.architecture,
    }
    if first.memory_bytes:
        description["memory_gib"] = round(first.memory_bytes / 2**30, 1)
    if driver := driver_version(SYSTEM):
        description["driver"] = driver
    return description


def label(gpu: GPU) -> str:
    return f"{gpu.name}, {gpu.architecture}" if gpu.name else gpu.architecture


def without_torch(gpus: Sequence[GPU], reason: str) -> Verdict:
    """Return the verdict where torch is not for ROCm. Nobody expects to compute on a processor's
    graphics, nor on the AMD GPU beside NVIDIA's with a torch for CUDA."""
    if all(0 < gpu.memory_bytes < SMALL for gpu in gpus):
        return Absent(f"the AMD GPU ({label(gpus[0])}) has little memory, and {reason}")
    if (torch_versions() or {}).get("cuda") is not None and NVIDIA_DRIVER.exists():
        return Absent(f"the installed torch is for CUDA, and the AMD GPU is {label(gpus[0])}")
    return Broken(f"there is an AMD GPU ({label(gpus[0])}), but {reason}")


def devices_of(gpu: GPU) -> list[Path]:
    """Return the files that ROCm opens for a GPU. It leaves out a GPU whose file is not there."""
    return [DEVICES / "kfd", *([DEVICES / "dri" / gpu.render] if gpu.render else [])]


def access_reason(gpus: Sequence[GPU]) -> str | None:
    """Return why this process cannot open the devices, or None. ROCm opens those of hidden GPUs
    too, and gives up if it may not."""
    devices = dict.fromkeys(device for gpu in gpus for device in devices_of(gpu))
    for device in devices:
        if os.access(device, os.R_OK | os.W_OK):
            continue
        group = group_of(device)
        if group == "root":
            return (
                f"this process may not open {device}: it belongs to the group root, and not to "
                "render or video as usual; see the rules of udev"
            )
        return (
            f"this process may not open {device}: add this user to its group {group} (sudo usermod "
            f"-a -G {group} $USER) and log in again; docker run needs --group-add {group}"
        )
    return None


def group_of(path: Path) -> str:
    """Return the name of the group of a file, or its number if it has no name here."""
    number = path.stat().st_gid
    try:
        return getgrgid(number).gr_name
    except KeyError:
        return str(number)
