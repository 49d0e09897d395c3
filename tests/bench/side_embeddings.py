"""A side of embeddings.py: side_embeddings.py KIND FOLDER SETTINGS makes vectors of the texts that
it reads, with the model in FOLDER. SETTINGS: those of Pegboard and vLLM, as JSON.

The kinds `onnxruntime` and `openvino` run a graph of the model and its mean pooling in float32,
which is exported with torch, as a careful user would run it: batches of texts of similar length, of
the size that was the fastest in the first turn, and with OpenVINO as many requests at a time as
there are cores, if that is faster.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Embed = Callable[[list[str]], Any]
Batches = Sequence[tuple[np.ndarray, np.ndarray]]
SIZES = (1, 4, 8, 16, 32, 64)
LONGEST = 256
"""Tokens of a text, as the model's files say."""
CORES = len(os.sched_getaffinity(0))


def pegboard(folder: str, settings: dict[str, Any]) -> Embed:
    from pegboard import LLM

    llm = LLM(folder, **settings)
    return lambda texts: [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)]


def vllm(folder: str, settings: dict[str, Any]) -> Embed:
    from vllm import LLM

    llm = LLM(folder, runner="pooling", max_model_len=LONGEST, **settings)
    return lambda texts: [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)]


def sentence_transformers(folder: str, settings: dict[str, Any]) -> Embed:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")
    return lambda texts: model.encode(texts, normalize_embeddings=True)


def onnxruntime(folder: str, settings: dict[str, Any]) -> Embed:
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = CORES
    graph = str(exported(folder))
    session = runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def run(batches: Batches) -> list[np.ndarray]:
        return [session.run(None, {"ids": ids, "mask": mask})[0] for ids, mask in batches]

    return fastest(folder, [run])


def openvino(folder: str, settings: dict[str, Any]) -> Embed:
    import openvino as runtime

    graph = runtime.Core().read_model(exported(folder))
    precision = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": CORES}
    one = runtime.compile_model(graph, "CPU", {**precision, "PERFORMANCE_HINT": "LATENCY"})
    many = runtime.compile_model(graph, "CPU", {**precision, "NUM_STREAMS": CORES})
    queue = runtime.AsyncInferQueue(many, CORES)

    def run_one(batches: Batches) -> list[np.ndarray]:
        return [one({"ids": ids, "mask": mask})[0] for ids, mask in batches]

    def run_many(batches: Batches) -> list[np.ndarray]:
        results: list[np.ndarray] = [np.empty(0)] * len(batches)

        def keep(request: Any, place: int) -> None:
            results[place] = request.get_output_tensor().data.copy()

        queue.set_callback(keep)
        for place, (ids, mask) in enumerate(batches):
            queue.start_async({"ids": ids, "mask": mask}, place)
        queue.wait_all()
        return results

    return fastest(folder, [run_one, run_many])


def exported(folder: str) -> Path:
    """Write the graph (ids [n, length], mask [n, length]) → normalized vectors [n, width]."""
    import torch
    from transformers import AutoModel

    class Sentences(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            states = self.model(ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).to(states.dtype)
            return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)

    path = Path(tempfile.mkdtemp(prefix="pegboard-bench-")) / "model.onnx"
    example = torch.ones(2, 7, dtype=torch.int64)
    dynamic = {0: "count", 1: "length"}
    torch.onnx.export(
        Sentences().eval(),
        (example, example),
        path,
        input_names=["ids", "mask"],
        dynamic_axes={"ids": dynamic, "mask": dynamic},
        dynamo=False,  # the newer way exports another computation
    )
    return path


def fastest(folder: str, runs: Sequence[Callable[[Batches], list[np.ndarray]]]) -> Embed:
    """Return what makes vectors with the way to run a graph, and the size of a batch, that were the
    fastest with the first texts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    chosen: list[tuple[Any, int]] = []

    def embed(texts: list[str], run: Any, size: int) -> np.ndarray:
        rows = [each.ids for each in tokenizer.encode_batch(texts)]
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        parts = [order[first : first + size] for first in range(0, len(order), size)]
        batches = []
        for part in parts:
            ids = np.zeros((len(part), len(rows[part[-1]])), np.int64)
            mask = np.zeros_like(ids)
            for at, place in enumerate(part):
                ids[at, : len(rows[place])] = rows[place]
                mask[at, : len(rows[place])] = 1
            batches.append((ids, mask))
        vectors = np.concatenate(run(batches))
        result = np.empty_like(vectors)
        result[order] = vectors
        return result

    def best(texts: list[str]) -> np.ndarray:
        if len(texts) == 1:
            return embed(texts, runs[0], 1)
        if not chosen:
            seconds = {}
            for run in runs:
                for size in SIZES:
                    embed(texts[:64], run, size)
                    start = time.perf_counter()
                    embed(texts[::4], run, size)
                    seconds[run, size] = time.perf_counter() - start
            chosen.append(min(seconds, key=seconds.__getitem__))
            print(f"{chosen[0][0].__name__}, batches of {chosen[0][1]}", file=sys.stderr)
        return embed(texts, *chosen[0])

    return best


KINDS = {
    each.__name__: each for each in (pegboard, vllm, sentence_transformers, onnxruntime, openvino)
}


def main() -> None:
    kind, folder, settings = sys.argv[1:]
    embed = KINDS[kind](folder, json.loads(settings))
    embed(["a"])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        texts = json.loads(line)["texts"]
        start = time.perf_counter()
        vectors = embed(texts)
        seconds = time.perf_counter() - start
        first = np.asarray(vectors[0]).tolist()
        print(json.dumps({"seconds": seconds, "vector": first}), flush=True)


if __name__ == "__main__":
    main()
