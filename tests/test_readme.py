"""README says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.readme_tables import rewritten
from tests.test_config import BAD_SECTIONS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_generated_tables_are_up_to_date():
    assert rewritten(README) == README, "run python scripts/readme_tables.py"
    assert "tide.capture.sample_rate" in README
    assert "vllm_tide:captured_rows_total" in README


def test_bad_input_table_quotes_real_sentences():
    sentences = {sentence for _, sentence in BAD_SECTIONS}
    quoted = re.findall(r"\| `(tide[.:][^`]*)` \|$", README, flags=re.MULTILINE)
    assert quoted
    assert set(quoted) <= sentences


def test_every_path_in_the_layout_map_exists():
    layout = README.split("## Layout")[1]
    paths = re.findall(r"^\| `([a-z_./]+)` \| ", layout, flags=re.MULTILINE)
    assert len(paths) >= 10
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing == []
