"""Makes this folder importable, because the tests here import `report` and other modules from
it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
