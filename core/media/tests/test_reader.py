"""The reader: its options, its errors, the cheap import, audio and video."""

from __future__ import annotations

import base64
import contextlib
import io
import subprocess
import sys
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pegboard.errors import ConfigError, RequestError
from pegboard.interfaces.multimodal_processor import MediaReaderSetup, MediaSource
from pegboard_media import Reader, audio, reader, video
from pegboard_testing.films import film_of

TONE = (np.sin(np.arange(4000) / 9) / 2).astype(np.float32)


def read_both(modality: str, value: Any, **options: Any) -> tuple[Any, bytes]:
    setup = MediaReaderSetup(options={modality: options} if options else {})
    return Reader(setup).read(MediaSource(modality=modality, value=value, path="prompt"))


def read(modality: str, value: Any, **options: Any) -> Any:
    return read_both(modality, value, **options)[0]


def sound(samples: np.ndarray, rate: int = 8000, **options: Any) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, **{"format": "WAV", "subtype": "FLOAT"} | options)
    return buffer.getvalue()


def film(count: int, rate: int = 10, width: int = 32, codec: str = "ffv1") -> bytes:
    """A video without losses. The frame of number n has the shade 5n."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, 16, "bgr0"
        for number in range(count):
            shade = np.full((16, width, 3), number * 5, np.uint8)
            frame = av.VideoFrame.from_ndarray(shade, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


# --- the reader -----------------------------------------------------------------------------------


def test_the_import_is_cheap() -> None:
    names = "'PIL', 'numpy', 'torch', 'scipy', 'soundfile', 'av'"
    code = f"import sys, pegboard_media; assert not {{{names}}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "options",
    [
        {"images": {}},
        {"image": {"background": 1}},
        {"audio": {"rate": 1}},
        {"video": {"frames": 1}},
        {"video": {"num_frames": 0}},
        {"video": {"num_frames": -2}},
        {"video": {"num_frames": True}},
        {"video": {"num_frames": 2.0}},
        {"video": {"fps": 0}},
        {"video": {"fps": float("nan")}},
        {"video": {"fps": float("inf")}},
        {"video": {"fps": "2"}},
        {"image": {"rgba_background_color": "white"}},
        {"image": {"rgba_background_color": [1, 2]}},
        {"image": {"rgba_background_color": [1, 2, 256]}},
        {"image": {"rgba_background_color": [1, 2, True]}},
    ],
)
def test_options_that_do_not_exist(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"media_io_kwargs.*expected"):
        Reader(MediaReaderSetup(options=options))


@pytest.mark.parametrize("value", [b"abc", object()])
def test_an_unknown_modality(value: Any) -> None:
    with pytest.raises(RequestError, match="expected image, audio or video"):
        read("smell", value)


@pytest.mark.parametrize("modality", ["image", "audio", "video"])
def test_files_that_are_too_large(modality: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_BYTES", 10)
    with pytest.raises(RequestError, match="larger than 10 bytes") as error:
        read(modality, b"a" * 11)
    assert error.value.parameter == "prompt"


@given(st.binary(max_size=200), st.sampled_from(["image", "audio", "video"]))
def test_random_bytes_are_refused(content: bytes, modality: str) -> None:
    with pytest.raises(RequestError, match=f"prompt: the {modality}"):
        read(modality, content)


# --- audio ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["WAV", "FLAC", "OGG", "MP3", "AIFF"])
def test_audio_files(file_format: str) -> None:
    subtype = None if file_format in ("OGG", "MP3") else "PCM_16"
    content = sound(TONE, 16_000, format=file_format, subtype=subtype)
    samples, rate = read("audio", content)
    assert rate == 16_000
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert abs(len(samples) - len(TONE)) < 2000
    if subtype:
        assert np.abs(samples - TONE).max() < 1e-4


def test_channels_are_averaged() -> None:
    samples, _ = read("audio", sound(np.stack([TONE, TONE * 0], 1)))
    assert np.allclose(samples, TONE / 2)


def test_audio_of_a_data_url_is_that_of_its_bytes() -> None:
    content = sound(TONE)
    url = "data:audio/wav;base64," + base64.b64encode(content).decode()
    (one, rate), identity = read_both("audio", url)
    assert np.array_equal(one, TONE)
    assert identity == read_both("audio", content)[1]
    assert identity != read_both("audio", (TONE, rate))[1]


def test_audio_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "MAX_AUDIO_SECONDS", 0.4)
    for value in (sound(TONE), (TONE, 8000)):
        with pytest.raises(RequestError, match="too long"):
            read("audio", value)
    assert len(read("audio", (TONE, 16_000))[0]) == 4000


@pytest.mark.parametrize(
    "value",
    [
        sound(np.array([0.1, np.nan])),
        sound(np.zeros(0)),
        (np.zeros(0, np.float32), 8000),
        (np.array([np.inf]), 8000),
        (TONE[None], 8000),
        (np.zeros(3, np.int16), 8000),
        (TONE, 0),
        (TONE, -1),
        (TONE, 0.5),
        (TONE, float("nan")),
        (TONE, 10**9),
        (TONE, "8000"),
        TONE,
        None,
    ],
    ids=lambda value: type(value).__name__,  # a recording has the time when it was made
)
def test_audio_that_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="prompt: the audio"):
        read("audio", value)


def test_audio_objects_pass() -> None:
    samples, rate = read("audio", (TONE.astype(np.float64), 8000.0))
    assert (samples.dtype, rate) == (np.float32, 8000)
    assert read_both("audio", (TONE, 8000))[1] != read_both("audio", (TONE, 8001))[1]
    assert read_both("audio", (TONE, 8000))[1] != read_both("audio", (TONE * 0.9, 8000))[1]


@given(st.data())
def test_damaged_audio_is_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(sound(TONE[:100], subtype="PCM_16"))
    places = st.tuples(st.integers(0, 60), st.integers(0, 255))
    for place, byte in data.draw(st.lists(places, max_size=8)):
        content[place] = byte
    try:
        samples, rate = read("audio", bytes(content))
    except RequestError:
        return
    assert len(samples) and rate > 0


def test_a_damaged_file_cannot_seek_before_its_beginning() -> None:
    content = audio.Content(b"abc")
    content.seek(2)
    assert content.seek(-1) == 2
    assert content.seek(2**70) == 2
    assert content.seek(-1, io.SEEK_END) == 2


def test_resampling_keeps_a_tone() -> None:
    samples = audio.resample(TONE, 8000, 16_000)
    assert (samples.dtype, len(samples)) == (np.float32, 8000)
    assert np.abs(samples[100:-100:2] - TONE[50:-50]).max() < 0.01
    assert audio.resample(TONE, 8000, 8000) is TONE


@pytest.mark.parametrize(("modality", "package"), [("audio", "soundfile"), ("video", "av")])
def test_a_missing_decoder(modality: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RequestError, match=rf"pegboard-media\[{modality}\]"):
        read(modality, b"abc")


def test_missing_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.signal", None)
    with pytest.raises(ConfigError, match=r"pegboard-media\[audio\]"):
        audio.resample(TONE, 8000, 16_000)


# --- video ----------------------------------------------------------------------------------------


def shades(frames: np.ndarray) -> list[int]:
    return [round(int(frame.max()) / 5) for frame in frames]


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        (3, {}, [0, 1, 2]),
        (40, {}, [index * 39 // 31 for index in range(32)]),
        (40, {"num_frames": 4}, [0, 13, 26, 39]),
        (40, {"num_frames": 1}, [0]),
        (40, {"num_frames": -1}, list(range(40))),
        (40, {"fps": 1}, [0, 13, 26, 39]),
        (40, {"fps": 0.01}, [0]),
        (40, {"num_frames": 2, "fps": 1}, [0, 39]),
        (40, {"num_frames": -1, "fps": -1}, list(range(40))),
    ],
)
def test_frames_are_evenly_spaced(count: int, options: Any, expected: list[int]) -> None:
    frames, rate, seconds, _ = read("video", film(count), **options)
    assert (frames.dtype, frames.shape) == (np.uint8, (len(expected), 16, 32, 3))
    assert shades(frames) == expected
    assert rate == pytest.approx(10 * len(expected) / count)
    assert seconds == pytest.approx([index / 10 for index in expected])


def test_the_decoder_knows_the_limit_of_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size that the file states is that of another video."""
    monkeypatch.setattr(video, "check_frames", lambda width, height, count: None)
    assert len(read("video", FILM)[0]) == 3
    monkeypatch.setattr(video, "MAX_PIXELS", 16 * 32 - 1)
    with pytest.raises(RequestError, match="is not a video"):
        read("video", FILM)


def test_limits_of_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    content = film(10)
    for name, limit in (
        ("MAX_VIDEO_FRAMES", 9),
        ("MAX_PIXELS", 16 * 32 * 10 - 1),
        ("MAX_DECODED_PIXELS", 16 * 32 * 10 - 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(video, name, limit)
            with pytest.raises(RequestError, match="has .* (frames|pixels)"):
                read("video", content)


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{0}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{0}'\n",
        "<MPD><Period><BaseURL>{0}</BaseURL></Period></MPD>",
    ],
)
def test_files_that_name_other_files_are_refused(text: str, tmp_path: Any) -> None:
    path = tmp_path / "film.mkv"
    path.write_bytes(film(3))
    for name in (str(path), path.as_uri()):
        with pytest.raises(RequestError, match="is not a video"):
            read("video", text.format(name).encode())


# --- the sound of videos --------------------------------------------------------------------------


def heard(num_channels: int = 2) -> tuple[bytes, np.ndarray]:
    """A file, and the samples of its sound."""
    frames = np.zeros((3, 16, 32, 3), np.uint8)
    samples = np.random.default_rng(1).normal(size=(num_channels, 5000)).astype(np.float32)
    return film_of(frames, 10, samples, 8000), samples


@pytest.mark.parametrize("num_channels", [1, 2])
def test_the_sound_of_a_video(num_channels: int) -> None:
    content, samples = heard(num_channels)
    one, rate = read("video", content).sound()
    assert rate == 8000 and one.dtype == np.float32
    np.testing.assert_allclose(one, samples.mean(0), atol=1e-7)


def test_a_video_without_sound() -> None:
    assert read("video", film(3)).sound() is None
    assert read("video", (np.zeros((3, 16, 32, 3), np.uint8), 2.0)).sound is None


def test_sound_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    film_with_sound = read("video", heard()[0])
    monkeypatch.setattr(audio, "MAX_AUDIO_SECONDS", 0.4)
    with pytest.raises(RequestError, match="the video is too long; at most"):
        film_with_sound.sound()


@given(st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 255)), min_size=1, max_size=9))
@settings(deadline=None)
def test_damaged_sound_is_read_or_refused(changes: list[tuple[int, int]]) -> None:
    content = bytearray(HEARD)
    for place, byte in changes:
        content[place % len(content)] = byte
    with contextlib.suppress(RequestError):
        sound_of_it = read("video", bytes(content)).sound()
        assert sound_of_it is None or np.isfinite(sound_of_it[0]).all()


HEARD = heard()[0]


@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), max_size=6))
def test_damaged_videos_are_read_or_refused(changes: list[tuple[int, int]]) -> None:
    content = bytearray(FILM)
    for place, byte in changes:
        content[place % len(content)] = byte
    try:
        frames, rate, seconds, _ = read("video", bytes(content))
    except RequestError:
        return
    assert frames.ndim == 4 and rate > 0 and len(seconds) == len(frames)


FILM = film(3)


def test_video_objects_pass() -> None:
    frames = np.zeros((2, 3, 4, 3), np.uint8)
    value, identity = read_both("video", (frames, 2))
    assert np.array_equal(value[0], frames)
    assert value[1:3] == (2.0, (0.0, 0.5))
    others = [(frames + 1, 2), (frames, 3), (frames.reshape(3, 2, 4, 3), 2)]
    assert len({identity, *(read_both("video", other)[1] for other in others)}) == 4


@given(st.integers(1, 5), st.floats(0.1, 100), st.booleans())
def test_forms_of_video_objects(count: int, fps: float, as_images: bool) -> None:
    """Lists of frames, and metadata as transformers has it."""
    frames = np.random.default_rng(count).integers(0, 256, (count, 3, 4, 3), np.uint8)
    listed = [Image.fromarray(frame) if as_images else frame for frame in frames]
    expected = read_both("video", (frames, fps))
    for value in ((listed, fps), (listed, {"fps": fps}), expected[0]):
        found = read_both("video", value)
        assert np.array_equal(found[0].frames, frames)
        assert found[0][1:] == expected[0][1:] and found[1] == expected[1]
    assert read("video", listed).fps == read("video", (frames, {"fps": None})).fps == 24.0
    indices = [3 * index for index in range(count)]
    metadata = {"fps": fps, "frames_indices": np.array(indices), "total_num_frames": 4 * count}
    found = read("video", (frames, metadata))
    assert found.fps == pytest.approx(fps / 4)
    assert found.seconds == pytest.approx([index / fps for index in indices])


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [np.zeros((2, 3, 3), np.uint8), np.zeros((3, 3, 3), np.uint8)],
        ["a", "b"],
        np.zeros((3, 4, 3), np.uint8),
        (np.zeros((2, 3, 4, 3), np.uint8), "2"),
        (np.zeros((2, 3, 4, 3), np.uint8), []),
        (np.zeros((2, 3, 4, 3), np.uint8), {"fps": 0}),
        (np.zeros((2, 3, 4, 3), np.uint8), {"frames_indices": [1]}),
        (np.zeros((2, 3, 4, 3), np.uint8), {"frames_indices": [-1, 1]}),
        (np.zeros((2, 3, 4, 3), np.uint8), {"frames_indices": 3}),
        (np.zeros((2, 3, 4, 3), np.uint8), {"frames_indices": [1, 2], "total_num_frames": -1}),
        (np.zeros((3, 4, 3), np.uint8), 2),
        (np.zeros((2, 3, 4, 3), np.float32), 2),
        (np.zeros((0, 3, 4, 3), np.uint8), 2),
        (np.zeros((2, 3, 4, 3), np.uint8), 0),
        (np.zeros((2, 3, 4, 3), np.uint8), float("nan")),
    ],
)
def test_video_objects_that_are_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="prompt: the video"):
        read("video", value)


def test_an_identity_depends_on_the_options() -> None:
    identities = {
        read_both("video", FILM, **options)[1]
        for options in ({}, {"num_frames": 2}, {"fps": 2.0}, {"num_frames": 3})
    }
    assert len(identities) == 4
