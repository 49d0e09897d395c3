from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegboard_pack_gguf.ggml_types import GGML_TYPES
from pegboard_pack_gguf.header import read_header
from pegboard_pack_gguf.loader import GGUFLoader

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import WeightLoaderSetup


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def file_bytes(
    values: bytes = b"",
    num_values: int = 0,
    tensors: bytes = b"",
    num_tensors: int = 0,
    version: int = 3,
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + values + tensors


def tensor(
    name: bytes = b"t", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0
) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def test_type_table_equals_the_packages() -> None:
    for number, known in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (known.name, (known.block_size, known.block_bytes)) == (
            kind.name,
            gguf.GGML_QUANT_SIZES[kind],
        )


def test_every_value_type_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"u{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"i{bits}", -(2 ** (bits - 1)))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "žluťoučký 😀")
    writer.add_array("strings", ["", "a", "▁b"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("bools", [True, False])
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    expected = {f"u{bits}": 2**bits - 1 for bits in (8, 16, 32, 64)} | {
        f"i{bits}": -(2 ** (bits - 1)) for bits in (8, 16, 32, 64)
    }
    expected |= {
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "žluťoučký 😀",
        "strings": ["", "a", "▁b"],
    }
    expected |= {
        "numbers": [1, -2, 3],
        "floats": [0.5, -1.5],
        "bools": [True, False],
        "general.architecture": "llama",
    }
    assert header.metadata == expected
    (found,) = header.tensors
    assert (found.name, found.shape, found.type.name, found.num_bytes) == ("t", (2, 3), "F32", 24)
    assert np.frombuffer(path.read_bytes(), np.float32, 6, found.offset).tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04", "is not a GGUF file: it starts with .*; fetch it again"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid",
            "is a Git LFS pointer, not the file itself: run `git lfs pull` in",
        ),
        (b"GGUF", "ends inside version"),
        (file_bytes(version=1), "version 1"),
        (file_bytes(version=0x03000000), "big-endian"),
        (file_bytes(num_tensors=2**60), "tensor count .*; fetch it again"),
        (file_bytes(num_values=2**60), "metadata count"),
        (file_bytes(string(b"k") + struct.pack("<I", 99) + bytes(20), 1), "unknown value type 99"),
        (file_bytes(struct.pack("<Q", 2**63) + bytes(20), 1), "ends inside a metadata key"),
        (file_bytes(string(b"\xff\xfe") + bytes(20), 1), "not UTF-8"),
        (file_bytes(string(b"k") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(20), 1), "item count"),
        (file_bytes(string(b"k") + struct.pack("<IIQ", 9, 8, 2**61) + bytes(20), 1), "item count"),
        (
            file_bytes(string(b"k") + struct.pack("<IIQQ", 9, 8, 1, 2**62) + bytes(20), 1),
            "ends inside item 0",
        ),
        (
            file_bytes(string(b"k") + struct.pack("<II", 9, 9) + bytes(20), 1),
            "array of the unsupported type 9",
        ),
        (file_bytes((string(b"k") + struct.pack("<II", 4, 1)) * 2, 2), "occurs twice"),
        (file_bytes(string(b"general.alignment") + struct.pack("<II", 4, 24), 1), "power of two"),
        (file_bytes(string(b"general.alignment") + struct.pack("<II", 4, 0), 1), "power of two"),
        (file_bytes(tensors=tensor(dims=(1,) * 5) + bytes(99), num_tensors=1), "5 dimensions"),
        (file_bytes(tensors=tensor(dims=()) + bytes(99), num_tensors=1), "0 dimensions"),
        (file_bytes(tensors=tensor(dims=(2**62, 4)) + bytes(99), num_tensors=1), "past the end"),
        (
            file_bytes(tensors=tensor(dims=(0, 4)) + bytes(99), num_tensors=1),
            "cannot have the dimensions",
        ),
        (
            file_bytes(tensors=tensor(dims=(33,), kind=2) + bytes(99), num_tensors=1),
            "cannot have the dimensions",
        ),
        (
            file_bytes(tensors=tensor(kind=77) + bytes(99), num_tensors=1),
            "type 77, which is unknown",
        ),
        (
            file_bytes(tensors=tensor(kind=9) + bytes(99), num_tensors=1),
            "Q8_1, which ggml uses for activations only",
        ),
        (
            file_bytes(tensors=tensor(kind=31) + bytes(99), num_tensors=1),
            "no longer has; convert the model again",
        ),
        (file_bytes(tensors=tensor(offset=3) + bytes(99), num_tensors=1), "not aligned"),
        (file_bytes(tensors=tensor(offset=2**62) + bytes(99), num_tensors=1), "past the end"),
        (file_bytes(tensors=tensor() * 2 + bytes(99), num_tensors=2), "occurs twice"),
    ],
)
def test_damage_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        read_header(tmp_path / "none.gguf")


def describe_damaged(path: Path, data: bytes) -> None:
    """The file is described, or refused with a ModelError; anything else fails the test."""
    damaged = path.with_name("damaged.gguf")
    damaged.write_bytes(data)
    try:
        GGUFLoader(None, WeightLoaderSetup()).describe(LocalFiles(damaged))
    except ModelError:
        return


FUZZ = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(data=st.data())
def test_truncated_files_are_refused(write_gguf, data: st.DataObject) -> None:
    path = write_gguf(name="whole.gguf")
    whole = path.read_bytes()
    damaged = path.with_name("damaged.gguf")
    last = max(tensor.offset + tensor.num_bytes for tensor in read_header(path).tensors)
    damaged.write_bytes(whole[: data.draw(st.integers(0, last - 1))])
    with pytest.raises(ModelError):
        GGUFLoader(None, WeightLoaderSetup()).describe(LocalFiles(damaged))


@FUZZ
@given(data=st.data())
def test_mutated_files_fail_with_a_reason_only(write_gguf, data: st.DataObject) -> None:
    path = write_gguf(
        metadata={
            "tokenizer.ggml.tokens": ["a", "b"],
            "tokenizer.ggml.model": "gpt2",
            "rope.scaling.type": "none",
        },
        name="whole.gguf",
    )
    mutated = bytearray(path.read_bytes())
    header_bytes = min(tensor.offset for tensor in read_header(path).tensors)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_bytes - 1))
        new = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([b"\xff" * 8, bytes(8), b"\x7f" * 4]),
            )
        )
        mutated[at : at + len(new)] = new
    describe_damaged(path, bytes(mutated))


@FUZZ
@given(rest=st.binary(max_size=200))
def test_random_bytes_behind_the_magic(tmp_path: Path, rest: bytes) -> None:
    describe_damaged(tmp_path / "x", b"GGUF" + struct.pack("<I", 3) + rest)
