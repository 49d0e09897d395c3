"""Everything that needs a GPU, in one run: first whether kernels and models are right, then how
fast they are. It writes one JSON.

    python tests/gpu/measure.py                                    # on a GPU
    python tests/gpu/measure.py --device cpu --interpret --tiny    # the script itself, in Triton's
    interpreter

A part that is already in the JSON and right is not run again, so a run that was cut off can be
resumed. Only the roofs are measured in every run. After `--minutes`, no further part is started.
Parts run in processes of their own, a group of them in each; one that breaks its process, or takes
too long, is recorded as failed, and the next one runs in a new process.

Errors are relative norms, against float64 on the same device. Rates are shown with their share of
the roof that the same run has measured: a large copy for memory, and torch's product of two large
matrices for arithmetic.
"""

from __future__ import annotations

from measure_driver import main

if __name__ == "__main__":
    raise SystemExit(main())
