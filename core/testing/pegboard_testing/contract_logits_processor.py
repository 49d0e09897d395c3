"""Contract tests of the kind `logits_processor`. A plugin's test file:

class TestMyProcessor(LogitsProcessorContract):
    name = "mine"
    requests = ({}, {"my_argument": 3})

A row's logits may depend on its request, its tokens and its drafts, and on nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pegboard.data.sampling_params import SamplingParams
from pegboard.installed import Entry
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessor, LogitsProcessorSetup
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard.plugins.importing import import_part, import_spec
from pegboard.plugins.options import resolve
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_limits import fake_limits

NUM_ROWS = 4
VOCAB_SIZE = 12
END = VOCAB_SIZE - 1
VOCABULARY = Vocabulary(
    tuple(f" {chr(97 + i)}".encode() for i in range(END)) + (b"",), frozenset({END}), (END,)
)


class LogitsProcessorContract:
    """Every logits processor passes these. name: of the installed plugin. options: what the user
    would set. requests: `extra_args` that it accepts."""

    name: str
    options: Mapping[str, Any] = {}
    requests: Sequence[Mapping[str, Any]] = ({},)

    @property
    def entry(self) -> Entry:
        return installed_entry("logits_processor", self.name)

    def make(self) -> LogitsProcessor:
        """Return a new processor for a batch of NUM_ROWS rows and a vocabulary of VOCAB_SIZE
        tokens, the last of which ends."""
        spec = import_spec(self.entry)
        limits = fake_limits(max_num_seqs=NUM_ROWS, vocab_size=VOCAB_SIZE)
        setup = LogitsProcessorSetup(limits, "cpu", lambda: VOCABULARY)
        processor: LogitsProcessor = import_part(self.entry, spec.implementation, "implementation")(
            resolve(self.entry, spec, self.options), setup
        )
        return processor

    def test_entry(self) -> None:
        check_entry(self.entry)
        assert self.make().argmax_invariant in (True, False)
        flag = "host_tokens" in import_spec(self.entry).flags
        assert bool(getattr(self.make(), "host_tokens", False)) == flag, (
            "the spec's flag and the attribute differ"
        )

    def test_requests_are_accepted(self) -> None:
        spec = import_spec(self.entry)
        known = spec.arguments
        for arguments in self.requests:
            assert known is None or set(arguments) <= set(known), (
                f"{arguments} has names that the spec does not list"
            )
            if spec.validate is not None:
                judge = import_part(self.entry, spec.validate, "validate")
                assert judge(self.params(arguments)) is None

    def params(self, arguments: Mapping[str, Any]) -> SamplingParams:
        return SamplingParams(
            max_tokens=24, extra_args=dict(arguments) or None, eos_token_ids=[END]
        )

    @pytest.mark.parametrize("seed", range(12))
    def test_each_row_is_as_if_it_were_alone(self, seed: int) -> None:
        """Rows come, grow, go and resume, with and without drafts. Every logits row equals that of
        a new processor that has only this request, with the drafts as outputs."""
        chance = random.Random(seed)
        torch_chance = torch.Generator().manual_seed(seed)
        processor = self.make()
        rows = dict[int, AddedRow]()
        for _ in range(30):
            gone = [row for row in rows if chance.random() < 0.15]
            for row in gone:
                del rows[row]
            added = [
                self._new(chance, row)
                for row in range(NUM_ROWS)
                if row not in rows and chance.random() < 0.4
            ]
            rows |= {new.row: new for new in added}
            if gone or added:
                processor.update(added, np.array(gone, np.int32))
            running = chance.sample(list(rows), chance.randint(0, len(rows)))
            if not running:
                continue
            drafts = [
                [chance.randrange(3) for _ in range(chance.choice([0, 0, 2]))] for _ in running
            ]
            places = [
                (row, ids[:n])
                for row, ids in zip(running, drafts, strict=True)
                for n in range(len(ids) + 1)
            ]
            logits = torch.randn(len(places), VOCAB_SIZE, generator=torch_chance)
            changed = self._applied(processor, logits.clone(), places)
            if processor.argmax_invariant:
                assert torch.equal(changed.argmax(-1), logits.argmax(-1)), (
                    "argmax_invariant, and another token became the best"
                )
            for i, (row, before) in enumerate(places):
                alone = self.make()
                this = rows[row]
                outputs = np.append(this.outputs, before).astype(np.int32)
                alone.update([this._replace(row=1, outputs=outputs)], np.zeros(0, np.int32))
                expected = self._applied(alone, logits[i : i + 1].clone(), [(1, [])])
                torch.testing.assert_close(
                    changed[i : i + 1], expected, msg=f"row {row} is not what it would be alone"
                )
            tokens = [[*ids[: chance.randint(0, len(ids))], chance.randrange(3)] for ids in drafts]
            for row, new in zip(running, tokens, strict=True):
                rows[row] = rows[row]._replace(
                    outputs=np.append(rows[row].outputs, new).astype(np.int32)
                )
            if getattr(processor, "host_tokens", False):
                processor.extend(np.array(running), tokens)

    def _new(self, chance: random.Random, row: int) -> AddedRow:
        prompt = np.array([chance.randrange(3) for _ in range(chance.randint(1, 6))], np.int32)
        outputs = np.array([chance.randrange(3) for _ in range(chance.choice([0, 0, 5]))], np.int32)
        return AddedRow(row, self.params(chance.choice(list(self.requests))), prompt, outputs)

    def _applied(
        self, processor: LogitsProcessor, logits: Tensor, places: Sequence[tuple[int, list[int]]]
    ) -> Tensor:
        rows = torch.tensor([row for row, _ in places])
        depth = torch.tensor([len(drafts) for _, drafts in places])
        changed = processor.apply(
            logits, rows, depth, lambda: [list(drafts) for _, drafts in places]
        )
        assert changed.shape == logits.shape and changed.dtype == logits.dtype
        assert not changed.isnan().any() and (changed > -torch.inf).any(-1).all(), (
            "a row has no token left"
        )
        return changed
