"""A trainer changes the weights of a running engine with a worker extension: `collective_rpc` calls
its methods on every rank. Afterwards the prefix cache is reset, because it holds what the old
weights made.

python examples/offline/rlhf.py [--model MODEL]
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from pegboard import LLM, SamplingParams


class WorkerExtension:
    """The public methods are called on the worker, whose `model` holds the weights."""

    model: Any

    def scale_norm(self, factor: float) -> float:
        """Multiply the last norm's weight, and return its mean."""
        weight = self.model.layers.norm.weight.data
        weight.mul_(factor)
        return float(weight.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    sys.path.insert(0, str(Path(__file__).parent))  # the engine imports this module
    with LLM(parser.parse_args().model, worker_extension_cls="rlhf:WorkerExtension") as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        for factor in (1.0, -1.0, -1.0):
            (mean,) = llm.collective_rpc("scale_norm", args=(factor,))
            llm.reset_prefix_cache()
            (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
            print(f"mean of the norm {mean:.3f}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
