"""What ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES show.

ROCm's runtime (ROCr) reads the first. HIP reads the second, or the third if the second is not set,
and counts what ROCr has left. Both take indices and UUIDs, and an entry that is no GPU ends the
list. They are otherwise strict in different ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pegboard_platform_rocm.sysfs import GPU

ROCR = "ROCR_VISIBLE_DEVICES"
HIP = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
UUID_LENGTHS = range(5, 21)
"""Of a UUID, or of its beginning, in characters with "GPU-"."""


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that count, by name."""
    names = [ROCR, *[name for name in HIP if name in environ][:1]]
    return {name: environ[name] for name in names if name in environ}


def visible_gpus(gpus: Sequence[GPU], environ: Mapping[str, str]) -> list[GPU]:
    """Return the visible GPUs in HIP's order. gpus: in the order of the kernel. A variable that is
    set to nothing hides all: so does torch read it."""
    shown = list(gpus)
    for name, value in variables(environ).items():
        shown = _by_rocr(value, shown) if name == ROCR else _by_hip(value, shown)
    return shown


def _by_rocr(value: str, gpus: Sequence[GPU]) -> list[GPU]:
    """Indices may be octal or hexadecimal. A UUID may be cut short if that is clear. A GPU that is
    listed again ends the list."""
    places: list[int] = []
    for entry in value.split(","):
        place = _rocr_place(entry.strip().upper(), gpus)
        if place is None or place in places:
            break
        places.append(place)
    return [gpus[place] for place in places]


def _rocr_place(entry: str, gpus: Sequence[GPU]) -> int | None:
    if entry.startswith("G"):
        matches = [
            place
            for place, gpu in enumerate(gpus)
            if len(entry) in UUID_LENGTHS and gpu.uuid.upper().startswith(entry)
        ]
        return matches[0] if len(matches) == 1 else None
    try:
        place = int(entry, 8 if entry.startswith("0") and entry.isdigit() else 0)
    except ValueError:
        return None
    return place if 0 <= place < len(gpus) else None


def _by_hip(value: str, gpus: Sequence[GPU]) -> list[GPU]:
    """Indices are plain decimal numbers. The first GPU with these characters in its UUID counts. A
    GPU that is listed again is left out."""
    places: list[int] = []
    for entry in value.split(","):
        place = _hip_place(entry, gpus)
        if place is None:
            break
        if place not in places:
            places.append(place)
    return [gpus[place] for place in places]


def _hip_place(entry: str, gpus: Sequence[GPU]) -> int | None:
    if "GPU-" in entry:
        return next((place for place, gpu in enumerate(gpus) if entry in gpu.uuid), None)
    return next((place for place in range(len(gpus)) if entry == str(place)), None)
