"""Images: the formats and modes, what is transparent, and that damaged files are only refused."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import MediaReaderSetup, MediaSource
from pegboard_media import Reader, images

SIZE = (7, 5)


def read(value: Any, **options: Any) -> Any:
    return read_both(value, **options)[0]


def read_both(value: Any, **options: Any) -> tuple[Any, bytes]:
    reader = Reader(MediaReaderSetup(options={"image": options}))
    return reader.read(MediaSource(modality="image", value=value, path="content[1]"))


def saved(image: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def picture(mode: str = "RGB") -> Image.Image:
    numbers = np.random.default_rng(3).integers(0, 256, (SIZE[1], SIZE[0], 3), np.uint8)
    return Image.fromarray(numbers).convert(mode)


@cache
def files() -> dict[str, bytes]:
    return {name: saved(picture(), name) for name in images.FORMATS}


@pytest.mark.parametrize("name", images.FORMATS)
def test_formats(name: str) -> None:
    image = read(files()[name])
    assert (image.mode, image.size) == ("RGB", SIZE)
    if name in ("PNG", "BMP", "TIFF"):
        assert image.tobytes() == picture().tobytes()


@pytest.mark.parametrize("name", ["EPS", "PDF", "PPM", "TGA", "ICO", "ICNS", "PCX"])
def test_other_formats_are_not_tried(name: str) -> None:
    with pytest.raises(RequestError, match="not one of PNG, JPEG"):
        read(saved(picture(), name))


@pytest.mark.parametrize("mode", ["1", "L", "P", "I", "F", "CMYK", "YCbCr", "HSV", "LAB", "I;16"])
@pytest.mark.parametrize("is_file", [False, True])
def test_modes(mode: str, is_file: bool) -> None:
    if mode == "I;16":
        numbers = np.arange(35, dtype=np.uint16).reshape(5, 7) * 1800
        image = Image.fromarray(numbers)
    elif mode == "LAB":
        image = Image.new("LAB", SIZE, (100, 128, 128))
    else:
        image = picture(mode)
    value = saved(image, "TIFF") if is_file and mode != "HSV" else image
    result = read(value)
    assert (result.mode, result.size) == ("RGB", SIZE)
    if mode != "YCbCr":
        assert result.tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA", "RGBa"])
@pytest.mark.parametrize("color", [(255, 255, 255), (10, 20, 30)])
def test_transparent_parts_show_the_background(mode: str, color: tuple[int, int, int]) -> None:
    if mode in ("P", "PA"):
        image = Image.new("P", (2, 1))
        image.putpalette([0, 0, 0, 90, 90, 90])
        image.putpixel((1, 0), 1)
        image.info["transparency"] = 0
    else:
        image = Image.new("RGBA", (2, 1))
        image.putpixel((1, 0), (90, 90, 90, 255))
    image = image.convert(mode)
    values = [image, saved(image, "PNG")] if mode in ("P", "LA", "RGBA") else [image]
    for value in values:
        result = read(value, rgba_background_color=list(color))
        assert [result.getpixel((column, 0)) for column in (0, 1)] == [color, (90, 90, 90)]


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation(name: str) -> None:
    frames = [Image.new("RGB", SIZE, color) for color in ("red", "lime", "blue")]
    options: dict[str, Any] = {"lossless": True} if name == "WEBP" else {}
    content = saved(frames[0], name, save_all=True, append_images=frames[1:], **options)
    assert read(content).getpixel((0, 0)) == (255, 0, 0)


def test_exif_does_not_turn_a_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read(saved(picture(), "JPEG", exif=exif)).size == SIZE


@pytest.mark.parametrize("name", images.FORMATS)
def test_too_many_pixels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 34)
    with pytest.raises(RequestError, match="7 x 5 pixels; at most 34"):
        read(files()[name])
    with pytest.raises(RequestError, match="7 x 5 pixels; at most 34"):
        read(picture())


@pytest.mark.parametrize("side", [9000, 20_000, 2**31 - 1])
def test_a_bomb_is_refused_by_its_header(side: int) -> None:
    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    content += chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    with pytest.raises(RequestError, match="pixels"):
        read(content)


@pytest.mark.parametrize("name", images.FORMATS)
def test_truncated_files_are_refused(name: str) -> None:
    content = saved(Image.effect_noise((64, 64), 90).convert("RGB"), name)
    for part in (content[: len(content) // 2], content[:20], content[:1], b""):
        with pytest.raises(RequestError) as error:
            read(part)
        assert error.value.parameter == "content[1]"


@given(st.data())
def test_damaged_files_are_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(files()[data.draw(st.sampled_from(images.FORMATS))])
    places = st.integers(0, len(content) - 1)
    for place, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=12)):
        content[place] = byte
    start, count = data.draw(st.tuples(places, st.integers(0, 8)))
    if data.draw(st.booleans()):
        del content[start : start + count]
    try:
        image = read(bytes(content))
    except RequestError:
        return
    assert image.mode == "RGB"


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(RequestError):
        read(content)


@given(arrays(np.uint8, st.tuples(st.integers(1, 6), st.integers(1, 6), st.just(3))))
def test_objects_are_what_their_files_are(numbers: np.ndarray) -> None:
    expected = Image.fromarray(numbers)
    for value in (numbers, numbers[::-1][::-1], expected, saved(expected, "PNG")):
        assert np.array_equal(np.asarray(read(value)), numbers)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        ["a"],
        np.zeros((2, 2), np.uint8),
        np.zeros((2, 2, 4), np.uint8),
        np.zeros((2, 2, 3), np.float32),
        np.zeros((0, 2, 3), np.uint8),
        Image.new("RGB", (0, 3)),
    ],
)
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="content"):
        read(value)


@given(
    arrays(np.uint8, st.tuples(st.integers(1, 3), st.integers(1, 3), st.just(3))),
    arrays(np.uint8, st.tuples(st.integers(1, 3), st.integers(1, 3), st.just(3))),
)
def test_identities_differ_where_images_do(one: np.ndarray, other: np.ndarray) -> None:
    is_same = one.shape == other.shape and np.array_equal(one, other)
    assert (read_both(one)[1] == read_both(other)[1]) == is_same
    as_files = [saved(Image.fromarray(numbers), "BMP") for numbers in (one, other)]
    assert (read_both(as_files[0])[1] == read_both(as_files[1])[1]) == is_same
    assert read_both(one)[1] == read_both(Image.fromarray(one))[1]


def test_an_identity_depends_on_the_background() -> None:
    clear = saved(Image.new("RGBA", (2, 2)), "PNG")
    for value in (clear, Image.new("RGBA", (2, 2))):
        white, black = (
            read_both(value, rgba_background_color=[shade] * 3)[1] for shade in (255, 0)
        )
        assert white != black
        assert white == read_both(value)[1]


def test_the_object_of_the_caller_is_not_shared() -> None:
    image = picture()
    result = read(image)
    image.putpixel((0, 0), (1, 2, 3))
    assert result.tobytes() == picture().tobytes()
