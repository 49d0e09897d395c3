"""From a model reference to the description of a checkpoint: its files, its loader, its config."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pegboard import env
from pegboard.config.schema import Settings
from pegboard.errors import ModelError, blame, expect
from pegboard.interfaces.model_source import (
    FileFilter,
    LocalFiles,
    ModelSource,
    ModelSourceSetup,
    Progress,
)
from pegboard.interfaces.spec import Need
from pegboard.interfaces.tokenizer import TokenizerSpec
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    TokenizerPayload,
    WeightLoader,
    WeightLoaderSetup,
    WeightLoaderSpec,
)
from pegboard.plan.model_config import overridden
from pegboard.plan.model_reference import parse_reference, weight_patterns
from pegboard.plugins.defaults import default_name
from pegboard.plugins.names import missing_providers
from pegboard.plugins.registry import Registry
from pegboard.plugins.selection import Decision


def fetch(
    registry: Registry,
    settings: Settings,
    text: str,
    wanted: FileFilter,
    progress: Progress,
    revision: str | None,
) -> LocalFiles:
    """Return the files that a reference stands for, which its model source fetches if they are not
    there. Raises ModelError, PluginError."""
    engine = settings.engine
    reference = parse_reference(text, registry, revision=revision)
    decision = registry.choose(
        "model_source", Need(), explicit=reference.scheme, key=reference.scheme
    )
    folder = Path(engine.download_dir).expanduser() if engine.download_dir else env.cache_dir()
    token = engine.hf_token or env.hub_token()
    is_chosen = engine.download_dir is not None
    setup = ModelSourceSetup(folder, token, env.hub_offline(), is_chosen, weight_patterns(registry))
    source: ModelSource = registry.build(decision.require(), setup)
    with blame(decision.require().id, registry.modules):
        files: LocalFiles = expect(
            source.fetch(reference, wanted, progress), LocalFiles, source, "fetch"
        )
    return files


def describe_files(
    registry: Registry, files: LocalFiles, load_format: str, seed: int
) -> Checkpoint:
    """Return the description of the model in `files`. load_format: a weight loader, or "auto".
    Raises ModelError."""
    decision = _choose_loader(registry, load_format, files.root)
    loader: WeightLoader = registry.build(decision.require(), WeightLoaderSetup(seed=seed))
    with blame(decision.require().id, registry.modules):
        checkpoint: Checkpoint = expect(loader.describe(files), Checkpoint, loader, "describe")
    return checkpoint


def with_overrides(checkpoint: Checkpoint, overrides: Mapping[str, Any] | None) -> Checkpoint:
    """Return the checkpoint with `hf_overrides` applied to its config."""
    if not overrides:
        return checkpoint
    config = overridden(checkpoint.config, overrides)
    return replace(
        checkpoint,
        config=config,
        architectures=tuple(config.get("architectures") or checkpoint.architectures),
    )


def _choose_loader(registry: Registry, asked: str, root: Path) -> Decision:
    """Choose the loader: the one that was asked for, or the best of those whose file patterns and
    magic match the files."""
    if asked != "auto":
        return registry.choose("weight_loader", Need(), explicit=asked)
    entries = registry.entries("weight_loader")
    suited = [entry for entry in entries if _reads(registry.spec(entry), root)]  # type: ignore[arg-type]
    if entries and not suited:
        advice = missing_providers("weight_loader", registry.names("weight_loader"))
        raise ModelError(
            f"{root}: no installed weight loader reads its files ({_listing(root)}); installed: "
            f"{', '.join(entry.name for entry in entries)}{f'; {advice}' if advice else ''}"
        )
    return registry.choose("weight_loader", Need(), among=suited if entries else None)


def _reads(spec: WeightLoaderSpec, root: Path) -> bool:

    def fits(path: Path) -> bool:
        if not path.is_file() or not any(path.match(pattern) for pattern in spec.file_patterns):
            return False
        if spec.magic is None:
            return True
        with path.open("rb") as file:
            return file.read(len(spec.magic)) == spec.magic

    files = (
        [root]
        if root.is_file()
        else sorted({path for pattern in spec.file_patterns for path in root.glob(pattern)})
    )
    return any(map(fits, files))


def _listing(root: Path) -> str:
    names = [root.name] if root.is_file() else sorted(path.name for path in root.iterdir())
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"


def tokenizer_payload(
    registry: Registry, settings: Settings, text: str, progress: Progress
) -> TokenizerPayload:
    """Return the tokenizer that --tokenizer points to: the payload in a checkpoint file, or the
    files of a directory."""
    specs = [cast(TokenizerSpec, registry.spec(entry)) for entry in registry.entries("tokenizer")]
    wanted = sorted({pattern for spec in specs for pattern in spec.reads})
    files = fetch(registry, settings, text, FileFilter(tuple(wanted)), progress, None)
    if files.root.is_file():
        return describe_files(
            registry, files, settings.engine.load_format, settings.engine.seed
        ).tokenizer
    return TokenizerPayload(str(default_name("tokenizer")), files.root)


@contextmanager
def download_bars() -> Iterator[Progress]:
    """Yield the function that a download reports to. It shows one tqdm bar per file on stderr if
    that is a terminal."""
    bars: dict[str, Any] = {}

    def report(what: str, done: int, total: int | None) -> None:
        if what not in bars:
            from tqdm import tqdm

            bars[what] = tqdm(desc=what, total=total, unit="B", unit_scale=True, file=sys.stderr)
        bars[what].update(done - bars[what].n)

    try:
        yield report if sys.stderr.isatty() else lambda what, done, total: None
    finally:
        for bar in bars.values():
            bar.close()
