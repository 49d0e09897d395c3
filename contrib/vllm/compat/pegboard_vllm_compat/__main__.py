"""`python -m pegboard_vllm_compat …` is the same as `pegboard vllm-compat …`."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["vllm-compat"]
    runpy.run_module("pegboard", run_name="__main__")
