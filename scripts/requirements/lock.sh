#!/usr/bin/env bash
# Rewrite cpu.lock and dev.lock from vLLM's CPU wheel and pyproject.toml.
#
#   PYTHON=python3 scripts/requirements/lock.sh
#
# PYTHON needs uv and packaging (pip install uv packaging). torch and its family are not
# locked: the build depends on the machine, and scripts/install.sh selects it. Requirements
# of torch are locked. The lock has the hashes of every file of a release that this platform
# can install, for all Python versions.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../..
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

wheel=$("$python" "$here/../fetch_vllm.py" wheel "${TIDE_VLLM_ARCHIVES:-$scratch}" | tail -1)
"$python" - "$wheel" "$root/pyproject.toml" "$scratch" <<'PY'
import email, re, sys, tomllib, zipfile
from pathlib import Path

wheel, project, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
with zipfile.ZipFile(wheel) as archive:
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
torch_family = re.compile(r"torch(vision|audio|codec)?\b(?!-)")
requirements = [
    requirement
    for requirement in metadata.get_all("Requires-Dist")
    if "extra ==" not in requirement and not torch_family.match(requirement)
]
tables = tomllib.loads(project.read_text())["project"]
requirements += tables["dependencies"] + tables["optional-dependencies"]["report"]
# What torch 2.13 requires.
# A requirement of only some files of intel-openmp, which uv does not detect.
requirements += ["intel-cmplr-lib-ur==2024.2.1; platform_machine == 'x86_64'"]
requirements += ["sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5"]
(out / "cpu.in").write_text("\n".join(requirements) + "\n")
(out / "dev.in").write_text("\n".join(tables["optional-dependencies"]["dev"]) + "\n")
never = "python_version < '3'"
(out / "overrides").write_text(
    "".join(f"torch{part} ; {never}\n" for part in ("", "vision", "audio", "codec"))
)
PY

lock() {
    local name=$1
    shift
    "$python" -m uv pip compile --quiet --universal --python-version 3.11 \
        --generate-hashes --no-header --no-annotate --no-emit-index-url \
        --overrides "$scratch/overrides" "$@" --output-file "$scratch/$name.lock" \
        "$scratch/$name.in"
    {
        echo "# Written by scripts/requirements/lock.sh; x86-64 Linux, Python >= 3.11."
        cat "$scratch/$name.lock"
    } > "$here/$name.lock"
    "$python" "$here/linux_hashes.py" "$here/$name.lock"
    echo "$here/$name.lock: $(grep -c '==' "$here/$name.lock") pins"
}

lock cpu
lock dev --constraints "$scratch/cpu.lock"
