"""A recording in any language is written down in English.

pegboard serve openai/whisper-small
python examples/online/translation_client.py [--file RECORDING]
"""

import argparse
import io
import wave
from pathlib import Path

import httpx
import numpy as np


def tone(seconds: float = 1.0, rate: int = 16_000) -> bytes:
    """Return a WAV file with a tone of 440 Hz."""
    times = np.arange(int(seconds * rate)) / rate
    samples = (3000 * np.sin(2 * np.pi * 440 * times)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setnchannels(1)
        target.setsampwidth(2)
        target.setframerate(rate)
        target.writeframes(samples.tobytes())
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--file", type=Path, help="a recording; default: a tone")
    words = parser.parse_args()
    content = words.file.read_bytes() if words.file else tone()
    name = words.file.name if words.file else "tone.wav"
    form = {"language": "de", "temperature": "0", "max_completion_tokens": "24"}
    answer = httpx.post(
        f"{words.url}/v1/audio/translations", data=form, files={"file": (name, content)}, timeout=60
    )
    print("text:", answer.raise_for_status().json()["text"])


if __name__ == "__main__":
    main()
