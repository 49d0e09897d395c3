"""What the probe says of the kernel's files, on a fake of sysfs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegboard_platform_rocm import probe
from pegboard_platform_rocm.sysfs import GPU, architecture_of, gpus_of
from pegboard_platform_rocm.visible import visible_gpus

from pegboard.interfaces.spec import Absent, Broken, Ok, ProbeFacts

FACTS = ProbeFacts("x86_64")
VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
GIB = 2**30


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


@dataclass
class Machine:
    """Fake files of the kernel below a folder. The first node is a CPU."""

    root: Path

    def __post_init__(self) -> None:
        self.num_gpus = 0
        self.versions: dict[str, str | None] = {"cuda": None, "hip": "7.2.53211"}
        self.locked: set[str] = set()
        write(self.node(0) / "properties", "cpu_cores_count 64\nsimd_count 0\n")
        write(self.node(0) / "mem_banks/0/properties", f"heap_type 0\nsize_in_bytes {512 * GIB}\n")
        write(self.root / "dev/kfd", "")

    def node(self, number: int) -> Path:
        return self.root / "sys/class/kfd/kfd/topology/nodes" / str(number)

    def add(
        self,
        version: int = 90402,
        gib: int = 192,
        uuid: int = 0,
        product: str = "",
        has_bank: bool = True,
    ) -> None:
        """Adds a GPU. has_bank: the kernel lists its memory with the node."""
        self.num_gpus += 1
        minor = 127 + self.num_gpus
        node = self.node(self.num_gpus)
        device = self.root / f"sys/class/drm/renderD{minor}/device"
        write(
            node / "properties",
            f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {version}\n"
            f"unique_id {uuid}\ndrm_render_minor {minor}\n",
        )
        if has_bank:
            write(node / "mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {gib * GIB}\n")
        write(device / "mem_info_vram_total", f"{gib * GIB}\n")
        if product:
            write(device / "product_name", product + "\n")
        write(self.root / f"dev/dri/renderD{minor}", "")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(probe, "SYSTEM", tmp_path / "sys")
    monkeypatch.setattr(probe, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(probe, "NVIDIA_DRIVER", tmp_path / "nvidia")
    monkeypatch.setattr(probe, "torch_versions", lambda: machine.versions)
    monkeypatch.setattr("pegboard_gpus.torch_build.torch_versions", lambda: machine.versions)
    monkeypatch.setattr(
        probe.os, "access", lambda path, mode: Path(path).name not in machine.locked
    )
    monkeypatch.setattr(probe, "group_of", lambda path: "render")
    return machine


def reason(kind: type[Absent] | type[Broken]) -> str:
    verdict = probe.probe(FACTS)
    assert isinstance(verdict, kind), verdict
    return verdict.reason


def facts() -> dict[str, object]:
    verdict = probe.probe(FACTS)
    assert isinstance(verdict, Ok), verdict
    return dict(verdict.facts)


def test_a_gpu_is_described(machine: Machine) -> None:
    machine.add(product="AMD Instinct MI300X OAM")
    machine.add()
    write(machine.root / "sys/module/amdgpu/version", "6.12.12\n")
    assert facts() == {
        "devices": 2,
        "name": "AMD Instinct MI300X OAM",
        "architecture": "gfx942",
        "memory_gib": 192.0,
        "driver": "6.12.12",
    }


def test_what_the_kernel_does_not_say_is_left_out(machine: Machine) -> None:
    machine.add(version=90010, gib=64, has_bank=False)
    assert facts() == {
        "devices": 1,
        "name": "AMD gfx90a",
        "architecture": "gfx90a",
        "memory_gib": 64.0,
    }
    (machine.root / "sys/class/drm/renderD128/device/mem_info_vram_total").unlink()
    assert "memory_gib" not in facts()


def test_nodes_are_numbers(machine: Machine) -> None:
    """The tenth comes after the second."""
    for gib in range(1, 11):
        machine.add(gib=gib)
    (machine.node(3) / "properties").write_bytes(b"")  # as in a container that hides it
    sizes = [gpu.memory_bytes // GIB for gpu in gpus_of(probe.SYSTEM)]
    assert sizes == [1, 2, 4, 5, 6, 7, 8, 9, 10]


def test_no_gpu_is_no_problem(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no AMD GPU that computes" in reason(Absent)
    machine.add(uuid=0xAB12)
    for name in VARIABLES:
        for value in ("", "-1", "3", "GPU-99999999"):
            monkeypatch.setenv(name, value)
            assert reason(Absent) == (f"{name}={value} hides all AMD GPUs (GPU-000000000000ab12)")
        monkeypatch.delenv(name)
    for path in ("dri/renderD128", "kfd"):
        (machine.root / "dev" / path).unlink()
        text = reason(Absent)
        assert f"{path} is not here; docker run needs --device" in text and "gfx942" in text


def test_a_gpu_without_its_file_does_not_count(machine: Machine) -> None:
    machine.add(gib=64)
    machine.add(gib=128)
    (machine.root / "dev/dri/renderD128").unlink()
    assert (facts()["devices"], facts()["memory_gib"]) == (1, 128.0)


def test_devices_that_may_not_be_opened_are_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.add(product="AMD Instinct MI210")
    machine.add()
    machine.locked = {"kfd"}
    text = reason(Broken)
    assert text.startswith("there is an AMD GPU (AMD Instinct MI210, gfx942), but this process may")
    assert "/dev/kfd: add this user to its group render (sudo usermod -a -G render $USER)" in text
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(probe, "group_of", lambda path: "video")
    machine.locked = {"renderD129"}  # hidden, and opened nevertheless
    assert "dri/renderD129: add this user to its group video" in reason(Broken)
    monkeypatch.setattr(probe, "group_of", lambda path: "root")
    assert "belongs to the group root, and not to render or video" in reason(Broken)


def test_groups_have_names_or_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(probe, "getgrgid", unknown)
    assert probe.group_of(tmp_path) == str(tmp_path.stat().st_gid)


def test_a_torch_that_is_not_for_rocm_is_a_problem(machine: Machine) -> None:
    machine.add()
    machine.versions = {"cuda": None, "hip": None}
    assert "(gfx942), but the installed torch was built without ROCm" in reason(Broken)
    machine.versions = {"cuda": "13.0", "hip": None}
    assert "install a torch for ROCm, or choose --device cpu" in reason(Broken)


def test_gpus_that_nobody_wants_to_use_are_no_problem(machine: Machine) -> None:
    """A torch for ROCm is the sign that they should be used."""
    machine.versions = {"cuda": "13.0", "hip": None}
    machine.add(version=100306, gib=1)
    assert "the AMD GPU (gfx1036) has little memory, and the installed" in reason(Absent)
    machine.add()
    assert "without ROCm" in reason(Broken)
    write(machine.root / "nvidia", "580.1")
    assert "torch is for CUDA" in reason(Absent)
    machine.versions["hip"] = "7.2"
    assert facts()["memory_gib"] == 1.0


def test_names_of_architectures() -> None:
    versions = {
        90402: "gfx942",
        90010: "gfx90a",
        90008: "gfx908",
        90500: "gfx950",
        100306: "gfx1036",
        110501: "gfx1151",
        120001: "gfx1201",
        0: "unknown",
    }
    assert {version: architecture_of(version) for version in versions} == versions


def gpu(uuid: str) -> GPU:
    return GPU("gfx942", uuid, 0, uuid[-1:], "")


GPUS = [
    gpu("GPU-000000000000aa01"),
    gpu("GPU-000000000000aa02"),
    gpu("GPU-bb00000000000003"),
    gpu(""),
]


def names(**variables: str) -> str:
    """Returns the last digits of the visible GPUs; - = the one without a UUID."""
    environ = {f"{name.upper()}_VISIBLE_DEVICES": value for name, value in variables.items()}
    return "".join(gpu.name or "-" for gpu in visible_gpus(GPUS, environ))


@pytest.mark.parametrize(
    ("variables", "visible"),
    [
        ({}, "123-"),
        ({"rocr": "2,0"}, "31"),
        ({"rocr": "0x1, 02 ,3"}, "23-"),
        ({"rocr": "1,1,0"}, "2"),
        ({"rocr": "0,9,1"}, "1"),
        ({"rocr": "0,1x,2"}, "1"),
        ({"rocr": "gpu-BB,0"}, "31"),
        ({"rocr": "GPU-000000000000aa"}, ""),  # two begin so
        ({"rocr": "GPU-,0"}, ""),
        ({"rocr": "08,0"}, ""),
        ({"rocr": ""}, ""),
        ({"hip": "2,0"}, "31"),
        ({"hip": "1,1,0"}, "21"),
        ({"hip": "0,-1,1"}, "1"),
        ({"hip": "0,01,1"}, "1"),
        ({"hip": "0, 1"}, "1"),
        ({"hip": "GPU-bb,GPU-0"}, "31"),
        ({"hip": "GPU-BB"}, ""),
        ({"cuda": "1"}, "2"),
        ({"cuda": "1", "hip": "0"}, "1"),
        ({"rocr": "2,1", "hip": "0"}, "3"),
        ({"rocr": "2,1", "cuda": "1"}, "2"),
        ({"rocr": "2,1", "hip": "2"}, ""),
    ],
)
def test_lists_are_read_as_rocm_reads_them(variables: dict[str, str], visible: str) -> None:
    assert names(**variables) == visible


@given(
    st.dictionaries(
        st.sampled_from(["rocr", "hip", "cuda"]), st.text("0123x-, GPUabé²", max_size=9)
    )
)
def test_any_text_shows_some_of_the_gpus(variables: dict[str, Any]) -> None:
    shown = names(**variables)
    assert set(shown) <= set("123-") and len(set(shown)) == len(shown)
