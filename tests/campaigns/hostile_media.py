"""A campaign: damaged images, recordings and videos are read, as they come with requests.

    python tests/campaigns/hostile_media.py --count 2000
    python tests/campaigns/hostile_media.py --count 500 --server

Each file is a valid one with bytes that were changed, moved, cut off or repeated. A process of its
own reads it. Right is: it is read, or it is a RequestError; never another exception, a crash, more
than 10 seconds or more than 1 GiB.

With --server, the images are sent to a server with a tiny LLaVA, with large valid ones among them.
Right is: each is answered or refused with 400, and /health takes less than 0.5 seconds throughout.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import select
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import httpx
import numpy as np
import soundfile
from PIL import Image

SECONDS = 10.0
HEALTH_SECONDS = 0.5
MAX_BYTES = 2**30
READER = """
import json, re, struct, sys, time
from pegboard.data.media import MediaSource
from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import MediaReaderSetup
from pegboard_media.reader import Reader
reader = Reader(MediaReaderSetup())
take = sys.stdin.buffer.read
while head := take(9):
    kind, size = struct.unpack("<cQ", head)
    modality = {b"i": "image", b"a": "audio", b"v": "video"}[kind]
    started = time.perf_counter()
    try:
        item, _ = reader.read(MediaSource(modality=modality, value=take(size), path="file"))
        if modality == "video":
            item.sound()
        what = "read"
    except RequestError:
        what = "refused"
    except BaseException as error:
        what = repr(error)[:200]
    # getrusage also counts the process that started this one
    most = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
    print(json.dumps([what, time.perf_counter() - started, most]), flush=True)
"""


class ReaderProcess:
    """Reads files in a process, which is replaced if it ends or hangs."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def read(self, modality: str, content: bytes) -> str:
        """Return "read", "refused", or what went wrong."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self.read("image", b"")  # imports are not part of the time
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(struct.pack("<cQ", modality[:1].encode(), len(content)) + content)
        process.stdin.flush()
        if not select.select([process.stdout], [], [], SECONDS + 20)[0]:
            self.close()
            return "hangs"
        line = process.stdout.readline()
        if not line:
            self.close()
            return f"the reader ended with {process.returncode}"
        what, seconds, num_bytes = json.loads(line)
        if seconds > SECONDS:
            return f"takes {seconds:.0f} s"
        if num_bytes > MAX_BYTES:
            self.close()
            return f"takes {num_bytes} bytes"
        return str(what)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def files() -> list[tuple[str, bytes]]:
    """Return small valid files of many formats, each with its modality."""
    return [*images(), *recordings(), *videos()]


def images() -> Iterator[tuple[str, bytes]]:
    pixels = np.random.default_rng(1).integers(0, 256, (3, 37, 23, 3), np.uint8)
    frames = [Image.fromarray(each) for each in pixels]
    for kind, mode, more in (
        ("PNG", "RGB", {}),
        ("PNG", "P", {}),
        ("PNG", "I;16", {}),
        ("PNG", "RGBA", {"save_all": True, "append_images": frames[1:]}),
        ("JPEG", "RGB", {}),
        ("JPEG", "CMYK", {"progressive": True}),
        ("GIF", "P", {"save_all": True, "append_images": frames[1:]}),
        ("WEBP", "RGB", {"save_all": True, "append_images": frames[1:]}),
        ("BMP", "RGB", {}),
        ("TIFF", "RGB", {"compression": "tiff_lzw"}),
    ):
        file = io.BytesIO()
        image = frames[0].convert("L").convert(mode) if mode == "I;16" else frames[0].convert(mode)
        image.save(file, kind, **more)
        yield "image", file.getvalue()


def recordings() -> Iterator[tuple[str, bytes]]:
    samples = np.random.default_rng(2).standard_normal((3000, 2)).astype(np.float32) * 0.1
    for kind, subtype in (
        ("WAV", "PCM_16"),
        ("WAV", "FLOAT"),
        ("WAV", "IMA_ADPCM"),
        ("FLAC", "PCM_24"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
        ("AIFF", "PCM_16"),
        ("CAF", "ALAC_16"),
        ("AU", "ULAW"),
    ):
        file = io.BytesIO()
        soundfile.write(file, samples, 16_000, format=kind, subtype=subtype)
        yield "audio", file.getvalue()


def videos() -> Iterator[tuple[str, bytes]]:
    pixels = np.random.default_rng(3).integers(0, 256, (6, 32, 48, 3), np.uint8)
    samples = np.random.default_rng(4).integers(-9000, 9000, (1, 2 * 9600), np.int16)
    for kind, codec, track in (
        ("mp4", "mpeg4", "aac"),
        ("matroska", "vp8", "libopus"),
        ("avi", "mjpeg", "pcm_s16le"),
    ):
        file = io.BytesIO()
        with av.open(file, "w", format=kind) as container:
            stream: Any = container.add_stream(codec, rate=Fraction(10))
            stream.width, stream.height = 48, 32
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            sound: Any = container.add_stream(track, rate=48_000, layout="stereo")
            for each in pixels:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(each, format="rgb24")))
            block = av.AudioFrame.from_ndarray(samples, format="s16", layout="stereo")
            block.sample_rate = 48_000
            container.mux(sound.encode(block))
            for each in (stream, sound):
                container.mux(each.encode())
        yield "video", file.getvalue()


def mutated(content: bytes, seed: int) -> bytes:
    """Return the file with a few changes, mostly near its start, where its sizes are."""
    chance = random.Random(seed)
    data = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        if not data:
            break
        near = chance.random() < 0.6
        place = chance.randrange(min(len(data), 96) if near else len(data))
        kind = chance.randrange(7)
        if kind == 0:
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[place] = chance.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            form = chance.choice("HIQ")
            number = chance.choice([0, 1, 2**15, 2**31 - 1, 2**32 - 1, 2**63]) % (
                256 ** struct.calcsize(f"<{form}")
            )
            size = struct.calcsize(f"<{form}")
            data[place : place + size] = struct.pack(f"{chance.choice('<>')}{form}", number)
        elif kind == 3:
            del data[place:]
        elif kind == 4:
            del data[place : place + chance.randrange(1, 40)]
        elif kind == 5:
            data[place:place] = data[place : place + chance.randrange(1, 60)] * chance.randrange(
                1, 50
            )
        else:
            other = chance.randrange(len(data))
            data[place : place + 16] = data[other : other + 16]
    return bytes(data)


def run(count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Read `count` damaged files. Return how many of each modality were read and refused, and what
    went wrong."""
    reader = ReaderProcess()
    valid = files()
    results: Counter[str] = Counter()
    wrong = []
    try:
        for modality, content in valid:
            assert reader.read(modality, content) == "read", "a valid file is refused"
        for number in range(seed, seed + count):
            index = number % len(valid)
            modality, content = valid[index]
            what = reader.read(modality, mutated(content, number))
            if what in ("read", "refused"):
                results[f"{modality} {what}"] += 1
            else:
                wrong.append(f"file {index}, seed {number}: {what}")
    finally:
        reader.close()
    return results, wrong


def send(count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Send `count` images to a server, and ask for its health all the while. Return how many were
    answered and refused, and what went wrong."""
    for folder in ("parity", "server"):
        sys.path.insert(0, str(Path(__file__).parents[1] / folder))
    from server_process import Server
    from tiny_media import write_llava

    valid = [content for _, content in images()]
    large = io.BytesIO()
    Image.linear_gradient("L").resize((5000, 5000)).convert("RGB").save(large, "PNG")
    results: Counter[str] = Counter()
    wrong = []
    with TemporaryDirectory() as place, httpx.Client(timeout=SECONDS) as health:
        folder = Path(place) / "model"
        write_llava(folder)
        settings = ("--max-model-len", "256", "--kv-cache-memory-bytes", "8M")
        with Server(folder, Path(place), *settings) as server, ThreadPoolExecutor(4) as clients:
            server.wait_until_ready()

            def ask(number: int) -> int:
                content = mutated(valid[number % len(valid)], number)
                content = large.getvalue() if number % 20 == 0 else content
                url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
                part = {"type": "image_url", "image_url": {"url": url}}
                body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
                address = f"{server.url}/v1/chat/completions"
                return httpx.post(address, json=body, timeout=60).status_code

            answers = [clients.submit(ask, number) for number in range(seed, seed + count)]
            slowest = 0.0
            while not all(answer.done() for answer in answers):
                started = time.perf_counter()
                health.get(f"{server.url}/health").raise_for_status()
                slowest = max(slowest, time.perf_counter() - started)
                time.sleep(0.02)
            for number, answer in enumerate(answers, seed):
                if (status := answer.result()) in (200, 400):
                    results["image answered" if status == 200 else "image refused"] += 1
                else:
                    wrong.append(f"seed {number}: {status}")
    if slowest > HEALTH_SECONDS:
        wrong.append(f"/health takes {slowest:.2f} s")
    print(f"/health takes at most {1000 * slowest:.0f} ms")
    return results, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", action="store_true", help="send images to a server")
    options = parser.parse_args()
    results, wrong = (send if options.server else run)(options.count, options.seed)
    for name, number in sorted(results.items()):
        print(f"{number:6} {name}")
    print("\n".join(wrong) or "nothing went wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
