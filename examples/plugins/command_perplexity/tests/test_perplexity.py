"""The contract of the kind, and the number: from one forward it is what step after step gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pegboard_command_perplexity.command import Perplexity, logprobs_of

from pegboard import LLM, SamplingParams
from pegboard.errors import UsageError
from pegboard.interfaces.command import Command, CommandSetup
from pegboard_testing.contract_command import CommandContract, command_setup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.tiny_engine import CONFIG, DEFAULTS

TEXT = "The capital of France is Paris. The capital of Italy is Rome."


def test_contract() -> None:
    check_entry(installed_entry("command", "perplexity"))


class TestPerplexity(CommandContract):
    word = "perplexity"

    def command(self, setup: CommandSetup) -> Command:
        return Perplexity(None, setup)


def run(*words: str) -> int:
    return Perplexity(None, command_setup("perplexity")).run(words)


def test_the_number_is_that_of_single_steps(tmp_path: Path) -> None:
    """The tokens of this tokenizer are bytes. A piece has 8 tokens, because the model's limit is
    9."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    text = "abcdefgh01234567x"
    with LLM(str(tmp_path), max_model_len=9, max_logprobs=-1, **DEFAULTS) as llm:
        fake: Any = SimpleNamespace(
            llm_engine=llm.llm_engine,
            generate=llm.generate,
            get_tokenizer=lambda: SimpleNamespace(encode=lambda text: list(text.encode())),
        )
        found = logprobs_of(fake, text)
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
        expected = []
        for piece in (text[:8].encode(), text[8:16].encode()):
            for end in range(1, 8):
                output = llm.generate(
                    {"prompt_token_ids": list(piece[:end])}, params, use_tqdm=False
                )[0].outputs[0]
                assert output.logprobs is not None
                expected.append(output.logprobs[0][piece[end]].logprob)
    assert found == pytest.approx(expected, abs=1e-4), (
        "the last piece has one token, and so no logprob"
    )


def test_a_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--file .*missing.txt cannot be read"):
        run("model", "--file", str(tmp_path / "missing.txt"))


@pytest.mark.real_model
def test_sense_is_more_likely_than_nonsense(
    smollm2_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for text in (TEXT, " ".join(reversed(TEXT.split()))):
        (tmp_path / "text").write_text(text, "utf-8")
        assert (
            run(
                str(smollm2_gguf),
                "--max-model-len",
                "64",
                "--file",
                str(tmp_path / "text"),
                "--json",
            )
            == 0
        )
        found.append(json.loads(capsys.readouterr().out)["perplexity"])
    assert 1 < found[0] < 20 and found[1] > 3 * found[0] and not math.isnan(found[1])
