"""Tests; some drive servers with parts of `scripts/` (`bench`, `sim`, `json_text`)."""

import sys
from pathlib import Path

_SCRIPTS = str(Path(__file__).resolve().parents[1] / "scripts")
if _SCRIPTS not in sys.path:
    sys.path.append(_SCRIPTS)
