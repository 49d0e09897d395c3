"""The worker on a fake GPU: recorded steps, tokens that stay on the device, asynchronous copies,
and memory that is measured first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch

from pegboard.config.limits import Limits
from pegboard.config.schema import EngineConfig
from pegboard.data.batch import Batch, BlockDelta, NewRequest, StepOutput
from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import ConfigError, PluginFailure
from pegboard.interfaces.attention import AttentionInputs, AttentionLayer, KVGroup, KVPlan
from pegboard.interfaces.executor import Place
from pegboard.interfaces.platform import PlatformSetup
from pegboard.interfaces.sampler import Sampled
from pegboard.layers import Build
from pegboard.worker.endings import Step
from pegboard.worker.first_steps import Checked
from pegboard.worker.recordings import Recorded
from pegboard.worker.worker import Worker, WorkerPlan
from pegboard_testing.contract_platform import PlatformContract
from pegboard_testing.fake_build import FakeWeight
from pegboard_testing.fake_gpu import (
    DEVICE,
    TOTAL_BYTES,
    DeviceTensor,
    FakeGPU,
    FakeGPUPlatform,
    FakeReplay,
)
from pegboard_testing.fake_limits import fake_limits
from pegboard_testing.fake_parts import (
    FakeGreedySampler,
    FakePagedAttention,
    TinyModel,
    fake_worker_registry,
    tiny_checkpoint,
)

GPU = "pegboard_testing.fake_gpu:FAKE_GPU"
SIZES = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16, "vocab_size": 61}
LIMITS = fake_limits(**SIZES)
NONE = np.zeros(0, np.int32)


@pytest.fixture
def gpu() -> Iterator[FakeGPU]:
    with FakeGPU() as gpu:
        yield gpu


class TestFakeGPU(PlatformContract):
    @pytest.fixture(autouse=True)
    def _on(self, gpu: FakeGPU) -> None: ...

    def platform(self, setup: PlatformSetup) -> FakeGPUPlatform:
        return FakeGPUPlatform(None, setup)


def make_worker(tmp_path: Path, limits: Limits = LIMITS, **settings: object) -> Worker:
    given = {
        "sampler": "greedy",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "num_threads": 1,
    } | settings
    config = msgspec.structs.replace(EngineConfig(), **given)
    worker = Worker(
        fake_worker_registry(GPU),
        WorkerPlan(config, limits, tiny_checkpoint(tmp_path), lambda: None),
        Place(),
    )
    worker.ready = worker.load()  # type: ignore[attr-defined]
    return worker


def plan_of(worker: Worker, num_blocks: int = 40) -> KVPlan:
    specs = worker.ready.kv_specs  # type: ignore[attr-defined]
    return KVPlan(
        (KVGroup(tuple(specs), specs[0], 4),), num_blocks, specs[0].slot_bytes() * 4 * len(specs), 4
    )


def batch_of(
    step: int, rows: Sequence[int], counts: Sequence[int], computed: Sequence[int], **more: object
) -> Batch:
    fields = {
        "new": [],
        "removed_rows": NONE,
        "samples": np.ones(len(rows), bool),
        "copy_blocks": np.zeros((0, 3), np.int32),
    } | more
    return Batch(
        step=step,
        rows=np.array(rows, np.int32),
        num_scheduled_tokens=np.array(counts, np.int32),
        num_computed_tokens=np.array(computed, np.int32),
        num_draft_tokens=np.zeros(len(rows), np.int32),
        new_blocks=BlockDelta.empty(),
        **fields,
    )  # type: ignore[arg-type]


def request(row: int, prompt: Sequence[int]) -> NewRequest:
    blocks = np.arange(1 + 8 * row, 9 + 8 * row, dtype=np.int32)
    return NewRequest(
        row, str(row), np.array(prompt, np.int32), len(prompt), 0, SamplingParams(), None, (blocks,)
    )


PROMPTS = [[5, 7, 9], [11], [3, 1, 4, 1, 5]]


def generate(worker: Worker, num_steps: int, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Return the greedy tokens of all prompts. All steps are started before the first result is
    read."""
    rows = range(len(prompts))
    new = [request(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
    waiting: list[Callable[[], StepOutput]] = []
    computed = [0] * len(prompts)
    for step in range(num_steps):
        counts = [len(prompt) for prompt in prompts] if step == 0 else [1] * len(prompts)
        waiting.append(
            worker.run(batch_of(step, rows, counts, computed, new=new if step == 0 else []))
        )
        computed = [done + count for done, count in zip(computed, counts, strict=True)]
    outputs = [wait() for wait in waiting]
    return [[output.token_ids.row(row).tolist()[0] for output in outputs] for row in rows]


def expected(worker: Worker, num_steps: int, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Return the tokens of `generate`, but compute the whole prompt again for every token, without
    a KV cache, padding or recordings."""
    found = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(num_steps):
            tokens.append(generate(worker, 1, [tokens])[0][0])
        found.append(tokens[len(prompt) :])
    return found


def memory_for_cache(worker: Worker) -> int:
    return int(worker.ready.kv_memory_bytes)  # type: ignore[attr-defined]


def ready(tmp_path: Path, **settings: object) -> Worker:
    worker = make_worker(tmp_path, **settings)
    worker.allocate(plan_of(worker))
    worker.warm_up()
    return worker


def test_recorded_steps_give_the_tokens_of_eager_ones(gpu: FakeGPU, tmp_path: Path) -> None:
    eager = ready(tmp_path, enforce_eager=True)
    assert gpu.captures == 0
    (made,) = [made for made in eager.registry.describe_decisions() if made["key"] == "recorder"]
    assert made["notes"] == ["not replayed: every step runs eagerly: enforce_eager is set"]
    wanted = expected(eager, 6)
    recorded = ready(tmp_path)
    assert recorded.registry.decisions["kernel", "recorder"].notes == ()
    before = gpu.replays
    assert generate(recorded, 6) == wanted
    # the pieces and the output head for the prompts, and five whole steps
    assert gpu.replays - before == 7


@pytest.mark.parametrize(
    ("mode", "prompts", "decodes", "is_padded"),
    [
        ("full", 2, 1, True),
        ("full_decode_only", 1, 1, False),  # only the output head
        ("full_and_piecewise", 2, 1, False),
        ("piecewise", 2, 2, False),
    ],
)
def test_each_mode_gives_the_tokens_of_eager_steps(
    gpu: FakeGPU, tmp_path: Path, mode: str, prompts: int, decodes: int, is_padded: bool
) -> None:
    """In pieces, attention sees the tokens of the step only."""
    wanted = generate(ready(tmp_path, enforce_eager=True), 5)
    worker = ready(tmp_path, recording_mode=mode)
    assert worker.registry.decisions["kernel", "recorder"].notes == ()
    whole = worker.running.stages.recordings.by_trait.get(("decode", False), [])
    assert bool(whole) == (mode != "piecewise")
    sizes: list[int] = []
    plan = FakePagedAttention.plan

    def planned(self: FakePagedAttention, inputs: AttentionInputs) -> None:
        sizes.append(len(inputs.slot_mapping))
        plan(self, inputs)

    with mock.patch.object(FakePagedAttention, "plan", planned):
        before = gpu.replays
        generate(worker, 1)
        assert gpu.replays - before == prompts and sizes == [16 if is_padded else 9]
        before = gpu.replays
        assert generate(worker, 5) == wanted
        assert gpu.replays - before == prompts + 4 * decodes


def test_steps_above_the_largest_size_run_eagerly(
    gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = generate(ready(tmp_path, enforce_eager=True), 3)
    monkeypatch.setattr(FakeReplay, "sizes", lambda self, trait, largest: (1, 4))
    worker = ready(tmp_path, recording_mode="piecewise")
    before = gpu.replays
    assert generate(worker, 3) == wanted
    assert gpu.replays - before == 1 + 2 * 2, "the prompts have 9 tokens"


def test_a_mode_that_the_platform_does_not_have_is_refused_before_weights_are_loaded(
    gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeReplay, "outside")
    with pytest.raises(ConfigError, match="recording_mode piecewise: this platform records"):
        make_worker(tmp_path, recording_mode="piecewise")


def test_nothing_waits_for_the_device_between_steps(gpu: FakeGPU, tmp_path: Path) -> None:
    worker = ready(tmp_path)
    addresses = [buffer.on_device.data_ptr() for buffer in worker.running.inputs.buffers]
    generate(worker, 2)
    reads = gpu.host_reads
    blocking = gpu.blocking_uploads
    downloads = gpu.downloads
    generate(worker, 8)
    assert (gpu.host_reads, gpu.blocking_uploads) == (reads, blocking)
    assert gpu.downloads - downloads == 8, "each step copies only the tokens to the host"
    assert [buffer.on_device.data_ptr() for buffer in worker.running.inputs.buffers] == addresses


def test_blocks_are_copied_without_waiting(gpu: FakeGPU, tmp_path: Path) -> None:
    worker = ready(tmp_path)
    (expected,) = generate(worker, 2, [PROMPTS[0]])
    worker.run(batch_of(0, [0], [3], [0], new=[request(0, PROMPTS[0])]))()
    second = msgspec.structs.replace(request(1, PROMPTS[0]), num_computed_tokens=2)
    waits = gpu.host_reads, gpu.blocking_uploads
    copies = np.array([[0, 1, 9]], np.int32)
    wait = worker.run(batch_of(1, [1], [1], [2], new=[second], copy_blocks=copies))
    assert (gpu.host_reads, gpu.blocking_uploads) == waits
    assert wait().token_ids.row(0).tolist() == expected[:1]


def test_drafts_are_uploaded_without_waiting(gpu: FakeGPU, tmp_path: Path) -> None:
    worker = ready(tmp_path)
    generate(worker, 1)
    inputs = worker.running.inputs
    blocking = gpu.blocking_uploads
    worker.running.state.token_ids[0, 3] = 8
    worker.running.state.proposals.token_ids[0] = np.array([4, 6], np.int32)
    batch = batch_of(1, [0, 1], [3, 1], [3, 1])
    batch.num_draft_tokens[:] = [2, 0]
    drafts = inputs.build(batch).draft_token_ids
    assert gpu.blocking_uploads == blocking and drafts is not None and drafts.tolist() == [4, 6]
    assert inputs.input_ids.on_device[:3].tolist() == [8, 4, 6]


def test_a_decode_step_uploads_little_and_computes_nothing_else(
    gpu: FakeGPU, tmp_path: Path
) -> None:
    worker = ready(tmp_path)
    generate(worker, 2)
    uploads = gpu.uploads
    replays = gpu.replays
    worker.run(batch_of(9, [0, 1, 2], [1, 1, 1], [4, 2, 6]))()
    # ids, positions, two for lengths, table, slots, and three for rows whose last token is on the
    # device
    assert gpu.uploads - uploads == 9 and gpu.replays - replays == 1


def test_one_recording_for_each_size_and_trait(gpu: FakeGPU, tmp_path: Path) -> None:
    worker = ready(tmp_path)
    stages = worker.running.stages
    assert {
        key: [recorded.num_tokens for recorded in made]
        for key, made in stages.recordings.by_trait.items()
    } == {
        ("forward", False): [8, 16],
        ("decode", False): [1, 2, 4],
        ("logits", False): [1, 2, 4],
    }
    assert (
        stages.recordings.find("decode", 3)
        is stages.recordings.find("decode", 4)
        is not stages.recordings.find("decode", 2)
    )
    assert stages.recordings.find("decode", 5) is None
    assert gpu.captures == 8 + 6, "the smallest and the largest were measured before"


def logits_of(worker: Worker, rows: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """Return the logits [T, vocabulary] of a step that follows the prompts. Each row has a token
    and `counts` drafts."""
    generate(worker, 1)
    computed = [len(PROMPTS[row]) for row in rows]
    batch = batch_of(1, rows, [1 + count for count in counts], computed)
    batch.num_draft_tokens[:] = counts
    for row, count in zip(rows, counts, strict=True):
        worker.running.state.proposals.token_ids[row] = np.arange(row, row + count, dtype=np.int32)
    ending = worker.running.ending
    logits: list[torch.Tensor] = []

    def end(step: Step) -> Callable[[], StepOutput]:
        logits.append(ending.logits(step).clone())
        return lambda: step.output

    with mock.patch.object(ending, "end", end):
        worker.run(batch)()
    return logits[0]


@pytest.mark.parametrize(
    ("rows", "counts", "trait", "size"),
    [
        ([0, 1, 2], [3, 3, 3], "verify", 16),  # as many tokens fit, and 3 rows, in 4 · 4
        ([0, 1], [3, 1], "verify", 8),
        ([2], [1], "verify", 4),
        ([0, 1, 2], [1, 0, 0], "decode", 4),  # it would be a quarter of the recording for 4 rows
        ([0, 1, 2], [2, 0, 0], "verify", 16),  # no recording of the other trait is large enough
        ([0, 1, 2], [0, 0, 0], "decode", 4),
    ],
)
def test_drafts_are_verified_in_a_recording_of_few_rows(
    rows: list[int],
    counts: list[int],
    trait: str,
    size: int,
    gpu: FakeGPU,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = fake_limits(**SIZES, max_drafts=3, stored_drafts=3)
    eager = make_worker(tmp_path, limits, enforce_eager=True)
    eager.allocate(plan_of(eager))
    eager.warm_up()
    worker = make_worker(tmp_path, limits)
    worker.allocate(plan_of(worker))
    worker.warm_up()
    stages = worker.running.stages
    assert {
        key: [(recorded.num_rows, recorded.num_tokens) for recorded in made]
        for (key, _), made in stages.recordings.by_trait.items()
    } == {
        "forward": [(4, 8), (4, 16)],
        "decode": [(1, 1), (2, 2), (4, 4)],
        "verify": [(1, 4), (2, 8), (4, 16)],
        "logits": [(1, 1), (2, 2), (4, 4)],
    }
    used: list[Recorded] = []
    decode = stages.decode
    monkeypatch.setattr(
        stages,
        "decode",
        lambda recorded, num_tokens: used.append(recorded) or decode(recorded, num_tokens),
    )
    expected = logits_of(eager, rows, counts)
    assert len(expected) == sum(counts) + len(rows)
    torch.testing.assert_close(logits_of(worker, rows, counts), expected)
    assert used[-1].num_tokens == size and used[-1] in stages.recordings.by_trait[trait, False]


def test_padding_touches_no_block_of_a_request(gpu: FakeGPU, tmp_path: Path) -> None:
    """Three rows run as four. The fourth writes to the null block, which belongs to no request."""
    worker = ready(tmp_path)
    generate(worker, 4)
    keys = worker.running.parts.views[0]["k"]
    with torch._C.DisableTorchFunction():
        used = keys.flatten(1).abs().sum(1).nonzero().flatten().tolist()
    assert used == [0, 1, 2, 9, 17, 18]


def test_a_row_that_is_taken_again_starts_from_its_own_prompt(gpu: FakeGPU, tmp_path: Path) -> None:
    """This holds even while a step of the row's previous owner is in flight."""
    worker = ready(tmp_path)
    (wanted,) = expected(worker, 2, [[8, 6]])
    first = worker.run(batch_of(0, [0], [3], [0], new=[request(0, [5, 7, 9])]))
    second = worker.run(batch_of(1, [0], [1], [3]))
    third = worker.run(
        batch_of(2, [0], [2], [0], new=[request(0, [8, 6])], removed_rows=np.array([0], np.int32))
    )
    fourth = worker.run(batch_of(3, [0], [1], [2]))
    found = [wait().token_ids.row(0).tolist()[0] for wait in (first, second, third, fourth)]
    assert found[2:] == wanted


def test_new_memory_makes_recordings_void(gpu: FakeGPU, tmp_path: Path) -> None:
    worker = ready(tmp_path)
    before = generate(worker, 4)
    old = worker.running.stages.recordings.find("decode", 4)
    worker.allocate(plan_of(worker, 33))
    assert generate(worker, 4) == before, "it runs eagerly until it is recorded again"
    worker.warm_up()
    captured = gpu.replays
    assert generate(worker, 4) == before and gpu.replays > captured
    with pytest.raises(AssertionError, match="void after reset"):
        assert old is not None and old.recording(3)


def test_the_largest_step_is_run_before_the_cache_is_sized(gpu: FakeGPU, tmp_path: Path) -> None:
    small = memory_for_cache(make_worker(tmp_path))
    share = EngineConfig().gpu_memory_utilization
    assert 0 < small < share * TOTAL_BYTES - gpu.used_bytes, (
        "the memory that the step needs stays free"
    )
    assert memory_for_cache(make_worker(tmp_path, kv_cache_memory_bytes=12345)) == 12345


def test_recordings_are_measured_before_the_cache_is_sized(gpu: FakeGPU, tmp_path: Path) -> None:
    """With the memory that is left, everything can be recorded, and the device is not over its
    share."""
    worker = make_worker(tmp_path)
    eager = make_worker(tmp_path, enforce_eager=True)
    left = [memory_for_cache(each) for each in (worker, eager)]
    before = gpu.used_bytes
    worker.allocate(plan_of(worker))
    worker.warm_up()
    assert isinstance(worker.replay, FakeReplay)
    assert 0 < left[1] - left[0] < 2 * worker.replay.pool_bytes
    assert gpu.peak_bytes - before < TOTAL_BYTES * EngineConfig().gpu_memory_utilization - left[0]


def test_without_memory_the_largest_steps_are_not_recorded(
    gpu: FakeGPU,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = generate(ready(tmp_path), 4)
    record = FakeReplay.record

    def in_little_memory(replay: FakeReplay, *given: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "total_bytes", gpu.used_bytes - replay.pool_bytes + 150000)
            return record(replay, *given)

    monkeypatch.setattr(FakeReplay, "record", in_little_memory)
    with caplog.at_level("INFO"):
        worker = ready(tmp_path, kv_cache_memory_bytes=1)
    recordings = worker.running.stages.recordings
    sizes = [recorded.num_tokens for recorded in recordings.by_trait["decode", False]]
    assert sizes and sizes == [1, 2, 4][: len(sizes)] != [1, 2, 4]
    assert f"decode of more than {sizes[-1]} tokens" in caplog.text
    assert generate(worker, 4) == wanted


def test_rows_of_items_leave_less_for_the_cache(gpu: FakeGPU, tmp_path: Path) -> None:
    """As many as are kept, or those of one item that is larger."""

    def left(**items: int) -> int:
        return memory_for_cache(make_worker(tmp_path, limits=fake_limits(**SIZES, **items)))

    assert left(encoder_cache_size=30) == left()
    one = left(max_num_encoder_input_tokens=100, encoder_cache_size=30)
    kept = left(max_num_encoder_input_tokens=100, encoder_cache_size=300)
    assert left() - kept == 3 * (left() - one) > 0


def test_what_cannot_be_recorded_is_named_and_runs(
    gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = TinyModel.forward

    def clipped(self: TinyModel, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert float(hidden.abs().max()) < 1e9
        return plain(self, hidden, positions)

    wanted = generate(ready(tmp_path), 4)
    monkeypatch.setattr(TinyModel, "forward", clipped)
    with caplog.at_level("INFO"):
        worker = ready(tmp_path)
    refusal = "decode, forward run eagerly: __float__ reads a tensor of the device on the host"
    assert refusal in caplog.text
    (note,) = worker.registry.decisions["kernel", "recorder"].notes
    assert note == f"not replayed: {refusal}"
    assert generate(worker, 4) == wanted


def test_a_mistake_in_a_model_stops_the_start(
    gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(tmp_path)
    worker.allocate(plan_of(worker))
    monkeypatch.setattr(TinyModel, "forward", lambda self, hidden: hidden)
    with pytest.raises(PluginFailure, match="model:Tiny .* failed: TypeError"):
        worker.warm_up()


WRONG_ATTENTION = {
    r"a \w*Tensor \[\d+, 33\] torch.float32: expected the shape \[\d+, 32\] of": lambda out: (
        torch.cat([out, out[:, :1]], 1)
    ),
    (
        r"a \w*Tensor \[\d+, 32\] torch.float16: expected the shape \[\d+, 32\] of torch.float32"
    ): lambda out: out.half(),
    "a list: expected a Tensor": lambda out: [out],
}


@pytest.mark.parametrize("told", WRONG_ATTENTION)
@pytest.mark.parametrize("memory", [None, 1 << 20], ids=["measurement", "warm-up"])
def test_attention_of_a_wrong_shape_or_type_stops_the_start(
    gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, memory: int | None
) -> None:
    """Native code that gets it would read and write other memory, so nothing else sees it: not even
    in the step that measures."""
    plain = FakePagedAttention.bind
    wrong = WRONG_ATTENTION[told]

    def bind(self: FakePagedAttention, layer: AttentionLayer) -> Callable[..., object]:
        attend = plain(self, layer)
        return lambda q, k, v: wrong(attend(q, k, v))

    monkeypatch.setattr(FakePagedAttention, "bind", bind)
    with pytest.raises(
        PluginFailure,
        match=rf"plugin attention:paged .* contract: attention of layer 0 returned {told}",
    ):
        ready(tmp_path, kv_cache_memory_bytes=memory)


WRONG_RESULTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    (
        r"fakes .*: the bound call of layers.0 returned a \w*Tensor \[\d+, 97\] .*: expected the "
        r"shape \[\d+, 96\]"
    ): (
        FakeWeight,
        "bind_head",
        lambda weight, kernels: lambda x: torch.nn.functional.pad(x @ weight.weight.T, (0, 1)),
    ),
    (
        r"fakes .*: the bound call of layers.0.* returned a \w*Tensor .*bfloat16.*: expected "
        r".*float32"
    ): (
        FakeWeight,
        "bind",
        lambda weight, kernels: (
            lambda x: weight.weight[x] if weight.is_table else (x @ weight.weight.T).bfloat16()
        ),
    ),
    (
        r"sampler:greedy .*: FakeGreedySampler.sample\(\) returned a Sampled: a token id is not "
        r"between 0 and 60"
    ): (
        FakeGreedySampler,
        "sample",
        lambda sampler, logits, step: Sampled(
            logits.argmax(-1, True) + 61, logits.new_ones(len(logits), dtype=torch.int64)
        ),
    ),
    (
        r"model:Tiny .*: TinyModel.logits\(\) returned a \w*Tensor \[5, 61\] .*: expected the "
        r"shape \[1, 61\]"
    ): (
        TinyModel,
        "logits",
        lambda model, hidden: model.head(hidden)[:1].repeat(5, 1),
    ),
}


@pytest.mark.parametrize("told", WRONG_RESULTS)
def test_wrong_results_of_other_parts_stop_the_start(
    gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    kind, method, wrong = WRONG_RESULTS[told]
    monkeypatch.setattr(kind, method, wrong)
    with pytest.raises(PluginFailure, match=f"plugin {told}"):
        ready(tmp_path, kv_cache_memory_bytes=1 << 20)


def test_checks_of_the_first_steps_cost_nothing_later(gpu: FakeGPU, tmp_path: Path) -> None:
    """No part of the runner and no bound call is watched after the start."""
    worker = ready(tmp_path)
    files = set()
    waiting: list[object] = [
        worker.running.stages.model,
        worker.running.ending.sampler,
    ]
    for layer in worker.models[0].layers:
        waiting += [
            layer.forward,
            *(value for value in vars(layer).values() if not isinstance(value, Build)),
        ]
    waiting += worker.models[0].build.attention.values()
    while waiting:
        item = waiting.pop()
        assert not isinstance(item, Checked)
        if isinstance(item, FunctionType):
            files.add(Path(item.__code__.co_filename).name)
            waiting += [cell.cell_contents for cell in item.__closure__ or ()]
    assert "linear.py" in files and "fake_parts.py" in files and "first_steps.py" not in files, (
        files
    )


def test_a_model_that_fails_in_its_first_step_stops_the_start(
    gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder does not reach the mistake, because it refuses what comes before."""

    def broken(self: TinyModel, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert float(hidden.abs().max()) < 1e9
        raise AttributeError("no attribute 'weight'")

    worker = make_worker(tmp_path)
    worker.allocate(plan_of(worker))
    monkeypatch.setattr(TinyModel, "forward", broken)
    with pytest.raises(
        PluginFailure, match="model:Tiny .* failed: AttributeError: no attribute 'weight'"
    ):
        worker.warm_up()


def test_the_trial_leaves_no_trace(gpu: FakeGPU, tmp_path: Path) -> None:
    worker = ready(tmp_path)
    assert all(
        not view[0].any()
        for tensors in worker.running.parts.views.values()
        for view in tensors.values()
    )


def test_an_attention_that_does_not_replay_is_named(gpu: FakeGPU, tmp_path: Path) -> None:
    worker = ready(tmp_path)
    replay = worker.setup.platform.replay(None)
    assert replay is not None
    refusal = "the attention of x cannot be replayed"
    stages = worker.running.stages
    stages.record(replay, ("decode", "logits"), worker.models[0].plan, lambda trait: refusal)
    (reason,) = stages.recordings.reasons()
    assert reason == "decode run eagerly: the attention of x cannot be replayed"
    assert stages.recordings.find("logits", 2) is not None


def test_the_fake_refuses_what_a_gpu_refuses(gpu: FakeGPU) -> None:
    on_device = torch.ones(3, device=DEVICE)
    assert isinstance(on_device + 1, DeviceTensor)
    with pytest.raises(RuntimeError, match="one is on the host"):
        on_device + torch.ones(3)
    assert on_device.sum().item() == 3 and gpu.host_reads == 1
    copies = FakeGPUPlatform(None, PlatformSetup()).copies()
    memory = copies.host((3,), torch.float32)
    target = torch.zeros(3, device=DEVICE)
    copies.upload(memory, target)
    memory.numpy()[0] = 9
    with pytest.raises(AssertionError, match="before its copy"):
        copies.mark()()
    with pytest.raises(AssertionError, match="by itself"):
        copies.upload(torch.ones(3), target)


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            "load",
            "the weights do not fit: .*; raise tensor_parallel_size or cpu_offload_gb, or set",
        ),
        ("profile", "a step does not fit: .*; lower max_num_batched_tokens, max_num_seqs or gpu_m"),
        ("warm-up", "a step does not fit: .*; lower max_num_batched_tokens"),
        ("step", "a step does not fit: .*; lower max_num_batched_tokens"),
    ],
)
def test_too_little_memory_names_the_settings_that_help(
    gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, told: str
) -> None:
    """Wherever it is missing, the message has the numbers, and no plugin is blamed."""
    forward = TinyModel.forward

    def large(self: TinyModel, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        torch.zeros(2**25, device=DEVICE)  # 128 MiB
        return forward(self, hidden, positions)

    numbers = "a part of [0-9.]+ MiB was asked for, and the device has 0.0[0-9] of 0.06 GiB free"
    refused = pytest.raises(ConfigError, match=f"{told}".replace(".*", numbers))
    if place == "load":
        gpu.total_bytes = 1000
        monkeypatch.setattr("pegboard.worker.worker.check_memory", lambda *given: None)
        with pytest.raises(ConfigError, match=told):
            make_worker(tmp_path)
        return
    if place == "profile":
        monkeypatch.setattr(TinyModel, "forward", large)
        with refused:
            make_worker(tmp_path)
        return
    worker = make_worker(tmp_path, enforce_eager=True)
    worker.allocate(plan_of(worker))
    if place == "step":
        worker.warm_up()
    monkeypatch.setattr(TinyModel, "forward", large)
    with refused:
        worker.warm_up() if place == "warm-up" else generate(worker, 1)
