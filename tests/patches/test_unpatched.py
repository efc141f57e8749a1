"""An unpatched vLLM with a `tide` section gives the command to run, in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patches.pristine import make_pristine
from vllm_tide.engine.unpatched import FILE_SENTENCE, SENTENCE

ROOT = Path(__file__).parents[2]

# As in `vllm serve` and in `LLM`; vLLM itself finds the plugin and loads it.
PROBE = """
import contextlib, io, json, sys
from types import SimpleNamespace as Args
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
report = []
for value in sys.argv[1:]:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            args = parser.parse_args(["--speculative-config", value])
        report.append(args.speculative_config)
    except SystemExit as ended:
        report.append([ended.code, stderr.getvalue()])
try:
    EngineArgs.create_speculative_config(Args(speculative_config={"tide": {}}))
except ValueError as error:
    report.append(str(error))
print("REPORT", json.dumps(report))
"""


def run(code: str, *args: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{path}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        env=env,
        cwd=path,
        timeout=280,
    )


@pytest.mark.vllm
def test_an_unpatched_vllm_names_the_command(tmp_path):
    pristine = make_pristine(tmp_path / "pristine")
    info = pristine / "vllm_tide-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-tide\nVersion: 0\n"
    )
    plugin = "[vllm.general_plugins]\nvllm_tide = vllm_tide.engine.unpatched:announce\n"
    assert plugin.splitlines()[1].replace(" = ", ' = "') + '"' in (
        ROOT / "pyproject.toml"
    ).read_text(encoding="utf-8")
    (info / "entry_points.txt").write_text(plugin)
    ours, other = tmp_path / "draft.json", tmp_path / "other.json"
    ours.write_text('// a comment\n{"model": "x", "num_speculative_tokens": 3}')
    other.write_text("{}")
    plain = '{"method": "ngram", "num_speculative_tokens": 2}'
    done = run(PROBE, str(ours), '{"tide": {}}', plain, str(other), path=pristine)
    lines = [x for x in done.stdout.splitlines() if x.startswith("REPORT ")]
    assert lines, done.stderr[-3000:]
    results = json.loads(lines[-1].removeprefix("REPORT "))
    file, inline, theirs, foreign, offline = results
    for (code, stderr), sentence in ((file, FILE_SENTENCE), (inline, SENTENCE)):
        assert code == 2
        assert stderr.splitlines()[-1].endswith(f"-sc: {sentence}")
    assert offline == SENTENCE
    assert theirs == json.loads(plain)
    assert foreign[0] == 2 and "patch apply" not in foreign[1]


@pytest.mark.slow
def test_the_plugin_imports_nothing_heavy_and_does_nothing_without_arguments():
    code = (
        "import sys; from vllm_tide.engine.unpatched import announce; announce();"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('vllm', 'vllm_tide', 'torch', 'pydantic', 'numpy')))"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("[")[1].split("]")[0].split(", ") == [
        "'vllm_tide'",
        "'vllm_tide.engine'",
        "'vllm_tide.engine.unpatched'",
    ]


@pytest.mark.vllm
def test_a_patched_vllm_is_not_changed():
    from vllm.engine import arg_utils

    from vllm_tide.engine.unpatched import announce

    before = arg_utils.optional_type, arg_utils.EngineArgs.create_speculative_config
    announce()
    after = arg_utils.optional_type, arg_utils.EngineArgs.create_speculative_config
    assert before == after
