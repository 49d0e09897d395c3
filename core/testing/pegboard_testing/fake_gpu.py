"""A GPU simulated on the CPU: separate memory, asynchronous copies and captured graphs, as strict
as a real GPU.

    with FakeGPU() as gpu:                      # inside, the device "privateuseone:0" exists
        platform = FakeGPUPlatform(None, PlatformSetup())
        …
    assert gpu.host_reads == 0

Its tensors are `DeviceTensor`s. Mixing them with the host's fails. Reading one on the host counts
as a wait for the device, and so does what has a size that only the device knows, like an index that
is a mask; in a capture both are refused. A recording is a list of operators with the addresses they
were captured with. Replaying one overwrites the results of all others, as if they shared memory.
Writing host memory before its copy to the device is done is an error.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pegboard.errors import CannotRecord, NoRoom
from pegboard.interfaces.platform import Device, MemoryNumbers, PlatformSetup, PlatformSpec, Replay

DEVICE = "privateuseone:0"
TOTAL_BYTES = 64 * 2**20
HOST_READS = frozenset(
    (
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "equal",
        "nonzero",
        "unique",
        "bincount",
    )
)

FAKE_GPU = PlatformSpec(
    api="1.0",
    implementation="pegboard_testing.fake_gpu:FakeGPUPlatform",
    flags=frozenset({"device"}),
)


class DeviceTensor(Tensor):
    """Memory of the fake device."""

    device = property(lambda self: torch.device(DEVICE))  # type: ignore[assignment]


class FakeGPU(TorchFunctionMode):
    """The device, which exists inside the `with` block. host_reads: how often the host waited to
    read a tensor. uploads, downloads: numbers of copies that did not make the host wait when they
    were started. blocking_uploads: uploads from host memory that the device cannot copy from by
    itself. total_bytes: its memory. is_mapped: whether there is memory behind an address; None =
    always. uses: (address, stream) of the calls of `Tensor.record_stream`. place: returns memory
    for a new tensor of so many bytes, or None if there is none; None = it stays where it is."""

    current: FakeGPU | None = None

    def __init__(self) -> None:
        super().__init__()
        self.host_reads = self.uploads = self.downloads = self.blocking_uploads = self.captures = (
            self.replays
        ) = 0
        self.peak_bytes = 0
        self.total_bytes = TOTAL_BYTES
        self.is_capturing = False
        self.refusal: Callable[[str], Exception] = CannotRecord
        self.captured_bytes = 0  # by the graph that is being captured
        self.spare_bytes = 0  # that other graphs have and this one may use
        self.used_bytes = 0
        self.is_mapped: Callable[[int], bool] | None = None
        self.uses: list[tuple[int, Any]] = []
        self.place: Callable[[int], Tensor | None] | None = None
        self._tensors: dict[int, int] = {}  # live tensors by the address of their memory

    def __enter__(self) -> FakeGPU:
        FakeGPU.current = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        FakeGPU.current = None
        super().__exit__(*error)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        tensors = list(_tensors((args, kwargs)))
        on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        if on_device and name in HOST_READS:
            self._read(name)
            with torch._C.DisableTorchFunction():
                self.check_mapped(on_device)
            return function(*_to_host(args), **kwargs)
        if _is_sized_by_device(name, args, kwargs):
            self._read(name)
        if (
            name == "to"
            and not on_device
            and any(_is_device(value) for value in (*args[1:], *kwargs.values()))
        ):
            self.blocking_uploads += 1
            rest = [value for value in args[1:] if not _is_device(value)]
            return self._made(args[0].clone().to(*rest).as_subclass(DeviceTensor))
        if name == "to":
            args = [a for a in args if not _is_device(a)]
            kwargs = {k: v for k, v in kwargs.items() if not _is_device(v)}
            if len(args) == 1 and not kwargs:
                return args[0]
        elif _is_device(kwargs.get("device")):
            self.blocking_uploads += name in ("tensor", "as_tensor")  # of what the host has
            del kwargs["device"]
            with torch._C.DisableTorchFunction():
                return self._made(function(*args, **kwargs).as_subclass(DeviceTensor))
        elif name in ("copy_", "__setitem__") and on_device and len(on_device) < len(tensors):
            self.blocking_uploads += 1
            with torch._C.DisableTorchFunction():
                return function(*args, **kwargs)
        elif on_device and any(
            tensor.dim() for tensor in tensors if not isinstance(tensor, DeviceTensor)
        ):
            raise RuntimeError(
                f"{name}: expected all tensors on the device, but one is on the host"
            )
        result = self._made(function(*args, **kwargs))
        if self.is_mapped is not None:
            self._check_access(name, on_device, result)
        return result

    def _check_access(self, name: str, given: Sequence[Tensor], result: Any) -> None:
        """A view reads and writes nothing."""
        with torch._C.DisableTorchFunction():
            storages = {_storage(tensor) for tensor in given}
            fresh = [tensor for tensor in _tensors(result) if _storage(tensor) not in storages]
            writes = name == "__setitem__" or (name[-1:] == "_" and name[:2] != "__")
            if fresh or (writes and name != "set_"):
                self.check_mapped(given)

    def check_mapped(self, tensors: Iterable[Tensor]) -> None:
        """The device uses these tensors."""
        if self.is_mapped is not None and not all(
            self.is_mapped(tensor.data_ptr()) for tensor in tensors if tensor.numel()
        ):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def _read(self, name: str) -> None:
        if self.is_capturing:
            raise self.refusal(f"{name} reads a tensor of the device on the host")
        self.host_reads += 1

    def _made(self, result: Any) -> Any:
        """Count the memory in use. That of graphs is counted when one has been captured."""
        if self.place is not None and not self.is_capturing:
            with torch._C.DisableTorchFunction():
                result = self._placed(result)
        for tensor in _tensors(result):
            if isinstance(tensor, DeviceTensor):
                with torch._C.DisableTorchFunction():
                    storage = tensor.untyped_storage()
                    address = storage.data_ptr()
                    size = storage.nbytes()
                is_new = address not in self._tensors
                needed = size if is_new else 0
                more = needed
                if self.is_capturing:
                    more = max(0, self.captured_bytes + needed - self.spare_bytes)
                if self.used_bytes + more > self.total_bytes:
                    self._refuse(size)
                if is_new and self.is_capturing:
                    self.captured_bytes += size
                    continue
                self.used_bytes += needed
                self._tensors[address] = self._tensors.get(address, 0) + 1
                weakref.finalize(tensor, self._gone, address, size)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return result

    def _placed(self, value: Any) -> Any:
        """Move new tensors to memory of the pool that is in use. The library counts that."""
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self._placed(part) for part in value)
        if not isinstance(value, DeviceTensor) or not value.untyped_storage().nbytes():
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() in self._tensors:
            return value
        assert self.place is not None
        data = self.place(storage.nbytes())
        if data is None:
            self._refuse(storage.nbytes())
        data.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        place = value.storage_offset(), value.size(), value.stride()
        moved = torch.empty(0, dtype=value.dtype).set_(data.untyped_storage(), *place)
        self._tensors[_storage(moved)] = 1  # for good
        return moved.as_subclass(DeviceTensor)

    def _refuse(self, size: int) -> NoReturn:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU 0 has a total "
            f"capacity of {self.total_bytes / 2**20:.2f} MiB."
        )

    def _gone(self, address: int, size: int) -> None:
        self._tensors[address] -= 1
        if not self._tensors[address]:
            del self._tensors[address]
            self.used_bytes -= size


def _is_device(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value) == DEVICE


def _is_sized_by_device(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether the host must know how many places of a mask are set, how often rows are
    repeated, or how long segments are."""
    if name == "masked_select":
        return True
    if name == "segment_reduce":  # the host checks the lengths
        return not kwargs.get("unsafe")
    if name == "repeat_interleave":
        counts = kwargs.get("repeats", args[-1] if args else None)
        return isinstance(counts, DeviceTensor) and kwargs.get("output_size") is None
    if name not in ("__getitem__", "__setitem__"):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    has_mask = any(isinstance(i, DeviceTensor) and i.dtype is torch.bool for i in index)
    is_filled = name == "__setitem__" and (not isinstance(args[2], Tensor) or not args[2].dim())
    return has_mask and not is_filled


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _to_host(args: Any) -> list[Any]:
    with torch._C.DisableTorchFunction():
        return [arg.as_subclass(Tensor) if isinstance(arg, Tensor) else arg for arg in args]


def _gpu() -> FakeGPU:
    assert FakeGPU.current is not None, "the fake device exists inside `with FakeGPU()`"
    return FakeGPU.current


class FakeCopies:
    """See `pegboard.interfaces.platform.Copies` and `SideCopies`. What is stored arrives as late as
    possible."""

    def __init__(self) -> None:
        self.in_flight: list[tuple[Tensor, Tensor]] = []
        self.pinned: set[int] = set()
        self.stored: list[tuple[Tensor, Tensor, list[Tensor]]] = []

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        memory = torch.zeros(shape, dtype=dtype)
        self.pinned.add(memory.untyped_storage().data_ptr())
        return memory

    def upload(self, source: Tensor, target: Tensor) -> None:
        gpu = _gpu()
        gpu.uploads += 1
        with torch._C.DisableTorchFunction():
            assert self._is_pinned(source), "the device cannot copy from this memory by itself"
            assert (
                isinstance(target, DeviceTensor)
                and source.shape == target.shape
                and source.dtype == target.dtype
            )
            is_used = source.numel() and any(
                source.data_ptr() == other.data_ptr() for other, _ in self.in_flight
            )
            assert not is_used, (
                "host memory was filled again, and nothing waited for its copy to the device"
            )
            self.in_flight.append((source, source.clone()))
            target.copy_(source)

    def download(self, source: Tensor) -> Callable[[], Tensor]:
        _gpu().downloads += 1
        assert isinstance(source, DeviceTensor)
        with torch._C.DisableTorchFunction():
            copied = source.clone().as_subclass(Tensor)
        return lambda: copied

    def mark(self) -> Callable[[], None]:
        started = list(map(id, self.in_flight))

        def wait() -> None:
            for copy in [copy for copy in self.in_flight if id(copy) in started]:
                assert torch.equal(*copy), (
                    "host memory was written before its copy to the device was done"
                )
                self.in_flight = [other for other in self.in_flight if other is not copy]

        return wait

    def store(self, rows: Tensor, targets: Sequence[Tensor]) -> None:
        _gpu().downloads += 1
        with torch._C.DisableTorchFunction():
            assert isinstance(rows, DeviceTensor) and len(rows) == len(targets)
            assert all(self._is_pinned(target) for target in targets)
            self.stored.append((rows, rows.clone(), list(targets)))

    def load(self, sources: Sequence[Tensor]) -> Tensor:
        gpu = _gpu()
        gpu.uploads += 1
        self._arrive()
        with torch._C.DisableTorchFunction():
            assert all(map(self._is_pinned, sources))
            return gpu._made(torch.stack(list(sources)).as_subclass(DeviceTensor))  # type: ignore[no-any-return]

    def _arrive(self) -> None:
        with torch._C.DisableTorchFunction():
            for rows, before, targets in self.stored:
                assert torch.equal(rows, before), "rows were changed before they were copied"
                for row, target in zip(before, targets, strict=True):
                    target.copy_(row)
        self.stored.clear()

    def _is_pinned(self, memory: Tensor) -> bool:
        return memory.untyped_storage().data_ptr() in self.pinned


class FakeReplay:
    """Captured graphs, one for each size class. What is captured while calls are left out consists
    of pieces. pool_bytes: of the memory that they share, which is as large as the largest one
    needs."""

    pads = True

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.pool_bytes = 0

    def sizes(self, trait: str, largest: int) -> Sequence[int]:
        """Return the powers of two. Steps with prompts have only two sizes."""
        if trait == "forward":
            return sorted({max(largest // 2, 1), largest})
        return sorted({min(2**power, largest) for power in range(largest.bit_length() + 1)})

    def outside(self, call: Callable[..., Tensor], width: int) -> Callable[..., Tensor]:
        """See `pegboard.interfaces.platform.PiecewiseReplay`."""

        def stand_in(*given: Tensor | None) -> Tensor:
            tape = Tape.current
            assert tape is not None, "this stands for a call only while a step is recorded"
            first = given[0]
            assert first is not None
            result = first.new_zeros(len(first), width)
            left = FakeOutside(call, given, result)
            tape.calls.append((left, [x for x in given if x is not None], {}, result))
            return result

        return stand_in

    def record(self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> FakeGraph:
        gpu = _gpu()
        assert all(isinstance(tensor, DeviceTensor) for tensor in inputs), (
            "a graph computes with memory of the device"
        )
        try:
            gpu.is_capturing = True
            gpu.spare_bytes = self.pool_bytes
            with Tape() as tape:
                outputs = run(*inputs)
        except torch.OutOfMemoryError as error:
            raise NoRoom(str(error)) from error
        finally:
            gpu.is_capturing = False
            self._resize(max(self.pool_bytes, gpu.captured_bytes))
            gpu.captured_bytes = 0
        gpu.captures += 1
        self.graphs.append(FakeGraph(self, tape.calls, outputs, len(inputs[0])))
        return self.graphs[-1]

    def reset(self) -> None:
        for graph in self.graphs:
            graph.calls = None
        self.graphs.clear()
        self._resize(0)

    def _resize(self, num_bytes: int) -> None:
        _gpu().used_bytes += num_bytes - self.pool_bytes
        self.pool_bytes = num_bytes


class Tape(TorchDispatchMode):
    """Records operators in the order of their calls, with all tensors that they use. current: the
    one that is recording."""

    current: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __enter__(self) -> Tape:
        Tape.current = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        Tape.current = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, out))
        return out


class FakeGraph:
    """See `pegboard.interfaces.platform.Recording`."""

    def __init__(
        self, replay: FakeReplay, calls: Any, outputs: tuple[Tensor, ...], size: int
    ) -> None:
        self.replay = replay
        self.calls = calls
        self.outputs = outputs
        self.size = size
        self.results: list[Tensor] = []
        with torch._C.DisableTorchFunction():
            known = {
                _storage(tensor)
                for _, args, kwargs, _ in calls
                for tensor in _tensors((args, kwargs))
            }
            fresh: set[int] = set()
            for _, args, _, out in calls:
                given = {_storage(tensor) for tensor in _tensors(args)}
                for tensor in _tensors(out):
                    if _storage(tensor) not in given and _storage(tensor) not in fresh:
                        fresh.add(_storage(tensor))
                        self.results.append(tensor)
            assert known or not calls

    def __call__(self, num_rows: int) -> tuple[Tensor, ...]:
        assert self.calls is not None, "a recording is void after reset()"
        assert 0 < num_rows <= self.size, f"a graph of {self.size} rows cannot compute {num_rows}"
        _gpu().replays += 1
        with torch._C.DisableTorchFunction():
            for other in self.replay.graphs:
                for tensor in other.results if other is not self else ():
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        for operator, args, kwargs, out in self.calls:
            if isinstance(operator, FakeOutside):
                operator(num_rows)
                continue
            with torch._C.DisableTorchFunction():
                _gpu().check_mapped(_tensors((args, kwargs)))
                again = operator(*args, **kwargs)
                for old, new in zip(_tensors(out), _tensors(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)
        with torch._C.DisableTorchFunction():
            return tuple(output[:num_rows].as_subclass(DeviceTensor) for output in self.outputs)


class FakeOutside:
    """A call between two pieces. The rows that it does not compute are not numbers, so what uses
    them shows in the results."""

    def __init__(
        self, call: Callable[..., Tensor], given: Sequence[Tensor | None], result: Tensor
    ) -> None:
        self.call = call
        self.given = given
        self.result = result

    def __call__(self, num_rows: int) -> None:
        computed = self.call(*(x if x is None else x[:num_rows] for x in self.given))
        assert computed.shape == (num_rows, self.result.shape[1])
        assert computed.dtype == self.result.dtype
        self.result.fill_(float("nan"))
        self.result[:num_rows].copy_(computed)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class FakeGPUPlatform:
    """See `pegboard.interfaces.platform.Platform`. The KV cache gets the memory that a step of the
    largest size leaves free."""

    def __init__(self, options: None, setup: PlatformSetup) -> None:
        self.replays: list[FakeReplay] = []
        self.all_copies = FakeCopies()

    def start(self, local_rank: int) -> Device:
        return Device(DEVICE, 1, fixed_tokens=64.0)

    def memory(self, *, reset_peak: bool = False) -> MemoryNumbers:
        gpu = _gpu()
        if reset_peak:
            gc.collect()
        used = gpu.used_bytes
        total = gpu.total_bytes
        numbers = MemoryNumbers(total - used, total, used, max(used, gpu.peak_bytes))
        gpu.peak_bytes = used if reset_peak else gpu.peak_bytes
        return numbers

    def zeros(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)

    def copies(self) -> FakeCopies:
        return self.all_copies

    def replay(self, programs: Callable[[], Replay] | None) -> FakeReplay:
        self.replays.append(FakeReplay())
        return self.replays[-1]

    def defaults(self, checkpoint_dtype: str | None) -> Mapping[str, object]:
        return {
            "dtype": "float32",
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
        }

    def profile(self, path: Path | None) -> None:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            (path / "trace.json").write_text("{}", "utf-8")
