"""Block hashes, retention rules, the KV plan, and KVCache."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.config.schema import EngineConfig, Settings
from pegboard.data.batch import TransferReport
from pegboard.data.prompt_embeds import PromptEmbeds
from pegboard.data.request import EngineRequest, LoRARequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.kv.cache import KVCache
from pegboard.engine.kv.connectors import KVConnectors
from pegboard.engine.kv.hashes import (
    BlockHasher,
    root_hash,
    sha256_block,
)
from pegboard.engine.kv.plan import blocks_per_request, fit_kv, plan_kv
from pegboard.engine.kv.special_rules import make_rule
from pegboard.engine.requests import Request
from pegboard.errors import ConfigError, KVCacheTooSmall
from pegboard.interfaces.attention import Chunk, Full, KVGroup, KVPlan, Retain, State, Window
from pegboard.interfaces.draft import DraftSource
from pegboard.interfaces.kv_connector import BlockView, Release
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard.plan.engine_plan import EnginePlan
from pegboard.plugins.registry import PluginLock
from pegboard_testing.fake_limits import fake_limits
from pegboard_testing.fake_model import FakeModel, fake_kv_spec


def make_request(tokens: list[int], **fields: Any) -> Request:
    source = EngineRequest(
        request_id=fields.pop("id", "r"), prompt_token_ids=tokens, params=SamplingParams(), **fields
    )
    return Request.of(source)


def hashes(tokens: list[int], algo: str = "sha256", **fields: Any) -> list[bytes]:
    request = make_request(tokens, **fields)
    BlockHasher(algo, 4).extend(request)
    return request.block_hashes


def small_plan(*retains: Retain, num_blocks: int = 40, **limits: Any) -> Any:
    specs = {i: fake_kv_spec(retain) for i, retain in enumerate(retains)}
    return plan_kv(
        specs, 0, fake_limits(**{"max_model_len": 32, **limits}), num_blocks_override=num_blocks
    )


def small_cache(*retains: Retain, num_blocks: int = 40) -> KVCache:
    return KVCache(small_plan(*retains, num_blocks=num_blocks), fake_limits())


# --- hashes ---------------------------------------------------------------------------------------


def test_the_chain_is_what_the_docstring_says() -> None:
    first = hashlib.sha256(
        root_hash("") + b"".join(t.to_bytes(8, "little") for t in (1, 2, 3, 4))
    ).digest()
    assert (
        hashes([1, 2, 3, 4, 5, 6, 7, 8, 9])[0]
        == first
        == sha256_block(root_hash(""), [1, 2, 3, 4], b"")
    )
    assert len(hashes([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 2


few_tokens = st.lists(st.integers(0, 2), max_size=30)


@given(few_tokens, few_tokens, st.sampled_from(["sha256", "sha256_cbor"]))
def test_equal_hash_means_equal_history(a: list[int], b: list[int], algo: str) -> None:
    for i, (x, y) in enumerate(zip(hashes(a, algo), hashes(b, algo), strict=False)):
        assert (x == y) == (a[: 4 * i + 4] == b[: 4 * i + 4])


def test_hashes_grow_with_the_outputs() -> None:
    request = make_request([1, 2, 3])
    hasher = BlockHasher("sha256", 4)
    hasher.extend(request)
    assert request.block_hashes == []
    request.all_token_ids.extend([4, 5])
    hasher.extend(request)
    assert request.block_hashes == hashes([1, 2, 3, 4])


def test_everything_that_decides_a_block_enters_its_hash() -> None:
    tokens = list(range(12))
    variants = [
        hashes(tokens),
        hashes(tokens, cache_salt="a"),
        hashes(tokens, cache_salt="b"),
        hashes(tokens, lora=LoRARequest("x", 1, "/p", digest="1")),
        hashes(tokens, lora=LoRARequest("x", 1, "/p", digest="2")),
    ]
    assert len({chain[0] for chain in variants}) == len(variants)
    assert len({chain[2] for chain in variants}) == len(variants), (
        "and later hashes of the chain depend on it"
    )


def rows_of(values: list[int], start: int) -> PromptEmbeds:
    rows = np.array(values, np.float32)[:, None]
    return PromptEmbeds.of(rows, start)


spans_of_prompt = st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 1), max_size=7)))


def prompt_of(spans: list[tuple[int, list[int]]], types: list[int]) -> dict[str, Any]:
    """A prompt of `spans` of rows, each with its distance from the end of the last one."""
    embeds = []
    end = 0
    for gap, values in spans:
        if values and end + gap + len(values) <= 24:
            embeds.append(rows_of(values, end + gap))
            end += gap + len(values)
    return {"prompt_embeds": tuple(embeds), "token_inputs": {"token_types": types} if types else {}}


types_of_prompt = st.one_of(st.just([]), st.lists(st.integers(0, 1), min_size=24, max_size=24))


@given(spans_of_prompt, types_of_prompt, spans_of_prompt, types_of_prompt)
def test_blocks_are_equal_where_rows_and_inputs_are(
    spans: Any, types: list[int], others: Any, other_types: list[int]
) -> None:
    """All token ids are 0, also those outside of the rows."""
    content = []
    chains = []
    for fields in (prompt_of(spans, types), prompt_of(others, other_types)):
        places: list[Any] = [None] * 24
        for embeds in fields["prompt_embeds"]:
            values = np.frombuffer(embeds.data, np.float32).tolist()
            places[embeds.start : embeds.stop] = values
        inputs = fields["token_inputs"].get("token_types", [None] * 24)
        content.append(list(zip(places, inputs, strict=True)))
        chains.append(hashes([0] * 24, **fields))
    for i, (x, y) in enumerate(zip(*chains, strict=True)):
        end = 4 * i + 4
        assert x != y or content[0][:end] == content[1][:end]
        if prompt_of(spans, types) == prompt_of(others, other_types):
            assert x == y


def test_a_common_beginning_of_rows_is_shared() -> None:
    """Wherever its spans are cut."""
    values = [1, 2, 3, 4, 5, 6, 7, 8]
    long = hashes([0] * 12, prompt_embeds=(rows_of([*values, 9], 1),))
    short = hashes([0] * 12, prompt_embeds=(rows_of(values, 1),))
    assert long[:2] == short[:2] and long[2] != short[2]


def test_caches_of_different_identity_share_no_hash() -> None:
    plan = small_plan(Full())
    found = []
    for identity in ("", "a", "b", "a"):
        request = make_request(list(range(20)))
        KVCache(msgspec.structs.replace(plan, identity=identity), fake_limits()).lookup(request)
        found.append(request.block_hashes)
    assert found[1] == found[3] and len({found[0][0], found[1][0], found[2][0]}) == 3
    assert len({found[0][-1], found[1][-1], found[2][-1]}) == 3


def plan_of(folder: Path, **engine: Any) -> tuple[EnginePlan, EngineConfig]:
    """Return the parts of an engine plan that decide what its KV blocks contain."""
    checkpoint = Checkpoint(
        format="fake",
        path=folder,
        config={"rope_theta": 1e4},
        architectures=("Fake",),
        tensors={},
        tokenizer=TokenizerPayload("hf"),
        digest="sha256:1",
    )
    config = EngineConfig(model="fake", **{"dtype": "float32", **engine})
    plan = EnginePlan(Settings(config), PluginLock(), checkpoint, ("fake",), 32, 64)
    return plan, config


def test_everything_that_decides_a_block_enters_the_identity(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from pegboard.engine.kv.identity import identified

    plan, config = plan_of(tmp_path)
    kv_plan = small_plan(Full())
    layout = "native 1"
    facts: list[dict[str, str]] = []

    def identity(
        layout: str = layout,
        kv: KVPlan = kv_plan,
        engine: EngineConfig = config,
        draft: str | None = None,
        **checkpoint: Any,
    ) -> str:
        target = dataclasses.replace(plan.checkpoint, **checkpoint)
        source = None
        if draft is not None:
            source = DraftSource(dataclasses.replace(plan.checkpoint, digest=draft))
        changed = dataclasses.replace(plan, checkpoint=target, draft=source)
        plan_with_facts = identified(kv, changed, engine, [layout, layout])
        facts.append(plan_with_facts.facts)
        return plan_with_facts.identity

    group = kv_plan.groups[0]
    other_type = msgspec.structs.replace(
        group.spec,
        tensors=tuple(
            msgspec.structs.replace(tensor, dtype="int8") for tensor in group.spec.tensors
        ),
    )
    variants = [
        identity(),
        identity(digest="sha256:2"),
        identity(config={"rope_theta": 5e5}),
        identity(rope_style="pairs"),
        identity(quantization={"quant_method": "x"}),
        identity(draft="sha256:3"),
        identity(draft="sha256:4"),
        identity(layout="native 2"),
        identity(engine=msgspec.structs.replace(config, dtype="bfloat16")),
        identity(engine=msgspec.structs.replace(config, quantization="int8")),
        identity(engine=msgspec.structs.replace(config, tensor_parallel_size=2)),
        identity(engine=msgspec.structs.replace(config, prefix_caching_hash_algo="sha256_cbor")),
        identity(kv=msgspec.structs.replace(kv_plan, hash_block_size=8)),
        identity(
            kv=msgspec.structs.replace(
                kv_plan, groups=(msgspec.structs.replace(group, block_size=32),)
            )
        ),
        identity(
            kv=msgspec.structs.replace(
                kv_plan, groups=(msgspec.structs.replace(group, spec=other_type),)
            )
        ),
    ]
    assert len(set(variants)) == len(variants)
    texts = {repr(sorted(each.items())) for each in facts}
    assert len(texts) == len(variants), "each of them is also a fact"
    assert facts[0]["checkpoint"] == "Fake, sha256:1" and facts[0]["layout"] == layout
    assert facts[8]["dtype"] == "bfloat16"
    assert identity() == identity(kv=msgspec.structs.replace(kv_plan, num_blocks=99)), (
        "the size of the cache decides nothing"
    )
    assert identity(digest="") != identity(digest=""), "a checkpoint without a digest is unknown"


# --- rules ----------------------------------------------------------------------------------------

retains = st.one_of(
    st.just(Full()),
    st.builds(Window, st.integers(1, 12), st.integers(0, 5)),
    st.builds(Chunk, st.integers(1, 12)),
)


@given(retains, st.integers(1, 5), st.integers(0, 40))
def test_expired_blocks_hold_nothing_a_later_token_sees(
    retain: Retain, block_size: int, num_computed: int
) -> None:
    rule = make_rule(KVGroup((0,), fake_kv_spec(retain), block_size), 1)
    model = FakeModel([retain])
    seen = {
        int(p) // block_size
        for later in range(num_computed, num_computed + 20)
        for p in model.seen(retain, later)
    }
    assert not seen & set(rule.expired(num_computed))


@given(retains, st.integers(1, 5), st.integers(0, 40))
def test_next_expiry_misses_nothing(retain: Retain, block_size: int, num_computed: int) -> None:
    rule = make_rule(KVGroup((0,), fake_kv_spec(retain), block_size), 1)
    until = min(rule.next_expiry(num_computed), num_computed + 30)
    assert until > num_computed
    for n in range(num_computed, until):
        assert rule.expired(n).stop <= max(
            rule.expired(num_computed).stop, rule.expired(num_computed).start
        )


@given(retains, st.integers(1, 4), st.sets(st.integers(0, 11)), st.integers(0, 12))
def test_a_hit_is_the_longest_prefix_whose_needed_blocks_are_there(
    retain: Retain, block_size: int, cached: set[int], max_blocks: int
) -> None:
    rule = make_rule(KVGroup((0,), fake_kv_spec(retain), block_size), block_size)
    chain = [bytes([i]) for i in range(12)]
    max_tokens = max_blocks * block_size

    def servable(num_tokens: int) -> bool:
        needed = set(range(num_tokens // block_size)) - set(rule.expired(num_tokens))
        return needed <= cached

    best = max(n for n in range(0, max_tokens + 1, block_size) if servable(n))
    assert (
        rule.hit(lambda h: h[0] + 1 if h[0] in cached else None, chain, max_tokens, block_size)
        == best
    )


@given(retains, st.integers(1, 5), st.integers(1, 9), st.integers(1, 60))
def test_a_request_holds_as_many_blocks_as_its_rule_says_and_hardly_fewer(
    retain: Retain, block_size: int, chunk: int, num_tokens: int
) -> None:
    """Before a chunk is computed, what expired is dropped. The bound may be larger where blocks
    cannot begin at every token."""
    rule = make_rule(KVGroup((0,), fake_kv_spec(retain), block_size), 1)

    def most_held(num_tokens: int, chunk: int) -> int:
        steps = [(start, min(start + chunk, num_tokens)) for start in range(num_tokens)]
        return max(rule.blocks_needed(end) - len(rule.expired(start)) for start, end in steps)

    bound = rule.max_blocks(num_tokens, chunk)
    assert most_held(num_tokens, chunk) <= bound
    whole = chunk if isinstance(retain, Full) else chunk + 2 * block_size
    assert bound <= most_held(num_tokens + whole + 24, whole)
    if isinstance(retain, Window) and block_size > 1:
        filled = chunk + -(retain.tokens - 1 + chunk) % block_size
        assert bound <= most_held(200, filled), (
            "the last tokens of the window and the chunk fill their blocks"
        )


# --- the plan -------------------------------------------------------------------------------------


def test_one_type_is_one_group() -> None:
    specs = {layer: fake_kv_spec(slot_bytes=8) for layer in range(6)}
    plan = plan_kv(specs, 100_000, fake_limits(block_size=16, max_model_len=128))
    assert [group.layers for group in plan.groups] == [(0, 1, 2, 3, 4, 5)]
    assert plan.block_bytes == 6 * 8 * 16 and plan.num_blocks == 100_000 // plan.block_bytes
    assert plan.hash_block_size == 16


def test_mixed_layers_become_groups_of_equal_size() -> None:
    specs = {layer: fake_kv_spec(Full() if layer % 4 == 3 else Window(64)) for layer in range(32)}
    plan = plan_kv(specs, 10_000_000, fake_limits(block_size=16, max_model_len=1024))
    assert sorted(len(group.layers) for group in plan.groups) == [8, 8, 8, 8]
    assert sum(isinstance(group.spec.retain, Window) for group in plan.groups) == 3
    assert sorted(layer for group in plan.groups for layer in group.layers) == list(range(32))


@pytest.mark.parametrize(("num_layers", "sizes"), [(8, [1] * 9), (30, [3] * 10 + [1])])
def test_one_layer_of_another_type_makes_few_groups(num_layers: int, sizes: list[int]) -> None:
    """As a draft model with one layer."""
    specs = {layer: fake_kv_spec(slot_bytes=8) for layer in range(num_layers)}
    specs[num_layers] = fake_kv_spec(slot_bytes=16)
    plan = plan_kv(specs, 10_000_000, fake_limits(block_size=16, max_model_len=1024))
    assert [len(group.layers) for group in plan.groups] == sizes


@given(st.integers(1, 5), st.integers(0, 7))
def test_stages_hold_equal_parts_of_every_group(count: int, first_full: int) -> None:
    """So each of them needs its share of the memory, and the cache grows with them."""
    limits = fake_limits(block_size=16, max_model_len=1024)
    is_full = [layer % 8 in (first_full, 3) for layer in range(40)]
    specs = {layer: fake_kv_spec(Full() if is_full[layer] else Window(64)) for layer in range(40)}
    stages = [range(40)[stage::1][: 40 // count] for stage in range(0, 40, 40 // count)][:count]
    whole = plan_kv(specs, 10_000_000, limits)
    plan = plan_kv(specs, 10_000_000, limits, stages=stages)
    held = [len(set(group.layers) & set(stage)) for group in plan.groups for stage in stages]
    size = whole.block_bytes // max(len(group.layers) for group in whole.groups)
    assert plan.groups == whole.groups and plan.block_bytes == max(held) * size
    assert max(held) <= -(-max(len(group.layers) for group in plan.groups) // count) + 1
    assert plan.num_blocks == 10_000_000 // plan.block_bytes


@given(st.lists(st.tuples(retains, st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 8))
def test_every_group_fits_a_block(layers: list[tuple[Retain, int]], block_size: int) -> None:
    specs = {i: fake_kv_spec(retain, slot_bytes=size) for i, (retain, size) in enumerate(layers)}
    plan = plan_kv(
        specs, 0, fake_limits(block_size=block_size, max_model_len=20), num_blocks_override=1000
    )
    for group in plan.groups:
        assert len(group.layers) * group.spec.slot_bytes() * group.block_size <= plan.block_bytes
        assert group.block_size % plan.hash_block_size == 0 and group.block_size >= block_size
    assert sorted(layer for group in plan.groups for layer in group.layers) == list(
        range(len(layers))
    )


def test_a_large_state_makes_the_blocks_of_attention_larger_and_is_kept_where_they_end() -> None:
    specs = {
        0: fake_kv_spec(slot_bytes=4),
        1: fake_kv_spec(State(checkpoint_every=32), slot_bytes=1000),
    }
    plan = plan_kv(specs, 100_000, fake_limits(block_size=16, max_model_len=128))
    assert plan.block_bytes == 1000
    assert [group.block_size for group in plan.groups] == [240, 240]
    assert plan.hash_block_size == 240


@given(st.integers(1, 40), st.integers(0, 40), st.booleans(), st.integers(1, 400))
def test_memory_grows_for_one_request_and_then_the_context_shrinks(
    blocks: int, room: int, shorten: bool, length: int
) -> None:
    specs = {0: fake_kv_spec(slot_bytes=4)}
    limits = fake_limits(block_size=16, max_model_len=length)
    block = 64
    enough = -(-length // 16) + 1
    largest = max(blocks, min(room, enough))
    if largest < enough and (not shorten or largest < 2):
        with pytest.raises(KVCacheTooSmall, match="-1 takes the largest|give the KV cache more"):
            fit_kv(specs, blocks * block, limits, room_bytes=room * block, shorten=shorten)
        return
    plan, fitting = fit_kv(specs, blocks * block, limits, room_bytes=room * block, shorten=shorten)
    assert plan.num_blocks == largest
    assert fitting.max_model_len == (length if largest >= enough else (largest - 1) * 16)


def test_block_size_is_what_the_kernels_need() -> None:
    spec = type(fake_kv_spec())(tensors=fake_kv_spec().tensors, block_size_multiple=32)
    assert (
        plan_kv({0: spec}, 100_000, fake_limits(block_size=16, max_model_len=64))
        .groups[0]
        .block_size
        == 32
    )


def test_too_little_memory_says_what_would_do() -> None:
    specs = {0: fake_kv_spec(slot_bytes=4)}
    with pytest.raises(
        KVCacheTooSmall, match=r"max_model_len=1000 tokens needs 4096 bytes.*at most 48 .*, or"
    ) as error:
        plan_kv(specs, 4 * 16 * 4, fake_limits(block_size=16, max_model_len=1000))
    assert "4 blocks" in str(error.value)
    assert plan_kv(specs, 4 * 16 * 4, fake_limits(block_size=16, max_model_len=48)).num_blocks == 4
    with pytest.raises(KVCacheTooSmall):
        plan_kv(
            specs, 1 << 30, fake_limits(block_size=16, max_model_len=1000), num_blocks_override=3
        )
    with pytest.raises(ConfigError):
        plan_kv({}, 1 << 30, fake_limits(block_size=16, max_model_len=1000))


def test_a_window_needs_few_blocks_however_long_the_text() -> None:
    plan = small_plan(Window(8), num_blocks=12, max_model_len=10_000, max_num_batched_tokens=16)
    assert blocks_per_request(plan, 10_000, 16) <= 7


# --- the cache ------------------------------------------------------------------------------------


def test_allocate_is_all_groups_or_nothing() -> None:
    cache = small_cache(Full(), Window(8), num_blocks=20)
    a = make_request([1] * 30, id="a")
    b = make_request([2] * 30, id="b")
    assert [len(ids) for ids in cache.allocate(a, 30) or ()] == [8, 8]
    before = cache.pool.num_free
    assert cache.allocate(b, 30) is None
    assert cache.pool.num_free == before and not cache.holds(b)
    assert cache.allocate(a, 31) == ([], [])
    cache.release(a)
    assert cache.pool.num_free == 19


def test_a_finished_prompt_is_found_again_but_for_its_last_token() -> None:
    cache = small_cache(Full())
    first = make_request(list(range(13)), id="a")
    cache.allocate(first, 13)
    cache.commit(first, 13)
    cache.release(first)
    assert cache.lookup(make_request(list(range(13)), id="b")).num_tokens == 12
    assert cache.lookup(make_request(list(range(12)), id="b")).num_tokens == 8, (
        "a fully cached prompt computes its last block"
    )
    assert cache.lookup(make_request([0, 1, 2, 3, 9, 9, 9, 9, 9], id="b")).num_tokens == 4
    assert cache.lookup(make_request(list(range(13)), id="b", cache_salt="x")).num_tokens == 0


def test_only_committed_tokens_are_found() -> None:
    cache = small_cache(Full())
    request = make_request(list(range(13)), id="a")
    cache.allocate(request, 13)
    cache.commit(request, 7)
    assert cache.lookup(make_request(list(range(13)), id="b")).num_tokens == 4


def test_a_shared_prefix_is_held_once_and_survives_its_first_owner() -> None:
    cache = small_cache(Full())
    a = make_request(list(range(13)), id="a")
    b = make_request(list(range(13)), id="b")
    cache.allocate(a, 13)
    cache.commit(a, 13)
    hit = cache.lookup(b)
    cache.allocate(b, 13, hit=hit, num_computed_tokens=hit.num_tokens)
    assert cache.tables(a)[0][:3] == cache.tables(b)[0][:3]
    assert cache.pool.num_free == 39 - 5
    cache.release(a)
    assert cache.pool.num_free == 39 - 4
    cache.release(b)
    assert cache.pool.num_free == 39


def test_blocks_before_the_window_go_back_and_a_window_hit_needs_no_more() -> None:
    cache = small_cache(Window(6))
    request = make_request(list(range(25)), id="a")
    cache.allocate(request, 25)
    cache.commit(request, 24)
    assert cache.tables(request)[0][:4] == [0, 0, 0, 0] and all(cache.tables(request)[0][4:])
    assert cache.pool.num_free == 39 - 3
    cache.release(request)
    hit = cache.lookup(make_request(list(range(25)), id="b"))
    assert (
        hit.num_tokens == 24
        and [bool(block) for block in hit.block_ids[0]] == [False] * 4 + [True] * 2
    )


def test_groups_agree_on_the_shortest_hit() -> None:
    cache = small_cache(Full(), Window(6), num_blocks=60)
    request = make_request(list(range(25)), id="a")
    cache.allocate(request, 25)
    cache.commit(request, 24)
    window_blocks = cache.tables(request)[1]
    cache.release(request)
    taken = cache.pool.take(59 - cache.pool.num_cached) or []
    # evict blocks until the window's last block is gone
    while cache.pool.find(1, request.block_hashes[5]) is not None:
        taken += cache.pool.take(1) or []
    assert window_blocks[5] in taken
    hit = cache.lookup(make_request(list(range(25)), id="b"))
    assert hit.num_tokens < 24
    for group in (0, 1):
        found = cache.rules[group].hit(
            lambda h, g=group: cache.pool.find(g, h), request.block_hashes, hit.num_tokens, 4
        )
        assert found == hit.num_tokens


def test_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    cache = small_cache(Full())
    parent = make_request(list(range(10)), id="a")
    child = make_request(list(range(10)), id="b")
    cache.allocate(parent, 10)
    assert cache.fork(parent, child)
    old = cache.tables(parent)[0]
    new = cache.tables(child)[0]
    assert old[:2] == new[:2] and old[2] != new[2] and len(new) == 3
    assert cache.take_copies() == [(0, old[2], new[2])]
    cache.release(parent)
    assert cache.pool.num_free == 39 - 4, "the copy's source is held until its step is over"
    cache.copies_done([(0, old[2], new[2])])
    cache.release(child)
    assert cache.pool.num_free == 39


def test_fork_at_a_block_border_copies_nothing() -> None:
    cache = small_cache(Full())
    parent = make_request(list(range(9)), id="a")
    child = make_request(list(range(9)), id="b")
    cache.allocate(parent, 9)
    assert cache.fork(parent, child)
    assert cache.take_copies() == []


def test_fork_is_refused_when_the_window_has_moved_on() -> None:
    cache = small_cache(Window(3))
    parent = make_request(list(range(10)), id="a")
    child = make_request(list(range(10)), id="b")
    cache.allocate(parent, 20)
    parent.all_token_ids.extend(range(9))
    cache.commit(parent, 18)
    before = cache.pool.num_free
    assert not cache.fork(parent, child)
    assert cache.pool.num_free == before and not cache.holds(child)


def test_what_a_connector_still_reads_outlives_the_request() -> None:
    class Slow:
        def released(self, request: Request, blocks: BlockView, why: str) -> Release:
            return Release(later=True)

        def update(self, reports: object) -> None:
            pass

    cache = small_cache(Full())
    connectors = KVConnectors({"c": Slow()}, cache)  # type: ignore[dict-item]
    request = make_request(list(range(10)), id="a")
    cache.allocate(request, 10)
    connectors.released(request, "finished")
    cache.release(request)
    assert cache.pool.num_free == 39 - 3 and connectors.has_open and not cache.pool.reset()
    for _ in range(2):  # a second report changes nothing
        connectors.update({"c": TransferReport(saved=["a"])})
        assert cache.pool.num_free == 39 and not connectors.has_open


def test_a_released_request_takes_its_waiting_copies_along() -> None:
    cache = small_cache(Full())
    parent = make_request(list(range(10)), id="a")
    child = make_request(list(range(10)), id="b")
    cache.allocate(parent, 10)
    cache.fork(parent, child)
    cache.release(child)
    assert cache.take_copies() == []
    cache.release(parent)
    assert cache.pool.num_free == 39


@settings(max_examples=50, deadline=None)
@given(
    st.lists(retains, min_size=1, max_size=3),
    st.lists(st.integers(0, 3), min_size=1, max_size=31),
    st.data(),
)
def test_a_request_never_holds_more_than_the_plan_reckons(
    layers: list[Retain], tokens: list[int], data: Any
) -> None:
    chunk = data.draw(st.integers(1, 9))
    plan = small_plan(
        *layers, num_blocks=60, block_size=2, max_num_seqs=1, max_num_batched_tokens=chunk
    )
    cache = KVCache(plan, fake_limits())
    request = make_request(tokens)
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        assert cache.allocate(request, end) is not None
        assert 59 - cache.pool.num_free <= blocks_per_request(plan, len(tokens), chunk)
        cache.commit(request, end)
