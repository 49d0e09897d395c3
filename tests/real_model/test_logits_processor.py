"""A third party's logits processor in a whole engine: it checks parameters, reads every new token,
and changes the logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pegboard import LLM, SamplingParams
from pegboard import installed as installed_plugins
from pegboard.errors import RequestError
from pegboard.plugins import discovery
from pegboard_testing.fake_distributions import FakeDistributions

pytestmark = pytest.mark.real_model

SPEC = """
from pegboard.interfaces.logits_processor import LogitsProcessorSpec

SPEC = LogitsProcessorSpec(
    api="1.0", implementation="acme_distinct_processor:Distinct", arguments=("distinct",), validate="acme_distinct:judge",
    flags=frozenset({"host_tokens"}),
)


def judge(params):
    window = (params.extra_args or {}).get("distinct", 1)
    return None if isinstance(window, int) and window > 0 else f"distinct must be a positive integer, got {window!r}"
"""  # noqa: E501

PROCESSOR = """
class Distinct:
    \"\"\"No token of the last `distinct` ones, outputs only, comes again, and none in capitals.\"\"\"

    argmax_invariant = False
    host_tokens = True

    def __init__(self, options, setup):
        self.windows, self.outputs = {}, {}
        vocabulary = setup.vocabulary()
        self.shouts = [token for token, text in enumerate(vocabulary.token_bytes) if text != text.lower()]
        assert setup.vocabulary() is vocabulary and len(self.shouts) > 100

    def update(self, added, removed):
        for row in removed.tolist():
            self.windows.pop(row, None)
        for row, params, prompt, outputs in added:
            self.windows[row], self.outputs[row] = (params.extra_args or {}).get("distinct"), outputs.tolist()

    def apply(self, logits, rows, depth, drafts):
        for i, row in enumerate(rows.tolist()):
            if self.windows[row]:
                logits[i, self.outputs[row][-self.windows[row]:]] = float("-inf")
                logits[i, self.shouts] = float("-inf")
        return logits

    def extend(self, rows, token_ids):
        for row, tokens in zip(rows.tolist(), token_ids):
            self.outputs[row] += tokens
"""  # noqa: E501


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FakeDistributions(tmp_path).add(
        "acme-distinct",
        {"logits_processor": {"distinct": "acme_distinct:SPEC"}},
        {"acme_distinct": SPEC, "acme_distinct_processor": PROCESSOR},
    )
    monkeypatch.syspath_prepend(tmp_path)
    discovery.scan.cache_clear()
    installed_plugins.installed.cache_clear()
    yield
    discovery.scan.cache_clear()
    installed_plugins.installed.cache_clear()


@pytest.mark.usefixtures("installed")
def test_a_processor_reads_every_new_token(smollm2_gguf: Path) -> None:
    llm = LLM(
        str(smollm2_gguf),
        max_model_len=256,
        kv_cache_memory_bytes=1 << 27,
        logits_processors=["distinct"],
    )
    try:
        params = [
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args=extra)
            for extra in (None, {"distinct": 40}, {"distinct": 1})
        ]
        outputs = llm.generate(["one two one two one two one two"] * 3, params, use_tqdm=False)
        plain, distinct, alternating = (output.outputs[0].token_ids for output in outputs)
        assert len(set(plain)) < len(set(distinct)) == 40
        assert (
            all(a != b for a, b in zip(alternating, alternating[1:], strict=False))
            and len(set(alternating)) < 40
        )
        assert outputs[1].outputs[0].text == outputs[1].outputs[0].text.lower()
        with pytest.raises(
            RequestError, match=r"no logits processor .* reads 'distnct'; known: distinct"
        ):
            llm.generate(["a"], SamplingParams(extra_args={"distnct": 1}), use_tqdm=False)
        with pytest.raises(RequestError, match="distinct must be a positive integer, got 0"):
            llm.generate(["a"], SamplingParams(extra_args={"distinct": 0}), use_tqdm=False)
    finally:
        llm.shutdown()
