"""A recording is written down: as a text, with times, and as a stream.

pegboard serve openai/whisper-small
python examples/online/transcription_client.py [--file RECORDING]
"""

import argparse
import io
import wave
from pathlib import Path

import numpy as np
from openai import OpenAI


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
    client = OpenAI(base_url=f"{words.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    fields = {"model": model, "file": (name, content), "language": "en", "temperature": 0}
    fields |= {"extra_body": {"max_completion_tokens": 24}}
    print("text:", client.audio.transcriptions.create(**fields).text)
    verbose = client.audio.transcriptions.create(**fields, response_format="verbose_json")
    print(f"verbose: {verbose.duration} seconds, {len(verbose.segments or [])} segments")
    print("stream: ", end="")
    for chunk in client.audio.transcriptions.create(**fields, stream=True):
        for choice in chunk.model_dump().get("choices") or ():
            print(choice["delta"].get("content") or "", end="|", flush=True)
    print()


if __name__ == "__main__":
    main()
