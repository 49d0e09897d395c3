"""Kind `executor`: runs one batch on every rank. Implementations: in-process, multi-process,
Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    from pegboard.data.batch import Batch, StepOutput, TokenMasks
    from pegboard.interfaces.attention import KVCacheSpec


START_CALLS = frozenset({"allocate", "warm_up", "embedding_size"})
"""Worker methods that `Executor.call` may name before the first step."""

SERVING_CALLS = frozenset({"memory", "profile"})
"""Worker methods that `Executor.call` may also name between steps."""

ENGINE_CALLS = frozenset(
    {
        "read_adapter",
        "load_adapter",
        "drop_adapters",
        "sleep",
        "wake_up",
        "collective_rpc",
        "update_weights",
        "transfer_weights",
        "save_sharded_state",
    }
)
"""Worker methods that only the engine itself calls, while no step is in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpec(Spec):
    """supports: `ranks` (True, or AtMost a number of ranks), `hosts`. host: "module:function" that
    gets a HostSetup, runs the ranks of a host without an engine, and returns the exit code of the
    process; an executor that supports `hosts` has it. launcher: "module:class" of a `Launcher`,
    which gets the plugin's options and a LaunchSetup, and starts engines elsewhere. flags:
    "engine_per_rank" = every rank is in a process that somebody else started, with an engine of its
    own, and the engines must decide alike."""

    host: str | None = None
    launcher: str | None = None

    FLAGS = frozenset({"engine_per_rank"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorNeed(Need):
    """ranks: how many the model is divided among; None = one. hosts: how many hosts of which a
    process was started on each; None = one."""

    ranks: int | None = None
    hosts: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs. ranks: how many there are. local_rank: its number among those of its host.
    local_ranks: how many that host has. address: where the ranks meet: "file:///…", a file below a
    folder that they share and only they can open, or "tcp://host:port". "" if there is one rank."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    address: str = ""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Several hosts with equally many ranks, on each of which somebody starts Pegboard. count: how
    many. number: of this one; the engine is on host 0. address, port: where the engine waits for
    the others."""

    count: int
    number: int
    address: str
    port: int


class ChildProcess(Protocol):
    """A process that was started with `ExecutorSetup.start_process`. It ends when the engine's
    process does."""

    pid: int

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process ends."""

    @property
    def exitcode(self) -> int | None:
        """None while the process runs; minus the number of the signal that killed it."""

    def how_it_ended(self) -> str: ...

    def end_now(self) -> None:
        """Send SIGUSR1, with which a process ends soon and in order."""

    def kill(self) -> None: ...

    def end(self, patience_s: tuple[float, float, float]) -> None:
        """Wait for the process to end. If it does not, send SIGUSR1 and wait, then SIGKILL."""


def nothing_to_check() -> None:
    """All ranks run on one host."""


@dataclass(frozen=True, slots=True)
class ExecutorSetup:
    """make_worker: builds core's worker for a place in the calling process. It can be pickled, so
    that a process elsewhere can call it. ranks: how many workers there are. sampling: those that
    sample and need masks. The first of them has the results of steps. Of all others, only the
    reports on transfers are wanted.
    start_process("module:function", role=…, folder=…, pass_fds=…, **arguments) runs a function in a
    new interpreter. role: its name in log lines. folder: a folder that it removes if this process
    dies first. pass_fds: file descriptors that it inherits under the same numbers. arguments: what
    JSON can encode. None = this engine starts no processes.
    check_plugins: raises PluginBroken in a process whose host has other plugins than this one. A
    process on another host calls it before `make_worker` is unpickled. platform: the name of that
    on which the ranks compute. num_threads: how many threads each rank computes with; None = a
    share of the cores. hosts: those of the ranks, if somebody starts a process on each; None = the
    executor decides."""

    make_worker: Callable[[Place], "WorkerLike"]
    ranks: int = 1
    start_process: Callable[..., ChildProcess] | None = None
    sampling: range = range(1)
    check_plugins: Callable[[], None] = nothing_to_check
    platform: str = ""
    num_threads: int | None = None
    hosts: Hosts | None = None


@dataclass(frozen=True, slots=True)
class HostSetup:
    """A host without an engine. ranks: how many it has. start_process: see ExecutorSetup."""

    hosts: Hosts
    ranks: int
    start_process: Callable[..., ChildProcess]


@dataclass(frozen=True, slots=True)
class LaunchSetup:
    """Engines that run elsewhere. num_ranks: of an engine. num_threads: of a rank; None = not
    known. platform: the name of that on which they compute. variables: more variables of the
    environment."""

    num_ranks: int
    num_threads: int | None
    platform: str
    variables: Mapping[str, str]


class Launcher(Protocol):
    """Starts engines on a cluster."""

    def connect(self) -> str:
        """Connect to the cluster. Return the address under which its hosts reach this process.
        Raises ConfigError."""

    def launch(self, words: Sequence[str], on_end: Callable[[str], None]) -> None:
        """Run `pegboard WORDS`, which runs one engine, wherever there is room. Does not block. It
        ends when this process does. on_end: gets the reason when the command could not be run, or
        has ended; from any thread."""

    def stop(self) -> None:
        """Free everything. All commands have ended, or are killed. A second call does nothing."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A rank that has loaded its weights. kv_specs: by layer index. kv_memory_bytes: memory that it
    can give to the KV cache. weight_bytes: memory that its weights take. kv_layout: the attention
    backends that arrange the KV cache, with their versions. drafts_ahead: see `Limits`.
    """

    rank: int
    kv_specs: dict[int, "KVCacheSpec"]
    kv_memory_bytes: int
    weight_bytes: int = 0
    kv_layout: str = ""
    drafts_ahead: bool = False


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A rank that has died. reason: why, with the traceback if there is one."""

    rank: int
    reason: str


class WorkerLike(Protocol):
    """Core's worker as an executor sees it."""

    def load(self) -> WorkerReady: ...

    def run(
        self, batch: "Batch", masks: "Callable[[], TokenMasks] | None"
    ) -> "Callable[[], StepOutput]":
        """Compute a step, or start it if the device works asynchronously. The returned callable
        waits for the result. The next step may be run before the callable is called."""

    def call(self, method: str, *args: object) -> object:
        """Call a method named in START_CALLS, SERVING_CALLS or ENGINE_CALLS. Raises ConfigError for
        any other method."""

    def stop(self) -> None: ...


class StepFuture(Protocol):
    """The result of a submitted step."""

    def result(self) -> "StepOutput":
        """Wait for the step. Raises what the step raised."""


class Executor(Protocol):
    """Runs batches on the workers. The engine owns it and calls it only from its own thread."""

    def start(self) -> list[WorkerReady]:
        """Start all ranks and load the model. Called once; cold. Raises ModelError, ConfigError or
        PluginError."""

    def submit(self, batch: "Batch") -> StepFuture:
        """Start a step. Steps run in the order in which they are submitted, and several may be in
        flight. Hot. An executor in the engine's process may compute here, or in `StepFuture.result`
        if the batch needs masks."""

    def provide_masks(self, step: int, masks: "TokenMasks") -> None:
        """Hand over the grammar masks of a submitted step whose batch has `needs_masks`. The
        sampler of that step waits for them."""

    def call(self, method: str, *args: object) -> list[object]:
        """Run a worker method on all ranks, between steps, and return the results in rank order."""

    def watch(self, on_death: Callable[[WorkerDeath], None]) -> None:
        """Register a callback for ranks that die outside a step. It is called at most once, from
        any thread."""

    def stop(self) -> None:
        """Stop all ranks, and leave no process and no socket behind. Later calls do nothing."""
