"""`python -m pegboard_vllm_compat …` is the same as `pegboard vllm-compat …`."""

from __future__ import annotations

import sys

from pegboard.errors import PegboardError, UsageError
from pegboard_vllm_compat.command import run_words

if __name__ == "__main__":
    try:
        code = run_words(sys.argv[1:])
    except UsageError as error:
        print(f"pegboard_vllm_compat: error: {error}", file=sys.stderr)
        code = 2
    except PegboardError as error:
        print(f"pegboard_vllm_compat: error: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)
