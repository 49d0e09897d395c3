"""Contract tests of KV connectors that also move the states of layers (flag `STATES`). A plugin's
test file:

class TestMyConnector(MovesStates):
    …
"""

from __future__ import annotations

import random

import pytest

from pegboard.data.request import EngineRequest
from pegboard.interfaces.attention import Full, Retain, State, Window
from pegboard_testing.contract_kv_connector import KVConnectorContract, greedy
from pegboard_testing.fake_engine import expected_tokens

STATES: list[list[Retain]] = [
    [State(checkpoint_every=4)],
    [Full(), State(checkpoint_every=8)],
    [Window(6), State(checkpoint_every=8), State(checkpoint_every=8)],
]


def distance(retains: list[Retain]) -> int:
    """Return the tokens between two places where a prefix may end."""
    return max(retain.checkpoint_every for retain in retains if isinstance(retain, State))


class MovesStates(KVConnectorContract):
    """Every connector with the flag passes these as well."""

    @pytest.mark.parametrize("length", [21, 24])
    @pytest.mark.parametrize("retains", STATES, ids=str)
    def test_states_are_loaded(self, retains: list[Retain], length: int) -> None:
        """Up to the last place before the end of a prompt, also if the prompt ends at another
        one."""
        first = self.engine(retains)
        expected = first.generate(range(length), greedy(6)).token_ids
        second = self.after(first)
        result = second.generate(range(length), greedy(6))
        assert result.token_ids == expected
        every = distance(retains)
        assert result.deltas[0].num_cached_tokens == (length - 1) // every * every
        second.check_idle()
        self.close(second)

    @pytest.mark.parametrize("retains", STATES, ids=str)
    @pytest.mark.parametrize("chunk", [8, 32])
    def test_a_prefix_ends_where_the_states_are_known(
        self, retains: list[Retain], chunk: int
    ) -> None:
        """These are the ends of the steps of the engine that computed it."""
        limits = {"max_num_batched_tokens": chunk}
        first = self.engine(retains, **limits)
        first.generate(range(40), greedy(10))
        second = self.after(first, **limits)
        prompt = [*range(22), 60, 61]
        result = second.generate(prompt, greedy(6))
        assert result.deltas[0].num_cached_tokens == (16 if chunk == 8 else 0)
        expected = EngineRequest(request_id="", prompt_token_ids=prompt, params=greedy(6))
        assert result.token_ids == expected_tokens(second.model, expected)[0]
        answer = [*range(40), *expected_tokens(second.model, _request(range(40)))[0]]
        result = second.generate([*answer, 5], greedy(3))
        assert result.deltas[0].num_cached_tokens == 48, "states of answers are saved too"
        self.close(second)

    def test_a_longer_prefix_than_the_local_one_is_loaded(self) -> None:
        """Its states take the place of the local ones."""
        retains: list[Retain] = [Full(), State(checkpoint_every=8)]
        limits = {"max_num_batched_tokens": 8}
        first = self.engine(retains, **limits)
        expected = first.generate(range(40), greedy(6)).token_ids
        second = self.after(first, **limits)
        second.generate([*range(17), 60], greedy(1))
        result = second.generate(range(40), greedy(6))
        assert result.deltas[0].num_cached_tokens == 32
        assert result.token_ids == expected
        self.close(second)

    def test_states_without_a_prefix_cache(self) -> None:
        retains: list[Retain] = [Full(), State(checkpoint_every=8)]
        limits = {"enable_prefix_caching": False}
        first = self.engine(retains, **limits)
        expected = first.generate(range(21), greedy(6)).token_ids
        second = self.after(first, **limits)
        result = second.generate(range(21), greedy(6))
        assert (result.token_ids, result.deltas[0].num_cached_tokens) == (expected, 16)
        self.close(second)

    @pytest.mark.parametrize("seed", range(5))
    def test_every_request_with_states_gets_the_tokens_it_gets_alone(self, seed: int) -> None:
        chance = random.Random(seed)
        max_drafts = chance.choice([0, 0, 2])
        retains = [
            State(retain.checkpoint_every, takes_drafts=max_drafts > 0)
            if isinstance(retain, State)
            else retain
            for retain in chance.choice(STATES)
        ]
        self.check_alone(chance, retains, max_drafts)

    @pytest.mark.parametrize("num_ranks", [1, 2])
    def test_every_rank_moves_its_own_states(self, num_ranks: int) -> None:
        self.check_ranks([Full(), State(checkpoint_every=8)], num_ranks)


def _request(prompt: range) -> EngineRequest:
    return EngineRequest(request_id="", prompt_token_ids=list(prompt), params=greedy(10))
