"""Reads which tensors a file of `torch.save` has, and where, without torch and without running
anything that the file says.

Since PyTorch 1.6 such a file is a zip archive: NAME/data.pkl is a pickle of the state dict, whose
tensors refer to storages, and NAME/data/KEY holds the bytes of a storage, not compressed. Older
files are five pickles in a row: a magic number, the version of the protocol, facts about the
machine, the state dict, the list of keys. Then come the storages in the order of the keys, each
with its number of items as 8 bytes before it.

The unpickler here knows a closed list of names (`_NAMES`). All others are refused before anything
is imported. Nothing on the list does more than to keep its arguments.
"""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pegboard.data.checkpoint_file import POINTER, refuse_pointer
from pegboard.errors import ModelError, brief
from pegboard.interfaces.weight_loader import TensorEntry

MAX_PICKLE_BYTES = 64 * 1024 * 1024
MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
LOCAL_HEADER = struct.Struct("<4s22xHH")
"""The header before a member of a zip archive: its signature, and the bytes of the name and of the
extra field that follow it."""
ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
}
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclass(frozen=True, slots=True)
class Storage:
    """The items of one or several tensors. key: its name in the file. num_items: of its type."""

    stored: str
    key: str
    num_items: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A view of a storage. offset, strides: in items. stored: the type of the items."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    stored: str


@dataclass(frozen=True, slots=True)
class StateFile:
    """The tensors of one file by name. is_archive: it is a zip archive, so it can be mapped."""

    tensors: dict[str, TensorEntry]
    is_archive: bool


def read_state_file(path: Path) -> StateFile:
    """Return what a file of torch.save holds. Raises ModelError, which names the file, unless it is
    a whole and plain dictionary of tensors."""
    with _blamed(path), path.open("rb") as file:
        start = file.read(len(POINTER))
        refuse_pointer(path, start)
        file_bytes = path.stat().st_size
        is_archive = start.startswith(b"PK\x03\x04")
        file.seek(0)
        read = _read_archive if is_archive else _read_pickles
        state, places = read(path, file, file_bytes)
        tensors = {name: _entry(path, name, one, places) for name, one in _plain(path, state)}
    return StateFile(tensors, is_archive)


@contextmanager
def _blamed(path: Path) -> Iterator[None]:
    """Turn errors of the file's content into ModelError. A pickle from a stranger may raise nearly
    any error."""
    try:
        yield
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:
        raise ModelError(
            f"{path} is no file of torch.save with a plain dictionary of tensors, or it is "
            f"truncated or damaged ({type(error).__name__}: {error!s:.200}); fetch it again"
        ) from error


# --- the two layouts ------------------------------------------------------------------------------


def _read_archive(path: Path, file: IO[bytes], file_bytes: int) -> tuple[Any, dict[str, int]]:
    """Return the unpickled value, and where each storage begins, in bytes."""
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        pickles = [name for name in members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ModelError(f"{path} is a zip archive, but none of torch.save: fetch it again")
        prefix = pickles[0].removesuffix("data.pkl")
        if members[pickles[0]].file_size > MAX_PICKLE_BYTES:
            raise ModelError(f"{path}: its data.pkl has more than {MAX_PICKLE_BYTES} bytes")
        order = f"{prefix}byteorder"
        if order in members and archive.read(order) != b"little":
            raise ModelError(f"{path} was written on a big-endian machine, which is not supported")
        with archive.open(pickles[0]) as source:
            reader = _Unpickler(path, source)
            state = reader.load()
    places = {}
    for key, storage in reader.storages.items():
        member = members.get(f"{prefix}data/{key}")
        expected = storage.num_items * ITEM_BYTES[storage.stored]
        if member is None or member.compress_type != zipfile.ZIP_STORED:
            raise ModelError(f"{path} has no uncompressed storage {key!r}; fetch it again")
        file.seek(member.header_offset)
        signature, name_bytes, extra_bytes = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        place = member.header_offset + LOCAL_HEADER.size + name_bytes + extra_bytes
        if signature != b"PK\x03\x04" or member.file_size < expected:
            raise ModelError(f"{path} is damaged: storage {key!r} is too short; fetch it again")
        _check_end(path, key, place + expected, file_bytes)
        places[key] = place
    return state, places


def _read_pickles(path: Path, file: IO[bytes], file_bytes: int) -> tuple[Any, dict[str, int]]:
    """Return the unpickled value of a file from before PyTorch 1.6, and where each storage
    begins."""
    if (magic := _Unpickler(path, file).load()) != MAGIC_NUMBER:
        raise ModelError(f"{path} is no file of torch.save: it begins with {brief(magic)}")
    if (protocol := _Unpickler(path, file).load()) != PROTOCOL:
        raise ModelError(f"{path} has version {brief(protocol)}, expected {PROTOCOL}")
    machine = _Unpickler(path, file).load()
    if not isinstance(machine, dict) or not machine.get("little_endian", True):
        raise ModelError(f"{path} was written on a big-endian machine, which is not supported")
    reader = _Unpickler(path, file)
    state = reader.load()
    keys = _Unpickler(path, file).load()
    places = {}
    place = file.tell()
    for key in keys:
        storage = reader.storages[key]
        places[key] = place + 8
        place += 8 + storage.num_items * ITEM_BYTES[storage.stored]
        _check_end(path, key, place, file_bytes)
    return state, places


def _check_end(path: Path, key: str, stop: int, file_bytes: int) -> None:
    if stop > file_bytes:
        raise ModelError(
            f"{path} is truncated: storage {key!r} ends at byte {stop}, the file at {file_bytes}; "
            "fetch it again"
        )


# --- the pickle -----------------------------------------------------------------------------------


def _tensor(
    storage: Storage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool = False,
    hooks: object = None,
    stored: str | None = None,
    metadata: object = None,
) -> StoredTensor:
    """Stand in for torch._utils._rebuild_tensor and its later versions."""
    return StoredTensor(storage, offset, tuple(shape), tuple(strides), stored or storage.stored)


def _version_2(
    storage: Storage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool = False,
    hooks: object = None,
    metadata: object = None,
) -> StoredTensor:
    return _tensor(storage, offset, shape, strides)


def _parameter(data: StoredTensor, requires_grad: bool = False, hooks: object = None) -> Any:
    """Stand in for torch._utils._rebuild_parameter."""
    return data


_NAMES: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _version_2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch.storage", "UntypedStorage"): "uint8",
    **{("torch", name): stored for name, stored in _STORAGES.items()},
    **{("torch", name): name for name in ITEM_BYTES},
}
"""Module and name in a pickle → what stands in for it."""


class _Unpickler(pickle.Unpickler):
    """storages: those that the pickle has named, by key."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        super().__init__(file, encoding="utf-8")
        self.path = path
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        known = _NAMES.get((module, name))
        if known is None:
            raise ModelError(
                f"{self.path} is refused: it is no plain dictionary of tensors, because its pickle "
                f"asks for {module}.{name}, and unpickling that could run any code. If you trust "
                "the file, save its state_dict() as safetensors"
            )
        return known

    def persistent_load(self, pid: Any) -> Storage:
        tag, stored, key, _, num_items, *view = pid
        if tag != "storage" or stored not in ITEM_BYTES or type(key) is not str:
            raise ModelError(f"{self.path} names the unknown storage {brief(pid)}")
        if type(num_items) is not int or num_items < 0 or (view and view[0] is not None):
            raise ModelError(f"{self.path} has the storage {brief(pid)}, which cannot be read")
        storage = Storage(stored, key, num_items)
        if self.storages.setdefault(key, storage) != storage:
            raise ModelError(f"{self.path} describes storage {key!r} in two ways")
        return storage


def _plain(path: Path, state: Any) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a state dict by name."""
    if not isinstance(state, dict) or not state:
        raise ModelError(
            f"{path} holds a {type(state).__name__}, expected a dictionary of tensors by name"
        )
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            advice = (
                f"; if it is the model, save only this part: torch.save(state[{name!r}], file)"
                if isinstance(value, dict)
                else ""
            )
            raise ModelError(
                f"{path} is no plain dictionary of tensors: {brief(name)} is a "
                f"{type(value).__name__}{advice}"
            )
        yield name, value


def _entry(path: Path, name: str, one: StoredTensor, places: Mapping[str, int]) -> TensorEntry:
    """Raise ModelError unless the tensor is inside its storage."""
    numbers = (one.offset, *one.shape, *one.strides)
    if len(one.shape) != len(one.strides) or not all(
        type(number) is int and number >= 0 for number in numbers
    ):
        raise ModelError(f"{path}: tensor {name!r} has shape {one.shape}, strides {one.strides}")
    item = ITEM_BYTES[one.stored]
    last = sum((size - 1) * step for size, step in zip(one.shape, one.strides, strict=True))
    stop = one.offset + last + 1 if all(one.shape) else one.offset
    if stop * item > one.storage.num_items * ITEM_BYTES[one.storage.stored]:
        raise ModelError(f"{path} is damaged: tensor {name!r} ends outside of its storage")
    offset = places[one.storage.key] + one.offset * item
    return TensorEntry(name, one.shape, one.stored, path.name, offset, math.prod(one.shape) * item)
