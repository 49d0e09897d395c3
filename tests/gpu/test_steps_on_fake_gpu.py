"""A worker with Triton's kernels and attention on a fake GPU: captured steps, eager steps and the
CPU give the same tokens."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from pegboard_kernel_triton import norm, sampling
from pegboard_platform_cpu.platform import CPUPlatform

from pegboard.config.schema import EngineConfig
from pegboard.data.batch import Batch, BlockDelta, NewRequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.installed import Entry
from pegboard.interfaces.attention import AttentionLayer, KVGroup, KVPlan
from pegboard.interfaces.executor import Place
from pegboard.interfaces.platform import PlatformSetup
from pegboard.layers import attention
from pegboard.worker.worker import Worker, WorkerPlan
from pegboard_testing.contract_generic import installed_entry
from pegboard_testing.fake_gpu import DEVICE, FakeGPU, FakeGPUPlatform
from pegboard_testing.fake_limits import fake_limits
from pegboard_testing.fake_parts import fake_worker_registry, tiny_checkpoint
from pegboard_testing.fake_triton import triton_on_fake_gpu

LIMITS = fake_limits(max_model_len=24, max_num_seqs=2, max_num_batched_tokens=12, vocab_size=61)
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 61,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}
OPS = ("rms_norm", "add_rms_norm", "rope", "silu_mul", "sample_tokens")
SAMPLED = {
    "temperature": 1.3,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "logit_bias": {3: 1.0},
    "bad_words_token_ids": [[7]],
}
PROMPTS = [[5, 7, 9, 2, 6], [11]]
NONE = np.zeros(0, np.int32)

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
]


def make_worker(
    path: Path, family: str, platform: str, entries: Sequence[Entry], **settings: Any
) -> Worker:
    given = {
        "dtype": "float32",
        "kv_cache_dtype": "auto",
        "num_threads": 1,
        "kv_cache_memory_bytes": 1,
    }
    config = msgspec.structs.replace(EngineConfig(), **given | settings)
    checkpoint = replace(tiny_checkpoint(path), architectures=("Qwen3ForCausalLM",), config=CONFIG)
    registry = fake_worker_registry(platform, family=family, others=entries)
    worker = Worker(registry, WorkerPlan(config, LIMITS, checkpoint, lambda: None), Place())
    specs = worker.load().kv_specs
    worker.allocate(
        KVPlan((KVGroup(tuple(specs), specs[0], 4),), 20, specs[0].slot_bytes() * 4 * len(specs), 4)
    )
    worker.warm_up()
    return worker


def parts_of_both() -> list[Entry]:
    return [installed_entry("model", "Qwen3ForCausalLM"), installed_entry("sampler", "torch")]


def on_gpu(path: Path, **settings: Any) -> Worker:
    parts = [installed_entry("kernel", f"{name}.triton") for name in OPS]
    parts += [installed_entry("attention", "triton"), *parts_of_both()]
    return make_worker(
        path, "cuda", "pegboard_testing.fake_gpu:FAKE_GPU", parts, sampler="torch", **settings
    )


def on_cpu(path: Path, **settings: Any) -> Worker:
    parts = [installed_entry("attention", "cpu_paged"), *parts_of_both()]
    platform = installed_entry("platform", "cpu").value
    # a process keeps the number that it began with
    threads = CPUPlatform.threads_in_use or EngineConfig().num_threads
    return make_worker(
        path, "cpu", platform, parts, sampler="torch", num_threads=threads, **settings
    )


def batch_of(
    step: int, counts: Sequence[int], computed: Sequence[int], new: list[NewRequest]
) -> Batch:
    return Batch(
        step=step,
        rows=np.arange(len(counts), dtype=np.int32),
        num_scheduled_tokens=np.array(counts, np.int32),
        num_computed_tokens=np.array(computed, np.int32),
        num_draft_tokens=np.zeros(len(counts), np.int32),
        new=new,
        removed_rows=NONE,
        samples=np.ones(len(counts), bool),
        new_blocks=BlockDelta.empty(),
        copy_blocks=np.zeros((0, 3), np.int32),
    )


def generate(
    worker: Worker,
    num_steps: int,
    params: SamplingParams | None = None,
    seed: int | None = None,
    whole: tuple[tuple[int, int], ...] = (),
) -> list[list[int]]:
    """Return the tokens of PROMPTS. All steps are started before the first result is read, as with
    two steps in flight. whole: items of the first prompt."""
    new = [
        NewRequest(
            row,
            str(row),
            np.array(prompt, np.int32),
            len(prompt),
            0,
            params or SamplingParams(temperature=0),
            seed,
            (np.arange(1 + 6 * row, 7 + 6 * row, dtype=np.int32),),
            whole=() if row else whole,
        )
        for row, prompt in enumerate(PROMPTS)
    ]
    counts = [len(prompt) for prompt in PROMPTS]
    computed = [0] * len(PROMPTS)
    waiting = []
    for step in range(num_steps):
        waiting.append(worker.run(batch_of(step, counts, computed, new if step == 0 else [])))
        computed = [done + count for done, count in zip(computed, counts, strict=True)]
        counts = [1] * len(PROMPTS)
    outputs = [wait() for wait in waiting]
    return [
        [output.token_ids.row(row).tolist()[0] for output in outputs] for row in range(len(PROMPTS))
    ]


@pytest.fixture
def cpu_tokens(tmp_path: Path) -> list[list[int]]:
    """The tokens that the CPU computes in five steps, with torch alone: the most likely ones, and
    some drawn with a seed."""
    worker = on_cpu(tmp_path)
    return generate(worker, 5) + generate(worker, 3, SamplingParams(**SAMPLED), seed=11)


@pytest.fixture
def gpu(cpu_tokens: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    monkeypatch.setattr(sampling, "ROWS", 2)  # faster in the interpreter
    with FakeGPU() as gpu, triton_on_fake_gpu():
        yield gpu


def test_captured_steps_equal_eager_ones_and_the_cpu(
    gpu: FakeGPU, tmp_path: Path, cpu_tokens: list[list[int]]
) -> None:
    assert generate(on_gpu(tmp_path, enforce_eager=True), 5) == cpu_tokens[:2]
    captured = on_gpu(tmp_path)
    assert captured.registry.decisions["kernel", "recorder"].notes == ()
    replays = gpu.replays
    reads = gpu.host_reads
    blocking = gpu.blocking_uploads
    assert generate(captured, 5) == cpu_tokens[:2]
    # the pieces and the output head for the prompts, and four whole steps
    assert gpu.replays - replays == 6
    assert (gpu.host_reads, gpu.blocking_uploads) == (reads, blocking), (
        "no step waits for the device"
    )
    assert generate(captured, 3, SamplingParams(**SAMPLED), seed=11) == cpu_tokens[2:]
    assert (gpu.host_reads, gpu.blocking_uploads) == (reads, blocking), (
        "sampling does not wait either"
    )


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_other_modes_of_recording(
    gpu: FakeGPU, tmp_path: Path, cpu_tokens: list[list[int]], mode: str
) -> None:
    worker = on_gpu(tmp_path, recording_mode=mode)
    waits = gpu.host_reads, gpu.blocking_uploads
    replays = gpu.replays
    assert generate(worker, 5) == cpu_tokens[:2]
    assert (gpu.host_reads, gpu.blocking_uploads) == waits
    assert gpu.replays - replays == {"full": 2 + 4, "piecewise": 2 * 5}[mode]


def test_logprobs_and_long_bad_words_do_not_wait(
    gpu: FakeGPU, tmp_path: Path, cpu_tokens: list[list[int]]
) -> None:
    """What words need of the tokens before is read when the next step is sampled."""
    likely = cpu_tokens[0]
    words = [likely[:3], likely[:2] + [0, 1]]
    params = SamplingParams(temperature=0, logprobs=2, bad_words_token_ids=words)
    worker = on_gpu(tmp_path)
    waits = gpu.host_reads, gpu.blocking_uploads
    tokens = generate(worker, 4, params)
    assert (gpu.host_reads, gpu.blocking_uploads) == waits
    assert tokens[0][:2] == likely[:2] and tokens[0][2] != likely[2]
    assert tokens[1] == cpu_tokens[1][:4]


def test_items_are_seen_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(**given: Any) -> AttentionLayer:
        return AttentionLayer(**{**given, "sees_items": True})

    monkeypatch.setattr(attention, "AttentionLayer", layer)
    monkeypatch.setitem(CONFIG, "num_hidden_layers", 2)
    params = SamplingParams(temperature=3.0)
    expected = generate(on_cpu(tmp_path), 4, params, seed=3, whole=((0, 4),))
    causal = generate(on_cpu(tmp_path), 4, params, seed=3)
    assert expected[0] != causal[0], "the item makes a difference"
    assert expected[1] == causal[1]
    monkeypatch.setattr(sampling, "ROWS", 2)
    with FakeGPU(), triton_on_fake_gpu():
        assert generate(on_gpu(tmp_path), 4, params, seed=3, whole=((0, 4),)) == expected


def test_a_captured_launch_keeps_its_numbers_and_reads_the_device(gpu: FakeGPU) -> None:
    """What the host passes as a number is as old as the capture. What the device holds is read when
    the launch is replayed."""
    platform = FakeGPUPlatform(None, PlatformSetup())
    x = torch.ones(2, 4, device=DEVICE)
    weight = torch.ones(4, device=DEVICE)
    eps = [3.0]
    recorded = platform.replay(None).record(
        lambda rows: (norm.rms_norm(rows, weight, eps[0]),), [x]
    )
    eps[0] = 0.0
    assert recorded(2)[0].tolist() == [[0.5] * 4] * 2
    x.fill_(1 / 2**0.5)
    weight.fill_(3.5**0.5)
    np.testing.assert_allclose(recorded(1)[0].tolist(), [[0.5**0.5] * 4], rtol=1e-6)
    with pytest.raises(ValueError, match="pointer argument weight cannot be accessed"):
        norm.rms_norm(x, torch.ones(4), 0.0)


def test_a_stopped_worker_gives_its_memory_back_at_once(gpu: FakeGPU, tmp_path: Path) -> None:
    """Another engine may start on the device before Python looks for reference cycles."""
    gc.collect()
    before = gpu.used_bytes
    gc.disable()
    try:
        worker = on_gpu(tmp_path)
        generate(worker, 2)
        assert gpu.used_bytes - before > 20_000, "weights and KV cache"
        worker.stop()
        assert gpu.used_bytes == before
    finally:
        gc.enable()
