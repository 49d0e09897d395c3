"""FlexibleArgumentParser and EngineArgs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pegboard_vllm_compat import engine_args
from pegboard_vllm_compat.arguments import FlexibleArgumentParser
from pegboard_vllm_compat.engine_args import AsyncEngineArgs, EngineArgs, of_args, settings_of

from pegboard.config.vllm_names import ABSENT, ALIASES, FORMS


@pytest.fixture
def parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--max_words", type=int)
    parser.add_argument("-O", dest="level", type=engine_args.value_of)
    return parser


def test_underscores_and_dashes(parser: FlexibleArgumentParser) -> None:
    args = parser.parse_args(["--max-words", "3", "--max_model_len=4k", "--no-enable_lora"])
    assert (args.max_words, args.max_model_len, args.enable_lora) == (3, 4000, False)


def test_parts_of_mappings(parser: FlexibleArgumentParser) -> None:
    words = ["--speculative-config.num_tokens", "3", "--speculative_config.names+=a", "-O2"]
    args = parser.parse_args([*words, "--speculative-config.names+", "b"])
    assert args.speculative_config == {"num_tokens": 3, "names": ["a", "b"]}
    assert args.level == 2


def test_a_config_file(parser: FlexibleArgumentParser, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: here\nmax-model-len: 8K\nenable_lora: true\nseed: 1\n"
        "served-model-name: [a, b]\nhf_overrides: {a: 1}\n"
    )
    args = parser.parse_args(["--seed", "2", "--config", str(file)])
    assert (args.model, args.max_model_len, args.enable_lora, args.seed) == ("here", 8192, True, 2)
    assert (args.served_model_name, args.hf_overrides) == (["a", "b"], {"a": 1})


def test_engine_args_are_a_dataclass(parser: FlexibleArgumentParser) -> None:
    args = EngineArgs(model="here", max_model_len=64)
    assert dataclasses.asdict(args)["max_model_len"] == 64
    assert of_args(args) == {"model": "here", "max_model_len": 64, "disable_log_stats": False}
    parsed = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", "here"]))
    assert of_args(parsed) == {"model": "here", "disable_log_stats": False}
    assert settings_of(vars(args)) == of_args(args)


def test_the_other_names_are_translated_or_refused_by_pegboard() -> None:
    names = {
        *engine_args.SWITCHES,
        *engine_args.TEXTS,
        *engine_args.NUMBERS,
        *engine_args.MAPPINGS,
    }
    assert names <= {*ABSENT, *ALIASES, *FORMS}
