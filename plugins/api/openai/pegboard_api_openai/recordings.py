"""Recordings that clients upload: the form, the samples, and where they are cut."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.requests import Request

from pegboard.data.media import MediaSource
from pegboard.errors import ConfigError, MalformedRequest
from pegboard_chat.request_body import checked

if TYPE_CHECKING:
    import numpy as np

MAX_FIELDS = 100
QUIET_S = 1.0
"""A clip ends at the quietest moment of its last second."""
WINDOW_S = 0.1
Number = Annotated[float, Field(allow_inf_nan=False)]


class RecordingFields(BaseModel):
    """The fields of a form. All values of a form are text, so numbers are read from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    stream: bool = False
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Number = 0.0
    top_p: Number | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Number | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    vllm_xargs: dict[str, Any] | None = None
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None


Form = TypeVar("Form", bound=RecordingFields)


class TranscriptionRequest(RecordingFields):
    """POST /v1/audio/transcriptions."""

    timestamp_granularities: list[Literal["segment", "word"]] = Field(default_factory=list)


class TranslationRequest(RecordingFields):
    """POST /v1/audio/translations. language: the one that is spoken."""

    to_language: str | None = None


async def read_form(http: Request, model: type[Form]) -> tuple[Form, bytes]:
    """Return the fields and the bytes of the file. Nothing is written to disk. Raises
    MalformedRequest, which names the field."""
    try:
        from python_multipart.exceptions import FormParserError
        from starlette.formparsers import MultiPartException, MultiPartParser
    except ImportError as error:
        raise ConfigError(
            "this server cannot read forms; install pegboard-api-openai[audio]"
        ) from error

    class InMemory(MultiPartParser):
        spool_max_size = 2**62

    if "boundary=" not in http.headers.get("content-type", ""):
        raise MalformedRequest("the form's Content-Type has no boundary", parameter="file")
    parser = InMemory(http.headers, http.stream(), max_files=1, max_fields=MAX_FIELDS)
    try:
        form = await parser.parse()
    except (FormParserError, MultiPartException, UnicodeError, KeyError) as error:
        reason = getattr(error, "message", None) or str(error)
        raise MalformedRequest(f"the form cannot be read: {reason}", parameter="file") from error
    given: dict[str, Any] = {}
    content = None
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != "file":
                raise MalformedRequest(
                    f"unknown file {name[:100]!r}; expected file", parameter=name
                )
            content = await value.read()
        elif name.endswith("[]"):
            given.setdefault(name.removesuffix("[]"), []).append(value)
        elif name in given:
            raise MalformedRequest(f"the field {name[:100]!r} was sent twice", parameter=name)
        else:
            given[name] = _object(value, name) if name == "vllm_xargs" else value
    if content is None:
        raise MalformedRequest("file is required: the recording", parameter="file")
    return checked(given, model), content


def _object(value: str, name: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise MalformedRequest(f"{name} is not JSON: {error}", parameter=name) from error


class Clip(NamedTuple):
    """A part of a recording. start: in seconds."""

    start: float
    samples: np.ndarray


def read_clips(content: bytes, rate: int, seconds: int) -> tuple[list[Clip], float]:
    """Return parts of at most `seconds` seconds with `rate` samples per second, and the length of
    the whole. Raises RequestError for a file that cannot be read."""
    try:
        from pegboard.interfaces.multimodal_processor import MediaReaderSetup
        from pegboard_media.audio import resample
        from pegboard_media.reader import Reader
    except ImportError as error:
        raise ConfigError(
            "this server cannot read audio; install pegboard-api-openai[audio]"
        ) from error
    source = MediaSource(modality="audio", value=content, path="file")
    (samples, given_rate), _ = Reader(MediaReaderSetup()).read(source)
    samples = resample(samples, given_rate, rate)
    return cut(samples, rate, seconds), len(samples) / rate


def cut(samples: np.ndarray, rate: int, seconds: int) -> list[Clip]:
    """Cut samples into parts of at most `seconds` seconds, where it is quiet."""
    clips = []
    start = 0
    while len(samples) - start > seconds * rate:
        stop = _quiet_moment(samples, start + seconds * rate, rate)
        clips.append(Clip(start / rate, samples[start:stop]))
        start = stop
    clips.append(Clip(start / rate, samples[start:]))
    return clips


def _quiet_moment(samples: np.ndarray, stop: int, rate: int) -> int:
    """Return the middle of the quietest window before `stop`."""
    size = int(WINDOW_S * rate)
    first = stop - int(QUIET_S * rate) // size * size
    windows = samples[first:stop].reshape(-1, size)
    quietest = int((windows * windows).mean(1).argmin())
    return first + quietest * size + size // 2
