"""The states that the prefix cache keeps."""

from __future__ import annotations

from pegboard.data.request import EngineRequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.kv.cache import KVCache
from pegboard.engine.kv.plan import plan_kv
from pegboard.engine.requests import Request
from pegboard.interfaces.attention import State
from pegboard_testing.fake_limits import fake_limits
from pegboard_testing.fake_model import fake_kv_spec


def make_request(tokens: list[int], id: str) -> Request:
    source = EngineRequest(request_id=id, prompt_token_ids=tokens, params=SamplingParams())
    return Request.of(source)


def small_cache(state: State) -> KVCache:
    limits = fake_limits(max_model_len=32)
    return KVCache(plan_kv({0: fake_kv_spec(state)}, 0, limits, num_blocks_override=40), limits)


def test_a_state_is_cached_at_its_checkpoints() -> None:
    cache = small_cache(State(checkpoint_every=4))
    request = make_request(list(range(10)), id="a")
    cache.allocate(request, 4)
    cache.checkpoint(request, 3)
    assert cache.take_copies() == []
    cache.checkpoint(request, 4)
    ((group, source, destination),) = cache.take_copies()
    assert (group, source) == (0, cache.tables(request)[0][0])
    cache.commit(request, 4)
    assert cache.lookup(make_request(list(range(10)), id="b")).num_tokens == 0, (
        "the copy may not have run yet"
    )
    cache.copies_done([(group, source, destination)])
    cache.commit(request, 8)
    hit = cache.lookup(make_request(list(range(10)), id="b"))
    assert (hit.num_tokens, hit.block_ids) == (4, ([destination],))
    cache.release(request)
    assert cache.pool.num_free == 39


def test_a_state_is_not_copied_twice_at_the_same_place() -> None:
    """After wrong drafts it is another one there until the step begins. The first time, blocks were
    short."""
    cache = small_cache(State(checkpoint_every=4, takes_drafts=True))
    request = make_request(list(range(10)), id="a")
    cache.allocate(request, 4)
    others = cache.pool.take(cache.pool.num_free)
    cache.checkpoint(request, 4)
    cache.pool.free(others or ())
    cache.checkpoint(request, 4)
    assert cache.take_copies() == []
    cache.checkpoint(request, 8)
    assert len(cache.take_copies()) == 1


def test_a_loaded_state_is_shared_at_once() -> None:
    """It stays in its block. The request that loaded it and others get copies."""
    cache = small_cache(State(checkpoint_every=4))
    request, other = (make_request(list(range(10)), id=name) for name in "ab")
    cache.hasher.extend(request)
    cache.allocate(request, 8, num_computed_tokens=8)
    loaded = cache.tables(request)[0][0]
    cache.keep_loaded(request, 8)
    hit = cache.lookup(other)
    assert (hit.num_tokens, hit.block_ids) == (8, ([loaded],))
    cache.allocate(other, 9, hit=hit, num_computed_tokens=8)
    copies = cache.take_copies()
    assert copies == [(0, loaded, cache.tables(each)[0][0]) for each in (request, other)]
    cache.copies_done(copies)
    cache.release(request)
    cache.release(other)
    assert cache.pool.num_free == 39
    assert cache.lookup(other).num_tokens == 8
    last = make_request([*range(8), 20, 21, 22, 23, 24], id="c")
    cache.allocate(last, 13, hit=cache.lookup(last), num_computed_tokens=12)
    assert cache.take_copies() == [], "a connector loads the state after 12 tokens"
