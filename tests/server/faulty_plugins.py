"""A distribution with one plugin of every kind that runs in a server. Each of them fails on demand.

`SWITCH` of the installed module `acme_fault` says which call fails and how: ("kind/call", fault),
or ("*", fault) for all calls. With the environment variable FAULT, the file with that name says it,
as "kind/call:fault".
"""

from __future__ import annotations

from pathlib import Path

from server_process import PROBE_MODULE, PROBE_SOURCE

from pegboard_testing.fake_distributions import FakeDistributions, spec_source

FAULT = '''
import os, threading, time

SWITCH = ["", ""]
"""The call that fails, and how."""

SEEN = []
"""(call, is in the main thread) of every call that failed."""

RELEASE = threading.Event()
"""Set: whoever hangs goes on."""

SAYS = []
"""Texts that the model writes at the end of the next messages."""

def fault(here, call=lambda: None):
    """Make a call, which fails if it is meant to."""
    place, what = SWITCH
    if path := os.environ.get("FAULT"):
        place, _, what = open(path).read().partition(":") if os.path.exists(path) else ("", "", "")
    if place not in (here, "*"):
        return call()
    SEEN.append((here, threading.current_thread() is threading.main_thread()))
    if what == "raise":
        raise ZeroDivisionError("no luck")
    if what == "exit":
        os._exit(7)
    if what == "slow":
        time.sleep(0.01)
    while what == "hang" and not RELEASE.is_set():
        time.sleep(0.001)
    return Nonsense() if what == "wrong type" else call()


class Nonsense:
    """A value that no call should return."""
'''

BASES = {
    # kind: (class, the methods that fail)
    "model_source": ("acme_bases:Source", "fetch"),
    "weight_loader": ("acme_bases:Loader", "describe tensors"),
    "platform": ("pegboard_platform_cpu.platform:CPUPlatform", "start"),
    "executor": ("pegboard_executor_local.in_process:InProcessExecutor", "start submit"),
    "model": ("pegboard_testing.fake_parts:TinyModel", "forward logits"),
    "quantization": ("acme_bases:Method", "linear"),
    "attention": ("acme_bases:Paged", "kv_spec plan"),
    "sampler": ("pegboard_sampler_torch.sampler:TorchSampler", "add sample"),
    "draft": ("acme_bases:Proposer", "propose"),
    "logits_processor": ("acme_bases:Processor", "apply"),
    "lora_resolver": ("acme_bases:Resolver", "resolve"),
    "kv_connector": ("acme_bases:Connector", "match plan"),
    "scheduling_policy": ("acme_bases:Policy", "budget waiting"),
    "structured_output": ("acme_bases:Grammars", "reject compile fill"),
    "metrics": ("acme_bases:Sink", "publish"),
    "tokenizer": ("acme_bases:Letters", "render encode"),
    "tool_parser": ("pegboard_testing.fake_parsers:FakeToolParser", "feed finish"),
    "reasoning_parser": ("pegboard_testing.fake_parsers:FakeReasoningParser", "feed"),
    "builtin_tool": ("pegboard_testing.fake_builtin_tool:FakeBuiltinTool", "start session"),
}

SPECIAL = {
    # what only some plugins need in their class
    "quantization": """
    def linear(self, layer):
        return fault("quantization/linear", lambda: Weight(super(Plugin, self).linear(layer)))
""",
    "attention": """
    @staticmethod
    def kv_spec(layer, dtype):
        return fault("attention/kv_spec", lambda: Base.kv_spec(layer, dtype))

    def bind(self, layer):
        bound = super().bind(layer)
        return lambda *args: fault("attention/the bound call", lambda: bound(*args))
""",
    "structured_output": """
    def compile(self, constraint):
        return fault("structured_output/compile", lambda: Fork(super(Plugin, self).compile(constraint)))

    def fill(self, grammars, masks):
        return fault("structured_output/fill", lambda: super(Plugin, self).fill([fork.inner for fork in grammars], masks))
""",  # noqa: E501
    "builtin_tool": """
    def session(self, *args):
        return fault("builtin_tool/session", lambda: Session(super(Plugin, self).session(*args)))
""",
    "lora_resolver": """
    async def resolve(self, name):
        found = await super().resolve(name)
        return fault("lora_resolver/resolve", lambda: found)
""",
    "tokenizer": """
    def stream(self, prompt_token_ids, *, skip_special_tokens):
        return Stream(skip_special_tokens)
""",
}

AFTER = {
    "quantization": """
class Weight:
    def __init__(self, inner): self.inner = inner
    def declare(self, available): return self.inner.declare(available)
    def accept(self, piece): return fault("quantization/accept", lambda: self.inner.accept(piece))
    def finish(self): self.inner.finish()
    def tensors(self): return self.inner.tensors()
    def dequantize(self): return self.inner.dequantize()
    def bind(self, kernels):
        bound = self.inner.bind(kernels)
        return lambda x: fault("quantization/the bound call", lambda: bound(x))
""",
    "structured_output": """
class Fork:
    def __init__(self, inner): self.inner = inner
    def accept(self, token_ids): return fault("structured_output/accept", lambda: self.inner.accept(token_ids))
    def rollback(self, num_tokens): self.inner.rollback(num_tokens)
    def fork(self): return Fork(self.inner.fork())
""",  # noqa: E501
    "builtin_tool": """
from pegboard.interfaces.builtin_tool import ToolOutput

class Session:
    def __init__(self, inner): self.inner = inner
    def functions(self): return self.inner.functions()
    async def run(self, name, arguments): return fault("builtin_tool/run", lambda: ToolOutput("3"))
    async def close(self): await self.inner.close()
""",
    "tokenizer": """
from acme_fault import SAYS
from pegboard_testing.fake_client import ByteStream

class Stream(ByteStream):
    def push(self, token_ids):
        return fault("tokenizer/push", lambda: super(Stream, self).push(token_ids))

    def flush(self):
        return SAYS.pop() if SAYS else super().flush()
""",
    "kv_connector": """
from pegboard.data.batch import TransferReport

class Worker:
    def __init__(self, options, setup): pass
    def register(self, views, groups): pass
    def save(self, plan): assert plan == b""
    def begin(self, plan): assert plan == b""
    def end(self): return fault("kv_connector/end in the worker", lambda: TransferReport())
    def close(self): pass
""",
    "logits_processor": """
def validate(params):
    return fault("logits_processor/validate")
""",
}

MODULES = {
    "acme_fault": FAULT,
    "acme_bases": '''
import numpy as np
from pathlib import Path

from pegboard.data.batch import CSR
from pegboard.interfaces.draft import Drafts
from pegboard.interfaces.kv_connector import Match, Release
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard_testing.fake_client import ByteTokenizer
from pegboard_testing.fake_policy import FakePolicy
from pegboard_testing.fake_structured_output import FakeStructuredOutput


class Source:
    def __init__(self, options, setup): pass
    def fetch(self, reference, wanted, progress): return LocalFiles(Path(__file__))


class Loader:
    def __init__(self, options, setup): pass

    def describe(self, files):
        from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload

        config = {"vocab_size": 61, "max_position_embeddings": 64, "num_hidden_layers": 2}
        return Checkpoint(format="acme", path=files.root, config=config, architectures=("Acme",), tensors={},
                          tokenizer=TokenizerPayload("acme"), dtype="float32")

    def tensors(self, checkpoint, wanted):
        from pegboard_testing.fake_parts import RandomLoader

        return RandomLoader(None, None).tensors(checkpoint, wanted)


def __getattr__(name):
    """What needs torch is imported when it is asked for."""
    from pegboard_testing import fake_parts
    if name == "Paged":
        return fake_parts.FakePagedAttention
    if name == "Method":
        return fake_parts.FakeMethod
    raise AttributeError(name)


class Proposer:
    def __init__(self, options, setup): pass
    def add(self, row, token_ids): pass
    def remove(self, rows): pass
    def propose(self, step): return Drafts([np.ones(min(1, most), np.int32) for most in step.max_drafts])


class Processor:
    argmax_invariant = False

    def __init__(self, options, setup): pass
    def update(self, added, removed): pass
    def apply(self, logits, rows, depth, drafts): return logits


class Connector:
    def __init__(self, options, setup): pass
    def match(self, request, num_local_tokens): return Match(0)
    def allocated(self, request, blocks, num_external_tokens): pass
    def plan(self, batch): return b""
    def released(self, request, blocks, why): return Release()
    def update(self, reports): pass
    def reset(self): pass


class Resolver:
    """Every name is that of an adapter that changes nothing."""
    def __init__(self, options, setup): pass
    async def resolve(self, name): return Path(__file__).parent


def read_adapter(folder, checkpoint):
    return 1.0, {}


class Policy(FakePolicy):
    def __init__(self, options, setup): super().__init__(setup)
    def observe(self, load, times): pass


class Grammars(FakeStructuredOutput):
    def __init__(self, options, setup): super().__init__(61, [1])


class Sink:
    def __init__(self, options, setup): pass
    def declare(self, metrics): pass
    def publish(self, sample): pass
    def close(self): pass


class Letters(ByteTokenizer):
    """A vocabulary of 61 tokens."""
    def __init__(self, options, setup): pass
    def encode(self, text, *, add_special_tokens): return [2 + ord(letter) % 59 for letter in text[-40:]]
    def vocabulary(self): return Vocabulary([b"x"] * 61, frozenset(), (1,), 0)
''',  # noqa: E501
    "acme_kernel": """
from acme_fault import fault
from pegboard.interfaces.kernel import KernelSpec

SPEC = KernelSpec(api="1.0", implementation="acme_kernel:op", supports={"dtype": {"float32"}})

def op(*args, **more):
    from pegboard.ops import REFERENCES
    return fault("kernel/an op", lambda: REFERENCES["rms_norm"](*args, **more))
""",
    "acme_hooks": """
from acme_fault import fault

def pegboard_amend_config(draft):
    return fault("hooks/amend_config")

def pegboard_model_loaded(model):
    return fault("hooks/model_loaded")
""",
    (
        "acme_api_sink"
    ): "from acme_fault import fault\nfrom acme_bases import Sink\n\nclass Plugin(Sink):\n"
    "    def publish(self, sample):\n        return fault('metrics/publish in the API process')\n",
    PROBE_MODULE: PROBE_SOURCE.replace(
        "        return JSONResponse(",
        "        from acme_fault import fault\n"
        "        if (wrong := fault('api/a route')) is not None:\n            return wrong\n      "
        "  return JSONResponse(",
    ),
}

FIELDS: dict[str, dict[str, object]] = {
    "attention": {
        "supports": {
            "dtype": {"float32"},
            "kv_dtype": {"float32"},
            "head_dim": True,
            "block_size": True,
        }
    },
    "builtin_tool": {"supports": {"type": frozenset({"mcp"})}},
    "draft": {"supports": {"max_drafts": True}},
    "kv_connector": {"worker": "acme_kv_connector:Worker"},
    "logits_processor": {"validate": "acme_logits_processor:validate"},
    "quantization": {"supports": {"dtype": {"float32"}}},
    "structured_output": {"supports": {"constraint": frozenset({"grammar"})}},
    "tokenizer": {"supports": {"payload": frozenset({"acme"})}},
    "weight_loader": {"file_patterns": ("acme_bases.py",), "adapters": "acme_bases:read_adapter"},
}
NAMES = {"model": "Acme", "quantization": "none"}


def install(site: Path) -> FakeDistributions:
    """Write the distribution acme-faults 1.0 to a folder, which must be on sys.path."""
    fakes = FakeDistributions(site)
    modules = dict(MODULES)
    entries = {}
    for kind, (base, methods) in BASES.items():
        modules[f"acme_{kind}"] = _plugin(kind, base, methods.split())
        modules[f"acme_{kind}_spec"] = spec_source(
            kind, implementation=f"acme_{kind}:Plugin", **FIELDS.get(kind, {})
        )
        entries[kind] = {NAMES.get(kind, "acme"): f"acme_{kind}_spec:SPEC"}
    api_sink = spec_source(
        "metrics", "API_SINK", implementation="acme_api_sink:Plugin", process="api"
    )
    modules["acme_metrics_spec"] += api_sink
    entries["metrics"]["acme-api"] = "acme_metrics_spec:API_SINK"
    entries |= {
        "kernel": {"rms_norm.acme": "acme_kernel:SPEC"},
        "api": {"probe": f"{PROBE_MODULE}:SPEC"},
    }
    fakes.add(
        "acme-faults",
        {**entries, "hooks": {"acme": "acme_hooks"}},
        modules,
        requires=["pegboard", "starlette"],
    )
    return fakes


def _plugin(kind: str, base: str, methods: list[str]) -> str:
    """The source of a plugin whose methods fail on demand."""
    module, _, name = base.partition(":")
    lines = [
        f"from {module} import {name} as Base",
        "from acme_fault import fault",
        "",
        "",
        "class Plugin(Base):",
    ]
    for method in methods:
        if f"def {method}(" in SPECIAL.get(kind, ""):
            continue
        place = "metrics/publish in the engine" if kind == "metrics" else f"{kind}/{method}"
        lines += [
            f"    def {method}(self, *args, **more):",
            f'        return fault("{place}", lambda: super(Plugin, self).{method}(*args, **more))',
            "",
        ]
    return "\n".join(lines) + SPECIAL.get(kind, "") + AFTER.get(kind, "")
