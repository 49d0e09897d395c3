"""The process in which `measure.py` runs its parts, so that a part that breaks it does not stop the
others. It reads a line of JSON for each part, and answers with lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


def quiet_output() -> TextIO:
    """Return the standard output, and let everything else that is printed go to the standard
    error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def interpret() -> None:
    """Use Triton's interpreter, with products that are right."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from triton.runtime.interpreter import InterpreterBuilder

    from pegboard_testing.fake_triton import corrected_products

    InterpreterBuilder.create_dot = corrected_products()


def machine(device: str) -> dict[str, Any]:
    """Return what the numbers belong to."""
    import torch
    import triton

    is_gpu = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if is_gpu else device,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main() -> int:
    """Run the parts that are named on the standard input. The first answer is the machine."""
    answers = quiet_output()
    given = json.loads(sys.argv[1])
    if given["interpret"]:
        interpret()

    def answer(kind: str, value: dict[str, Any]) -> None:
        answers.write(json.dumps({kind: value}) + "\n")
        answers.flush()

    answer("machine", machine(given["device"]))
    import torch
    from measure_run import Run
    from measure_stages import BY_NAME

    torch.manual_seed(0)
    run = Run(given["device"], given["tiny"], {}, lambda values: answer("note", values))
    for line in sys.stdin:
        asked = json.loads(line)
        run.results = asked["results"]
        started = time.perf_counter()
        try:
            result = BY_NAME[asked["stage"]].call(run)
        except Exception as failure:  # noqa: BLE001 – the other parts are still worth running
            result = {"right": False, "failed": f"{type(failure).__name__}: {failure}"}
        answer("result", {**result, "took_s": round(time.perf_counter() - started, 2)})
        if "failed" in result and not run.is_usable():
            os._exit(1)  # to end in order would wait for the device
    run.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
