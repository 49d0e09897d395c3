"""LoRA adapters of a server: the setting, the chain of resolvers, and what clients may name. The
engine and the resolvers are fakes; their clock stands still."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegboard.config.schema import EngineConfig, PluginConfig, Settings
from pegboard.data.request import LoRARequest
from pegboard.errors import (
    ConfigError,
    Overloaded,
    PluginFailure,
    PluginNotFound,
    RequestError,
    UnknownModel,
)
from pegboard.plugins.registry import Registry
from pegboard_server import adapters as adapters_module
from pegboard_server.adapters import (
    AdapterClient,
    check_adapters,
    check_name,
    read_module,
    recorded_base,
    resolver_names,
)
from pegboard_server.json_api import served_model
from pegboard_server.settings import ServerConfig
from pegboard_server.turns import SharedTurns, TurnQueue
from pegboard_testing.fake_client import FakeEngineClient


class Engine(FakeEngineClient):
    """Reads adapters as the engine's client does. refused: folder → why an adapter cannot be
    loaded. held: ids in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = SimpleNamespace(modules=dict)
        self.refused: dict[str, str] = {}
        self.loads: list[str] = []
        self.held: set[int] = set()

    async def add_lora(self, lora: LoRARequest) -> bool:
        self.loads.append(lora.lora_name)
        await asyncio.sleep(0)
        if lora.lora_path in self.refused:
            raise RequestError(self.refused[lora.lora_path], parameter="lora_request")
        self.held.add(lora.lora_int_id)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        self.held.remove(lora_id)
        return True


class Resolver:
    """Knows some adapters. gate: set it to answer. asked: every name, in order."""

    def __init__(self, known: dict[str, Any], *, is_open: bool = True) -> None:
        self.known = known
        self.asked = []
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()

    async def resolve(self, name: str) -> Any:
        self.asked.append(name)
        await self.gate.wait()
        found = self.known.get(name)
        if isinstance(found, Exception):
            raise found
        return found


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(work())  # type: ignore[arg-type]


def client(
    engine: Engine, *resolvers: Resolver, now: list[float] | None = None, **settings: Any
) -> AdapterClient:
    clock = now or [0.0]
    named = {f"lora_resolver:r{index}": resolver for index, resolver in enumerate(resolvers)}
    return AdapterClient(engine, named, ServerConfig(**settings), lambda: clock[0])  # type: ignore[arg-type]


async def load(served: AdapterClient, name: str, folder: Path, **more: Any) -> Any:
    folder.mkdir(exist_ok=True)
    return await served.control("load_lora_adapter", name=name, path=str(folder), **more)


def adapter(folder: Path, base: Any = "fake-model") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return folder


# --- what a request's model names -----------------------------------------------------------------


def test_a_request_names_the_base_model_or_an_adapter(tmp_path: Path) -> None:
    async def work() -> None:
        served = client(Engine())
        loaded = await load(served, "poet", tmp_path)
        assert await served_model(served, None) == ("fake-model", None)  # type: ignore[arg-type]
        assert await served_model(served, ("fake-model")) == (("fake-model"), None)  # type: ignore[arg-type]
        assert await served_model(served, "poet") == ("poet", loaded)  # type: ignore[arg-type]
        with pytest.raises(
            UnknownModel, match="`painter` does not exist. This server has: fake-model, poet$"
        ):
            await served_model(served, "painter")  # type: ignore[arg-type]

    run(work)


def test_the_first_resolver_that_knows_the_name_wins(tmp_path: Path) -> None:
    async def work() -> None:
        first = Resolver({})
        second = Resolver({"poet": adapter(tmp_path / "b")})
        third = Resolver({"poet": tmp_path / "c"})
        engine = Engine()
        served = client(engine, first, second, third)
        found = await served.adapter("poet")
        assert found is not None and found.lora_path == str(tmp_path / "b")
        assert (first.asked, second.asked, third.asked) == (["poet"], ["poet"], [])
        assert await served.adapter("poet") is found and first.asked == ["poet"]
        assert [(model.name, model.parent) for model in served.models()] == [
            ("fake-model", None),
            ("poet", "fake-model"),
        ]

    run(work)


def test_an_adapter_that_cannot_be_loaded_leaves_it_to_the_next(tmp_path: Path) -> None:
    async def work() -> None:
        engine = Engine()
        bad = adapter(tmp_path / "bad")
        good = adapter(tmp_path / "good")
        engine.refused[str(bad)] = f"{bad}/adapter_model.safetensors is damaged"
        served = client(engine, Resolver({"poet": bad}), Resolver({"poet": good}))
        found = await served.adapter("poet")
        assert found is not None and found.lora_path == str(good)
        alone = client(engine, Resolver({"other": bad}))
        with pytest.raises(
            RequestError,
            match=(
                "`other` was found but could not be loaded: other/adapter_model.safetensors is "
                "damaged"
            ),
        ):
            await alone.adapter("other")
        assert (
            [*served.adapters] == ["poet"]
            and not alone.adapters
            and engine.held == {found.lora_int_id}
        )

    run(work)


def test_requests_for_one_name_ask_once(tmp_path: Path) -> None:
    async def work() -> None:
        engine = Engine()
        resolver = Resolver({"poet": adapter(tmp_path / "p")}, is_open=False)
        served = client(engine, resolver)
        waiting = [asyncio.create_task(served.adapter("poet")) for _ in range(20)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # a client that disconnects does not end the lookup for the others
        resolver.gate.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert {one.lora_path for one in found[1:]} == {str(tmp_path / "p")}
        assert resolver.asked == ["poet"] == engine.loads

    run(work)


def test_a_slow_resolver_holds_up_nobody_else(tmp_path: Path) -> None:
    async def work() -> None:
        engine = Engine()
        resolver = Resolver({"poet": adapter(tmp_path / "p")}, is_open=False)
        served = client(engine, resolver, lora_resolver_wait_s=0)
        with pytest.raises(Overloaded, match="still being fetched; try again") as caught:
            await served.adapter("poet")
        assert caught.value.status == 503
        await load(served, "loaded", tmp_path / "l")
        assert await served.adapter("loaded") is not None
        resolver.gate.set()
        while "poet" not in served.adapters:  # the lookup goes on
            await asyncio.sleep(0)
        assert await served.adapter("poet") is not None and resolver.asked == ["poet"]

    run(work)


def test_there_is_a_limit_of_lookups_at_once() -> None:
    async def work() -> None:
        served = client(Engine(), Resolver({}, is_open=False), lora_resolver_wait_s=0)
        for index in range(adapters_module.MAX_LOOKUPS):
            with pytest.raises(Overloaded, match="still being fetched"):
                await served.adapter(f"name{index}")
        with pytest.raises(Overloaded, match="too many unknown models"):
            await served.adapter("one-more")

    run(work)


def test_an_unknown_name_is_remembered_for_a_while(tmp_path: Path) -> None:
    async def work() -> None:
        now = [0.0]
        resolver = Resolver({})
        engine = Engine()
        served = client(engine, resolver, now=now)
        for _ in range(3):
            assert await served.adapter("poet") is None
        assert resolver.asked == ["poet"]
        resolver.known["poet"] = adapter(tmp_path / "p")
        now[0] += adapters_module.UNKNOWN_S
        assert await served.adapter("poet") is not None
        for index in range(adapters_module.MAX_UNKNOWN + 10):
            assert await served.adapter(f"n{index}") is None
        assert len(served._unknown) == adapters_module.MAX_UNKNOWN

    run(work)


def test_a_reason_is_remembered_too(tmp_path: Path) -> None:
    async def work() -> None:
        resolver = Resolver({"poet": adapter(tmp_path / "p", "org/other")})
        served = client(Engine(), resolver)
        for _ in range(2):
            with pytest.raises(
                RequestError,
                match="made for the base model 'org/other', and this server has fake-model",
            ):
                await served.adapter("poet")
        assert resolver.asked == ["poet"]

    run(work)


@pytest.mark.parametrize(
    ("recorded", "allowed", "fits"),
    [
        ("fake-model", [], True),
        (None, [], True),
        ("", [], True),
        ("org/other", [], False),
        ("org/other", ["org/other"], True),
        ("org/other", ["*"], True),
        (7, [], True),
    ],
)
def test_the_recorded_base_model_must_match(
    tmp_path: Path, recorded: Any, allowed: list[str], fits: bool
) -> None:
    async def work() -> None:
        served = client(
            Engine(),
            Resolver({"poet": adapter(tmp_path / "p", recorded)}),
            lora_base_models=allowed,
        )
        try:
            assert await served.adapter("poet") is not None and fits
        except RequestError:
            assert not fits

    run(work)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b"\xff", b"[]", b'{"base_model_name_or_path": []}', None]
)
def test_a_damaged_config_records_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_bytes(content)
    assert recorded_base(tmp_path) is None


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a//b",
        "a/../b",
        ".hidden",
        "a/.b",
        "a\0b",
        "a b",
        "ä",
        "",
        "a/",
        "x" * 201,
    ],
)
def test_resolvers_never_see_a_name_that_cannot_be_one(name: str) -> None:
    resolver = Resolver({})
    assert run(lambda: client(Engine(), resolver).adapter(name)) is None
    assert resolver.asked == []
    with pytest.raises(RequestError, match="cannot be the name of an adapter"):
        check_name(name, RequestError)


@pytest.mark.parametrize("failure", [ValueError("boom"), KeyError("x")])
def test_a_resolver_that_fails_is_named(failure: Exception, tmp_path: Path) -> None:
    async def work() -> None:
        served = client(
            Engine(),
            Resolver({"poet": failure, "both": failure}),
            Resolver({"both": adapter(tmp_path / "b")}),
        )
        for _ in range(2):
            with pytest.raises(PluginFailure, match="lora_resolver:r0"):
                await served.adapter("poet")
        assert await served.adapter("both") is not None

    run(work)


def test_what_is_not_a_path_is_the_resolvers_fault() -> None:
    with pytest.raises(PluginFailure, match="returned a str, expected"):
        run(lambda: client(Engine(), Resolver({"poet": "/tmp"})).adapter("poet"))


# --- loading and unloading ------------------------------------------------------------------------


def test_loads_of_one_name_follow_each_other(tmp_path: Path) -> None:
    async def work() -> None:
        engine = Engine()
        served = client(engine)
        await asyncio.gather(
            *(load(served, "poet", tmp_path / str(n), load_inplace=True) for n in range(5))
        )
        assert served.adapters["poet"].lora_path == str(tmp_path / "4")
        assert engine.held == {served.adapters["poet"].lora_int_id}, (
            "what was replaced is forgotten"
        )
        with pytest.raises(RequestError, match="the name 'poet' is taken"):
            await load(served, "poet", tmp_path / "4")
        assert await served.control("unload_lora_adapter", name="poet") is True
        assert await served.control("unload_lora_adapter", name="poet") is False
        assert not served.adapters and not engine.held
        for name, words in (
            ("fake-model", "name of the base model"),
            ("../x", "cannot be the name"),
        ):
            with pytest.raises(RequestError, match=words):
                await load(served, name, tmp_path)
        await served.control("stats")
        assert engine.controls == [("stats", {})]

    run(work)


@pytest.mark.parametrize("path", ["", "/no/such/folder"])
def test_what_is_not_a_folder_is_refused(path: str) -> None:
    served = client(Engine())
    with pytest.raises(RequestError, match="is not a folder"):
        run(lambda: served.control("load_lora_adapter", name="poet", path=path))
    assert not served.adapters


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_is_not_opened(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    assert recorded_base(tmp_path) is None
    engine = Engine()
    with pytest.raises(RequestError, match=f"'{name}' is not a regular file"):
        run(lambda: load(client(engine), "poet", tmp_path))
    assert not engine.loads


def test_an_adapter_that_is_never_read_does_not_keep_the_turn(tmp_path: Path) -> None:
    class Stuck(Engine):
        async def add_lora(self, lora: LoRARequest) -> bool:
            if lora.lora_name == "stuck":
                await asyncio.Event().wait()
            return await super().add_lora(lora)

    async def work() -> None:
        served = AdapterClient(Stuck(), {}, ServerConfig(), load_s=0.05)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"'stuck' was not read within 0\.05 s"):
            await load(served, "stuck", tmp_path / "stuck")
        served._load_s = 60
        assert await load(served, "poet", tmp_path / "poet") == served.adapters["poet"]

    run(work)


def test_all_api_processes_give_an_adapter_the_same_id(tmp_path: Path) -> None:
    async def work() -> None:
        one, other = [await load(client(Engine()), "poet", tmp_path / "p") for _ in range(2)]
        assert one == other
        ids = {
            (await load(client(Engine()), name, tmp_path / folder)).lora_int_id
            for name in "ab"
            for folder in "pq"
        }
        assert len(ids) == 4

    run(work)


def test_a_loaded_adapter_is_not_unknown_any_more(tmp_path: Path) -> None:
    async def work() -> None:
        served = client(Engine(), Resolver({}))
        assert await served.adapter("poet") is None
        await load(served, "poet", tmp_path)
        await served.control("unload_lora_adapter", name="poet")
        assert await served.adapter("poet") is None

    run(work)


def test_the_modules_of_the_setting_are_loaded_at_the_start(tmp_path: Path) -> None:
    async def work() -> None:
        engine = Engine()
        paths = {name: adapter(tmp_path / name) for name in "abc"}
        modules = [
            f"a={paths['a']}",
            {"name": "b", "path": str(paths["b"]), "base_model_name": "fake-model"},
        ]
        served = client(engine, lora_modules=modules)
        await served.start()
        assert [*served.adapters] == ["a", "b"]
        assert [(model.name, model.parent) for model in served.models()[1:]] == [
            ("a", "fake-model"),
            ("b", "fake-model"),
        ]
        engine.refused[str(paths["c"])] = "adapter 'c': rank 32 exceeds max_lora_rank=16"
        with pytest.raises(ConfigError, match="lora_modules: adapter 'c': rank 32"):
            await client(engine, lora_modules=[f"c={paths['c']}"]).start()

    run(work)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("a=/x=y", {"name": "a", "path": "/x=y"}),
        ('{"name": "a", "path": "/x"}', {"name": "a", "path": "/x"}),
        (
            '{"name": "a", "path": "/x", "base_model_name": "m"}',
            {"name": "a", "path": "/x", "base_model_name": "m"},
        ),
        ({"name": "a", "path": "/x"}, {"name": "a", "path": "/x"}),
    ],
)
def test_forms_of_lora_modules(item: Any, expected: dict[str, str]) -> None:
    assert read_module(item) == expected


@pytest.mark.parametrize(
    "item",
    [
        "a",
        "=/x",
        "a=",
        "{",
        '{"name": "a"}',
        '{"name": "a", "path": 3}',
        '{"name": "a", "path": "/x", "rank": "8"}',
        {"path": "x"},
        "../a=/x",
    ],
)
def test_other_forms_are_refused(item: Any) -> None:
    with pytest.raises(ConfigError, match="lora_modules: expected|is not JSON|cannot be the name"):
        read_module(item)


# --- several API processes ------------------------------------------------------------------------


class Processes:
    """The adapters of several API processes with one engine, and the parent between them. Messages
    take a moment, and do not overtake each other. attach: connect another process."""

    def __init__(self, engine: Engine, count: int = 3) -> None:
        self.engine = engine
        self.queue = TurnQueue(count, self._to_process)
        self.turns: list[SharedTurns] = []
        self.all: list[AdapterClient] = []

    def attach(self, *resolvers: Resolver, **settings: Any) -> AdapterClient:
        name = str(len(self.turns)).encode()
        later = asyncio.get_running_loop().call_soon
        turns = SharedTurns(lambda data: later(self.queue.receive, name, data) and None)
        named: Any = {f"lora_resolver:r{index}": each for index, each in enumerate(resolvers)}
        self.turns.append(turns)
        self.all.append(
            AdapterClient(self.engine, named, ServerConfig(**settings), turns=turns)  # type: ignore[arg-type]
        )
        later(self.queue.attach, name)
        return self.all[-1]

    def names(self) -> list[list[str]]:
        """Return the names that each process lists, without the base model's."""
        return [[model.name for model in each.models()[1:]] for each in self.all]

    def _to_process(self, name: bytes, data: bytes) -> None:
        asyncio.get_running_loop().call_soon(self.turns[int(name)].receive, data)


def test_every_process_serves_what_one_has_loaded(tmp_path: Path) -> None:
    async def work() -> None:
        processes = Processes(Engine())
        first, second, third = [processes.attach() for _ in range(3)]
        loaded = await load(first, "poet", tmp_path / "a")
        assert [await each.adapter("poet") for each in (second, third)] == [loaded, loaded]
        with pytest.raises(RequestError, match="the name 'poet' is taken"):
            await load(third, "poet", tmp_path / "b")
        other = await load(second, "poet", tmp_path / "b", load_inplace=True)
        assert [each.adapters["poet"] for each in processes.all] == [other] * 3
        assert processes.engine.held == {other.lora_int_id}
        assert await third.control("unload_lora_adapter", name="poet") is True
        assert processes.names() == [[], [], []] and not processes.engine.held
        assert await first.control("unload_lora_adapter", name="poet") is False
        processes.engine.refused[str(tmp_path / "a")] = "adapter 'poet': rank 32 is too high"
        for each in processes.all:  # a turn that fails is over too
            with pytest.raises(RequestError, match="rank 32 is too high"):
                await load(each, "poet", tmp_path / "a")
        assert processes.names() == [[], [], []]

    run(work)


def test_processes_that_change_one_name_take_turns(tmp_path: Path) -> None:
    async def work() -> None:
        processes = Processes(Engine())
        served = [processes.attach() for _ in range(3)]
        answers = await asyncio.gather(
            *(load(each, "poet", tmp_path / str(n)) for n, each in enumerate(served * 3)),
            return_exceptions=True,
        )
        assert sum(isinstance(each, LoRARequest) for each in answers) == 1
        assert sum("is taken" in str(each) for each in answers) == 8
        await asyncio.gather(
            *(
                load(each, f"n{n % 4}", tmp_path / str(n), load_inplace=True)
                for n, each in enumerate(served * 4)
            ),
            *(each.control("unload_lora_adapter", name="poet") for each in served),
        )
        assert processes.names() == [["n0", "n1", "n2", "n3"]] * 3
        assert served[0].adapters == served[1].adapters == served[2].adapters
        ids = {lora.lora_int_id for lora in served[0].adapters.values()}
        assert processes.engine.held == ids

    run(work)


def test_a_client_that_disconnects_ends_no_turn(tmp_path: Path) -> None:
    async def work() -> None:
        processes = Processes(Engine())
        first, second, _ = [processes.attach() for _ in range(3)]
        for moment in range(12):
            asked = asyncio.create_task(load(first, f"n{moment}", tmp_path))
            for _ in range(moment):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await load(second, "last", tmp_path)
        names, *others = processes.names()
        assert names[-1] == "last" and others == [names, names]

    run(work)


def test_a_process_that_attaches_late_hears_everything(tmp_path: Path) -> None:
    async def work() -> None:
        processes = Processes(Engine(), 2)
        paths = {name: str(adapter(tmp_path / name)) for name in "ab"}
        modules = {"lora_modules": [f"{name}={path}" for name, path in paths.items()]}
        first = processes.attach(**modules)
        await first.start()
        await load(first, "extra", tmp_path / "extra")
        await load(first, "gone", tmp_path / "gone")
        for name in ("a", "gone"):
            await first.control("unload_lora_adapter", name=name)
        second = processes.attach(**modules)
        await second.start()  # what the first has loaded, and unloaded, is not loaded again
        assert processes.names() == [["b", "extra"]] * 2
        assert processes.engine.loads == ["a", "b", "extra", "gone"]
        await load(second, "more", tmp_path / "more")
        assert processes.names() == [["b", "extra", "more"]] * 2

    run(work)


def test_what_one_process_has_found_is_served_by_all(tmp_path: Path) -> None:
    async def work() -> None:
        processes = Processes(Engine())
        resolvers = [Resolver({}) for _ in range(3)]
        served = [processes.attach(each) for each in resolvers]
        await asyncio.sleep(0.01)
        assert await served[2].adapter("poet") is None  # remembered as unknown
        for each in resolvers:
            each.known["poet"] = adapter(tmp_path / "poet")
        one, other = await asyncio.gather(*(each.adapter("poet") for each in served[:2]))
        assert one is not None and one == other == await served[2].adapter("poet")
        assert processes.engine.loads == ["poet"]
        assert resolvers[2].asked == ["poet"]

    run(work)


# --- settings -------------------------------------------------------------------------------------

API = (
    'from pegboard.interfaces.api import ApiSpec\nSPEC = ApiSpec(api="1.0", implementation="x:Y", '
    "flags=frozenset({}))\n"
)
RESOLVER = """
from pegboard.interfaces.lora_resolver import LoRAResolverSpec
SPEC = LoRAResolverSpec(api="1.0", implementation="x:Y", options="x:Z")
"""


@pytest.fixture
def installed(fake_distributions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_distributions.add("acme", {"api": {"mine": "acme_api:SPEC"}}, {"acme_api": API.format("")})
    fake_distributions.add(
        "other", {"api": {"theirs": "other_api:SPEC"}}, {"other_api": API.format('{"adapters"}')}
    )
    names = {"one": "acme_find:SPEC", "two": "acme_find:SPEC"}
    fake_distributions.add("find", {"lora_resolver": names}, {"acme_find": RESOLVER})
    monkeypatch.setattr(
        Registry, "discover", lambda config: Registry(fake_distributions.scan(), config)
    )


def settings(loras: int, *apis: str, options: Any = None, **server: Any) -> Settings:
    plugins = PluginConfig(enable=[f"api:{name}" for name in apis], options=options or {})
    sections = {"server": ServerConfig(**server)}
    return Settings(EngineConfig(model="base", max_loras=loras), plugins, sections)


@pytest.mark.usefixtures("installed")
def test_settings_without_an_effect_are_refused() -> None:
    check_adapters(settings(0, "mine"))
    check_adapters(settings(2, "mine", "theirs"))
    check_adapters(
        settings(
            2, "theirs", lora_modules=["a=/a", "b=/b"], lora_resolvers=["two"], api_server_count=2
        )
    )
    with pytest.raises(ConfigError, match="no API of this server lets clients name LoRA adapters"):
        check_adapters(settings(2, "mine"))
    with pytest.raises(ConfigError, match="lora_modules needs LoRA: add --enable-lora"):
        check_adapters(settings(0, "theirs", lora_modules=["a=/a"]))
    with pytest.raises(ConfigError, match="lora_resolvers needs LoRA"):
        check_adapters(settings(0, "theirs", lora_resolvers=["one"]))
    for twice in (["a=/a", "a=/b"], ["base=/a"]):
        with pytest.raises(ConfigError, match="is the name of two models"):
            check_adapters(settings(1, "theirs", lora_modules=twice))
    with pytest.raises(PluginNotFound, match="three"):
        check_adapters(settings(1, "theirs", lora_resolvers=["three"]))


@pytest.mark.usefixtures("installed")
def test_resolvers_are_asked_if_they_are_named_or_have_options() -> None:
    def names(options: Any = None, **server: Any) -> list[str]:
        config = PluginConfig(options=options or {})
        return [
            name.rpartition(":")[2]
            for name in resolver_names(Registry.discover(config), ServerConfig(**server))
        ]

    assert names() == []
    assert names({"lora_resolver.two": {"x": 1}}) == ["two"]
    assert names({"lora_resolver.two": {"x": 1}}, lora_resolvers=["two", "one"]) == ["two", "one"]
    assert names({"lora_resolver.two": {"x": 1}}, lora_resolvers=[]) == []
