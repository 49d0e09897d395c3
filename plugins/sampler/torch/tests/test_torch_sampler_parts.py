"""The fast parts, compared with the plain references in `pegboard.ops.sampling`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_sampler_torch.choose import (
    Cuts,
    accept_equal,
    accept_on_host,
    apply_token_mask,
    argmax,
    draw,
    largest_values,
    running_sums,
    weigh,
)
from pegboard_sampler_torch.logprobs import gather_logprobs, log_sums, top_tokens
from pegboard_sampler_torch.penalties import PenaltyTable
from pegboard_sampler_torch.random import SeededUniforms, philox, seeded_uniforms
from pegboard_sampler_torch.step import pad_drafts
from pegboard_sampler_torch.upload import Upload

from pegboard.ops import sampling as ops
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.distributions import chi_square_fits, softmax
from pegboard_testing.exact_sums import OnlyExactSums
from pegboard_testing.fake_gpu import DEVICE, FakeGPU
from pegboard_testing.sampling_reference import apply_penalties, log_softmax_topk

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
vocabularies = st.sampled_from([1, 5, 63, 64, 65, 200, 1500, 9000])


def random_logits(
    seed: int, n: int, vocab_size: int, *, ties: bool = False, scale: float = 3.0
) -> torch.Tensor:
    x = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return x.round() if ties else x


def test_the_entry_keeps_the_generic_contract() -> None:
    try:
        entry = installed_entry("sampler", "torch")
    except AssertionError as e:
        pytest.skip(str(e))
    check_entry(entry)


@quick
@given(seeds, vocabularies, st.booleans())
def test_argmax_is_the_first_maximum(seed: int, vocab_size: int, ties: bool) -> None:
    x = random_logits(seed, 4, vocab_size, ties=ties)
    x[1] = -torch.inf
    x[2, vocab_size // 2] = torch.nan
    assert argmax(x).tolist() == x.argmax(-1).tolist()


@quick
@given(seeds, vocabularies)
def test_draw_equals_the_plain_inverse(seed: int, vocab_size: int) -> None:
    weights = random_logits(seed, 16, vocab_size).exp() * (
        random_logits(seed + 1, 16, vocab_size) > 0
    )
    weights[:, seed % vocab_size] += 1
    uniforms = torch.from_numpy(np.random.default_rng(seed).random(16))
    ids, failed = draw(weights, uniforms)
    assert not failed.any()
    assert (weights.gather(-1, ids.unsqueeze(-1)) > 0).all()
    # Both round, so a uniform next to a boundary may be on either side of it. The cumulative mass
    # is compared instead.
    cumulative = weights.double().cumsum(-1) / weights.double().sum(-1, keepdim=True)
    upper = cumulative.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    lower = upper - weights.double().gather(-1, ids.unsqueeze(-1)).squeeze(
        -1
    ) / weights.double().sum(-1)
    assert ((lower - 1e-6 <= uniforms) & (uniforms <= upper + 1e-6)).all()


@pytest.mark.parametrize("vocab_size", [5, 64, 100, 300])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_draw_at_the_ends_hits_the_first_and_last_token_with_weight(
    vocab_size: int, uniform: float
) -> None:
    weights = torch.zeros(1, vocab_size)
    weights[0, [1, vocab_size // 2, vocab_size - 2]] = torch.tensor([1e-20, 3.0, 1e20])
    ids, failed = draw(weights, torch.tensor([uniform], dtype=torch.float64))
    assert ids.item() == (vocab_size - 2 if uniform else 1) and not failed.item()


def test_draw_reports_rows_without_weight() -> None:
    weights = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0], [0.0, 1.0]])
    ids, failed = draw(weights, torch.full((4,), 0.5, dtype=torch.float64))
    assert (
        failed.tolist() == [True, True, True, False]
        and ids[3] == 1
        and ((ids >= 0) & (ids < 2)).all()
    )


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 300])
def test_draws_on_a_device(vocab_size: int) -> None:
    """They are the CPU's, up to rounding, and a row has the same sums in every batch."""
    x = random_logits(vocab_size, 5, vocab_size)
    uniforms = torch.linspace(0, 0.999, 5, dtype=torch.float64)
    k = torch.tensor([1, 2, 3, 200, 4]).clamp(max=vocab_size)
    numbers = torch.tensor([0.5, 1, 0.9, 0.8, 0.95])
    cuts = Cuts(numbers / 50, k, int(k.max()), numbers)
    peak = x.amax(-1, keepdim=True)
    weights, floor = weigh(x.clone(), peak, cuts)
    expected, _ = draw(weights, uniforms)
    with FakeGPU(), OnlyExactSums():
        given = Cuts(*(each.to(DEVICE) for each in (numbers / 50, k)), cuts.max_k)
        given = replace(given, top_p=numbers.to(DEVICE))
        on_device = [each.to(DEVICE) for each in (x.clone(), peak)]
        found, found_floor = weigh(*on_device, given)
        ids, failed = draw(found, uniforms.to(DEVICE))
        assert torch.equal(ids.cpu(), expected) and not failed.cpu().any()
        assert floor is not None and found_floor is not None
        torch.testing.assert_close(found_floor.cpu(), floor)
        sums = running_sums(found).cpu()
    torch.testing.assert_close(sums, weights.double().cumsum(-1))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_draws_at_the_ends_on_a_device(uniform: float) -> None:
    """Rows without weight, or with one that is not finite, fail."""
    weights = torch.zeros(4, 300)
    weights[0, [1, 150, 298]] = torch.tensor([1e-9, 0.5, 1e-9])
    weights[1, 150] = torch.inf
    weights[2, 150] = torch.nan
    with FakeGPU():
        numbers = torch.full((4,), uniform, dtype=torch.float64)
        ids, failed = draw(weights.to(DEVICE), numbers.to(DEVICE))
        assert ids.tolist()[0] == (298 if uniform else 1)
        assert failed.tolist() == [False, True, True, True]
        assert all(0 <= number < 300 for number in ids.tolist())


@quick
@given(
    seeds,
    vocabularies,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.1, 1.0, 5.0]),
)
def test_weigh_cuts_like_the_references(
    seed: int,
    vocab_size: int,
    with_min_p: bool,
    with_top_k: bool,
    with_top_p: bool,
    ties: bool,
    scale: float,
) -> None:
    rng = np.random.default_rng(seed)
    n = 5
    x = random_logits(seed, n, vocab_size, ties=ties, scale=scale)
    off = torch.from_numpy(rng.random((3, n)) < 0.3)
    min_p = torch.from_numpy(rng.uniform(0, 0.3, n)).float().masked_fill(off[0], 0)
    top_k = torch.from_numpy(rng.integers(1, vocab_size + 1, n)).masked_fill(off[1], vocab_size)
    top_p = torch.from_numpy(rng.uniform(0.01, 1, n)).float().masked_fill(off[2], 1)
    in_use = top_k[top_k < vocab_size]
    cuts = Cuts(
        min_p=min_p if with_min_p else None,
        top_k=top_k if with_top_k and len(in_use) else None,
        max_k=int(in_use.max()) if len(in_use) else 0,
        top_p=top_p if with_top_p else None,
    )
    expected = ops.apply_min_p(x, min_p) if with_min_p else x
    expected = ops.apply_top_k_top_p(
        expected, top_k if with_top_k else None, top_p if with_top_p else None
    )
    peak = x.amax(-1, keepdim=True)
    weights, floor = weigh(x.clone(), peak, cuts)
    kept = torch.ones_like(x, dtype=torch.bool) if floor is None else x >= floor
    # If a token's cumulative probability equals p up to rounding, one of them may keep it and the
    # other drop it.
    differing = (kept != expected.isfinite()).float() * (x - peak).exp()
    assert (differing.sum(-1) / (x - peak).exp().sum(-1) < 2e-3).all()
    assert (kept != expected.isfinite()).sum() <= (0 if not with_top_p or ties else 2)
    torch.testing.assert_close(weights, torch.where(kept, (x - peak).exp(), 0))


@quick
@given(seeds, vocabularies, st.floats(0, 1))
def test_masked_tokens_weigh_nothing(seed: int, vocab_size: int, share: float) -> None:
    """exp is clamped if most logits are −inf. The weights are unchanged by this, and are exactly 0
    under the mask."""
    rng = np.random.default_rng(seed)
    x = random_logits(seed, 4, vocab_size)
    x[torch.from_numpy(rng.random(x.shape) < share)] = float("-inf")
    x[:, 0] = 1.0
    peak = x.amax(-1, keepdim=True)
    (plain, _) = weigh(x, peak, Cuts())
    (quick_one, _) = weigh(x, peak, Cuts(), has_holes=True)
    torch.testing.assert_close(plain, quick_one)
    assert (quick_one[x == float("-inf")] == 0).all()


@quick
@given(seeds, vocabularies, st.integers(1, 9000))
def test_largest_values(seed: int, vocab_size: int, k: int) -> None:
    x = random_logits(seed, 3, vocab_size)
    k = min(k, vocab_size)
    assert largest_values(x, k).tolist() == x.sort(descending=True).values[:, :k].tolist()


@quick
@given(seeds, vocabularies, st.integers(1, 70), st.booleans())
def test_top_tokens_are_ordered_by_value_then_id(
    seed: int, vocab_size: int, k: int, ties: bool
) -> None:
    x = random_logits(seed, 3, vocab_size, ties=ties)
    x[1] = -torch.inf
    x[2] *= 0  # zeros of both signs are equal
    k = min(k, vocab_size)
    assert (
        top_tokens(x, k).tolist()
        == x.sort(dim=-1, descending=True, stable=True).indices[:, :k].tolist()
    )


def test_logprobs_of_a_row_have_the_same_bits_in_every_batch() -> None:
    """The vocabulary is larger than what torch sums on one thread."""
    x = torch.randn(5, 50_001) * 4
    chosen = torch.arange(5)
    found = gather_logprobs(x, chosen, 3, normalize=True).values
    for row in range(5):
        part = slice(row, row + 1)
        alone = gather_logprobs(x[part], chosen[part], 3, normalize=True).values
        assert (alone == found[part]).all()


@pytest.mark.parametrize("size", [1, 5, 64, 127])
def test_sums_on_a_device(size: int) -> None:
    """They are added number by number, so a row has the same bits alone. Empty rows give −∞."""
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(size)) * 4
    x[3] = float("-inf")
    expected = x.logsumexp(-1, keepdim=True)
    with FakeGPU():
        on_device = x.to(DEVICE)
        sums = log_sums(on_device).cpu()
        alone = [log_sums(on_device[row : row + 1]).cpu() for row in range(5)]
    torch.testing.assert_close(sums, expected)
    assert torch.equal(torch.cat(alone), sums)


@quick
@given(seeds, vocabularies, st.integers(-1, 30), st.booleans(), st.booleans())
def test_gather_logprobs(seed: int, vocab_size: int, k: int, ties: bool, normalize: bool) -> None:
    """The order is that of the logits, because log-softmax may round two of them to the same
    value."""
    x = random_logits(seed, 3, vocab_size, ties=ties)
    chosen = torch.from_numpy(np.random.default_rng(seed).integers(0, vocab_size, 3))
    found = gather_logprobs(x, chosen, k, normalize=normalize)
    ids, _, ranks = log_softmax_topk(x, chosen, k, normalize=False)
    assert found.token_ids.tolist() == ids.tolist() and found.ranks.tolist() == ranks.tolist()
    values = x.log_softmax(-1) if normalize else x
    np.testing.assert_allclose(found.values, values.gather(-1, ids).numpy(), atol=1e-5)
    _, expected, _ = log_softmax_topk(x, chosen, k, normalize=normalize)
    np.testing.assert_allclose(found.values, expected.numpy(), atol=1e-5)
    assert (found.token_ids.dtype, found.values.dtype, found.ranks.dtype) == (
        np.int32,
        np.float32,
        np.int32,
    )


@quick
@given(
    seeds,
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=6
    ),
)
def test_penalty_table(seed: int, lengths: list[tuple[int, int, int]]) -> None:
    """Rows with prompts, outputs and drafts of any length are compared with the dense reference.
    Some tokens are appended later."""
    rng = np.random.default_rng(seed)
    vocab_size = 12
    n = len(lengths)
    table = PenaltyTable(vocab_size, Upload("cpu", None))
    table.add(99, np.arange(9), np.arange(5))
    table.remove(99)
    masks = np.zeros((n, vocab_size), bool)
    counts = np.zeros((n, vocab_size), np.int64)
    drafts = np.full((n, max(d for *_, d in lengths)), -1)
    for row, (num_prompt, num_outputs, num_drafts) in enumerate(lengths):
        prompt = rng.integers(-1, vocab_size, num_prompt)
        outputs = rng.integers(0, vocab_size, num_outputs)
        table.add(row, prompt, outputs[:-1])
        if num_outputs:
            table.append([row], torch.from_numpy(outputs[-1:]))
        drafts[row, :num_drafts] = rng.integers(0, vocab_size, num_drafts)
        masks[row, prompt[prompt >= 0]] = True
        np.add.at(counts[row], [*outputs, *drafts[row, :num_drafts]], 1)
    x = random_logits(seed, n, vocab_size)
    parameters = torch.from_numpy(rng.uniform([[0.5], [-2], [-2]], 2, (3, n))).float()
    expected = apply_penalties(x, torch.from_numpy(masks), torch.from_numpy(counts), *parameters)
    table.apply(
        x,
        torch.arange(n),
        list(range(n)),
        parameters,
        torch.from_numpy(drafts) if drafts.shape[1] else None,
    )
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers from the authors' Random123 library
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert words[:, 0].tolist() == expected


steps_of_rows = st.lists(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(-5, 5), st.integers(0, 70)), min_size=1, max_size=6
    ),
    min_size=1,
    max_size=8,
)


@given(steps_of_rows)
def test_numbers_made_ahead_are_the_same(steps: list[list[tuple[int, int, int]]]) -> None:
    """Rows are added and removed, change their seeds, and occur more than once in a step."""
    ahead = SeededUniforms(4)
    for step in steps:
        seed_of = {row: seed for row, seed, _ in step}  # a row has one seed at a time
        rows = np.array([row for row, _, _ in step])
        positions = np.array([position for _, _, position in step])
        seeds = np.array([seed_of[row] for row in rows.tolist()])
        assert np.array_equal(ahead.of(rows, seeds, positions), seeded_uniforms(seeds, positions))


def test_seeded_uniforms_are_uniform_over_positions_and_over_seeds() -> None:
    for seeds_, positions in (
        (np.full(4000, -3), np.arange(4000)),
        (np.arange(4000), np.zeros(4000, np.int64)),
    ):
        numbers = seeded_uniforms(seeds_, positions)
        assert numbers.shape == (4000,) and (numbers >= 0).all() and (numbers < 1).all()
        counts = np.histogram(numbers, 16, (0, 1))[0]
        assert ((counts - 250) ** 2 / 250).sum() < 45  # 15 degrees of freedom: p < 10⁻⁴
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.06


@quick
@given(seeds, st.integers(1, 5), st.integers(1, 130))
def test_token_mask(seed: int, n: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, (n, vocab_size)).astype(np.float32)
    allowed = rng.random((n, vocab_size)) < 0.5
    words = np.zeros((n, -(-vocab_size // 32)), np.uint32)
    for row, token in zip(*np.nonzero(allowed), strict=True):
        words[row, token // 32] |= np.uint32(1 << (token % 32))
    masked = apply_token_mask(torch.tensor(x), torch.from_numpy(words.view(np.int32)))
    assert masked.tolist() == np.where(allowed, x, float("-inf")).tolist()


def test_accepting_drafts_is_lossless() -> None:
    """The first two tokens are distributed as without drafts, whatever was proposed."""
    rng = np.random.default_rng(5)
    vocab_size = 4
    n = 20_000
    p = softmax(rng.normal(0, 1, (2, vocab_size)))
    after = softmax(rng.normal(0, 1, vocab_size))
    tokens = ops.sample_inverse(
        torch.tensor(np.tile([*p, after], (n, 1))).float(), torch.tensor(rng.random(3 * n))
    )
    offsets = torch.arange(n + 1) * 3
    token_ids, counts = accept_equal(
        tokens,
        pad_drafts(torch.tensor([2, 1]).repeat(n), offsets.numpy(), torch.from_numpy),
        offsets,
    )
    first = token_ids[:, 0].numpy()
    second = token_ids[counts >= 2][:, :2].numpy()
    assert chi_square_fits(np.bincount(first, minlength=vocab_size), p[0])
    assert chi_square_fits(np.bincount(second[:, 1], minlength=vocab_size), p[1])
    assert (counts >= 2).float().mean().item() == pytest.approx(p[0][2], abs=0.02)
    assert (token_ids.ge(0).sum(-1) == counts).all()


@quick
@given(seeds, st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_drafts_are_accepted_while_they_equal_the_drawn_tokens(
    seed: int, lengths: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *(n + 1 for n in lengths)])
    drawn = rng.integers(0, 3, offsets[-1])
    drafts = [rng.integers(0, 3, n) for n in lengths]
    flat = torch.tensor(np.concatenate(drafts))
    padded = pad_drafts(flat, np.array(offsets), torch.from_numpy)
    token_ids, counts = accept_equal(torch.tensor(drawn), padded, torch.tensor(offsets))
    on_host = accept_on_host(torch.tensor(drawn), flat, offsets)
    assert token_ids.equal(on_host[0]) and counts.equal(on_host[1])
    for i, draft in enumerate(drafts):
        expected = []
        for wanted, proposed in zip(
            drawn[offsets[i] : offsets[i + 1]], [*draft, None], strict=True
        ):
            expected.append(wanted)
            if proposed != wanted:
                break
        assert token_ids[i, : counts[i]].tolist() == expected
        assert (token_ids[i, counts[i] :] == -1).all()
