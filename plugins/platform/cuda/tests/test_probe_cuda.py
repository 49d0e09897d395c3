"""What the probe says of the driver, its GPUs and CUDA_VISIBLE_DEVICES, on a fake of NVML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from pegboard_platform_cuda import nvml as nvml_module
from pegboard_platform_cuda import probe
from pegboard_platform_cuda.visible import part_of_gpu, visible_gpus

from pegboard.interfaces.spec import Absent, Broken, Ok, ProbeFacts, Verdict

FACTS = ProbeFacts("x86_64")
NO_SUCH = 6


@dataclass
class GPU:
    name: str = "NVIDIA X100"
    uuid: str = "GPU-aa11"
    gib: int = 80
    major: int = 9
    is_divided: bool = False


PART = GPU("NVIDIA X100 MIG 1g.10gb", "MIG-77", 10)
X100, X100_TOO, L4 = GPU(), GPU(uuid="GPU-aa22"), GPU("NVIDIA L4", "GPU-bb33", 24, 8)


class FakeNVML:
    """gpus: in the order of their PCI bus ids; a handle is a place in devices. status: what every
    function returns; 0 = success."""

    def __init__(self, *gpus: GPU, status: int = 0, parts: Sequence[GPU] = ()) -> None:
        self.nvmlErrorString = lambda status: b"Driver/library version mismatch"
        self.nvmlShutdown = lambda: 0
        self.status = status
        self.count = len(gpus)
        self.devices = [*gpus, *parts]

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.status or getattr(self, f"do_{name}")(*arguments) or 0

    def device(self, handle: Any) -> GPU:
        return self.devices[handle.value - 1]

    def do_nvmlInit_v2(self) -> None: ...

    def do_nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = self.count

    def do_nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:
        handle._obj.value = index.value + 1

    def do_nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        uuids = [device.uuid for device in self.devices]
        if uuid.decode() not in uuids:
            return NO_SUCH
        handle._obj.value = uuids.index(uuid.decode()) + 1
        return 0

    def do_nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: Any, handle: Any) -> None:
        handle._obj.value = 1

    def do_nvmlDeviceGetMigMode(self, gpu: Any, current: Any, pending: Any) -> None:
        current._obj.value = self.device(gpu).is_divided

    def do_nvmlDeviceGetUUID(self, gpu: Any, text: Any, length: Any) -> None:
        text.value = self.device(gpu).uuid.encode()

    def do_nvmlDeviceGetName(self, device: Any, text: Any, length: Any) -> None:
        text.value = self.device(device).name.encode()

    def do_nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> None:
        memory._obj.total = self.device(device).gib * 2**30

    def do_nvmlDeviceGetCudaComputeCapability(self, gpu: Any, major: Any, minor: Any) -> int:
        if gpu.value > self.count:
            return NO_SUCH  # parts have none of their own
        major._obj.value = self.device(gpu).major
        minor._obj.value = 0
        return 0

    def do_nvmlSystemGetDriverVersion(self, text: Any, length: Any) -> None:
        text.value = b"580.1"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Returns a function that installs a fake driver, or removes it (None)."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr(probe, "torch_reason", lambda *names: None)

    def install(nvml: FakeNVML | None, loaded: bool = True) -> None:
        def load(name: str) -> FakeNVML:
            if nvml is None:
                raise OSError(f"{name}: cannot open shared object file")
            return nvml

        monkeypatch.setattr(nvml_module.ctypes, "CDLL", load)
        monkeypatch.setattr(probe, "DRIVER", tmp_path if loaded else tmp_path / "none")

    return install


@pytest.fixture
def shown(driver: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function: the verdict for a value of CUDA_VISIBLE_DEVICES on these GPUs."""

    def verdict(value: str, *gpus: GPU, **more: Any) -> Verdict:
        driver(FakeNVML(*gpus, **more))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        return probe.probe(FACTS)

    return verdict


def facts_of(verdict: Verdict) -> dict[str, object]:
    assert isinstance(verdict, Ok)
    return dict(verdict.facts)


def test_a_gpu_is_described(driver: Any) -> None:
    driver(FakeNVML(X100, X100_TOO))
    facts = {
        "devices": 2,
        "name": "NVIDIA X100",
        "memory_gib": 80.0,
        "capability": "9.0",
        "driver": "580.1",
    }
    assert probe.probe(FACTS) == Ok(facts)


def test_no_gpu_is_no_problem(driver: Any, shown: Any) -> None:
    for nvml, loaded in ((None, False), (FakeNVML(X100, status=9), False), (FakeNVML(), True)):
        driver(nvml, loaded)
        assert isinstance(probe.probe(FACTS), Absent)
    for value in ("", "-1", "none", "NoDevFiles", "7", "GPU-ff", "GPU-aa", "0,0"):
        assert shown(value, X100, X100_TOO) == Absent(
            f"CUDA_VISIBLE_DEVICES={value} hides all GPUs"
        )


def test_a_gpu_that_cannot_be_used_is_a_problem(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(None)
    verdict = probe.probe(FACTS)
    assert isinstance(verdict, Broken) and "libnvidia-ml.so.1 is not usable" in verdict.reason
    driver(FakeNVML(X100, status=18))
    assert probe.probe(FACTS) == Broken(
        "the NVIDIA driver does not answer: nvmlInit_v2: Driver/library version mismatch"
    )
    driver(FakeNVML(X100))
    monkeypatch.setattr(probe, "torch_reason", lambda *names: "torch is old")
    assert probe.probe(FACTS) == Broken("there is an NVIDIA GPU (NVIDIA X100), but torch is old")


def test_the_first_visible_gpu_is_described(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("GPU-bb33", "GPU-b,GPU-aa1"):  # UUIDs do not depend on the order
        assert facts_of(shown(value, X100, L4))["memory_gib"] == 24
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    first = facts_of(shown("1,0", X100, L4))
    assert (first["devices"], first["name"], first["capability"]) == (2, "NVIDIA L4", "8.0")
    assert facts_of(shown("0", X100, L4))["name"] == "NVIDIA X100"


def test_no_name_is_claimed_where_the_order_is_unknown(
    shown: Any, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA sorts by speed, and NVML by PCI bus id."""
    facts = facts_of(shown("1", X100, L4, GPU("NVIDIA H2", "GPU-cc", 80)))
    assert facts["devices"] == 1 and facts["name"] == "NVIDIA X100 or NVIDIA L4 or NVIDIA H2"
    assert "CUDA_DEVICE_ORDER is not PCI_BUS_ID" in str(facts["note"])
    assert not {"memory_gib", "capability"} & facts.keys()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver(FakeNVML(X100, GPU("NVIDIA H2", "GPU-cc", 80)))
    facts = facts_of(probe.probe(FACTS))
    assert facts["memory_gib"] == 80 and "note" in facts
    assert "note" not in facts_of(shown("1", X100, X100_TOO)), "they are the same"


def test_parts_of_gpus(shown: Any, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GPU(is_divided=True)
    facts = facts_of(shown("MIG-77,MIG-78", whole, parts=[PART]))
    assert facts == {
        "devices": 1,
        "name": "NVIDIA X100 MIG 1g.10gb",
        "memory_gib": 10.0,
        "capability": "9.0",
        "part": "MIG-77",
        "driver": "580.1",
    }
    facts = facts_of(shown("MIG-GPU-aa11/1/0", whole, parts=[PART]))
    assert facts["name"] == "MIG-GPU-aa11/1/0" and "memory_gib" not in facts
    assert "the driver does not describe this part: nvmlDevice" in str(facts["part"])
    facts = facts_of(shown("0", whole))
    assert "memory_gib" not in facts and "one part (MIG)" in str(facts["part"])


@pytest.mark.parametrize(
    ("variable", "places"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("0,2,-1,1", [0, 2]),
        ("1,9,0", [1]),
        ("1gpu,2x", [1, 2]),  # only the number at the beginning is read
        ("1,,2", [1]),
        ("0,GPU-b", [0]),
        ("GPU-b,GPU-a2", [2, 1]),
        ("GPU-b,GPU-a,GPU-a2", [2]),  # two UUIDs begin with GPU-a
        ("GPU-b,0", [2]),
        ("GPU-b,GPU-b1", []),
        ("1,1", []),
        ("", []),
    ],
)
def test_lists_are_read_as_cuda_reads_them(variable: str | None, places: list[int]) -> None:
    assert visible_gpus(variable, ["GPU-a1", "GPU-a2", "GPU-b1"]) == places
    assert part_of_gpu(variable) is None


def test_a_torch_without_cuda_is_named(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "torch_reason", lambda *names: f"no {' '.join(names)}")
    assert shown("0", X100) == Broken("there is an NVIDIA GPU (NVIDIA X100), but no cuda CUDA")
