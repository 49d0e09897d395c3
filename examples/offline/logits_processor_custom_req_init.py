"""A logits processor with options, given as a class. Its constructor reads what the engine is: the
size of the vocabulary, and the largest batch.

python examples/offline/logits_processor_custom_req_init.py [--model MODEL]
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pegboard import LLM, SamplingParams
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup


class LastHalf:
    """Requests with `last_half` choose from the last half of the vocabulary."""

    argmax_invariant = False

    def __init__(self, options: None, setup: LogitsProcessorSetup) -> None:
        self.middle = setup.limits.vocab_size // 2
        self.rows: set[int] = set()

    def update(self, added: Sequence[AddedRow], removed: np.ndarray) -> None:
        self.rows -= set(removed.tolist())
        self.rows |= {each.row for each in added if (each.params.extra_args or {}).get("last_half")}

    def apply(
        self, logits: Tensor, rows: Tensor, depth: Tensor, drafts: Callable[[], list[list[int]]]
    ) -> Tensor:
        for place, row in enumerate(rows.tolist()):
            if row in self.rows:
                logits[place, : self.middle] = -torch.inf
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    plain = SamplingParams(temperature=0, max_tokens=4)
    halved = SamplingParams(temperature=0, max_tokens=4, extra_args={"last_half": True})
    with LLM(parser.parse_args().model, logits_processors=[LastHalf]) as llm:
        for output in llm.generate(["Hello, my name is"] * 2, [plain, halved], use_tqdm=False):
            print(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
