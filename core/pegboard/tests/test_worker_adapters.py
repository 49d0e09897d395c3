"""Adapters are read in threads, each once, and not at all if nobody wants them any more. A digest
tells their values apart."""

from __future__ import annotations

import threading
import time

import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.data.request import LoRARequest
from pegboard.errors import ModelError
from pegboard.layers.lora import Weights
from pegboard.worker.adapters import NUM_THREADS, Adapters, digest_of


def lora(number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", 1 + number, f"/{number}")


def result(adapters: Adapters, number: int) -> tuple[str, str]:
    """Ask until the adapter is read, as the engine does."""
    until = time.monotonic() + 60
    while (found := adapters.read(number, lora(number))) is None:
        assert time.monotonic() < until, "it is never read"
        time.sleep(0.001)
    return found


def test_what_is_dropped_before_its_turn_is_never_read() -> None:
    begun: list[str] = []
    may_end = threading.Event()

    def read(source: LoRARequest) -> tuple[float, Weights]:
        begun.append(source.lora_name)
        assert may_end.wait(60)
        return 1.0, {}

    adapters = Adapters([], read)
    for number in range(NUM_THREADS + 2):
        assert adapters.read(number, lora(number)) is None
    adapters.drop([NUM_THREADS, 99])
    may_end.set()
    assert result(adapters, NUM_THREADS + 1)[1] == ""
    assert sorted(begun) == [
        lora(number).lora_name for number in (*range(NUM_THREADS), NUM_THREADS + 1)
    ]
    adapters.close()


def test_what_cannot_be_read_is_said_and_others_are_read() -> None:
    def read(source: LoRARequest) -> tuple[float, Weights]:
        if source.lora_int_id == 1:
            raise ModelError("no such file")
        if source.lora_int_id == 2:
            raise KeyError("rank")
        return 1.0, {
            "layers.9": (torch.ones(1, 2), torch.ones(2, 1))
        } if source.lora_int_id == 3 else {}

    adapters = Adapters([], read)
    assert result(adapters, 0) == ("", "no such file")
    assert result(adapters, 1) == ("", "KeyError: 'rank'")
    assert result(adapters, 2) == ("", "it changes modules that this model does not have: layers.9")
    digest, reason = result(adapters, 3)
    assert digest and not reason
    adapters.close()


@given(st.data())
def test_a_digest_tells_adapters_apart_by_their_values_alone(data: st.DataObject) -> None:
    numbers = st.lists(st.integers(-3, 3), min_size=4, max_size=4)
    values = {name: data.draw(numbers) for name in ("a", "b")}

    def weights(names: str = "ab", **changed: list[int]) -> Weights:
        made = {
            name: torch.tensor(changed.get(name, values[name]), dtype=torch.float32)
            for name in names
        }
        return {name: (matrix.view(2, 2), matrix.view(2, 2).T) for name, matrix in made.items()}

    same = digest_of(1.0, weights())
    assert same == digest_of(1.0, weights("ba")), "their order does not count"
    other = data.draw(numbers.filter(lambda found: found != values["b"]))
    different = [
        digest_of(2.0, weights()),
        digest_of(1.0, weights(b=other)),
        digest_of(1.0, weights("a")),
        digest_of(
            1.0, {name: (first.view(1, 4), second) for name, (first, second) in weights().items()}
        ),
        digest_of(
            1.0, {name: (first.double(), second) for name, (first, second) in weights().items()}
        ),
    ]
    assert same not in different and len(set(different)) == len(different)
