"""The only module that reads the process environment. Each variable has a type and a default.

In addition, `plugin_options()` reads the options of plugins, which follow one pattern:
`PEGBOARD__KIND__NAME__FIELD=value`. `vllm_variables()` returns the variables of vLLM. A value that
does not parse is an error; it is never replaced by the default.
"""

from __future__ import annotations

import os
from pathlib import Path

from pegboard.errors import ConfigError


def cache_dir() -> Path:
    """PEGBOARD_CACHE: where fetched models and derived files are kept. Default:
    ~/.cache/pegboard."""
    root = os.environ.get("PEGBOARD_CACHE")
    if root:
        return Path(root).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pegboard"


def config_file() -> Path | None:
    """PEGBOARD_CONFIG: a YAML or TOML file of settings. The command line overrides it."""
    value = os.environ.get("PEGBOARD_CONFIG")
    return Path(value).expanduser() if value else None


def log_level() -> str:
    """PEGBOARD_LOG_LEVEL, else VLLM_LOGGING_LEVEL: DEBUG, INFO, WARNING or ERROR. Default INFO."""
    name = next(
        (name for name in ("PEGBOARD_LOG_LEVEL", "VLLM_LOGGING_LEVEL") if os.environ.get(name)), ""
    )
    value = os.environ.get(name, "INFO").upper()
    if value not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        raise ConfigError(f"{name}={value!r}: expected DEBUG, INFO, WARNING or ERROR")
    return value


def log_everything() -> None:
    """Set the log level of this process and its children to DEBUG, as `-v` requests."""
    os.environ["PEGBOARD_LOG_LEVEL"] = "DEBUG"


def api_key() -> str | None:
    """PEGBOARD_API_KEY, else VLLM_API_KEY: the bearer token that clients must send. Default:
    none."""
    return os.environ.get("PEGBOARD_API_KEY") or os.environ.get("VLLM_API_KEY") or None


def vllm_variables() -> dict[str, str]:
    """Return all variables of vLLM (VLLM_…). `config/vllm_names.toml` says what they mean here."""
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and value}


CLUSTER_KEY = "PEGBOARD_CLUSTER_KEY"


def cluster_key() -> str | None:
    """PEGBOARD_CLUSTER_KEY: a secret that hosts share which run one engine or the engines of one
    server. Default: none."""
    return os.environ.get(CLUSTER_KEY) or None


def required_cluster_key(what: str) -> str:
    """Return the secret that hosts share. what: needs it. Raises ConfigError if there is none."""
    key = cluster_key()
    if key is None:
        raise ConfigError(
            f"{what} on several hosts need a secret: set the environment variable {CLUSTER_KEY} to "
            "the same random text on every host"
        )
    return key


def launcher_variables() -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT: the place of this
    process among those that a launcher such as torchrun has started. TORCHELASTIC_…: what torchrun
    says of its store."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    store = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
    return {name: value for name in (*names, *store) if (value := os.environ.get(name))}


def client_key() -> str | None:
    """OPENAI_API_KEY: the bearer token that `pegboard chat`, `complete` and `bench serve` send.
    PEGBOARD_API_KEY takes precedence."""
    return api_key() or os.environ.get("OPENAI_API_KEY") or None


def plugins_allowed() -> tuple[str, ...] | None:
    """PEGBOARD_PLUGINS: comma-separated list of the plugins that may be used, each a distribution
    or `kind:name`. Default: everything that is installed."""
    value = os.environ.get("PEGBOARD_PLUGINS")
    return (
        tuple(part.strip() for part in value.split(",") if part.strip())
        if value is not None
        else None
    )


def hub_token() -> str | None:
    """HF_TOKEN: access token for gated models on the Hugging Face hub."""
    return os.environ.get("HF_TOKEN") or None


def hub_offline() -> bool:
    """HF_HUB_OFFLINE, or TRANSFORMERS_OFFLINE: 1, on, yes or true = download nothing, use the
    models that are there."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in {"1", "ON", "YES", "TRUE"}


def strict() -> bool:
    """PEGBOARD_STRICT: with 1, every plugin failure is fatal. Otherwise a plugin that was not
    explicitly requested is quarantined when it fails."""
    return _is_on("PEGBOARD_STRICT")


def check() -> bool:
    """PEGBOARD_CHECK: with 1, everything that plugins return is checked while they run. Steps run
    eagerly and are slower. Needs pegboard-testing."""
    return _is_on("PEGBOARD_CHECK")


def _is_on(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in {"0", "1"}:
        raise ConfigError(f"{name}={value!r}: expected 0 or 1")
    return value == "1"


def plugin_options() -> dict[tuple[str, str, str], str]:
    """Return all `PEGBOARD__KIND__NAME__FIELD` variables as {(kind, name, field): value}. The keys
    are lower case."""
    options = {}
    for key, value in os.environ.items():
        if not key.startswith("PEGBOARD__"):
            continue
        parts = key.lower().split("__")[1:]
        if len(parts) != 3 or not all(parts):
            raise ConfigError(f"environment variable {key}: expected PEGBOARD__KIND__NAME__FIELD")
        options[parts[0], parts[1], parts[2]] = value
    return options


def usable_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def cpu_flags(listing: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the features that the system lists of the first CPU (x86 "flags", Arm "Features"). The
    set is empty if the list is missing or cannot be read."""
    lines = (
        listing.read_text("utf-8", "replace").splitlines() if os.access(listing, os.R_OK) else ()
    )
    return frozenset(
        next((line for line in lines if line.startswith(("flags", "Features"))), "")
        .partition(":")[2]
        .split()
    )


def compute_threads(default: int | None = None) -> int:
    """OMP_NUM_THREADS: the number of compute threads, as for torch. Of a list, for nested loops,
    the first counts. Default: one per CPU that this process may use, or as many as its platform
    says (`default`)."""
    value = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not value:
        return default or len(usable_cpus())
    if not value.isdecimal() or not int(value):
        raise ConfigError(f"OMP_NUM_THREADS={value!r}: expected a number of threads, at least 1")
    return int(value)


def let_compute_threads_sleep() -> None:
    """Tell OpenMP, which torch computes with, to let waiting threads sleep. Waiting threads that
    spin would take cores away from the code that runs between two operators. The call has an effect
    only before torch is imported. It does not change a value that the user has set."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
