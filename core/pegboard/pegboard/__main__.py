"""`python -m pegboard` is `pegboard`."""

from __future__ import annotations

import sys

from pegboard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
