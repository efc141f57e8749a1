"""READMEs show what the code does."""

from __future__ import annotations

import re

from scripts.readme_tables import READMES, ROOT, rewritten
from tests.test_config import BAD_SECTIONS

README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "vllm_tide" / "README.md").read_text(encoding="utf-8")
ALL = [
    *ROOT.glob("*.md"),
    *(
        p
        for d in ("vllm_tide", "scripts", "tests", "patches")
        for p in (ROOT / d).rglob("*.md")
    ),
]


def test_generated_tables_are_up_to_date():
    for name in READMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert rewritten(text) == text, "run python scripts/readme_tables.py"
    assert "tide.capture.sample_rate" in REFERENCE
    assert "vllm_tide:captured_rows_total" in REFERENCE
    assert "vllm_tide:trainer_" in REFERENCE


def test_the_first_page_is_short():
    assert README.count("\n") <= 250
    assert len(README.split()) <= 2500


def test_bad_input_table_quotes_real_sentences():
    sentences = {sentence for _, sentence in BAD_SECTIONS}
    quoted = re.findall(r"\| `(tide[.:][^`]*)` \|$", REFERENCE, flags=re.MULTILINE)
    assert quoted
    assert set(quoted) <= sentences


def test_every_path_in_the_layout_map_exists():
    layout = README.split("## Where things are")[1]
    paths = re.findall(r"^\| `([a-z_./]+)` \| ", layout, flags=re.MULTILINE)
    assert len(paths) >= 10
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_every_link_leads_somewhere():
    missing = []
    for page in ALL:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
            if not (page.parent / link).exists():
                missing.append(f"{page.relative_to(ROOT)}: {link}")
    assert missing == []


def test_knobs_that_the_first_page_names_exist():
    table = README.split("## Ten knobs")[1].split("\n## ")[0]
    named = re.findall(r"^\| `([a-z_.]+)` \| ", table, flags=re.MULTILINE)
    assert len(named) == 10
    assert [knob for knob in named if f"`tide.{knob}`" not in REFERENCE] == []
