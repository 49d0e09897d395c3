"""A campaign: serves damaged checkpoints, and counts crashes, hangs, raw exceptions and memory.

    python tests/campaigns/damaged_checkpoints.py --count 500

Small checkpoints of each kind of file are mutated: bytes are flipped, cut and copied, and values
are replaced by hostile ones. A child process loads each of them, tokenizes, renders a chat and
generates two tokens. Only an answer, or an error of Pegboard that names its cause, is right. The
child serves many mutations; when it dies or hangs, the next one goes on after the culprit. It
cannot allocate more than 2 GiB: what needs more is a crash or a raw exception.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("config", "tokenizer", "template", "safetensors", "gguf")
LIMIT_S = 10.0
START_S = 120.0
LIMIT_BYTES = 2 << 30
HIDDEN = 32
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
INNER = 48
LAYERS = 2
VOCAB = 262
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "layer_types": ["full_attention"] * LAYERS,
    "dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": 257,
}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] | "
    "trim }}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if "
    "add_generation_prompt %}assistant:{% endif %}"
)
HOSTILE: tuple[Any, ...] = (
    -1,
    0,
    1,
    2,
    3,
    2**15,
    2**31 - 1,
    2**31,
    2**63,
    10**30,
    -(2**63),
    0.0,
    -1.0,
    0.5,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
    True,
    False,
    None,
    "",
    "a",
    "false",
    "\0",
    "x" * 5000,
    [],
    [1],
    ["a"] * 3,
    [[]],
    {},
    {"a": 1},
    "yarn",
    "longrope",
    "linear",
    "dynamic",
    "default",
    ["sliding_attention", "full_attention"],
    "MixtralForCausalLM",
    ["Gemma2Model"],
    "gelu",
    "mamba",
)
JINJA = (
    "{{",
    "}}",
    "{%",
    "%}",
    "{% for x in messages %}",
    "{% endfor %}",
    "{{ messages[99] }}",
    "{{ 1 / 0 }}",
    "{{ undefined.x.y }}",
    "{{ messages | nope }}",
    "{% include 'x' %}",
    "{% extends 'x' %}",
    "{{ ''.__class__ }}",
    "{{ raise_exception('no') }}",
    "{{ messages | tojson(indent=-1) }}",
    "{% set ns = namespace(x=1) %}{{ ns.x }}",
    "{{ strftime_now(5) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ (" * 60 + "1" + ") }}" * 60,
    "{{ [1] * 3 }}",
    "{{ 'é' | upper }}",
)


# --- the healthy files ----------------------------------------------------------------------------


def llama_shapes(names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors. names: those of the embedding, the last norm and the nine
    parts of a layer, with {} for its number."""
    kv = HIDDEN // HEADS * KV_HEADS
    parts = (
        (HIDDEN,),
        (HIDDEN, HIDDEN),
        (kv, HIDDEN),
        (kv, HIDDEN),
        (HIDDEN, HIDDEN),
        (HIDDEN,),
        (INNER, HIDDEN),
        (INNER, HIDDEN),
        (HIDDEN, INNER),
    )
    shapes: dict[str, tuple[int, ...]] = {names[0]: (VOCAB, HIDDEN), names[1]: (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {name.format(layer): shape for name, shape in zip(names[2:], parts, strict=True)}
    return shapes


def byte_alphabet() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)
    ]


def tokenizer_json() -> dict[str, Any]:
    special = ["<s>", "</s>"]
    merged = ["th", "he", "in", "er"]
    added = [
        {
            "id": 256 + number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, text in enumerate(special)
    ]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    post = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    }
    vocabulary = {text: number for number, text in enumerate([*byte_alphabet(), *special, *merged])}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "NFC"},
                {"type": "Replace", "pattern": {"String": "``"}, "content": '"'},
            ],
        },
        "pre_tokenizer": level,
        "post_processor": post,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(text) for text in merged],
        },
    }


def write_healthy(directory: Path) -> None:
    """Write a checkpoint in Hugging Face layout."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    layer = "model.layers.{}."
    names = (
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(
            f"{layer}{part}.weight"
            for part in (
                "input_layernorm",
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "post_attention_layernorm",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            )
        ),
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.1
        for name, shape in llama_shapes(names).items()
    }
    save_file(tensors, directory / "model.safetensors")
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    files = {
        "config.json": CONFIG,
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": settings,
        "generation_config.json": {"temperature": 0.7, "top_p": 0.9, "eos_token_id": [257]},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


def write_gguf(
    path: Path, changes: Mapping[str, Any] | None = None, stored: str = "F32", arch: str = "llama"
) -> None:
    """Write a GGUF file. changes: metadata values by the last part of their key; a text is written
    where a text belongs. stored: the type of the matrices that can have it. arch: one whose layers
    have the tensors of Llama's."""
    import gguf
    import numpy as np

    told = changes or {}
    writer = gguf.GGUFWriter(path, arch)
    counts = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    fractions = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0}
    if arch != "llama":
        counts |= {
            "attention.sliding_window": 16,
            "attention.key_length": HEAD_DIM,
            "rope.dimension_count": HEAD_DIM,
        }
        fractions |= {
            "attention.layer_norm_epsilon": 1e-5,
            "attention.scale": 0.3,
            "logit_scale": 0.5,
        }
    for key, count in counts.items():
        writer.add_uint32(f"{arch}.{key}", told.get(key.rpartition(".")[2], count))
    for key, fraction in fractions.items():
        writer.add_float32(f"{arch}.{key}", told.get(key.rpartition(".")[2], fraction))
    if "factor" in told:
        writer.add_string(f"{arch}.rope.scaling.type", "linear")
        writer.add_float32(f"{arch}.rope.scaling.factor", told["factor"])
    writer.add_string("tokenizer.ggml.model", told.get("model", "gpt2"))
    writer.add_string("tokenizer.ggml.pre", told.get("pre", "gpt-2"))
    writer.add_array(
        "tokenizer.ggml.tokens", [*byte_alphabet(), "<s>", "</s>", "th", "he", "in", "er"]
    )
    writer.add_array("tokenizer.ggml.token_type", [1] * 256 + [3, 3] + [1] * 4)
    writer.add_array("tokenizer.ggml.merges", told.get("merges", ["t h", "h e", "i n", "e r"]))
    writer.add_uint32("tokenizer.ggml.bos_token_id", told.get("bos_token_id", 256))
    writer.add_uint32("tokenizer.ggml.eos_token_id", told.get("eos_token_id", 257))
    writer.add_string("tokenizer.chat_template", told.get("chat_template", TEMPLATE))
    layer = "blk.{}."
    names = (
        "token_embd.weight",
        "output_norm.weight",
        *(
            f"{layer}{part}.weight"
            for part in (
                "attn_norm",
                "attn_q",
                "attn_k",
                "attn_v",
                "attn_output",
                "ffn_norm",
                "ffn_gate",
                "ffn_up",
                "ffn_down",
            )
        ),
    )
    generator = np.random.default_rng(0)
    for name, shape in llama_shapes(names).items():
        values = (generator.standard_normal(shape) * 0.1).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32
        if len(shape) == 2 and shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType[stored]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- mutations ------------------------------------------------------------------------------------


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value in a JSON value. Of long containers, only a few are
    taken."""
    found: list[tuple[Any, Any]] = []
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for key, item in items[:24]:
        found += [(value, key), *places(item)]
    return found


def mutate_json(text: str, draw: random.Random) -> str:
    value = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        container, key = draw.choice(places(value) or [([0], 0)])
        match draw.randrange(4):
            case 0 if isinstance(container, dict):
                del container[key]
            case 1 if isinstance(container, list):
                container.append(copy.deepcopy(draw.choice(container)))
            case 2 if isinstance(container[key], int | float) and not isinstance(
                container[key], bool
            ):
                container[key] = draw.choice(
                    (-container[key], container[key] * 2, container[key] + 1, container[key] / 3)
                )
            case _:
                container[key] = copy.deepcopy(draw.choice(HOSTILE))
    text = json.dumps(value)
    return (
        mutate_bytes(text.encode(), draw).decode("utf-8", "surrogateescape")
        if draw.random() < 0.1
        else text
    )


def mutate_bytes(data: bytes, draw: random.Random, head: int = 1 << 30) -> bytes:
    """Damage bytes, mostly among the first `head`, where a file describes itself."""
    changed = bytearray(data)
    limit = max(1, min(head, len(changed)) if draw.random() < 0.8 else len(changed))
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(limit)
        match draw.randrange(6):
            case 0:
                changed[at : at + 8] = draw.choice(
                    (2**63, 2**31, 2**32 - 1, 2**64 - 1, 0)
                ).to_bytes(8, "little")
            case 1:
                del changed[at : at + draw.choice((1, 8, 100))]
            case 2:
                changed[at:at] = changed[at : at + draw.choice((1, 8, 100))]
            case 3:
                del changed[at if draw.random() < 0.5 else draw.randrange(len(changed) or 1) :]
            case _:
                if at < len(changed):
                    changed[at] ^= 1 << draw.randrange(8)
        limit = max(1, min(limit, len(changed)))
    return bytes(changed)


def mutate_template(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text))
    match draw.randrange(4):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + text[at + draw.randrange(1, 30) :]
        case 2:
            return text + draw.choice(JINJA)
        case _:
            return text[:at] + draw.choice(JINJA) + text[at:]


def gguf_changes(draw: random.Random) -> dict[str, Any]:
    """Return hostile metadata for `write_gguf`."""
    numbers = (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "head_count",
        "head_count_kv",
        "bos_token_id",
        "eos_token_id",
        "sliding_window",
        "key_length",
        "dimension_count",
    )
    fractions = (
        "layer_norm_rms_epsilon",
        "layer_norm_epsilon",
        "freq_base",
        "factor",
        "scale",
        "logit_scale",
    )
    changes: dict[str, Any] = {}
    for _ in range(draw.choice((1, 1, 2))):
        match draw.randrange(5):
            case 0:
                changes[draw.choice(fractions)] = draw.choice(
                    (-1.0, 0.0, 1e-30, 1e30, float("nan"), float("inf"), 0.5)
                )
            case 1:
                hostile = (
                    "",
                    "llama",
                    "t5",
                    "bert",
                    "rwkv",
                    "\0",
                    "x" * 5000,
                    mutate_template(TEMPLATE, draw),
                )
                changes[draw.choice(("model", "pre", "chat_template"))] = draw.choice(hostile)
            case 2:
                changes["merges"] = draw.choice((["t"], [""], ["a b c"], ["x y"] * 3, ["\0 \0"]))
            case _:
                changes[draw.choice(numbers)] = draw.choice(
                    (0, 1, 2, 3, 5, 31, 33, 64, 2**15, 2**24, 2**31 - 1, 2**32 - 1)
                )
    return changes


def read_names(path: Path) -> list[str]:
    with path.open("rb") as file:
        return list(json.loads(file.read(int.from_bytes(file.read(8), "little"))))


def mutate(kind: str, healthy: Path, target: Path, draw: random.Random) -> Path:
    """Write a damaged copy of a healthy checkpoint to `target`. Returns the model reference."""
    shutil.rmtree(target, ignore_errors=True)
    if kind == "gguf":
        target.mkdir()
        if draw.random() < 0.5:
            arch = draw.choice(("llama", "llama", "granite", "cohere2", "smollm3"))
            write_gguf(
                target / "model.gguf",
                gguf_changes(draw),
                draw.choice(("F32", "Q8_0", "MXFP4")),
                arch,
            )
            return target / "model.gguf"
        data = (healthy / "model.gguf").read_bytes()
        (target / "model.gguf").write_bytes(mutate_bytes(data, draw, head=6000))
        return target / "model.gguf"
    shutil.copytree(healthy / "hf", target)
    if kind == "safetensors":
        path = target / "model.safetensors"
        if draw.random() < 0.2:
            path = path.rename(target / "model-00001-of-00001.safetensors")
            names = [name for name in read_names(path) if name != "__metadata__"]
            index = json.dumps(
                {
                    "metadata": {"total_size": path.stat().st_size},
                    "weight_map": dict.fromkeys(names, path.name),
                }
            )
            (target / "model.safetensors.index.json").write_bytes(
                mutate_json(index, draw).encode("utf-8", "surrogateescape")
            )
            return target
        path.write_bytes(mutate_bytes(path.read_bytes(), draw, head=2600))
        return target
    if kind == "template":
        template: Any = mutate_template(TEMPLATE, draw)
        if draw.random() < 0.2:
            template = draw.choice(
                (
                    *HOSTILE,
                    [{"name": "default", "template": template}],
                    [{"name": draw.choice(HOSTILE)}],
                )
            )
        if isinstance(template, str) and draw.random() < 0.3:
            (target / "chat_template.jinja").write_bytes(
                mutate_bytes(template.encode() or b"x", draw)
            )
            return target
        path = target / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
        return target
    names = {
        "config": ("config.json", "generation_config.json"),
        "tokenizer": ("tokenizer.json", "tokenizer_config.json"),
    }[kind]
    path = target / draw.choice((names[0], names[0], names[0], names[1]))
    path.write_bytes(mutate_json(path.read_text(), draw).encode("utf-8", "surrogateescape"))
    return target


# --- the child ------------------------------------------------------------------------------------


def serve(reference: Path) -> str:
    """Load a checkpoint and use it. Returns what happened; raw exceptions start with "raw"."""
    from pegboard import LLM, SamplingParams
    from pegboard.errors import PegboardError, PluginFailure, RequestError
    from pegboard.interfaces.tokenizer import Chat

    try:
        with LLM(
            str(reference),
            dtype="float32",
            kv_cache_memory_bytes=8 << 20,
            max_num_seqs=4,
            max_num_batched_tokens=64,
        ) as llm:
            try:
                prompt = llm.llm_engine.builder.tokenizer.render(
                    Chat(messages=[{"role": "user", "content": "the hé 1"}])
                )
                ids = list(prompt.token_ids)[:32]
            except RequestError:
                ids = [1, 2, 3]
            output = llm.generate(
                [{"prompt_token_ids": ids or [1]}, {"prompt": "in the"}],
                SamplingParams(max_tokens=2),
                use_tqdm=False,
            )
            failed = any(item.outputs[0].finish_reason == "error" for item in output)
            return "refused the weights give logits that are not numbers" if failed else "served"
    except PluginFailure as error:
        return f"raw {error}"
    except PegboardError as error:
        return f"refused {error}"
    except BaseException as error:  # noqa: BLE001  this is what the campaign looks for
        return f"raw {type(error).__name__}: {error}"


def child(kinds: list[str], count: int, first: int, healthy: Path, seed: int) -> None:
    """Serve the mutations from number `first` on: `count` of the first kind, then `count` of the
    second, and so on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    # imports count as the start, not as the first mutation
    importlib.import_module("pegboard_model_transformers.model")
    assert serve(healthy / "hf") == serve(healthy / "model.gguf") == "served"
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, len(kinds) * count):
            kind = kinds[number // count]
            draw = random.Random(f"{kind} {seed} {number % count}")
            reference = mutate(kind, healthy, Path(folder) / "model", draw)
            print(json.dumps({"begin": number}), flush=True)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            started = time.process_time()
            told = serve(reference)
            took = time.process_time() - started
            print(
                json.dumps(
                    {"end": number, "told": told[:600], "peak": peak_memory(), "took": took}
                ),
                flush=True,
            )


def peak_memory() -> int:
    """Return the bytes that this process held at most. (ru_maxrss would count the parent's too,
    from before exec.)"""
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) * 1024


# --- the parent -----------------------------------------------------------------------------------


@dataclass
class Result:
    """What the campaign found for one kind of file. bad: (number of the mutation, what
    happened)."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[int, str]] = field(default_factory=list)
    slowest_s: float = 0.0
    peak_bytes: int = 0

    def note(self, number: int, word: str, text: str) -> None:
        self.counts[word] += 1
        if word not in ("served", "refused"):
            self.bad.append((number, f"{word} {text}"))


@dataclass
class Campaign:
    """Serves `count` mutations of each kind of file in limited children, and collects a Result for
    each kind. limit_s: seconds of processor time for one mutation. told: gets a line for each
    mutation."""

    kinds: list[str]
    count: int
    healthy: Path
    seed: int = 0
    limit_s: float = LIMIT_S
    told: Callable[[str], None] = lambda line: None
    results: dict[str, Result] = field(default_factory=dict)

    def run(self) -> dict[str, Result]:
        self.results = {kind: Result() for kind in self.kinds}
        number = 0
        total = len(self.kinds) * self.count
        while number < total:
            number = self._one_child(number, total)
        return self.results

    def _one_child(self, first: int, total: int) -> int:
        """Serve mutations in one child until it has served all, died or was killed. Returns the
        number of the next mutation."""
        numbers = [str(number) for number in (self.count, first)]
        arguments = [
            sys.executable,
            __file__,
            "--child",
            ",".join(self.kinds),
            *numbers,
            str(self.healthy),
            str(self.seed),
        ]
        environment = {**os.environ, "PYTHONPATH": "", "MALLOC_ARENA_MAX": "2"}
        number = first
        limit = START_S
        is_serving = False
        with subprocess.Popen(
            arguments, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        ) as running:
            while number < total:
                message = next_message(running, limit)
                if isinstance(message, str):
                    word, text = (
                        ("hang", f"no answer after {limit:g} s")
                        if message == "late"
                        else ("crash", message)
                    )
                    self._note(number, word, text if is_serving else f"{text}, between mutations")
                    running.kill()
                    return number + 1
                if "begin" in message:
                    number = message["begin"]
                    limit = self.limit_s
                    is_serving = True
                    continue
                word, _, text = message["told"].partition(" ")
                result = self.results[self.kinds[number // self.count]]
                result.slowest_s = max(result.slowest_s, message["took"])
                result.peak_bytes = max(result.peak_bytes, message["peak"])
                self._note(number, word, text)
                number = number + 1
                is_serving = False
            running.kill()
        return total

    def _note(self, number: int, word: str, text: str) -> None:
        kind = self.kinds[number // self.count]
        self.results[kind].note(number % self.count, word, text)
        self.told(f"{kind} {number % self.count}: {word} {text}")


def next_message(running: subprocess.Popen[bytes], limit_s: float) -> dict[str, Any] | str:
    """Return the next message of a child; "late" if none comes within `limit_s` seconds of its
    processor time, or six times as many seconds; or how the child ended. Its stdout must not be
    buffered."""
    assert running.stdout is not None
    before = processor_s(running.pid)
    deadline = time.monotonic() + 6 * limit_s
    while not select.select([running.stdout], [], [], 0.5)[0]:
        if processor_s(running.pid) - before > limit_s or time.monotonic() > deadline:
            return "late"
    if line := running.stdout.readline():
        return dict(json.loads(line))
    return f"exit status {running.wait()}"


def processor_s(pid: int) -> float:
    """Return the processor time of a process: on a busy machine, the time that goes by would
    measure the others."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_all_healthy(folder: Path) -> Path:
    write_healthy(folder / "hf")
    write_gguf(folder / "model.gguf")
    return folder


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        kinds, count, first, healthy, seed = sys.argv[2:]
        child(kinds.split(","), int(count), int(first), Path(healthy), int(seed))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="mutations of each kind of file")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--verbose", action="store_true", help="print what happened to every mutation"
    )
    arguments = parser.parse_args()
    show = (
        functools.partial(print, file=sys.stderr, flush=True)
        if arguments.verbose
        else lambda line: None
    )
    with tempfile.TemporaryDirectory() as folder:
        healthy = write_all_healthy(Path(folder))
        found = Campaign(
            arguments.kind or list(KINDS), arguments.count, healthy, arguments.seed, told=show
        ).run()
    print(
        "| file | served | refused by name | raw | crash | hang | slowest | peak memory "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    for kind, result in found.items():
        numbers = [result.counts[word] for word in ("served", "refused", "raw", "crash", "hang")]
        row = [
            kind,
            *map(str, numbers),
            f"{result.slowest_s:.1f} s",
            f"{result.peak_bytes >> 20} MiB",
        ]
        print("|", " | ".join(row), "|")
        for number, text in result.bad:
            print(f"  bad: {kind} {number}: {text}", file=sys.stderr)
    return 1 if any(result.bad for result in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
