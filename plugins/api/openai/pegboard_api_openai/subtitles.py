"""The forms of a transcription that say when something was said."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple


class Line(NamedTuple):
    """Text that was said from `start` to `stop`, in seconds. avg_logprob: the mean of its
    tokens'."""

    start: float
    stop: float
    text: str
    token_ids: Sequence[int]
    avg_logprob: float


def srt(lines: Sequence[Line]) -> str:
    """Return the lines in the format of SubRip."""
    return "\n".join(
        f"{number}\n{clock(line.start, ',')} --> {clock(line.stop, ',')}\n{line.text.strip()}\n"
        for number, line in enumerate(lines, 1)
    )


def vtt(lines: Sequence[Line]) -> str:
    """Return the lines as WebVTT."""
    return "WEBVTT\n\n" + "\n".join(
        f"{clock(line.start, '.')} --> {clock(line.stop, '.')}\n"
        # an arrow would begin another line
        f"{line.text.strip().replace('-->', '->')}\n"
        for line in lines
    )


def clock(seconds: float, point: str) -> str:
    """Return a time as 00:01:02,345. point: before the milliseconds."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def segments(lines: Sequence[Line], temperature: float) -> list[dict[str, Any]]:
    """Return the lines as OpenAI's segments. compression_ratio: high where text repeats itself."""
    return [
        {
            "id": number,
            "seek": 0,
            "start": round(line.start, 3),
            "end": round(line.stop, 3),
            "text": line.text,
            "tokens": [*line.token_ids],
            "temperature": temperature,
            "avg_logprob": line.avg_logprob,
            "compression_ratio": compression_ratio(line.text),
            "no_speech_prob": None,
        }
        for number, line in enumerate(lines)
    ]


def compression_ratio(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data))
