"""LoRA adapters of a server: those of `--lora-modules`, those that the lora resolvers find, and
those that an operator loads and unloads while the server runs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pegboard.config.schema import Settings
from pegboard.data.checkpoint_file import read_object
from pegboard.data.request import LoRARequest
from pegboard.errors import (
    ConfigError,
    ModelError,
    Overloaded,
    PegboardError,
    PluginFailure,
    RequestError,
    bare,
    blame,
    expect,
)
from pegboard.interfaces.api import ServedModel
from pegboard.interfaces.lora_resolver import LoRAResolver, LoRAResolverSetup
from pegboard.interfaces.spec import Need
from pegboard.log import get_logger
from pegboard_server.settings import ServerConfig
from pegboard_server.turns import OwnTurns, Turns

if TYPE_CHECKING:
    from pegboard.front.async_llm import AsyncLLM
    from pegboard.plugins.registry import Registry

log = get_logger(__name__)

MAX_NAME = 200
"""The most characters of an adapter's name."""
MAX_LOOKUPS = 64
"""The most names that are looked for at the same time. Anyone can send unknown names."""
MAX_UNKNOWN = 1024
"""The most names that are remembered as unknown."""
UNKNOWN_S = 10.0
"""Seconds for which the resolvers are not asked again for a name that none of them knows."""
LOOKUP_S = 600.0
"""Seconds after which a resolver that has not answered is given up."""
LOAD_S = 300.0
"""Seconds after which an adapter that is not in memory is given up, so that the next one has its
turn."""
_NAME = re.compile(r"[\w+=@:-][\w.+=@:-]*(/[\w+=@:-][\w.+=@:-]*)*", re.ASCII)
_CONFIG_BYTES = 1 << 20


def check_adapters(settings: Settings) -> None:
    """Raise ConfigError if settings about LoRA have no effect. Called before the engine starts."""
    from pegboard.plugins.registry import Registry

    server = settings.section(ServerConfig)
    modules = [read_module(item) for item in server.lora_modules or ()]
    if not settings.engine.max_loras:
        given = "lora_modules" if modules else "lora_resolvers" if server.lora_resolvers else ""
        if given:
            raise ConfigError(
                f"{given} needs LoRA: add --enable-lora, or --max-loras N for more than one "
                "adapter per step"
            )
        return
    own_names = settings.engine.served_model_name or [settings.engine.model or ""]
    names = [*own_names, *(module["name"] for module in modules)]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(
            f"lora_modules: {min(twice)!r} is the name of two models; names must differ"
        )
    registry = Registry.discover(settings.plugins)
    specs = [registry.spec(entry) for entry in registry.enabled("api")]
    if not any("adapters" in spec.flags for spec in specs):
        raise ConfigError(
            "enable_lora, max_loras: no API of this server lets clients name LoRA adapters, so "
            "LoRA would have no effect; leave it out. Offline, LLM.generate(lora_request=…) uses "
            "adapters"
        )
    resolver_names(registry, server)


def read_module(item: str | Mapping[str, Any]) -> dict[str, str]:
    """Return `name`, `path` and, if given, `base_model_name` of an item of `lora_modules`:
    name=path, JSON, or a mapping. Raises ConfigError."""
    value: Any = item
    if isinstance(item, str):
        name, equals, path = item.partition("=")
        try:
            value = (
                json.loads(item)
                if item.startswith("{")
                else {"name": name, "path": path}
                if equals
                else None
            )
        except ValueError as error:
            raise ConfigError(f"lora_modules: {item!r} is not JSON: {error}") from error
    known = ("name", "path", "base_model_name")
    fits = isinstance(value, Mapping) and all(
        key in known and isinstance(text, str) for key, text in value.items()
    )
    if not fits or not value.get("name") or not value.get("path"):
        raise ConfigError(
            "lora_modules: expected name=path, or JSON with name, path and optionally "
            f"base_model_name; got {item!r}"
        )
    check_name(value["name"], ConfigError)
    return dict(value)


def check_name(name: str, error: type[ConfigError | RequestError]) -> None:
    """Raise `error` unless `name` can be the name of an adapter."""
    if len(name) > MAX_NAME or _NAME.fullmatch(name) is None:
        raise error(
            f"{name[:MAX_NAME]!r} cannot be the name of an adapter: expected up to {MAX_NAME} "
            "letters, digits and _-.+=@: with single slashes, and no part that begins with a dot"
        )


def resolver_names(registry: "Registry", config: ServerConfig) -> Sequence[str]:
    """Return the names of the resolvers in the order in which they are asked: those of the setting,
    or else those that have options. Raises PluginNotFound, PluginConflict."""
    if config.lora_resolvers is None:
        return [
            entry.name for entry in registry.entries("lora_resolver") if registry.has_options(entry)
        ]
    return [registry.find("lora_resolver", name).qualified for name in config.lora_resolvers]


def serve_adapters(client: "AsyncLLM", turns: Turns | None = None) -> "AdapterClient":
    """Return the client for API plugins of a server with LoRA. turns: see `AdapterClient`.
    Raises ConfigError, PluginError."""
    registry = client.registry
    config = client.plan.settings.section(ServerConfig)
    setup = LoRAResolverSetup(_fetcher(client, registry))
    resolvers = {}
    for name in resolver_names(registry, config):
        entry = registry.choose("lora_resolver", Need(), explicit=name, key=name).require()
        resolvers[entry.id] = registry.build(entry, setup)
    return AdapterClient(client, resolvers, config, turns=turns)


def _fetcher(
    client: "AsyncLLM", registry: "Registry"
) -> Callable[[str, str | None, tuple[str, ...]], Path]:
    from pegboard.interfaces.model_source import FileFilter
    from pegboard.plan.checkpoint import fetch

    def run(reference: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
        return fetch(
            registry,
            client.plan.settings,
            reference,
            FileFilter(patterns),
            lambda *_: None,
            revision,
        ).root

    return run


class AdapterClient:
    """An engine client whose models can be adapters. Everything that is not about adapters is
    passed to `client`.

    adapters: those that are served, by name. resolvers: by plugin id, in the order in which they
    are asked. clock: returns seconds. turns: those in which adapters are loaded and
    unloaded. All API processes serve the same adapters."""

    def __init__(
        self,
        client: "AsyncLLM",
        resolvers: Mapping[str, LoRAResolver],
        config: ServerConfig,
        clock: Callable[[], float] = time.monotonic,
        load_s: float = LOAD_S,
        turns: Turns | None = None,
    ) -> None:
        self._client = client
        self._load_s = load_s
        self.adapters: dict[str, LoRARequest] = {}
        self._resolvers = resolvers
        self._wait_s = config.lora_resolver_wait_s
        self._modules = [read_module(item) for item in config.lora_modules or ()]
        self._allowed = frozenset(config.lora_base_models)
        self._clock = clock
        self._lookups: dict[str, asyncio.Task[PegboardError | None]] = {}
        self._unknown: OrderedDict[str, tuple[float, PegboardError | None]] = OrderedDict()
        self._turns = turns or OwnTurns()
        self._turns.on_told = self._hear

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def models(self) -> Sequence[ServedModel]:
        """Return the base model's names, then the adapters."""
        served = self._client.models()
        base = served[0]
        return [
            *served,
            *(
                replace(
                    base, name=name, root=lora.lora_path, parent=lora.base_model_name or base.name
                )
                for name, lora in self.adapters.items()
            ),
        ]

    async def start(self) -> None:
        """Load the adapters of `lora_modules`. Called once the engine is ready. The first
        API process loads them for all. Raises ConfigError."""
        async with self._turns:
            for module in self._modules:
                base: str | None = module.get("base_model_name")
                if base not in [model.name for model in self.models()]:
                    base = None  # as in vLLM: it is only shown, and only if it is served
                try:
                    await self._load(module["name"], module["path"], base_model_name=base)
                except (RequestError, ModelError) as error:
                    raise ConfigError(f"lora_modules: {error}") from error

    async def control(self, action: str, **arguments: Any) -> object:
        """Run a control action: "load_lora_adapter" (name, path, load_inplace) and
        "unload_lora_adapter" (name), or one of the client's. A later load of the same name waits
        for the earlier one. When it returns, all API processes serve the adapter, or none does. A
        client that disconnects does not end it. Raises RequestError."""
        if action == "load_lora_adapter":
            return await asyncio.shield(self._in_turn(self._load, arguments))
        if action == "unload_lora_adapter":
            return await asyncio.shield(self._in_turn(self._unload, arguments))
        return await self._client.control(action, **arguments)

    async def _in_turn(
        self, change: Callable[..., Awaitable[object]], arguments: Mapping[str, Any]
    ) -> object:
        async with self._turns:
            return await change(**arguments)

    def _hear(self, name: str, lora: LoRARequest | None) -> None:
        """Take what another API process has loaded or unloaded."""
        self._modules = [module for module in self._modules if module["name"] != name]
        if lora is None:
            self.adapters.pop(name, None)
        else:
            self.adapters[name] = lora
            self._unknown.pop(name, None)

    async def _load(
        self,
        name: str,
        path: str,
        *,
        base_model_name: str | None = None,
        load_inplace: bool = False,
    ) -> LoRARequest:
        """Read the adapter in a folder into memory, and serve it under this name. Raises
        RequestError if it cannot be loaded, or if the name is taken and `load_inplace` is not
        set."""
        check_name(name, RequestError)
        if name in [model.name for model in self._client.models()]:
            raise RequestError(
                f"{name!r} is the name of the base model; give the adapter another name",
                parameter="lora_name",
            )
        if name in self.adapters and not load_inplace:
            raise RequestError(f"the name {name!r} is taken", parameter="lora_name")
        try:
            async with asyncio.timeout(self._load_s):
                folder, lora_id = await asyncio.to_thread(_folder_of, name, path)
                lora = LoRARequest(name, lora_id, str(folder), base_model_name)
                await self._client.add_lora(
                    msgspec.structs.replace(lora, load_inplace=load_inplace)
                )
        except TimeoutError as error:
            raise RequestError(
                f"adapter {name!r} was not read within {self._load_s:g} s", parameter="lora_path"
            ) from error
        before = self.adapters.get(name, lora)
        self.adapters[name] = lora
        await self._turns.tell(name, lora)
        if before.lora_int_id != lora.lora_int_id:
            await self._client.remove_lora(before.lora_int_id)
        self._unknown.pop(name, None)
        return lora

    async def _unload(self, name: str) -> bool:
        """Stop to serve an adapter. Running requests end normally. Return False if there is no such
        adapter."""
        lora = self.adapters.pop(name, None)
        if lora is not None:
            await self._turns.tell(name, None)
            await self._client.remove_lora(lora.lora_int_id)
        return lora is not None

    # --- names that are not served yet ------------------------------------------------------------

    async def adapter(self, name: str) -> LoRARequest | None:
        """Return the adapter of this name, which the resolvers may find now. None: there is no such
        adapter. Raises RequestError if it is there but cannot be used, Overloaded if finding it
        takes long, and PluginFailure."""
        lora = self.adapters.get(name)
        if (
            lora is not None
            or not self._resolvers
            or len(name) > MAX_NAME
            or _NAME.fullmatch(name) is None
        ):
            return lora
        until, error = self._unknown.get(name, (0.0, None))
        if self._clock() >= until:
            error = await self._looked_up(name)
        if error is not None:
            raise bare(error)
        return self.adapters.get(name)

    async def _looked_up(self, name: str) -> PegboardError | None:
        """Wait for the only lookup of this name. Return why the adapter cannot be used, or None."""
        lookup = self._lookups.get(name)
        if lookup is None:
            if len(self._lookups) >= MAX_LOOKUPS:
                raise Overloaded("too many unknown models are being looked for; try again later")
            lookup = self._lookups[name] = asyncio.create_task(self._look_up(name))
            lookup.add_done_callback(lambda _: self._lookups.pop(name, None))
        # a client that disconnects does not end the lookup
        done, _ = await asyncio.wait([lookup], timeout=self._wait_s)
        if not done:
            raise Overloaded(
                f"The LoRA adapter `{name[:MAX_NAME]}` is still being fetched; try again",
                retry_after_s=self._wait_s,
            )
        return lookup.result()

    async def _look_up(self, name: str) -> PegboardError | None:
        """Ask the resolvers in order until one has an adapter that can be loaded. Return why none
        could, or None."""
        first: PegboardError | None = None
        for plugin, resolver in self._resolvers.items():
            try:
                if await self._load_from(plugin, resolver, name):
                    log.info("LoRA adapter %r was found by %s", name, plugin)
                    return None
            except PegboardError as error:
                log.warning(
                    "LoRA adapter %r was not loaded: %s",
                    name,
                    error,
                    exc_info=isinstance(error, PluginFailure),
                )
                first = first or bare(error)
        self._unknown[name] = (self._clock() + UNKNOWN_S, first)
        self._unknown.move_to_end(name)
        if len(self._unknown) > MAX_UNKNOWN:
            self._unknown.popitem(last=False)
        return first

    async def _load_from(self, plugin: str, resolver: LoRAResolver, name: str) -> bool:
        """Return False if the resolver does not know the name. Raises PluginFailure, and
        RequestError if the adapter is there but cannot be used."""
        folder: Path | None = None
        try:
            with blame(plugin, self._client.registry.modules):
                async with asyncio.timeout(LOOKUP_S):
                    folder = expect(await resolver.resolve(name), Path | None, resolver, "resolve")
            if folder is None:
                return False
            self._check_base(await asyncio.to_thread(recorded_base, folder))
            async with self._turns:
                if name not in self.adapters:
                    await self._load(name, str(folder))
        except (RequestError, ModelError) as error:
            # where it is on this machine is not for clients
            reason = str(error).replace(str(folder), name)
            message = f"The LoRA adapter `{name}` was found but could not be loaded: {reason}"
            raise RequestError(message, parameter="model") from error
        return True

    def _check_base(self, recorded: str | None) -> None:
        """Raise RequestError if the adapter was made for another base model."""
        served = self._bases()
        if recorded is not None and "*" not in self._allowed and recorded not in served:
            raise RequestError(
                f"it was made for the base model {recorded[:MAX_NAME]!r}, and this server has "
                f"{', '.join(sorted(served))}; the setting lora_base_models allows other names of "
                "the base model"
            )

    def _bases(self) -> frozenset[str]:
        return self._allowed | {
            name for model in self._client.models() for name in (model.name, model.root)
        }


def _folder_of(name: str, path: str) -> tuple[Path, int]:
    """Return the folder of an adapter, and its id. Raises RequestError if it is not a folder or has
    files that are not regular. A network file system may hang, so this runs in a thread."""
    folder = Path(path).expanduser()
    if not path or not folder.is_dir():
        raise RequestError(f"adapter {name!r}: {path!r} is not a folder", parameter="lora_path")
    for file in folder.iterdir():
        if not (file.is_file() or file.is_dir()):
            raise RequestError(
                f"adapter {name!r}: {file.name!r} is not a regular file", parameter="lora_path"
            )
    return folder, _id_of(name, folder)


def _id_of(name: str, folder: Path) -> int:
    """Return the id of an adapter. It follows from its name and folder, so that all API processes
    use the same."""
    digest = hashlib.sha256(f"{name}\0{folder.resolve()}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:7]) + 1


def recorded_base(folder: Path) -> str | None:
    """Return the base model that a folder's adapter_config.json records, or None if it records
    none. Loading the adapter reports a file that is damaged."""
    try:
        recorded = read_object(folder / "adapter_config.json", _CONFIG_BYTES).get(
            "base_model_name_or_path"
        )
    except ModelError:
        return None
    return recorded if isinstance(recorded, str) and recorded else None
