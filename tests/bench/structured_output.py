"""What structured output costs per step: 32 rows decoding JSON on the default model, for each
installed backend.

    python tests/bench/structured_output.py [backend …]

Times the additional work of a constrained step, inside real steps: filling the masks, applying them
to the logits, and advancing the grammars. Prints the median of each in milliseconds and the share
of the whole step.
"""

from __future__ import annotations

import statistics
import sys
import time

from step_shares import Timer

from pegboard import LLM, SamplingParams
from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.grammar.request_grammar import RequestGrammar
from pegboard.plugins.registry import Registry

ROWS = 32
STEPS = 60
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["street", "number"],
        },
    },
    "required": ["name", "tags", "address"],
}


def measure(backend: str | None) -> dict[str, float]:
    """Returns the median milliseconds per step, by part."""
    config = {"backend": backend} if backend else {}
    with LLM(max_model_len=1024, max_num_seqs=ROWS, structured_outputs_config=config) as llm:
        sampler = llm.llm_engine.engine._parts.executor.worker.running.ending.sampler
        parts = {"apply": Timer(sampler, "_apply_masks")}
        structure = StructuredOutputsParams(json=SCHEMA) if backend else None
        params = SamplingParams(
            max_tokens=STEPS + 100, temperature=1.0, min_tokens=STEPS, structured_outputs=structure
        )
        for i in range(ROWS):
            llm.llm_engine.add_request(str(i), f"Person number {i} as JSON:", params)
        while llm.llm_engine.engine.stats()["num_requests_running"] < ROWS:
            llm.llm_engine.step()
        shares: dict[str, list[float]] = {"step": [], "fill": [], "apply": [], "advance": []}
        FILL.take(), ADVANCE.take(), parts["apply"].take()
        for _ in range(STEPS):
            started = time.perf_counter()
            llm.llm_engine.step()
            step = time.perf_counter() - started
            if llm.llm_engine.engine.stats()["num_requests_running"] == ROWS:
                shares["step"].append(step)
                shares["fill"].append(FILL.take())
                shares["apply"].append(parts["apply"].take())
                shares["advance"].append(ADVANCE.take())
        llm.llm_engine.abort_all()
    return {name: statistics.median(values) * 1e3 for name, values in shares.items() if values}


FILL = Timer(Grammars, "masks")
ADVANCE = Timer(RequestGrammar, "accept")


def main() -> None:
    names = sys.argv[1:] or Registry.discover().names("structured_output")
    print(f"{'backend':<20} {'step ms':>8} {'fill':>7} {'apply':>7} {'advance':>8} {'share':>7}")
    for name in [None, *names]:
        found = measure(name)
        more = found["fill"] + found["apply"] + found["advance"]
        print(
            f"{name or '(free)':<20} {found['step']:8.1f} {found['fill']:7.2f} "
            f"{found['apply']:7.2f} {found['advance']:8.2f} {more / found['step']:7.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
