"""What all APIs check of the engine's outputs."""

from __future__ import annotations

from pegboard.data.output import RequestOutput
from pegboard.errors import PegboardError


def check_finished(output: RequestOutput) -> None:
    """Raise PegboardError if the engine gave up a completion."""
    if any(completion.finish_reason == "error" for completion in output.outputs):
        raise PegboardError(
            f"request {output.request_id} failed in the engine; the log of the server says why"
        )
