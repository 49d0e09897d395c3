"""The AMD GPUs that the kernel knows, read from sysfs.

The compute driver (KFD) has a folder for each node of the machine, CPUs included. ROCm numbers GPUs
in the order of these nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FRAME_BUFFER = frozenset({1, 2})
"""Values of heap_type for memory of the GPU: visible to the host, and private."""


@dataclass(frozen=True, slots=True)
class GPU:
    """architecture: such as "gfx942". uuid: ROCm's, "GPU-" and 16 hexadecimal digits; "" = the GPU
    has none. memory_bytes: of the GPU itself; 0 = unknown. name: the product, or "". render: its
    file below /dev/dri, or ""."""

    architecture: str
    uuid: str
    memory_bytes: int
    name: str
    render: str


def gpus_of(system: Path) -> list[GPU]:
    """Return the GPUs in ROCm's order. system: the folder of sysfs. Nodes that this process may not
    read (in containers) are left out, as ROCm does."""
    nodes = system / "class/kfd/kfd/topology/nodes"
    numbers = sorted(int(path.name) for path in nodes.glob("*") if path.name.isdigit())
    rows = [
        (nodes / str(number), _numbers(nodes / str(number) / "properties")) for number in numbers
    ]
    return [_gpu(system, node, facts) for node, facts in rows if facts.get("simd_count", 0)]


def driver_version(system: Path) -> str:
    """Return the version of the driver that AMD publishes. A driver of the kernel itself has
    none ("")."""
    return _text(system / "module/amdgpu/version")


def architecture_of(version: int) -> str:
    """Return the name of gfx_target_version: 90402 → "gfx942", 90010 → "gfx90a". Before Linux 5.14,
    it is not there (0)."""
    if not version:
        return "unknown"
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _gpu(system: Path, node: Path, facts: dict[str, int]) -> GPU:
    minor = facts.get("drm_render_minor", 0)
    render = f"renderD{minor}" if minor else ""
    device = system / "class/drm" / (render or "none") / "device"
    uuid = facts.get("unique_id", 0)
    banks = [_numbers(file) for file in node.glob("mem_banks/*/properties")]
    memory = sum(
        bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in FRAME_BUFFER
    )
    total = _text(device / "mem_info_vram_total")
    return GPU(
        architecture=architecture_of(facts.get("gfx_target_version", 0)),
        uuid=f"GPU-{uuid:016x}" if uuid else "",
        memory_bytes=memory or (int(total) if total.isdigit() else 0),
        name=_text(device / "product_name"),
        render=render,
    )


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _numbers(file: Path) -> dict[str, int]:
    """Return the lines of a file: a name and a number each."""
    pairs = [line.split() for line in _text(file).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
