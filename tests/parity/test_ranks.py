"""Models that ranks divide compute what transformers computes: with ranks that are threads of this
process, and with processes that share memory. `pytest tests/parity --ranks 2 --stages 2` runs all
parity tests so."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pegboard_platform_cpu.platform import CPUPlatform
from test_depths import GPT2
from test_state_parity import ARCHITECTURES as STATES
from tiny_models import check_cached, check_parity, divide, nightly, open_llm, random_prompts

from pegboard import LLM, SamplingParams
from pegboard.config.sources import engine_settings
from pegboard.engine import build
from pegboard.errors import ConfigError, EngineDeadError, ModelError, PluginFailure
from pegboard.interfaces.platform import MemoryNumbers, PlatformSetup
from pegboard.plan.engine_plan import resolve
from pegboard.worker.expert_balance import ExpertBalance
from pegboard_testing.fake_collective import FakeCollective

HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
GROUPS = {
    "num_heads": 8,
    "head_dim": 8,
    "expand": 2,
    "n_groups": 2,
    "state_size": 16,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "intermediate_size": None,
}
DELTA = {
    "rms_norm_eps": 0.1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
GATES = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 6,
    "laurel_rank": 5,
    "vocab_size_per_layer_input": 100,
    "intermediate_size": [48, 32, 48, 40],
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0],
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
LATENT = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads in unequal shares": ("llama", HEADS),
    "tied, biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "merged projections": ("phi3", {"pad_token_id": 0}),
    "one head of keys": ("gpt_bigcode", {"n_head": 4, "n_embd": 32, "n_layer": 3, "n_inner": 48}),
    "norms of all heads": ("olmo2", {}),
    "experts": ("mixtral", EXPERTS),
    "experts, sinks": ("gpt_oss", {**EXPERTS, "head_dim": 8, "sliding_window": 9}),
    "latents": ("deepseek_v3", LATENT),
    "channels with states": (
        "mamba",
        {**dict.fromkeys(GROUPS), "state_size": 4, "expand": 2},
    ),
    "heads with states": ("mamba2", GROUPS),
    "states of more ranks than groups": ("mamba2", {**GROUPS, "n_groups": 1}),
    "delta rule, gated attention": ("qwen3_next", DELTA),
    "closed gates": ("gemma3n_text", GATES),
}
WITH_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": MODELS["experts"],
    "gpt_oss, biases": MODELS["experts, sinks"],
    "deepseek_v3, groups and shared experts": MODELS["latents"],
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "llama4, weighted inputs": (
        "llama4_text",
        {"num_local_experts": 4, "intermediate_size_mlp": 40, "head_dim": 8},
    ),
    "qwen3_next": MODELS["delta rule, gated attention"],
}
FALLBACK = {"hf_overrides": {"architectures": ["SomeForCausalLM"]}}
STAGED = {**MODELS, "hybrid": STATES["bamba"]}
del STAGED["closed gates"]
Write = Callable[..., Any]
pytestmark = pytest.mark.one_rank  # they divide models themselves
FAILING = """
class Failing:
    argmax_invariant = False
    host_tokens = False

    def __init__(self, options, setup): ...

    def update(self, added, removed): ...

    def apply(self, logits, rows, depth, drafts):
        return 1 // 0

    def extend(self, rows, token_ids): ...
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize(("count", "stages"), nightly([(1, 2), (1, 3), (2, 2)], (1, 2)))
def test_stages(
    write: Write, monkeypatch: pytest.MonkeyPatch, name: str, count: int, stages: int
) -> None:
    """Most of these models have three layers."""
    kind, values = STAGED[name]
    divide(monkeypatch, count, stages)
    check_parity(write(kind, **values), lengths=(6, 17), max_model_len=64)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_threads(write: Write, monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    """Three ranks share the two KV heads of most of these models."""
    kind, values = MODELS[name]
    divide(monkeypatch, count)
    check_parity(write(kind, **values), lengths=(6, 17), max_model_len=64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", nightly([2, 3], 3))
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", HEADS),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("gpt_neox", {"hidden_size": 48, "num_attention_heads": 6}),
        ("starcoder2", {}),
        ("cohere", {}),
        ("helium", {"head_dim": 8}),
        ("qwen3", {"head_dim": 8}),
        ("gemma2", {"head_dim": 8}),
        ("olmo2", {}),
        ("glm", {"head_dim": 8, "pad_token_id": 0}),
        ("phi3", {"pad_token_id": 0}),
        ("mixtral", EXPERTS),
        ("deepseek_v3", LATENT),
    ],
)
def test_the_fallback(
    write: Write, monkeypatch: pytest.MonkeyPatch, kind: str, values: dict[str, Any], count: int
) -> None:
    """Modules of transformers, divided by its plan. Of some plans, attention stays whole."""
    divide(monkeypatch, count)
    reference = write(kind, "fallback", **values)
    check_parity(reference, lengths=(6, 17), max_model_len=64, **FALLBACK)


@pytest.mark.slow
def test_the_fallback_in_processes(write: Write) -> None:
    settings = {"tensor_parallel_size": 2, "block_size": 16, "max_model_len": 64, **FALLBACK}
    check_parity(write("mixtral", "fallback", **EXPERTS), lengths=(6, 33), **settings)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize("count", nightly([2, 3], 2))
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_whole_experts(
    write: Write, monkeypatch: pytest.MonkeyPatch, name: str, count: int, placement: str
) -> None:
    kind, values = WITH_EXPERTS[name]
    divide(monkeypatch, count)
    settings: dict[str, Any] = {
        "enable_expert_parallel": True,
        "expert_placement_strategy": placement,
    }
    check_parity(write(kind, **values), lengths=(6, 17), max_model_len=64, **settings)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3, groups and shared experts"])
def test_whole_experts_of_processes(write: Write, name: str) -> None:
    kind, values = WITH_EXPERTS[name]
    settings = {"tensor_parallel_size": 2, "block_size": 16, "enable_expert_parallel": True}
    check_parity(write(kind, **values), lengths=(6, 33), **settings)


MOVING: dict[str, Any] = {
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "max_model_len": 64,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", WITH_EXPERTS)
@pytest.mark.parametrize(("redundant", "stages"), [(0, 1), (2, 1), (2, 2)])
def test_experts_that_move(
    write: Write, monkeypatch: pytest.MonkeyPatch, name: str, redundant: int, stages: int
) -> None:
    """They move after every second step."""
    kind, values = WITH_EXPERTS[name]
    odd = values.get("num_experts") == 5
    divide(monkeypatch, 2, stages)
    reference = write(kind, **values)
    moved = moves_of(monkeypatch)
    config = {"step_interval": 2, "window_size": 3, "num_redundant_experts": redundant + odd}
    check_parity(reference, lengths=(6, 17), eplb_config=config, **MOVING)
    assert sum(moved) > 1
    if kind != "qwen3_next":
        check_cached(reference, (20, 9, 20), eplb_config=config, **MOVING)


def moves_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every move of a layer's experts adds how many slots it changes."""
    moved: list[int] = []
    move = ExpertBalance._move

    def watched(self: ExpertBalance, layer: Any, slots: Any, experts: Any) -> None:
        moved.append(int((slots.experts != experts).sum()))
        move(self, layer, slots, experts)

    monkeypatch.setattr(ExpertBalance, "_move", watched)
    return moved


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3, groups and shared experts"])
def test_experts_that_move_between_processes(write: Write, name: str) -> None:
    """What they count is part of the recording. They come back before the weights are loaded
    again."""
    kind, values = WITH_EXPERTS[name]
    reference = write(kind, **values)
    settings: dict[str, Any] = {
        **MOVING,
        "tensor_parallel_size": 2,
        "block_size": 16,
        "eplb_config": {"step_interval": 2, "num_redundant_experts": 2},
    }
    check_parity(reference, lengths=(6, 33), **settings)
    check_cached(reference, (32, 20, 32), **settings)
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts((7, 11, 5))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    answers = []
    with open_llm(reference.directory, enable_sleep_mode=True, **settings) as llm:
        for level in (1, 2, 0):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            moved = llm.collective_rpc(has_moved)
            assert moved == [True, True]
            if level:
                llm.sleep(level=level)
                llm.wake_up()
    assert answers[0] == answers[1] == answers[2]


def has_moved(worker: Any) -> bool:
    return any((slots.experts != slots.first).any() for _, slots in worker.balance.layers)


def test_experts_that_cannot_be_held_equally_are_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, values = WITH_EXPERTS["qwen3_moe"]
    directory = write(kind, **values).directory
    divide(monkeypatch, 2)
    for redundant in (0, 2, 7):
        config = {"num_redundant_experts": redundant}
        with pytest.raises(ModelError, match="2 ranks cannot hold 5 experts .* such as 1"):
            open_llm(directory, eplb_config=config, **MOVING)


def test_whole_experts_of_one_rank_are_all(write: Write) -> None:
    check_parity(write("mixtral", **EXPERTS), lengths=(6,), enable_expert_parallel=True)


def test_models_without_experts_cannot_share_them_out(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write("llama").directory
    for count in (1, 2):
        if count > 1:
            divide(monkeypatch, count)
        with pytest.raises(ConfigError, match="has no experts; remove enable_expert_parallel"):
            open_llm(directory, enable_expert_parallel=True)


def test_ranks_without_an_expert_are_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**EXPERTS, "num_local_experts": 2}
    divide(monkeypatch, 3)
    with pytest.raises(ModelError, match="2 heads, channels or experts .* among 3 ranks"):
        open_llm(write("mixtral", **values).directory, enable_expert_parallel=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "ranks", "stages"),
    nightly(
        [
            ("heads in unequal shares", 2, 1),
            ("experts", 2, 1),
            ("latents", 2, 1),
            ("heads with states", 2, 1),
            ("experts, sinks", 1, 3),
            ("heads in unequal shares", 2, 2),
        ],
        ("heads in unequal shares", 2, 1),  # also part of the last one
        ("experts", 2, 1),  # also in `test_whole_experts_of_processes`
        ("latents", 2, 1),  # also in `test_context.py`
        ("experts, sinks", 1, 3),  # also in `test_stages`, in threads
    ),
)
def test_processes(write: Write, name: str, ranks: int, stages: int) -> None:
    """The exchange is part of the recording. Blocks of 16 are those of the native attention."""
    kind, values = MODELS[name]
    reference = write(kind, **values)
    settings: dict[str, Any] = {
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": stages,
        "max_model_len": 64,
        "block_size": 16,
        "mamba_block_size": 16,
    }
    check_parity(reference, lengths=(6, 33), **settings)
    check_cached(reference, (32, 20, 32), **settings)


def test_states_of_requests_on_all_ranks(write: Write) -> None:
    """Requests that are preempted or drafted give the tokens of one rank, also after the ranks have
    slept."""
    reference = write("llama", **HEADS)
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts((7, 11, 5, 9))]
    params = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, detokenize=False),
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False),
        SamplingParams(temperature=0.7, top_k=5, seed=4, n=2, max_tokens=9, detokenize=False),
        SamplingParams(temperature=0.0, min_p=0.1, max_tokens=20, detokenize=False),
    ]
    answers = []
    for ranks, stages in ((1, 1), (2, 1), (1, 2)):
        settings: dict[str, Any] = {
            "tensor_parallel_size": ranks,
            "pipeline_parallel_size": stages,
            "num_gpu_blocks_override": 14,
            "max_model_len": 44,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
            "max_in_flight": 2,
            "enable_sleep_mode": True,
        }
        with open_llm(reference.directory, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([[each.token_ids for each in out.outputs] for out in outputs])
            llm.sleep(level=2)
            llm.wake_up()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [[each.token_ids for each in out.outputs] for out in outputs] == answers[-1]
            assert llm.collective_rpc("memory")[ranks * stages - 1]["total"] > 0
    assert answers[0] == answers[1] == answers[2]


def test_the_plan_for_two_ranks_of_a_host(write: Write) -> None:
    """What `pegboard plugins why` shows: the collective that processes of one host use."""
    settings = {
        "tensor_parallel_size": 2,
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "num_threads": CPUPlatform(None, PlatformSetup()).num_threads,  # as other tests here
    }
    plan, registry = resolve(engine_settings(str(write("llama").directory), settings))
    kv_plan, *_ = build.choose_for_model(plan, registry)
    assert kv_plan.groups[0].spec.tensors[0].shape[0] == 1, "two KV heads, one on each rank"
    assert registry.decisions["collective", ""].require().name == "shared_memory"
    assert registry.decisions["executor", ""].require().name == "mp"


def test_the_plan_for_three_stages_of_a_host(write: Write) -> None:
    """Every stage stores a third in each block. Each tensor is read by some stage."""
    settings = {
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "num_threads": CPUPlatform(None, PlatformSetup()).num_threads,  # as other tests here
    }
    directory = str(write("llama").directory)
    plans = []
    for stages in (1, 3):
        staged = settings | {"pipeline_parallel_size": stages}
        plan, registry = resolve(engine_settings(directory, staged))
        plans.append(build.choose_for_model(plan, registry))
    (whole, _, names), (divided, _, names_of_stages) = plans
    assert names == names_of_stages
    assert divided.groups == whole.groups and whole.block_bytes == 3 * divided.block_bytes


def test_each_rank_needs_memory_for_its_share(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write("llama").directory
    free = int(0.7 * (directory / "model.safetensors").stat().st_size)
    numbers = MemoryNumbers(free, 1 << 30, 0, 0)
    monkeypatch.setattr(CPUPlatform, "memory", lambda self, reset_peak=False: numbers)
    with pytest.raises(ConfigError, match="the weights of .* needs"):
        open_llm(directory)
    divide(monkeypatch, 2)
    open_llm(directory).shutdown()


def test_a_collective_is_closed_with_its_worker(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    monkeypatch.setattr(FakeCollective, "close", lambda self: closed.append(self.rank))
    divide(monkeypatch, 2)
    with open_llm(write("llama").directory):
        assert not closed
    assert sorted(closed) == [0, 1]


def test_what_ranks_cannot_divide_is_refused_by_name(write: Write) -> None:
    def opened(directory: Any, ranks: int, **settings: Any) -> LLM:
        return open_llm(directory, tensor_parallel_size=ranks, num_threads=1, **settings)

    with pytest.raises(ModelError, match="no tensor parallel plan for GPT2LMHeadModel"):
        opened(write(GPT2[0], "fallback", **GPT2[1]).directory, 2, **FALLBACK)
    with pytest.raises(ModelError, match="4 heads, .* to divide among 5 ranks|has 2 heads"):
        opened(write("llama").directory, 5)


@pytest.mark.parametrize(
    ("kind", "values", "stages", "message"),
    [
        ("llama", {}, 4, "3 layers to divide among 4 stages.*pipeline_parallel_size"),
        (*STATES["zamba2"], 2, "the layers of this architecture cannot be divided"),
    ],
)
def test_what_stages_cannot_divide_is_refused(
    write: Write, kind: str, values: dict[str, Any], stages: int, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        open_llm(write(kind, **values).directory, pipeline_parallel_size=stages, num_threads=1)


def test_a_rank_that_dies_is_named(write: Write) -> None:

    with open_llm(write("llama").directory, tensor_parallel_size=2) as llm:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        workers = [pid for pid in children if b"rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(workers[1]), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="worker 1 died: signal SIGKILL"):
            llm.generate([{"prompt_token_ids": [5, 6]}], use_tqdm=False)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_plugin_that_fails_on_a_rank_is_named(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its traceback stays in the rank's process, so the plugin is found there."""
    (tmp_path / "acme_failing.py").write_text(FAILING)
    settings: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "logits_processors": ["acme_failing:Failing"],
    }
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginFailure, match="plugin logits_processor:Failing .*ZeroDivisionError"):
        open_llm(write("llama").directory, **settings)
