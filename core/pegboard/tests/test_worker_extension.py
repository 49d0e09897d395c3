"""Workers get the methods of a class, and only those can be called by name."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pegboard.config.schema import EngineConfig
from pegboard.engine.actions import CollectiveRpc
from pegboard.errors import ConfigError, PegboardError, RequestError
from pegboard.interfaces.executor import Place
from pegboard.worker.extension import make_worker
from pegboard.worker.worker import Worker, WorkerPlan
from pegboard_testing.fake_engine import FakeEngine


class Extension:
    rank: int

    def where(self, first: int, *, more: int = 0) -> tuple[int, int]:
        return self.rank, first + more

    def fail(self) -> None:
        raise ValueError("no such weight")

    def _hidden(self) -> None:
        raise AssertionError


class Taken:
    def run(self) -> None: ...

    def load(self) -> None: ...


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("rl_methods")
    vars(made).update(Extension=Extension, Taken=Taken, number=3)
    monkeypatch.setitem(sys.modules, "rl_methods", made)


def worker(path: str | None) -> Any:
    config = EngineConfig(worker_extension_cls=path)
    registry: Any = SimpleNamespace(modules=dict)
    return make_worker(registry, WorkerPlan(config, None, (), dict), Place(rank=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["rl_methods:Extension", "rl_methods.Extension"])
def test_methods_of_the_extension_are_called(path: str) -> None:
    made = worker(path)
    assert made.call("collective_rpc", "where", (5,), {"more": 1}) == (2, 6)
    with pytest.raises(ValueError, match="no such weight"):
        made.call("collective_rpc", "fail", (), {})
    assert type(worker(None)) is Worker, "the class of other workers is as before"


@pytest.mark.parametrize(
    "name", ["_hidden", "__init__", "stop", "load", "rank", "registry", "wher"]
)
def test_nothing_else_is_called_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"no method '{name}'"):
        worker("rl_methods:Extension").call("collective_rpc", name, (), {})


def test_a_function_gets_the_worker() -> None:
    assert (
        worker(None).call("collective_rpc", lambda worker, more: worker.rank + more, (1,), {}) == 3
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Extension", "expected module:Class"),
        ("rl_methods:", "expected module:Class"),
        ("no_such_module:Extension", "does not import: ModuleNotFoundError"),
        ("rl_methods:Missing", "does not import: AttributeError"),
        ("rl_methods:number", "is of type int, expected a class"),
        ("rl_methods:Taken", "has load, run, which the worker has too"),
    ],
)
def test_a_wrong_class_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        worker(path)


def test_the_steps_in_flight_end_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the method is its caller's. The engine goes on, with the same tokens."""
    engine = FakeEngine(max_in_flight=2)
    want = FakeEngine().generate(range(9)).token_ids
    engine.add("a", range(9))
    for _ in range(3):
        engine.step()
    seen = []

    def call(method: str, *args: object) -> None:
        seen.append((method, *args, engine.engine.stats()["num_steps_in_flight"]))
        raise PegboardError("failed")

    monkeypatch.setattr(engine.worker, "call", call)
    with pytest.raises(PegboardError, match="failed"):
        engine.ask(CollectiveRpc(method="m", args=[1], kwargs={"k": 2}))
    assert seen == [("collective_rpc", "m", (1,), {"k": 2}, 0)]
    assert engine.run()["a", 0].token_ids == want
