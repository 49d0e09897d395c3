"""A whole engine with fakes, and the answers that it must give. The tests of the engine and of the
front use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from pegboard.config.limits import Limits
from pegboard.data.request import EngineRequest, PositionLogprobs, RequestDelta
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.actions import Action, R
from pegboard.engine.engine import Engine, EngineParts
from pegboard.engine.grammar.compiler import GrammarCompiler
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.kv.events import KVEvents
from pegboard.engine.kv.plan import blocks_per_request, plan_kv
from pegboard.engine.kv.special_rules import make_rule
from pegboard.engine.metrics.step import StepMetrics
from pegboard.errors import ModelError
from pegboard.interfaces.attention import Full, KVPlan, Retain
from pegboard.interfaces.draft import DraftProposer, DraftSetup
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard.interfaces.metrics import MetricsSink
from pegboard.interfaces.scheduling_policy import SchedulingPolicy, SchedulingPolicySetup
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard_testing.engine_invariants import EngineInvariants
from pegboard_testing.fake_connectors import Halves
from pegboard_testing.fake_draft import FakeDraft
from pegboard_testing.fake_executor import FakeExecutor
from pegboard_testing.fake_model import FakeModel, cross_rows, fake_kv_spec, media_tokens
from pegboard_testing.fake_policy import FakePolicy
from pegboard_testing.fake_structured_output import FakeStructuredOutput
from pegboard_testing.fake_worker import FakeWorker

EOS = 1
"""End of sequence in the fake vocabulary."""

LIMITS = {
    "max_model_len": 64,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "vocab_size": 64,
    "block_size": 4,
}


@dataclass(slots=True)
class Result:
    """The merged deltas of one completion."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    deltas: list[RequestDelta] = field(default_factory=list)


class FakeEngine:
    """An Engine with access to its fakes. Every option has a small default.

    retains: the retention rule of each layer of the model. slot_bytes: bytes per token (or state)
    of each layer. num_blocks: the exact number of blocks; by default, spare_blocks more than the
    longest request needs. plan: another KV plan. identity: of what the blocks contain. draft: makes
    the proposer, if max_drafts > 0. kv: makes the halves of a KV connector. measured: more
    arguments of StepMetrics. reports_kv_events: as if a sink asked for them. parts: fields of
    EngineParts. limits: fields of Limits.
    """

    results: dict[tuple[str, int], Result]

    def __init__(
        self,
        retains: Sequence[Retain] = (Full(),),
        *,
        slot_bytes: Sequence[int] = (),
        num_blocks: int | None = None,
        spare_blocks: int = 40,
        plan: KVPlan | None = None,
        identity: str = "",
        draft: Callable[[DraftSetup], DraftProposer] = FakeDraft,
        kv: Callable[[KVConnectorSetup], Halves] | None = None,
        policy: SchedulingPolicy | None = None,
        by_priority: bool = False,
        structured_output: FakeStructuredOutput | None = None,
        metrics: Sequence[MetricsSink] = (),
        measured: Mapping[str, Any] | None = None,
        failing_step: int | None = None,
        reports_kv_events: bool = False,
        parts: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        self.limits = Limits(**{**LIMITS, **limits})
        self.plan = replace(
            plan or self._plan(retains, slot_bytes, num_blocks, spare_blocks), identity=identity
        )
        self.model = FakeModel(
            [group.spec.retain for group in self.plan.groups], self.limits.vocab_size
        )
        self.kv_events = KVEvents(self.plan) if reports_kv_events else None
        halves = kv(self._connector_setup()) if kv else None
        self.connector = halves[0] if halves else None
        proposer = draft(DraftSetup(self.limits)) if self.limits.max_drafts else None
        self.worker = FakeWorker(
            self.model,
            self.plan,
            self.limits.max_num_seqs,
            proposer=proposer,
            max_drafts=self.limits.max_drafts,
            ahead_rows=self.limits.max_draft_rows if self.limits.drafts_ahead else None,
            connectors={"fake": halves[1]} if halves else None,
            failing_step=failing_step,
        )
        self.worker.encoder_limits = (
            self.limits.max_num_encoder_input_tokens,
            self.limits.encoder_cache_size,
        )
        if isinstance(proposer, FakeDraft):
            proposer.target = self.worker.next_of_row
        self.executor = FakeExecutor(self.worker)
        given = dict(parts or {})
        clock = given.setdefault("clock", time.time)
        self.policy = policy or FakePolicy(
            SchedulingPolicySetup(self.limits), by_priority=by_priority
        )
        fakes = EngineParts(
            executor=self.executor,
            policy=self.policy,
            kv_plan=self.plan,
            limits=self.limits,
            connectors={"fake": halves[0]} if halves else {},
            grammars=self._grammars(structured_output),
            metrics=StepMetrics(self.limits, metrics, clock=clock, **(measured or {})),
            has_priority=by_priority,
            kv_events=self.kv_events,
            modules={
                type(self.policy).__module__: f"scheduling_policy {type(self.policy).__name__}"
            },
            describe_update=self._describe,
            **given,
        )
        self.engine = Engine(fakes)
        self.results, self.invariants = {}, EngineInvariants(self.engine, self.executor)

    def _connector_setup(self) -> KVConnectorSetup:
        expired = [
            make_rule(group, self.plan.hash_block_size).unneeded for group in self.plan.groups
        ]
        events = self.kv_events.of if self.kv_events is not None else None
        return KVConnectorSetup(self.plan, expired=expired, events=events)

    def _describe(self, path: str) -> Checkpoint:
        """Return an empty checkpoint. Its digest is its name. There is none below `missing`."""
        folder = Path(path)
        if folder.parent.name == "missing":
            raise ModelError(f"the checkpoint {path} does not exist")
        tokenizer = TokenizerPayload("fake")
        return Checkpoint(
            format="fake",
            path=folder,
            config={},
            architectures=(),
            tensors={},
            tokenizer=tokenizer,
            digest=folder.name,
        )

    def _grammars(self, backend: FakeStructuredOutput | None) -> Grammars:
        compiler = (
            GrammarCompiler({"fake": backend}, timeout_s=backend.timeout_s)
            if backend
            else GrammarCompiler({})
        )
        return Grammars(compiler, vocab_size=self.limits.vocab_size)

    def _plan(
        self,
        retains: Sequence[Retain],
        slot_bytes: Sequence[int],
        num_blocks: int | None,
        spare_blocks: int,
    ) -> KVPlan:
        limits = self.limits
        layers = enumerate(zip(retains, slot_bytes or [4] * len(retains), strict=True))
        specs = {i: fake_kv_spec(retain, slot_bytes=size) for i, (retain, size) in layers}

        def with_blocks(count: int) -> KVPlan:
            return plan_kv(specs, 0, limits, num_blocks_override=count)

        if num_blocks is not None:
            return with_blocks(num_blocks)
        roomy = with_blocks(1 << 20)
        return with_blocks(
            1 + blocks_per_request(roomy, limits.max_model_len, limits.chunk_tokens) + spare_blocks
        )

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        **fields: Any,
    ) -> None:
        """Add a request with the given prompt tokens."""
        params = params or SamplingParams(temperature=0.0)
        self.engine.add(
            EngineRequest(
                request_id=request_id, prompt_token_ids=list(prompt), params=params, **fields
            )
        )

    def step(self) -> list[RequestDelta]:
        """Run one engine step, check the engine's invariants, and merge the deltas into
        `results`."""
        deltas = self.engine.step()
        self.invariants.check()
        for delta in deltas:
            result = self.results.setdefault((delta.request_id, delta.index), Result())
            assert result.finish_reason is None, (
                f"{delta.request_id} got a delta after its last one"
            )
            result.token_ids.extend(delta.token_ids)
            result.finish_reason = delta.finish_reason
            result.stop_reason = delta.stop_reason
            result.deltas.append(delta)
        return deltas

    def run(self, max_steps: int = 5000) -> dict[tuple[str, int], Result]:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return self.results
            self.step()
        raise AssertionError(f"no end after {max_steps} steps: {self.engine.stats()}")

    def ask(self, action: Action[R], max_steps: int = 300) -> R:
        """Carry out an action, step until it is done, and return its answer."""
        future = self.engine.control(action)
        for _ in range(max_steps):
            if future.done():
                return future.result()
            self.step()
        raise AssertionError(f"{action} did not end after {max_steps} steps")

    def generate(
        self, prompt: Sequence[int], params: SamplingParams | None = None, **fields: Any
    ) -> Result:
        """Run one request to its end, together with any others that are present."""
        request_id = f"r{len(self.results)}-{len(prompt)}"
        self.add(request_id, prompt, params, **fields)
        self.run()
        return self.results[request_id, 0]

    def check_results(self, requests: Mapping[str, EngineRequest]) -> None:
        """Check that every result is what the model says, and that of an aborted request its
        beginning. requests: by id."""
        for (request_id, index), result in self.results.items():
            tokens, reason = expected_tokens(self.model, requests[request_id], index=index)
            if result.finish_reason == "abort":
                tokens = tokens[: len(result.token_ids)]
                reason = "abort"
            assert (result.token_ids, result.finish_reason) == (tokens, reason)

    def check_idle(self) -> None:
        """Check that everything has been released: no references, no rows, no pins, no adapters in
        use, no stored requests."""
        stats = self.engine.stats()
        assert (
            stats["num_requests_running"]
            == stats["num_requests_waiting"]
            == stats["num_steps_in_flight"]
            == 0
        )
        self.invariants.check_idle()
        holding = getattr(self.connector, "holding", None)
        assert not holding, f"never released: {holding}"
        unknown = [
            row
            for row, state in enumerate(self.worker.rows)
            if state and row not in self.engine._live.rows._removed
        ]
        assert not unknown, f"the worker was never told that these rows are free: {unknown}"


def scored_prompt(delta: RequestDelta) -> list[int]:
    """Return the prompt tokens that the delta has logprobs of."""
    encoded = delta.prompt_logprobs
    positions = msgspec.msgpack.decode(encoded, type=list[PositionLogprobs]) if encoded else []
    return [position.token_ids[0] for position in positions]


def expected_tokens(
    model: FakeModel,
    request: EngineRequest,
    *,
    index: int = 0,
    max_model_len: int = 64,
    allowed: Callable[[list[int]], list[int]] | None = None,
) -> tuple[list[int], str]:
    """Return (output tokens, finish reason) that completion `index` must get, computed without an
    engine. allowed: outputs so far → token ids that a grammar allows."""
    params = request.params
    outputs: list[int] = []
    seed = None if params.seed is None else params.seed + index
    tokens = list(request.prompt_token_ids)
    rows = media_tokens(request.media)
    while True:
        token = model.next_token(
            [rows.get(position, token) for position, token in enumerate(tokens)],
            seed=seed,
            lora_id=request.lora.lora_int_id if request.lora else 0,
            allowed=allowed(outputs) if allowed else None,
            rows=cross_rows(request.media),
        )
        tokens.append(token)
        outputs.append(token)
        if len(outputs) >= params.min_tokens and token in params.all_stop_token_ids:
            return outputs, "stop"
        if len(tokens) >= max_model_len or (
            params.max_tokens is not None and len(outputs) >= params.max_tokens
        ):
            return outputs, "length"
