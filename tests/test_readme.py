"""READMEs match the code."""

from __future__ import annotations

import re
import tomllib

from scripts.readme_tables import READMES, ROOT, rewritten
from tests.test_config import BAD_SECTIONS
from vllm_tide.cli.config import example_names
from vllm_tide.config import TideConfig
from vllm_tide.patching import VLLM_VERSIONS

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
    assert README.count("\n") <= 170
    assert len(README.split()) <= 1_700


def test_the_bad_input_table_quotes_real_messages():
    sentences = {sentence for _, sentence in BAD_SECTIONS}
    quoted = re.findall(r"\| `(tide[.:][^`]*)` \|$", REFERENCE, flags=re.MULTILINE)
    assert quoted
    assert set(quoted) <= sentences


def test_the_page_of_examples_has_each_of_them():
    page = (ROOT / "vllm_tide" / "examples" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `([a-z-]+)` ", page, flags=re.MULTILINE)) == sorted(
        example_names()
    )


def test_every_path_in_the_layout_map_exists():
    layout = README.split("## Where things are")[1]
    cells = re.findall(r"^\| (`[^|]*`) \| ", layout, flags=re.MULTILINE)
    paths = re.findall(r"`([a-z_./]+)`", " ".join(cells))
    assert len(paths) >= 10
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_every_link_has_a_target():
    missing = []
    for page in ALL:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
            if not (page.parent / link).exists():
                missing.append(f"{page.relative_to(ROOT)}: {link}")
    assert missing == []


def test_knobs_on_the_first_page_exist():
    section = "|".join(name for name in TideConfig.model_fields)
    named = set(re.findall(rf"`(?:tide\.)?((?:{section})\.[a-z_]+)", README))
    assert {"capture.consent", "train.max_passes", "spool.url"} <= named
    assert [knob for knob in sorted(named) if f"`tide.{knob}`" not in REFERENCE] == []


def test_the_table_of_versions_matches_the_package():
    table = README.split("## Versions and limits")[1]
    [releases] = re.findall(r"^\| vLLM \| ([0-9., ]+) ", table, flags=re.MULTILINE)
    assert tuple(releases.split(", ")) == VLLM_VERSIONS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"| Python | {project['requires-python'].lstrip('>=')} and newer" in table
    assert f"Version\n{project['version'].removesuffix('.0')}," in README
    kernels = (ROOT / "scripts" / "gpu" / "compile_all.py").read_text()
    assert "sm_90" in table
    assert "gfx942" in table and "gfx942" in kernels
