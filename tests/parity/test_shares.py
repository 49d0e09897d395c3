"""`save_sharded_state` and `load_format="sharded_state"`: ranks that read their own files compute
what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from stored_layouts import quantize
from test_adapters_over_formats import check as check_adapters
from test_gguf_parity import CASES as GGUF
from test_gguf_parity import convert
from test_ranks import MODELS, WITH_EXPERTS
from test_stored_formats import SIZES, check_logits
from tiny_models import check_parity, divide, open_llm

from pegboard import SamplingParams
from pegboard.errors import ConfigError, ModelError, RequestError
from pegboard.plugins.registry import Registry

Write = Callable[..., Any]
pytestmark = pytest.mark.one_rank  # they divide models themselves
FORMAT = "sharded_state"


def save(directory: Path, folder: Path, **arguments: Any) -> Path:
    """As vLLM's example does."""
    with open_llm(directory, max_model_len=64) as llm:
        llm.llm_engine.engine_core.save_sharded_state(path=folder, **arguments)
    return folder


def size(folder: Path, rank: int) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"model-rank-{rank}-part-*.safetensors"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "ranks", "stages"),
    [
        ("tied, biases", 1, 1),
        ("tied, biases", 1, 2),
        ("tied, biases", 2, 2),
        *((name, 2, 1) for name in MODELS),
    ],
)
def test_saved_shares_are_read(
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    ranks: int,
    stages: int,
) -> None:
    kind, values = MODELS[name]
    reference = write(kind, **values)
    divide(monkeypatch, ranks, stages)
    folder = save(reference.directory, tmp_path / "shares")
    check_parity(replace(reference, directory=folder), load_format=FORMAT, max_model_len=64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "case", ["gptq", "awq", "fp8", "pack-quantized", "int-quantized", "bitsandbytes"]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_quantized_shares_are_read(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int, case: str
) -> None:
    reference = write("llama", **{**SIZES, "intermediate_size": 128})
    quantize(reference, case)
    divide(monkeypatch, ranks)
    folder = save(reference.directory, tmp_path / "shares")
    with open_llm(folder, load_format=FORMAT, block_size=16) as llm:
        check_logits(llm, reference, 0.05)
    if case in ("gptq", "awq", "pack-quantized"):
        table = load_file(reference.directory / "model.safetensors")["model.embed_tokens.weight"]
        whole = (reference.directory / "model.safetensors").stat().st_size - table.nbytes
        assert size(folder, 0) - table.nbytes < {1: 1.02, 2: 0.7}[ranks] * whole


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (1, 2)])
def test_shares_of_a_gguf_file_are_read(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int, stages: int
) -> None:
    """With its configuration and its tokenizer, although they are in the file. The blocks are those
    of the file, so the tokens are the same."""
    case = GGUF["llama"]
    reference = write(case.model_type, **{**SIZES, "intermediate_size": 1024, **case.config})
    file = tmp_path / "model.gguf"
    convert(reference, "llama", case, file, "Q8_0")
    divide(monkeypatch, ranks, stages)
    folder = save(file, tmp_path / "shares")
    found = []
    for directory, settings in ((file, {}), (folder, {"load_format": FORMAT})):
        with open_llm(directory, download_dir=str(tmp_path / "cache"), **settings) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": [*range(3, 20)]}],
                SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True),
                use_tqdm=False,
            )
            found.append(outputs[0].outputs[0])
    assert found[0].token_ids == found[1].token_ids
    assert found[0].logprobs == found[1].logprobs
    if ranks == 2:
        assert size(folder, 1) < 0.6 * file.stat().st_size


@pytest.mark.parametrize("is_gguf", [False, True])
def test_adapters_fit_shares(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_gguf: bool
) -> None:
    """Also those of a GGUF file, whose heads have their rows in another order."""
    reference = write("llama", **SIZES)
    file = tmp_path / "model.gguf"
    if is_gguf:
        convert(reference, "llama", GGUF["llama"], file)
    divide(monkeypatch, 2)
    folder = save(file if is_gguf else reference.directory, tmp_path / "shares")
    settings: dict[str, Any] = {"max_loras": 1, "max_lora_rank": 4, "kv_cache_dtype": "float32"}
    with open_llm(folder, load_format=FORMAT, **settings) as llm:
        check_adapters(llm, reference.model, tmp_path / "adapter", 0.01)


def test_each_rank_reads_its_share(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Apart from the embedding, two ranks have little more than half of the bytes each."""
    reference = write("llama", intermediate_size=512)
    divide(monkeypatch, 2)
    folder = save(reference.directory, tmp_path / "shares")
    tensors = load_file(reference.directory / "model.safetensors")
    table = tensors["model.embed_tokens.weight"].nbytes
    whole = sum(tensor.nbytes for tensor in tensors.values()) - table
    sizes = []
    for rank in (0, 1):
        saved = load_file(folder / f"model-rank-{rank}-part-0.safetensors")
        sizes.append(sum(tensor.nbytes for tensor in saved.values()) - table)
    assert whole <= sum(sizes) and max(sizes) < 0.6 * whole


def test_parts_are_no_larger_than_asked(write: Write, tmp_path: Path) -> None:
    reference = write("llama")
    whole = (reference.directory / "model.safetensors").stat().st_size
    for max_size in (1, 20_000, whole):
        folder = tmp_path / f"of {max_size}"
        pattern = "r{rank} p{part}.safetensors"
        save(reference.directory, folder, pattern=pattern, max_size=max_size)
        parts = [load_file(path) for path in sorted(folder.glob("r0 p*.safetensors"))]
        sizes = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
        assert all(
            size <= max_size or len(part) == 1 for size, part in zip(sizes, parts, strict=True)
        )
        assert len(parts) == {1: len(load_file(reference.directory / "model.safetensors"))}.get(
            max_size, 1 if max_size == whole else len(parts)
        )
        check_parity(replace(reference, directory=folder), (17,), load_format=FORMAT)


def test_the_other_files_are_copied(write: Write, tmp_path: Path) -> None:
    reference = write("llama")
    (reference.directory / "tokenizer_config.json").write_text("{}")
    (reference.directory / "notes.txt").write_text("mine")
    (reference.directory / "pytorch_model.bin").write_text("weights")
    folder = save(reference.directory, tmp_path / "shares")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model-rank-0-part-0.safetensors",
        "notes.txt",
        "sharded_state.json",
        "shares-rank-0.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize(
    ("ranks", "stages", "now"),
    [
        (2, 1, "tensor_parallel_size=2, pipeline_parallel_size=1"),
        (1, 2, "tensor_parallel_size=1, pipeline_parallel_size=2"),
        (3, 1, "tensor_parallel_size=3, pipeline_parallel_size=1"),
    ],
)
def test_shares_of_another_layout_are_refused(
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ranks: int,
    stages: int,
    now: str,
) -> None:
    reference = write("llama", num_key_value_heads=4)
    folder = save(reference.directory, tmp_path / "shares")
    divide(monkeypatch, ranks, stages)
    saved = "tensor_parallel_size=1, pipeline_parallel_size=1"
    with pytest.raises(ModelError, match=f"was saved with {saved}, and this engine has {now}"):
        open_llm(folder, load_format=FORMAT)


def test_experts_in_another_order_are_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind, values = WITH_EXPERTS["qwen3_moe"]
    reference = write(kind, **values)
    divide(monkeypatch, 2)
    whole = {"load_format": FORMAT, "enable_expert_parallel": True}
    with open_llm(reference.directory, enable_expert_parallel=True) as llm:
        llm.save_sharded_state(tmp_path / "shares")
    reference = replace(reference, directory=tmp_path / "shares")
    check_parity(reference, (17,), **whole)
    with pytest.raises(ModelError, match="experts linear, and this engine has .*experts round_rob"):
        open_llm(reference.directory, expert_placement_strategy="round_robin", **whole)


def test_what_cannot_be_saved_is_refused(write: Write, tmp_path: Path) -> None:
    with open_llm(write("llama").directory) as llm:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "mine").write_text("")
        for folder, arguments, message in (
            ("full", {}, "has files already"),
            ("full/mine", {}, "exists"),
            ("new", {"max_size": 0}, "max_size must be at least 1 byte, got 0"),
            ("new", {"pattern": "a/{rank}-{part}.safetensors"}, "does not name files"),
            ("new", {"pattern": "{rank}.safetensors"}, "expected {rank}, {part} and the ending"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.save_sharded_state(tmp_path / folder, **arguments)


def test_shares_of_another_model_replace_nothing(write: Write, tmp_path: Path) -> None:
    """Weights are updated from shares, like from any checkpoint."""
    reference = write("llama")
    other = write("llama", "other", hidden_size=64, num_attention_heads=8)
    same = save(reference.directory, tmp_path / "saved")
    wide = save(other.directory, tmp_path / "saved and wide")
    with open_llm(same, load_format=FORMAT) as llm:
        llm.update_weights(same)
        with pytest.raises(RequestError, match="is another model: hidden_size is 64"):
            llm.update_weights(wide)


def test_without_a_loader_that_saves_it_is_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open_llm(write("llama").directory) as llm:
        monkeypatch.setattr(Registry, "entries", lambda self, kind: [])
        with pytest.raises(ConfigError, match="no installed weight loader saves"):
            llm.save_sharded_state(tmp_path / "shares")
