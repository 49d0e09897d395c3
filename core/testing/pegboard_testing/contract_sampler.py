"""Contract tests of the kind `sampler`. A plugin's test file:

    class TestMySampler(SamplerContract):
        def sampler(self, setup: SamplerSetup) -> Sampler:
            return MySampler(None, setup)

`processed_logits` implements the meaning of every parameter again, for one row and in plain Python.
The sampler is compared with it: exactly if it returns its distribution (processed logprobs), and by
chi-square if it draws tokens. A sampler that draws drafts (`DrawsDrafts`) takes
`DraftSamplerContract`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pegboard.data.batch import Logprobs, TokenMasks
from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.logits_processor import AddedRow
from pegboard.interfaces.sampler import Sampled, Sampler, SamplerSetup, SampleStep
from pegboard_testing.distributions import (
    NEG_INF,
    chi_square_fits,
    log_softmax,
    processed_logits,
    softmax,
)
from pegboard_testing.fake_limits import fake_limits

if TYPE_CHECKING:
    from torch import Tensor

VOCAB_SIZE = 96
TOLERANCE = 2e-4
Params = SamplingParams


def random_params(rng: np.random.Generator, **fixed: Any) -> Params:
    """Make parameters with a random set of features on."""

    def token(n: int) -> list[int]:
        return [int(value) for value in rng.integers(0, VOCAB_SIZE, n)]

    features: dict[str, Callable[[], Any]] = {
        "temperature": lambda: float(rng.choice([0.0, 0.5, 1.7])),
        "top_k": lambda: int(rng.integers(1, VOCAB_SIZE + 4)),
        "top_p": lambda: float(rng.uniform(0.05, 1)),
        "min_p": lambda: float(rng.uniform(0, 0.5)),
        "repetition_penalty": lambda: float(rng.uniform(0.5, 2)),
        "frequency_penalty": lambda: float(rng.uniform(-2, 2)),
        "presence_penalty": lambda: float(rng.uniform(-2, 2)),
        "logit_bias": lambda: dict(zip(token(5), rng.uniform(-9, 9, 5).tolist(), strict=True)),
        "allowed_token_ids": lambda: token(60),
        "bad_words_token_ids": lambda: [
            token(1),
            token(1),
            *([a, b] for a in range(0, VOCAB_SIZE, 2) for b in token(2)),
        ],
        "min_tokens": lambda: 4,
    }
    chosen = {name: make() for name, make in features.items() if rng.random() < 0.35}
    return Params(
        **{
            "max_tokens": None,
            "stop_token_ids": token(3),
            "eos_token_ids": token(1),
            **chosen,
            **fixed,
        }
    )


def tensor(array: Any, dtype: str) -> "Tensor":
    """Return a new torch tensor. torch is imported only here, so that importing the contract stays
    light."""
    import torch

    return torch.tensor(np.asarray(array), dtype=getattr(torch, dtype))


DRAWN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7, "top_p": 0.8},
    {"top_k": 4, "min_p": 0.1},
    {"repetition_penalty": 1.5, "presence_penalty": 0.7},
    {"logit_bias": {0: 1.0, 3: -2.0}, "temperature": 0.8},
]
NEEDS_HISTORY = {"repetition_penalty"}
"""Parameters whose effect depends on the tokens before."""


def logprobs_of(sampled: Sampled) -> list[Logprobs | None]:
    logprobs = sampled.shown()
    assert logprobs is not None
    return logprobs


class SamplerContract:
    """Every sampler passes these. Override `sampler`, and `device` if it does not run on the
    CPU."""

    device = "cpu"

    def sampler(self, setup: SamplerSetup) -> Sampler:
        """Return a new sampler."""
        raise AssertionError("override SamplerContract.sampler")

    def make(
        self, *, rows: int = 8, vocab_size: int = VOCAB_SIZE, seed: int = 0, **more: Any
    ) -> Sampler:
        return self.sampler(
            SamplerSetup(
                fake_limits(vocab_size=vocab_size, max_num_seqs=rows), self.device, seed, **more
            )
        )

    def run(
        self,
        sampler: Sampler,
        logits: np.ndarray,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]] | None = None,
        masks: TokenMasks | None = None,
        draft_probs: "Tensor | None" = None,
    ) -> Sampled:
        """Run one step. logits: [N, V]. drafts: token ids per row. draft_probs: of these ids."""
        lengths = [1 + len(d) for d in drafts] if drafts is not None else [1] * len(rows)
        offsets = np.cumsum([0, *lengths]).astype(np.int32)
        step = SampleStep(np.array(rows, np.int32), offsets, masks=masks, draft_probs=draft_probs)
        if drafts is not None:
            step.draft_token_ids = tensor([t for d in drafts for t in d], "int64").to(self.device)
        return sampler.sample(tensor(logits, "float32").to(self.device), step)

    def tokens(self, sampled: Sampled) -> list[list[int]]:
        counts = sampled.counts.tolist()
        return [ids[:n] for ids, n in zip(sampled.token_ids.tolist(), counts, strict=True)]

    def add(
        self,
        sampler: Sampler,
        row: int,
        params: Params,
        prompt: Sequence[int] = (1,),
        outputs: Sequence[int] = (),
    ) -> None:
        sampler.add(row, params, params.seed, np.array([*prompt, *outputs], np.int32), len(prompt))

    def test_processed_distribution_equals_the_definition(self) -> None:
        for trial in range(12):
            rng = np.random.default_rng(trial)
            sampler = self.make(logprobs_mode="processed_logprobs")
            state = {}
            for row in rng.permutation(8)[:6].tolist():
                prompt, outputs = (
                    rng.integers(0, VOCAB_SIZE, n).tolist() for n in rng.integers(1, 9, 2)
                )
                state[row] = (random_params(rng, logprobs=-1), prompt, outputs)
                self.add(sampler, row, *state[row])
            for _ in range(4):
                logits = rng.normal(0, 3, (len(state), VOCAB_SIZE)).astype(np.float32)
                sampled = self.run(sampler, logits, list(state))
                for x, (params, prompt, outputs), [token], shown in zip(
                    logits, state.values(), self.tokens(sampled), logprobs_of(sampled), strict=True
                ):
                    expected = processed_logits(x, params, prompt, outputs)
                    self.check_distribution(shown, expected, token)
                    assert not params.is_greedy or token == int(expected.argmax())
                    outputs.append(token)

    def check_distribution(self, shown: Logprobs | None, expected: np.ndarray, token: int) -> None:
        """Check that the whole-vocabulary logprobs of one position are log_softmax(expected), and
        that `token` may be drawn."""
        assert shown is not None
        assert expected[token] > NEG_INF
        actual = np.empty(len(expected))
        actual[shown.token_ids[0, 1:]] = shown.values[0, 1:]
        np.testing.assert_allclose(actual, log_softmax(expected), rtol=TOLERANCE, atol=TOLERANCE)

    def test_draws_follow_the_distribution(self) -> None:
        rng = np.random.default_rng(1)
        cases: list[dict[str, Any]] = [
            {},
            {"temperature": 0.6},
            {"top_k": 4},
            {"top_p": 0.7},
            {"min_p": 0.2},
            {"top_k": 6, "top_p": 0.8, "temperature": 2.0},
        ]
        for case in cases:
            for seeded in (False, True):
                sampler = self.make(rows=256, vocab_size=12)
                x = rng.normal(0, 1.5, 12)
                params = Params(max_tokens=None, **case)
                for row in range(256):
                    sampler.add(
                        row, params, 1000 + row if seeded else None, np.array([1], np.int32), 1
                    )
                drawn = [
                    self.run(sampler, np.tile(x, (256, 1)), range(256)).token_ids for _ in range(16)
                ]
                counts = np.bincount(
                    np.concatenate([d.cpu().numpy().ravel() for d in drawn]), minlength=12
                )
                assert chi_square_fits(counts, softmax(processed_logits(x, params, [1], []))), (
                    case,
                    seeded,
                    counts,
                )

    def test_speculation_is_lossless(self) -> None:
        """For any drafts, the first and second tokens are distributed as without drafts."""
        rng = np.random.default_rng(2)
        sampler = self.make(rows=256, vocab_size=6)
        (p0, p1) = rng.normal(0, 1, (2, 6))
        params = Params(max_tokens=None, temperature=0.8)
        for row in range(256):
            self.add(sampler, row, params)
        first = np.zeros(6)
        second = np.zeros(6)
        for _ in range(16):
            for ids in self.tokens(
                self.run(sampler, np.tile([p0, p1], (256, 1)), range(256), [[2]] * 256)
            ):
                first[ids[0]] += 1
                for token in ids[1:]:
                    second[token] += 1
        assert chi_square_fits(first, softmax(p0 / 0.8)), first
        assert second.sum() > 0 and chi_square_fits(second, softmax(p1 / 0.8)), second

    def test_drawn_drafts_have_their_contract(self) -> None:
        is_drawer = hasattr(self.make(), "draw_drafts")
        assert isinstance(self, DraftSamplerContract) == is_drawer, (
            "the tests of a sampler with draw_drafts derive from DraftSamplerContract"
        )

    def test_greedy_drafts_are_accepted_while_they_are_the_argmax(self) -> None:
        rng = np.random.default_rng(3)
        sampler = self.make()
        logits = rng.normal(0, 1, (9, VOCAB_SIZE))
        best = logits.argmax(-1).tolist()
        for row in range(3):
            self.add(sampler, row, Params(temperature=0))
        drafts = [best[0:3], [best[4], (best[5] + 1) % VOCAB_SIZE, best[6]], []]
        assert self.tokens(self.run(sampler, logits[:9], [2, 0, 1], drafts)) == [
            best[0:4],
            best[4:6],
            best[8:9],
        ]

    def test_drafts_count_as_outputs_for_the_positions_after_them(self) -> None:
        for trial in range(8):
            rng = np.random.default_rng(100 + trial)
            sampler = self.make(logprobs_mode="processed_logprobs")
            params = random_params(rng, logprobs=-1, temperature=0)
            prompt = [1, 2, 3]
            outputs = [4, 5]
            self.add(sampler, 3, params, prompt, outputs)
            for _ in range(2):
                logits = rng.normal(0, 3, (4, VOCAB_SIZE)).astype(np.float32)
                drafts: list[int] = []
                for x in logits[:3]:
                    drafts.append(
                        int(processed_logits(x, params, prompt, [*outputs, *drafts]).argmax())
                    )
                sampled = self.run(sampler, logits, [3], [drafts])
                [tokens] = self.tokens(sampled)
                shown = sampled.shown()
                assert (
                    tokens[:3] == drafts
                    and len(tokens) == 4
                    and shown is not None
                    and shown[0] is not None
                )
                assert len(shown[0].values) == 4
                for depth, token in enumerate(tokens):
                    expected = processed_logits(
                        logits[depth], params, prompt, [*outputs, *drafts[:depth]]
                    )
                    part = Logprobs(
                        *(
                            a[depth : depth + 1]
                            for a in (shown[0].token_ids, shown[0].values, shown[0].ranks)
                        )
                    )
                    self.check_distribution(part, expected, token)
                outputs += tokens

    def test_logprobs_are_raw_and_ranked(self) -> None:
        rng = np.random.default_rng(4)
        sampler = self.make()
        logits = rng.normal(0, 2, (5, VOCAB_SIZE)).astype(np.float32)
        asked: list[int | None] = [0, 3, -1, None, 7]
        for row, k in enumerate(asked):
            self.add(
                sampler,
                row,
                Params(
                    logprobs=k,
                    temperature=0.9,
                    top_k=2,
                    logit_bias={5: 50.0},
                    repetition_penalty=1.5,
                ),
            )
        sampled = self.run(sampler, logits, range(5))
        for x, k, [token], shown in zip(
            logits, asked, self.tokens(sampled), logprobs_of(sampled), strict=True
        ):
            if k is None:
                assert shown is None
                continue
            assert shown is not None
            expected = log_softmax(x)
            best = np.argsort(-x, kind="stable")[: VOCAB_SIZE if k < 0 else k]
            assert shown.token_ids.tolist() == [[token, *best.tolist()]]
            np.testing.assert_allclose(shown.values[0], expected[[token, *best]], atol=1e-4)
            assert shown.ranks.tolist() == [1 + int((x > x[token]).sum())]

    def test_nobody_asking_means_no_logprobs(self) -> None:
        sampler = self.make()
        self.add(sampler, 0, Params())
        assert self.run(sampler, np.zeros((1, VOCAB_SIZE)), [0]).logprobs is None

    def test_score(self) -> None:
        rng = np.random.default_rng(5)
        logits = rng.normal(0, 2, (300, VOCAB_SIZE)).astype(np.float32)
        targets = rng.integers(0, VOCAB_SIZE, 300)
        for top in (0, 4, -1):
            shown = self.make().score(
                tensor(logits, "float32").to(self.device),
                tensor(targets, "int64").to(self.device),
                top,
            )
            best = np.argsort(-logits, -1, kind="stable")[:, : VOCAB_SIZE if top < 0 else top]
            assert shown.token_ids.tolist() == np.column_stack([targets, best]).tolist()
            expected = np.take_along_axis(
                np.stack([log_softmax(x) for x in logits]), shown.token_ids.astype(np.int64), -1
            )
            np.testing.assert_allclose(shown.values, expected, atol=1e-4)
            assert shown.ranks.tolist() == [
                1 + int((x > x[t]).sum()) for x, t in zip(logits, targets, strict=True)
            ]

    def test_seeded_rows_do_not_depend_on_the_batch_and_resume(self) -> None:
        rng = np.random.default_rng(6)
        logits = rng.normal(0, 1, (12, VOCAB_SIZE))
        params = Params(seed=7, temperature=1.3, top_p=0.95)
        alone = self.make()
        self.add(alone, 0, params)
        expected = [self.tokens(self.run(alone, x[None], [0]))[0][0] for x in logits]
        assert len(set(expected)) > 3
        crowd = self.make(seed=99)
        for row, other in enumerate([Params(), Params(seed=8), Params(temperature=0)]):
            self.add(crowd, row, other)
        self.add(crowd, 5, params)
        actual: list[int] = []
        for step, x in enumerate(logits):
            # a request that was preempted and resumed in another row, with its outputs as known
            # tokens
            if step == 6:
                crowd.remove(np.array([5], np.int32))
                self.add(crowd, 4, params, [1], actual)
            rows = [0, 4 if step >= 6 else 5, 2, 1]
            actual.append(self.tokens(self.run(crowd, np.stack([x * 0.5, x, x, x]), rows))[1][0])
        assert actual == expected

    def test_two_runs_with_one_seed_agree_and_other_seeds_differ(self) -> None:
        def run(engine_seed: int, request_seed: int | None) -> list[int]:
            sampler = self.make(seed=engine_seed)
            self.add(sampler, 0, Params(seed=request_seed))
            return [
                self.tokens(self.run(sampler, np.zeros((1, VOCAB_SIZE)), [0]))[0][0]
                for _ in range(12)
            ]

        assert run(1, None) == run(1, None) != run(2, None)
        assert run(1, 5) == run(2, 5) != run(1, 6)

    def test_a_batch_gives_each_row_what_it_gets_alone(self) -> None:
        for trial in range(6):
            rng = np.random.default_rng(200 + trial)
            asked = [random_params(rng, seed=int(rng.integers(1000)), logprobs=2) for _ in range(6)]
            together = self.make()
            singles = [self.make() for _ in asked]
            for row, params in enumerate(asked):
                self.add(together, row, params)
                self.add(singles[row], row, params)
            for _ in range(3):
                order = rng.permutation(6)[: int(rng.integers(1, 7))].tolist()
                logits = rng.normal(0, 3, (len(order), VOCAB_SIZE))
                batch = self.run(together, logits, order)
                for i, row in enumerate(order):
                    single = self.run(singles[row], logits[i : i + 1], [row])
                    assert self.tokens(batch)[i] == self.tokens(single)[0]
                    a = logprobs_of(batch)[i]
                    b = logprobs_of(single)[0]
                    assert a is not None and b is not None
                    assert (
                        a.token_ids.tolist() == b.token_ids.tolist()
                        and a.ranks.tolist() == b.ranks.tolist()
                    )

    def test_a_reused_row_remembers_nothing(self) -> None:
        for trial in range(8):
            rng = np.random.default_rng(300 + trial)
            used = self.make(rows=2, logprobs_mode="processed_logprobs")
            for _ in range(3):
                self.add(used, 0, random_params(rng, logprobs=-1), [1, 2], [3, 4])
                self.run(used, rng.normal(0, 3, (1, VOCAB_SIZE)), [0])
                used.remove(np.array([0, 1], np.int32))
            params = random_params(rng, logprobs=-1)
            x = rng.normal(0, 3, VOCAB_SIZE).astype(np.float32)
            self.add(used, 0, params, [5], [6])
            sampled = self.run(used, x[None], [0])
            self.check_distribution(
                logprobs_of(sampled)[0],
                processed_logits(x, params, [5], [6]),
                self.tokens(sampled)[0][0],
            )

    def test_removing_unknown_rows_is_harmless(self) -> None:
        self.make().remove(np.array([0, 3], np.int32))

    def test_masks_hold_for_their_row_and_depth(self) -> None:
        rng = np.random.default_rng(7)
        logits = rng.normal(0, 2, (4, VOCAB_SIZE))
        allowed = np.concatenate(
            [rng.random((2, VOCAB_SIZE)) < 0.3, np.zeros((4, VOCAB_SIZE), bool)]
        )
        bits = np.packbits(allowed, -1, bitorder="little").view(np.uint32)
        # the last four forbid everything, and are for depths and a row that are not in the step
        masks = TokenMasks(
            np.array([6, 2, 2, 6, 2, 5], np.int32), np.array([1, 0, 1, 2, 2, 0], np.int32), bits
        )
        sampler = self.make()
        for row in (2, 6):
            self.add(sampler, row, Params(temperature=0, logprobs=-1))
        draft = int(logits[1].argmax())
        sampled = self.run(sampler, logits[:3], [2, 6], [[], [draft]], masks)
        masked = [
            np.where(allowed[1], logits[0], NEG_INF),
            logits[1],
            np.where(allowed[0], logits[2], NEG_INF),
        ]
        assert self.tokens(sampled) == [[int(masked[0].argmax())], [draft, int(masked[2].argmax())]]
        self.check_distribution(logprobs_of(sampled)[0], masked[0], int(masked[0].argmax()))

    def test_results_stay_when_the_next_step_runs(self) -> None:
        """They are read later if steps are in flight."""
        sampler = self.make()
        rng = np.random.default_rng(3)
        for row in range(3):
            self.add(
                sampler, row, Params(temperature=0, logprobs=2) if row else Params(temperature=0)
            )
        arrays: list[Any] = []
        copies: list[Any] = []
        for rows, drafts in (
            ([0], None),
            ([0, 1, 2], None),
            ([1, 2], [[5], [6]]),
            ([0, 1, 2], [[5], [6], [7]]),
            ([0], None),
        ):
            num_places = len(rows) + sum(map(len, drafts or []))
            sampled = self.run(sampler, rng.normal(0, 3, (num_places, VOCAB_SIZE)), rows, drafts)
            scores = [
                part
                for each in sampled.shown() or []
                if each
                for part in (each.token_ids, each.values, each.ranks)
            ]
            arrays += [sampled.token_ids, sampled.counts, *scores]
            copies += [part.tolist() for part in arrays[len(copies) :]]
            assert [part.tolist() for part in arrays] == copies

    def test_rows_with_nothing_to_draw_do_not_fail(self) -> None:
        sampler = self.make()
        x = np.full((4, VOCAB_SIZE), NEG_INF)
        x[2:] = np.nan
        for row in range(4):
            self.add(
                sampler,
                row,
                Params(temperature=0 if row % 2 else 1.0, top_p=0.9, top_k=3, logprobs=1),
            )
        assert all(0 <= ids[0] < VOCAB_SIZE for ids in self.tokens(self.run(sampler, x, range(4))))

    def test_processors_run_in_their_stage(self) -> None:
        """A processor that can change the most likely token runs after the bias and before
        penalties, also for greedy rows. One that cannot runs after the temperature, only for rows
        that draw. Both are told about a row before they process it."""
        rng = np.random.default_rng(8)
        x = rng.normal(0, 2, (2, VOCAB_SIZE)).astype(np.float32)
        changing = RecordingProcessor(False)
        invariant = RecordingProcessor(True)
        sampler = self.make(processors=(invariant, changing), logprobs_mode="processed_logprobs")
        params = [
            Params(logprobs=-1, temperature=0, logit_bias={1: 3.0}, repetition_penalty=1.7),
            Params(logprobs=-1, temperature=0.5, logit_bias={1: 3.0}, repetition_penalty=1.7),
        ]
        for row, each in zip((4, 2), params, strict=True):
            self.add(sampler, row, each, [1, 2], [3])
        sampled = self.run(sampler, x, [4, 2])
        assert (
            {row for row, *_ in changing.added} == {4, 2}
            and changing.rows == [4, 2]
            and invariant.rows == [2]
        )
        plain = Params(temperature=0, repetition_penalty=1.7)
        for i, scale in enumerate((1, 0.5)):
            biased = x[i].astype(np.float64)
            biased[1] += 3
            biased *= RecordingProcessor.FACTOR
            expected = processed_logits(biased, plain, [1, 2], [3]) / scale
            expected = expected if i == 0 else expected * RecordingProcessor.FACTOR
            self.check_distribution(logprobs_of(sampled)[i], expected, self.tokens(sampled)[i][0])
        sampler.remove(np.array([4], np.int32))
        self.add(sampler, 4, params[0], [9])
        self.run(sampler, x, [4, 2])
        assert changing.removed == [4] and [row for row, *_ in changing.added] == [4, 2, 4]

    def test_processors_that_read_tokens_get_every_new_one(self) -> None:
        """Listening processors are told about accepted drafts but not about rejected ones. Other
        processors are told nothing."""
        rng = np.random.default_rng(9)
        listening = RecordingProcessor(True, host_tokens=True)
        deaf = RecordingProcessor(True)
        sampler = self.make(processors=(listening, deaf))
        for row in (4, 2):
            self.add(sampler, row, Params(temperature=0), [1, 2])
        expected: dict[int, list[int]] = {4: [], 2: []}
        for _ in range(4):
            x = rng.normal(0, 2, (4, VOCAB_SIZE)).astype(np.float32)
            drafts = [[], [int(x[1].argmax()), int(rng.integers(VOCAB_SIZE))]]
            for row, tokens in zip(
                (4, 2), self.tokens(self.run(sampler, x, [4, 2], drafts)), strict=True
            ):
                expected[row] += tokens
        assert listening.tokens == expected and len(expected[2]) > 4 and not deaf.tokens


class RecordingProcessor:
    """Multiplies all logits by FACTOR and records every call."""

    FACTOR = 0.75

    def __init__(self, argmax_invariant: bool, host_tokens: bool = False) -> None:
        self.argmax_invariant = argmax_invariant
        self.host_tokens = host_tokens
        self.added: list[AddedRow] = []
        self.removed: list[int] = []
        self.rows: list[int] = []
        self.tokens: dict[int, list[int]] = {}

    def update(self, added: Sequence[AddedRow], removed: np.ndarray) -> None:
        self.added += added
        self.removed += removed.tolist()

    def apply(
        self,
        logits: "Tensor",
        rows: "Tensor",
        depth: "Tensor",
        drafts: Callable[[], list[list[int]]],
    ) -> "Tensor":
        assert len(rows) == len(depth) == len(logits)
        self.rows = rows.tolist()
        self.drafts = drafts()
        assert [len(each) for each in self.drafts] == depth.tolist()
        return logits.mul_(self.FACTOR)

    def extend(self, rows: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        for row, tokens in zip(rows.tolist(), token_ids, strict=True):
            self.tokens.setdefault(row, []).extend(tokens)


class DraftSamplerContract(SamplerContract):
    """A sampler that draws drafts (`DrawsDrafts`) passes these in addition."""

    @pytest.mark.parametrize("case", DRAWN, ids=str)
    def test_drafts_that_are_drawn_are_lossless(self, case: dict[str, Any]) -> None:
        """20,000 draws. The tokens are distributed as without drafts, and more drafts are accepted
        than if each were the most likely one. A row with a seed gets the tokens that it gets
        alone."""
        rng = np.random.default_rng(4)
        sampler = self.make(rows=256, vocab_size=6)
        drawer: Any = sampler
        (p0, p1, q0) = rng.normal(0, 1, (3, 6))
        q0 = (p0 + q0) / 2
        params = Params(max_tokens=None, **case)
        for row in range(255):
            self.add(sampler, row, params)
        self.add(sampler, 255, Params(max_tokens=None, seed=5, **case))
        alone = self.make(rows=1, vocab_size=6)
        self.add(alone, 0, Params(max_tokens=None, seed=5, **case))
        first = np.zeros(6)
        second = np.zeros(6)
        for _ in range(80):
            rows = np.arange(256)
            q = tensor(np.tile(q0, (256, 1)), "float32").to(self.device)
            ids, probs = drawer.draw_drafts(q, rows)
            assert probs is not None and not probs[255].any()
            drafts = [[token] for token in ids.tolist()]
            assert bool((probs.gather(1, ids[:, None])[:255] > 0).all())
            sampled = self.run(
                sampler, np.tile([p0, p1], (256, 1)), rows, drafts, draft_probs=probs
            )
            *drawn, seeded = self.tokens(sampled)
            for chosen in drawn:
                first[chosen[0]] += 1
                for token in chosen[1:]:
                    second[token] += 1
            assert seeded == [
                token
                for logits in (p0, p1)[: len(seeded)]
                for (token,) in self.tokens(self.run(alone, logits[None], [0]))
            ]
            if NEEDS_HISTORY & case.keys():  # which must not grow
                for row in range(255):
                    self.add(sampler, row, params)
        expected = [processed_logits(logits, params, [1], []) for logits in (p0, p1)]
        assert chi_square_fits(first, softmax(expected[0])), first
        if not NEEDS_HISTORY & case.keys():
            assert second.sum() > 0 and chi_square_fits(second, softmax(expected[1])), second
        if not case:
            usual = softmax(p0)[int(q0.argmax())] * first.sum()
            assert second.sum() > 1.1 * usual, (second.sum(), usual)
