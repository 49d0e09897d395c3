"""How an engine that pools makes vectors, as the files of sentence-transformers next to the model declare it."""

from __future__ import annotations

import json
from typing import Any

from pegboard.config.schema import EngineConfig
from pegboard.data.checkpoint_file import read_object, read_text
from pegboard.data.pooling_params import PoolingParams
from pegboard.errors import ConfigError, ModelError, RequestError
from pegboard.interfaces.weight_loader import Checkpoint

_STEPS = ("Transformer", "Pooling", "Normalize")
_MODES = "pooling_mode_"


def default_pooling(engine: EngineConfig, checkpoint: Checkpoint) -> PoolingParams | None:
    """Return the parameters of requests that do not set their own, or None if the engine generates text.

    `modules.json` lists the steps after the transformer. Only the pooling of the last token and Normalize are possible. Without
    that file, vectors are normalized. Raises ConfigError for settings that do not fit, ModelError for other steps.
    """
    if engine.runner != "pooling":
        return None
    if engine.spec_method is not None:
        raise ConfigError("runner 'pooling' samples no tokens, so drafts have no effect; remove spec_method")
    path = checkpoint.path / "modules.json"
    if not path.is_file():
        return PoolingParams(use_activation=True)
    modules = _listed(path)
    names = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if unknown := [name for name in names if name not in _STEPS]:
        raise ModelError(f"{path}: the step {unknown[0]!r:.80} is not supported; expected {', '.join(_STEPS)}")
    for module, name in zip(modules, names, strict=True):
        if name == "Pooling":
            _check_pooling(checkpoint, str(module.get("path")))
    return PoolingParams(use_activation="Normalize" in names)


def _listed(path: Any) -> list[dict[str, Any]]:
    try:
        modules = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} must contain a list of objects, one per step")
    return modules


def _check_pooling(checkpoint: Checkpoint, folder: str) -> None:
    root = checkpoint.path.resolve()
    path = (root / folder / "config.json").resolve()
    if not path.is_relative_to(root):
        raise ModelError(f"{checkpoint.path / 'modules.json'}: the path {folder!r:.80} leaves the model's folder")
    modes = [name.removeprefix(_MODES) for name, is_on in read_object(path).items() if name.startswith(_MODES) and is_on]
    if modes != ["lasttoken"]:
        raise ModelError(f"{path}: the model pools by {', '.join(modes) or 'nothing'}; only lasttoken is supported")


def merged_pooling(params: PoolingParams, default: PoolingParams, config: Any) -> PoolingParams:
    """Return `params` with the model's default. Raises RequestError for dimensions that the model does not declare: a config has
    `is_matryoshka`, or lists `matryoshka_dimensions`. They can be set with hf_overrides."""
    if (wanted := params.dimensions) is not None:
        listed, size = config.get("matryoshka_dimensions"), config.get("hidden_size")
        if not listed and not config.get("is_matryoshka"):
            reason = "the model does not declare is_matryoshka or matryoshka_dimensions, so its vectors cannot be shortened"
            raise RequestError(f"dimensions={wanted}: {reason}; leave dimensions out", parameter="dimensions")
        if wanted not in listed if listed else size is None or wanted > size:
            expected = ", ".join(map(str, listed)) if listed else f"at most {size}"
            raise RequestError(
                f"dimensions={wanted} is not possible with this model; expected {expected}", parameter="dimensions"
            )
    use_activation = default.use_activation if params.use_activation is None else params.use_activation
    return PoolingParams(dimensions=wanted, use_activation=use_activation)
