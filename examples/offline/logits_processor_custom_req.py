"""A logits processor for single requests: a function that gets the request's tokens and the logits
of the next one. A function makes it from the request's parameters.

python examples/offline/logits_processor_custom_req.py [--model MODEL]
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pegboard import LLM, SamplingParams


def processor_of(params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None:
    """Count up from `target_token`, if the request has one."""
    target = (params.extra_args or {}).get("target_token")
    if target is None:
        return None

    def count(output_ids: list[int], logits: Tensor) -> Tensor:
        forced = torch.full_like(logits, -torch.inf)
        forced[target + len(output_ids)] = 0.0
        return forced

    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    sys.path.insert(0, str(Path(__file__).parent))  # the engine imports this module
    plain = SamplingParams(temperature=0, max_tokens=4)
    forced = SamplingParams(temperature=0, max_tokens=4, extra_args={"target_token": 30})
    with LLM(
        parser.parse_args().model,
        logits_processors=["per_request"],
        plugin_options={
            "logits_processor.per_request": {"make": "logits_processor_custom_req:processor_of"}
        },
    ) as llm:
        for output in llm.generate(["Hello, my name is"] * 2, [plain, forced], use_tqdm=False):
            print(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
