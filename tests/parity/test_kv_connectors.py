"""KV connectors with real models: engines that load prefixes give the tokens of an engine without a
connector."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from threading import Timer
from typing import Any

import pytest
from safetensors import safe_open
from tiny_models import DIVIDED

from pegboard import LLM, SamplingParams
from pegboard.errors import ConfigError, PegboardError, RequestError

PARAMS = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, detokenize=False)
WINDOWS = {
    "num_hidden_layers": 4,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
}
COUNTERS = ("external_prefix_cache", "prefix_cache")
PROMPTS = [[*range(3, 40), 70 + number] for number in range(3)] + [[*range(60, 85)], [5, 6]]


def settings(folder: Path) -> dict[str, Any]:
    """vLLM's argument."""
    extra = {"shared_storage_path": str(folder)}
    return {
        "kv_transfer_config": {
            "kv_connector": "SharedStorageConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }


def generate(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Return the output tokens, and how many tokens of the prompts were not computed, after some of
    them were loaded."""
    stats = llm.llm_engine.engine.stats
    before = stats()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False
    )
    loaded, shared = (
        stats()[f"{name}_hits_total"] - before[f"{name}_hits_total"] for name in COUNTERS
    )
    return [list(output.outputs[0].token_ids) for output in outputs], loaded and loaded + shared


@pytest.mark.parametrize(
    ("model_type", "config", "engine"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"kv_cache_dtype": "int8", "block_size": 16}),
        (
            "llama",
            {},
            {"kv_cache_dtype": "bfloat16", "max_in_flight": 1, "enable_chunked_prefill": False},
        ),
        ("gemma3_text", WINDOWS, {}),
        ("gemma3_text", WINDOWS, {"num_gpu_blocks_override": 29}),
    ],
    ids=["float32", "int8", "bfloat16", "windows", "windows, preempted"],
)
def test_prefixes_are_loaded_after_a_restart(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    model_type: str,
    config: Any,
    engine: Any,
) -> None:
    reference = write(model_type, **config)
    engine = {"max_num_batched_tokens": 64 if "enable_chunked_prefill" in engine else 16, **engine}

    def stored(prompts: list[list[int]]) -> int:
        """The last token of a prompt is always computed."""
        return sum(
            (len(prompt) - 1) // engine.get("block_size", 4) * engine.get("block_size", 4)
            for prompt in prompts
        )

    with open_llm(reference.directory, **engine) as llm:
        expected, _ = generate(llm, PROMPTS)
    with open_llm(reference.directory, **engine, **settings(tmp_path / "kv")) as llm:
        assert generate(llm, PROMPTS)[0] == expected
        assert bool(llm.llm_engine.engine.stats()["num_preemptions_total"]) == (
            "num_gpu_blocks_override" in engine
        )
    files = list((tmp_path / "kv").rglob("*.safetensors"))
    with safe_open(files[0], "pt") as file:  # any reader of safetensors can read it
        assert file.metadata()["format"] == "pegboard-kv-1" and len(file.keys()) > 1
    with open_llm(reference.directory, **engine, **settings(tmp_path / "kv")) as llm:
        tokens, num_saved = generate(llm, PROMPTS)
        assert tokens == expected
        # else loaded blocks may be taken back before they are used
        is_whole = "num_gpu_blocks_override" not in engine or not DIVIDED
        assert num_saved == stored(PROMPTS) or stored(PROMPTS) > num_saved > 0 and not is_whole
        answers = [[*prompt, *output, 7] for prompt, output in zip(PROMPTS, expected, strict=True)]
        assert llm.reset_prefix_cache()
        tokens, num_saved = generate(llm, answers)
        is_whole = "num_gpu_blocks_override" not in engine
        assert num_saved == stored(answers) or stored(answers) > num_saved > 0 and not is_whole, (
            "outputs are stored too"
        )
    with open_llm(reference.directory, **engine) as llm:
        assert generate(llm, answers)[0] == tokens


def test_an_engine_that_cannot_load_says_why(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another type of the cache, then other weights."""
    first, second = write("llama"), write("llama", "other", initializer_range=0.3)
    texts = []
    for directory, engine in (
        (first.directory, {}),
        (first.directory, {"kv_cache_dtype": "bfloat16"}),
        (second.directory, {}),
        (first.directory, {}),
    ):
        caplog.clear()
        with open_llm(directory, **engine, **settings(tmp_path / "kv")) as llm:
            generate(llm, PROMPTS)
        texts += ["".join(x for x in caplog.messages if "KV blocks of other engines" in x)]
    assert texts[0] == texts[3] == ""
    assert "kv_cache_dtype: this engine has bfloat16" in texts[1] and "the folder has" in texts[1]
    assert "checkpoint: " not in texts[1] and " dtype: " not in texts[1]
    assert "checkpoint: this engine has LlamaForCausalLM, sha256:" in texts[2]
    assert "kv_cache_dtype" not in texts[2], "it is compared with the closest engine"


def test_one_connector_with_two_folders(
    write: Callable[..., Any], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """vLLM's form, and Pegboard's. Both folders get the blocks, and either is enough to load
    them. The rules about a plugin are about all its uses."""
    reference = write("llama")
    parts = [settings(tmp_path / name)["kv_transfer_config"] for name in ("first", "second")]
    chain = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": parts}}
    with open_llm(reference.directory) as llm:
        expected, _ = generate(llm, PROMPTS)
    with open_llm(reference.directory, kv_transfer_config=chain) as llm:
        assert generate(llm, PROMPTS)[0] == expected
    blocks = [
        {file.name for file in (tmp_path / name).rglob("*.safetensors")}
        for name in ("first", "second")
    ]
    assert blocks[0] == blocks[1] and blocks[0]
    rmtree(tmp_path / "first")
    two: dict[str, Any] = {
        "kv_connectors": ["shared_storage", "shared_storage@archive"],
        "plugins_allow": ["kv_connector:shared_storage"],
        "plugin_options": {
            "kv_connector.shared_storage": {"shared_storage_path": str(tmp_path / "first")},
            "kv_connector.shared-storage@archive": {
                "shared_storage_path": str(tmp_path / "second"),
                "role": "kv_consumer",
            },
        },
    }
    with open_llm(reference.directory, **two) as llm:
        tokens, num_loaded = generate(llm, PROMPTS)
        assert tokens == expected and num_loaded > 0
    assert list((tmp_path / "first").rglob("*.safetensors")), "the first one saves what was loaded"
    for change, told in [
        (
            {"kv_connectors": ["shared_storage", "shared_storage"]},
            "shared_storage is there twice; give one of them a label, as in shared_storage@second",
        ),
        (
            {"kv_connectors": ["shared_storage"]},
            "kv_connectors has no shared-storage@archive, only shared_storage",
        ),
        ({"kv_connectors": ["shared_storage", "nothing@2"]}, "nothing"),
        ({"plugins_deny": ["kv_connector:shared_storage"]}, "denied by 'kv_connector:shared_st"),
        (
            {"kv_connectors": ["shared_storage@archive", "shared_storage@other"]},
            "kv_connector.shared_storage@other.shared_storage_path: Field required",
        ),
    ]:
        with pytest.raises(PegboardError, match=told):
            open_llm(reference.directory, **{**two, **change})


@pytest.mark.parametrize("extra", [{}, {"fill_mean": 0.1, "fill_std": 1.0}], ids=["", "random"])
@pytest.mark.parametrize("retains", [{}, WINDOWS], ids=["full", "windows"])
def test_decode_is_measured_without_a_prefill(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    retains: Any,
    extra: Any,
) -> None:
    reference = write("gemma3_text" if retains else "llama", **retains)
    bench = {"kv_connector": "DecodeBenchConnector", "kv_connector_extra_config": extra}
    with open_llm(reference.directory, kv_transfer_config=bench) as llm:
        tokens, num_filled = generate(llm, PROMPTS)
        assert all(len(output) == 9 for output in tokens)
        assert num_filled == sum(len(prompt) - 1 for prompt in PROMPTS)
    chain = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [settings(tmp_path)["kv_transfer_config"], bench]
        },
    }
    with pytest.raises(ConfigError, match="DecodeBenchConnector must be the only one, because its"):
        open_llm(reference.directory, kv_transfer_config=chain)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("retains", [{}, WINDOWS], ids=["full", "windows"])
def test_evicted_blocks_come_back(
    write: Callable[..., Any], open_llm: Callable[..., LLM], tmp_path: Path, retains: Any
) -> None:
    """Host memory, and behind it a folder (MultiConnector), with a KV cache that holds a quarter of
    the prompts."""
    reference = write("gemma3_text" if retains else "llama", **retains)
    prompts = [[start, *range(4 + start, 40 + start)] for start in range(8)]
    number = 44 if retains else 22
    few = {"num_gpu_blocks_override": number, "max_num_seqs": 2}
    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"num_cpu_blocks": 8 * number},
    }
    both = [
        {**offload, "kv_connector_extra_config": {"num_cpu_blocks": number}},
        settings(tmp_path)["kv_transfer_config"],
    ]
    chain = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": both}}
    with open_llm(reference.directory) as llm:
        expected, _ = generate(llm, prompts)
    for config, folder_is_full in ((offload, False), (chain, False), (chain, True)):
        with open_llm(reference.directory, **few, kv_transfer_config=config) as llm:
            for turn in range(3):
                tokens, num_saved = generate(llm, prompts)
                assert tokens == expected
                assert num_saved == 8 * 36 if turn or folder_is_full else num_saved < 8 * 36


def test_a_decode_engine_waits_for_what_the_prefill_engine_writes(
    write: Callable[..., Any], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """The parameters of vLLM's proxies. The prefill engine's answer is handed on to the decode
    engine."""
    folder = tmp_path / "kv"
    prompt = {"prompt_token_ids": PROMPTS[0]}
    num_tokens = 9
    reference = write("llama")

    def ask(llm: LLM, parameters: dict[str, Any] | None, max_tokens: int = num_tokens) -> Any:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": parameters},
        )
        return llm.generate([prompt], params, use_tqdm=False)[0]

    with open_llm(reference.directory) as llm:
        expected = ask(llm, None).outputs[0].token_ids
        with pytest.raises(
            RequestError, match="no KV connector .* reads 'do_remote_decode'; none is configured"
        ):
            ask(llm, {"do_remote_decode": True})
    with open_llm(reference.directory, **settings(folder)) as prefill:
        answer = ask(
            prefill,
            {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None},
            max_tokens=1,
        )
        assert answer.kv_transfer_params == {"do_remote_prefill": True, "do_remote_decode": False}
        with pytest.raises(
            RequestError, match="reads 'remote_host'; known: do_remote_decode, do_remote_prefill"
        ):
            ask(prefill, {"remote_host": "h"})
        with pytest.raises(RequestError, match="must be an object"):
            ask(prefill, "x")  # type: ignore[arg-type]
    hidden = folder.rename(tmp_path / "later")
    folder.mkdir()
    with open_llm(reference.directory, **settings(folder)) as decode:
        missing = next(hidden.iterdir())
        timer = Timer(
            0.5, lambda: (rmtree(folder / missing.name), missing.rename(folder / missing.name))
        )
        timer.start()
        started = time.monotonic()
        result = ask(decode, answer.kv_transfer_params)
        assert time.monotonic() - started >= 0.4
        assert result.outputs[0].token_ids == expected and result.num_cached_tokens == 36
