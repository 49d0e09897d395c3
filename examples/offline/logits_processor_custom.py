"""A logits processor for the whole batch, given as a class. A request with `target_token` in its
`extra_args` gets nothing but this token.

python examples/offline/logits_processor_custom.py [--model MODEL]
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pegboard import LLM, SamplingParams
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup


class TargetToken:
    argmax_invariant = False

    def __init__(self, options: None, setup: LogitsProcessorSetup) -> None:
        self.targets: dict[int, int] = {}  # by row

    def update(self, added: Sequence[AddedRow], removed: np.ndarray) -> None:
        for row in removed.tolist():
            self.targets.pop(row, None)
        for each in added:
            target = (each.params.extra_args or {}).get("target_token")
            if target is not None:
                self.targets[each.row] = target

    def apply(
        self, logits: Tensor, rows: Tensor, depth: Tensor, drafts: Callable[[], list[list[int]]]
    ) -> Tensor:
        for place, row in enumerate(rows.tolist()):
            if row in self.targets:
                logits[place] = -torch.inf
                logits[place, self.targets[row]] = 0.0
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    plain = SamplingParams(temperature=0, max_tokens=4)
    forced = SamplingParams(temperature=0, max_tokens=4, extra_args={"target_token": 67})
    with LLM(parser.parse_args().model, logits_processors=[TargetToken]) as llm:
        for output in llm.generate(["Hello, my name is"] * 2, [plain, forced], use_tqdm=False):
            print(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
