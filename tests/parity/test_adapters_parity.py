"""Adapters against models whose weights contain them: W + scaling · B A, computed by transformers
alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_dense_parity import ARCHITECTURES
from test_latent_parity import ARCHITECTURES as LATENT
from test_latent_parity import kimi_of
from test_ranks import DELTA, HEADS
from test_state_parity import ARCHITECTURES as STATES
from tiny_models import divide, open_llm
from transformers.pytorch_utils import Conv1D

from pegboard import LoRARequest, SamplingParams
from pegboard.errors import RequestError
from pegboard.worker import worker

TOLERANCE = 1e-4
VOCAB_SIZE = 131
SCALING = 0.5
RANKS = (1, 8, 3)
"""One adapter for each. Two of them have a slot at the same time."""
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

Weights = dict[str, tuple[torch.Tensor, torch.Tensor]]


def random_adapter(model: Any, rank: int, seed: int) -> Weights:
    """Return A and B for every linear layer and for the embedding. The second adapter leaves out
    half of the layers."""
    generator = torch.Generator().manual_seed(seed)
    found = Weights()
    kinds = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    modules = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, kinds) and name.rpartition(".")[2] != "wpe"
    ]
    for name, module in modules[:: 2 if seed == 2 else 1]:
        is_table = isinstance(module, torch.nn.Embedding)
        is_row_major = isinstance(module, torch.nn.Linear)
        out, columns = module.weight.shape if is_row_major else module.weight.T.shape
        a = torch.randn(rank, columns, generator=generator) * (1 if is_table else columns**-0.5)
        found[name] = a, torch.randn(out, rank, generator=generator) * rank**-0.5
    return found


def random_expert_adapter(model: Any, rank: int, seed: int) -> Weights:
    """The same for each expert. The first adapter changes every linear layer too, and the third
    some experts only."""
    generator = torch.Generator().manual_seed(seed)
    found = random_adapter(model, rank, seed) if seed == 1 else Weights()
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        if not path.endswith(".experts"):
            continue
        modules = (
            {"gate_proj": (0, 2), "up_proj": (1, 2)} if kind == "gate_up_proj" else {kind: (0, 1)}
        )
        for expert, (out, columns) in enumerate([parameter.shape[1:]] * len(parameter)):
            for module, (_, parts) in modules.items():
                if seed < 3 or (expert % 2 and module != "up_proj"):
                    a = torch.randn(rank, columns, generator=generator) * columns**-0.5
                    found[f"{path}.{expert}.{module}"] = (
                        a,
                        torch.randn(out // parts, rank, generator=generator),
                    )
    return found


def merged(model: Any, weights: Weights) -> Any:
    """Return a copy of the model with the adapter in its weights."""
    model = copy.deepcopy(model)
    if "lm_head" in weights or model.lm_head.weight is model.get_input_embeddings().weight:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, (a, b) in weights.items():
            path, _, kind = name.rpartition(".")
            if (stack := path.rpartition("."))[0].endswith(".experts"):
                experts = model.get_submodule(stack[0])
                rows = experts.down_proj if kind == "down_proj" else experts.gate_up_proj
                half = 0 if kind != "up_proj" else len(b)
                rows[int(stack[2]), half : half + len(b)] += SCALING * b @ a
                continue
            module = model.get_submodule(name)
            change = SCALING * b @ a
            module.weight += change if isinstance(module, torch.nn.Linear) else change.T
    return model


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Weights]]:
    """Path → adapter. Workers read them from here."""
    known: dict[str, Weights] = {}
    monkeypatch.setattr(
        worker,
        "read_files",
        lambda registry, base, adapter: (SCALING, known[adapter.lora_path]),
    )
    yield known


def check(model: Any, prompt: list[int], output: Any, tolerance: float = TOLERANCE) -> None:
    """Compare the logprobs of every position with the model, and so also every greedy choice."""
    completion = output.outputs[0]
    with torch.no_grad():
        expected = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0].log_softmax(-1)
    found = [*(output.prompt_logprobs or [None])[1:], *completion.logprobs]
    first = len(prompt) + len(completion.token_ids) - len(found) - 1
    for position, row in enumerate(found, first):
        values = torch.tensor([row[token].logprob for token in range(VOCAB_SIZE)])
        worst = (values - expected[position]).abs().max().item()
        assert worst < tolerance, (
            f"position {position} of a prompt of {len(prompt)} tokens is off by {worst}"
        )
    assert completion.token_ids == expected[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model_type", "config", "engine"),
    [
        ("llama", {}, {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}, {"enforce_eager": True}),
        ("qwen2", {}, {"num_gpu_blocks_override": 18, "enable_prefix_caching": False}),
        ("olmo2", {}, {}),
        ("gemma", {"head_dim": 8}, {"max_num_batched_tokens": 64}),
        ("qwen3_moe", {"head_dim": 8, **EXPERTS}, {}),
        ("olmoe", EXPERTS, {"max_num_batched_tokens": 64}),
        ("qwen3_moe", {"head_dim": 8, **EXPERTS}, {"enable_expert_parallel": True}),
        (*ARCHITECTURES["gpt2"], {}),
        (*ARCHITECTURES["gpt_neox"], {"max_num_batched_tokens": 64}),
        (*ARCHITECTURES["mpt, limited queries"], {}),
        (*ARCHITECTURES["falcon, two norms"], {"enforce_eager": True}),
        (*LATENT["deepseek_v3, halves, dense"], {}),
        (*LATENT["deepseek_v2, groups"], {"enforce_eager": True, "max_num_batched_tokens": 64}),
        (
            "qwen3_moe",
            {"head_dim": 8, **EXPERTS},
            {"enforce_eager": True, "num_gpu_blocks_override": 18, "enable_prefix_caching": False},
        ),
    ],
    ids=[
        *("llama", "llama, tied, eager", "qwen2, preempted", "fallback", "fallback, tied"),
        *("experts", "experts, chunked", "experts, shared out"),
        *("transposed", "heads in groups", "limited queries", "groups of KV heads"),
        *("latents", "latents, experts, chunked", "experts, eager, preempted"),
    ],
)
def test_a_mixed_batch_equals_merged_models(
    write: Any,
    adapters: dict[str, Weights],
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    config: Any,
    engine: Any,
) -> None:
    if "enable_expert_parallel" in engine:
        divide(monkeypatch, 2)
    check_mixed_batch(write(model_type, **config), adapters, config, **engine)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("model_type", "config", "ranks", "stages"),
    [
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}, 2, 1),
        ("llama", HEADS, 2, 1),
        ("llama", HEADS, 3, 1),
        ("llama", {}, 2, 2),
        ("phi3", {"num_key_value_heads": 1}, 3, 1),
        ("gemma", {"head_dim": 8}, 2, 1),
        ("qwen3_moe", {"head_dim": 8, **EXPERTS}, 2, 1),
        ("qwen3_next", DELTA, 2, 1),
        (*ARCHITECTURES["gpt_neox"], 2, 1),
        (*LATENT["deepseek_v3, halves, dense"], 2, 1),
    ],
    ids=[
        *("tied, biases", "unequal shares", "three ranks", "stages", "merged QKV, one KV head"),
        *("fallback", "experts", "states", "heads in groups", "latents"),
    ],
)
def test_ranks_divide_both_matrices(
    write: Any,
    adapters: dict[str, Weights],
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    config: Any,
    ranks: int,
    stages: int,
) -> None:
    """`fully_sharded_loras`: the number of ranks does not divide those of the adapters."""
    divide(monkeypatch, ranks, stages)
    reference = write(model_type, **config)
    caches = model_type != "qwen3_next"  # the prompts are too short for its states
    check_mixed_batch(
        reference, adapters, config, fully_sharded_loras=True, enable_prefix_caching=caches
    )


LARGE_BLOCKS = ("bamba", "granite hybrid", "falcon_h1")
"""Hybrids in whose blocks the prompts are too short to be cached."""
SHARED = "zamba2"
"""Its layers share blocks, which an adapter may change in each layer in another way."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*(name for name in STATES if name != SHARED), "kimi_linear"])
def test_models_with_states(write: Any, adapters: dict[str, Weights], name: str) -> None:
    """Scans magnify the rounding of float32, see TOLERANCES of test_state_parity."""
    model_type, config = STATES.get(name, ("", {}))
    reference = write(model_type, **config) if model_type else kimi_of(write)
    if name.startswith("lfm2_moe"):
        config = {}  # its checkpoints have other names of what the adapters of experts change
    caches = not name.startswith(LARGE_BLOCKS)
    settings = {"mamba_block_size": 8, "enable_prefix_caching": caches}
    check_mixed_batch(reference, adapters, config, tolerance=5e-4, **settings)


def test_blocks_that_layers_share_take_no_adapters(
    write: Any, open_llm: Any, adapters: dict[str, Weights]
) -> None:
    model_type, config = STATES[SHARED]
    reference = write(model_type, **config)
    adapters["/a"] = random_adapter(reference.model, 4, 1)
    lora = LoRARequest("a", 1, "/a")
    with (
        open_llm(reference.directory, enable_lora=True, max_lora_rank=8) as llm,
        pytest.raises(RequestError, match=r"does not have: model\.layers\.2\.shared_transformer"),
    ):
        llm.generate([[3, 4]], lora_request=lora, use_tqdm=False)


def test_slots_of_ranks_that_divide_both_matrices_take_less_memory(
    write: Any, open_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the bytes, except for those of the embedding and the head."""
    directory = write("llama").directory
    divide(monkeypatch, 2)
    settings = {"enable_lora": True, "max_lora_rank": 64}
    sizes = []
    for is_fully_sharded in (False, True):
        with open_llm(directory, fully_sharded_loras=is_fully_sharded, **settings) as llm:
            sizes.append(llm.collective_rpc(bytes_of_slots))
    for half, quarter in zip(*sizes, strict=True):
        for kind in ("qkv_proj", "gate_up_proj"):
            assert half["a", kind] == 2 * quarter["a", kind]
            assert half["b", kind] == quarter["b", kind]
        for kind in ("o_proj", "down_proj"):
            assert half["a", kind] == quarter["a", kind]
            assert half["b", kind] == 2 * quarter["b", kind]
        for kind in ("embedding", "head"):
            assert half["a", kind] == quarter["a", kind] and half["b", kind] == quarter["b", kind]


def bytes_of_slots(worker: Any) -> dict[tuple[str, str], int]:
    """Return the memory of A and of B in the last layer of each kind."""
    found = {}
    for name, module in worker.models[0].model.named_modules():
        if (slots := getattr(module, "adapters", None)) is not None:
            kind = name.rpartition(".")[2]
            found["a", kind] = slots.a.nbytes
            found["b", kind] = slots.b.nbytes
    return found


@pytest.mark.one_rank
def test_one_rank_divides_nothing(write: Any, adapters: dict[str, Weights]) -> None:
    check_mixed_batch(write("llama"), adapters, {}, fully_sharded_loras=True)


def check_mixed_batch(
    reference: Any,
    adapters: dict[str, Weights],
    config: Any,
    *,
    tolerance: float = TOLERANCE,
    **engine: Any,
) -> None:
    """Compare requests of several adapters, and of none, with the merged models."""
    models = [reference.model]
    requests = [None]
    for number, rank in enumerate(RANKS, 1):
        path = f"/adapter{number}"
        adapters[path] = (random_expert_adapter if "num_experts" in config else random_adapter)(
            reference.model, rank, number
        )
        models.append(merged(reference.model, adapters[path]))
        requests.append(LoRARequest(f"adapter{number}", number, path))
    generator = torch.Generator().manual_seed(3)
    common = torch.randint(3, VOCAB_SIZE, (9,), generator=generator).tolist()
    asked = []
    for number, length in enumerate((1, 20, 6, 12, 20, 3, 7, 1)):
        prompt = common + torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        asked.append((number % len(models), prompt))
    greedy = {
        "max_tokens": 9,
        "temperature": 0,
        "logprobs": -1,
        "ignore_eos": True,
        "detokenize": False,
    }
    prompts = [{"prompt_token_ids": prompt} for _, prompt in asked]
    loras = [requests[which] for which, _ in asked]
    with open_llm(
        reference.directory,
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=2,
        max_lora_rank=8,
        **engine,
    ) as llm:
        for prompt_logprobs in (-1, None):  # the second time, prefixes come from the cache
            params = SamplingParams(**greedy, prompt_logprobs=prompt_logprobs)
            outputs = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
            for (which, prompt), output in zip(asked, outputs, strict=True):
                check(models[which], prompt, output, tolerance)
        stats = llm.llm_engine.engine.stats()
        assert stats["num_free_blocks"] == stats["num_blocks"] - 1
        if engine.get("enable_prefix_caching", True):
            assert any(output.num_cached_tokens for output in outputs)
        elif "num_gpu_blocks_override" in engine:
            assert stats["num_preemptions_total"]


def test_adapters_of_a_checkpoint_without_the_first_part_of_its_names(
    write: Any, adapters: dict[str, Weights]
) -> None:
    """GPT-2 on the hub. PEFT names the modules as transformers does."""
    reference = write("gpt2", **ARCHITECTURES["gpt2"][1])
    path = reference.directory / "model.safetensors"
    tensors = {name.removeprefix("transformer."): data for name, data in load_file(path).items()}
    save_file(tensors, path)
    check_mixed_batch(reference, adapters, {})


def test_modules_that_take_no_adapters_are_named(
    write: Any, open_llm: Any, adapters: dict[str, Weights]
) -> None:
    reference = write("gpt2", **ARCHITECTURES["gpt2"][1])
    table = reference.model.transformer.wpe
    adapters["/a"] = {"transformer.wpe": (torch.ones(1, len(table.weight)), torch.ones(32, 1))}
    with (
        open_llm(reference.directory, enable_lora=True, max_lora_rank=8) as llm,
        pytest.raises(RequestError, match=r"changes transformer\.wpe; heads for classes take"),
    ):
        llm.generate([[3, 4]], lora_request=LoRARequest("a", 1, "/a"), use_tqdm=False)


@pytest.mark.one_rank
def test_the_up_projections_are_as_before_when_their_adapter_leaves(
    write: Any, open_llm: Any, adapters: dict[str, Weights]
) -> None:
    """Steps with adapters are replayed again when the slot has another adapter."""
    model_type, config = LATENT["deepseek_v3, halves, dense"]
    reference = write(model_type, **config)
    weights = random_adapter(reference.model, 4, 1)
    adapters["/up"] = {name: each for name, each in weights.items() if "kv_b_proj" in name}
    adapters["/other"] = {name: each for name, each in weights.items() if "o_proj" in name}
    loras = [None, *(LoRARequest(name, len(name), f"/{name}") for name in ("other", "up"))]
    params = SamplingParams(
        temperature=0, max_tokens=6, logprobs=-1, ignore_eos=True, detokenize=False
    )
    settings = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 4}
    with open_llm(reference.directory, enable_prefix_caching=False, **settings) as llm:

        def answers(lora: LoRARequest | None) -> list[dict[int, float]]:
            (output,) = llm.generate([[3, 4, 5]], params, lora_request=lora, use_tqdm=False)
            return [
                {token: entry.logprob for token, entry in row.items()}
                for row in output.outputs[0].logprobs
            ]

        before = [answers(lora) for lora in loras[:2]]
        assert not any(llm.collective_rpc(eager_adapters))
        changed = answers(loras[2])
        assert llm.collective_rpc(eager_adapters) == [3]
        assert changed not in before
        assert [answers(lora) for lora in loras[:2]] == before
        assert llm.collective_rpc(eager_adapters) == [0]


def eager_adapters(worker: Any) -> int:
    """Return for how many layers steps with adapters are not replayed."""
    return len(worker.models[0].build.declared.eager)


def test_several_answers_from_one_prompt(
    write: Any, open_llm: Any, adapters: dict[str, Weights]
) -> None:
    reference = write("llama")
    adapters["/a"] = random_adapter(reference.model, 8, 2)
    model = merged(reference.model, adapters["/a"])
    prompt = list(range(3, 24))
    params = SamplingParams(
        n=3, temperature=1.0, seed=5, max_tokens=5, logprobs=-1, ignore_eos=True, detokenize=False
    )
    with open_llm(reference.directory, enable_lora=True, max_lora_rank=8) as llm:
        lora = LoRARequest("a", 1, "/a")
        (output,) = llm.generate(
            [{"prompt_token_ids": prompt}], params, lora_request=lora, use_tqdm=False
        )
        with pytest.raises(RequestError, match="adapter 'b'"):
            llm.generate(
                [prompt] * 2,
                params,
                lora_request=[lora, LoRARequest("b", 2, "/nowhere")],
                use_tqdm=False,
            )
        assert not llm.llm_engine.has_unfinished_requests()
    for completion in output.outputs:
        with torch.no_grad():
            expected = (
                model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0].log_softmax(-1)
            )
        for position, row in enumerate(completion.logprobs, len(prompt) - 1):
            values = torch.tensor([row[token].logprob for token in range(VOCAB_SIZE)])
            assert (values - expected[position]).abs().max() < TOLERANCE


@pytest.mark.parametrize("adaptive", [False, True])
def test_drafts_change_no_token_of_requests_with_adapters(
    write: Any, open_llm: Any, adapters: dict[str, Weights], adaptive: bool
) -> None:
    """In mixed batches of an engine with so few blocks that requests may be preempted."""
    reference = write("llama")
    requests: list[LoRARequest | None] = [None]
    for number, rank in enumerate(RANKS, 1):
        adapters[f"/{number}"] = random_adapter(reference.model, rank, number)
        requests.append(LoRARequest(f"adapter{number}", number, f"/{number}"))
    config = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    loras = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "num_gpu_blocks_override": 20}
    plain = open_llm(reference.directory, **loras)
    drafts = open_llm(
        reference.directory,
        **loras,
        speculative_config={**config, "adaptive_length": adaptive},
        disable_log_stats=False,
    )
    tokens = st.lists(st.integers(3, 6), min_size=1, max_size=20)
    samplings = st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 24), "temperature": st.sampled_from([0, 0, 0.8])},
        optional={
            "repetition_penalty": st.just(1.3),
            "allowed_token_ids": st.just([3, 4]),
            "stop_token_ids": st.just([5]),
        },
    )

    @settings(max_examples=15, deadline=None)
    @given(
        st.lists(st.tuples(tokens, st.sampled_from(requests), samplings), min_size=1, max_size=5)
    )
    def compare(asked: list[tuple[list[int], LoRARequest | None, dict[str, Any]]]) -> None:
        prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in asked]
        params = [
            SamplingParams(seed=4, ignore_eos=True, detokenize=False, **sampling)
            for _, _, sampling in asked
        ]
        found, wanted = (
            llm.generate(
                prompts, params, lora_request=[lora for _, lora, _ in asked], use_tqdm=False
            )
            for llm in (drafts, plain)
        )
        for one, other in zip(found, wanted, strict=True):
            assert list(one.outputs[0].token_ids) == list(other.outputs[0].token_ids)

    with plain, drafts:
        compare()
        values = {
            metric.name: metric.value
            for metric in drafts.get_metrics()
            if metric.name.endswith("_num_accepted_tokens")
        }
        assert values["vllm:spec_decode_num_accepted_tokens"] > 0
        for llm in (plain, drafts):
            stats = llm.llm_engine.engine.stats()
            assert stats["num_free_blocks"] == stats["num_blocks"] - 1
