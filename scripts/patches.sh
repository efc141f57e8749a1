#!/usr/bin/env bash
# Edits the patch series as git commits.
#
#   scripts/patches.sh import [DIR]   make DIR: pristine vLLM, then one commit per patch
#   scripts/patches.sh export [DIR]   rewrite patches/ from the commits of DIR
#
# DIR defaults to $TIDE_PATCHTREE or .patchtree. In DIR the tag `wheel` is the Python
# source of the CPU wheel (the base of the commits) and the tag `sdist` that of the sdist
# (the GPU wheel's form of the few files that differ). Export is byte-stable: an import
# followed by an export changes nothing.
#
# PYTHON (default: python3) needs pip. The archives are fetched through pip's own
# configuration; TIDE_VLLM_ARCHIVES keeps them in a folder.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
version=0.32.0
patches=$here/patches
action=${1:-}
tree=${2:-${TIDE_PATCHTREE:-$here/.patchtree}}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

die() { echo "patches.sh: $*" >&2; exit 1; }
tide() { PYTHONPATH=$here "$python" -m vllm_tide.cli.main "$@"; }

# A commit id that depends on nothing but the content.
commit_base() {
    local tag=$1
    git add --all
    GIT_AUTHOR_DATE='2026-01-01T00:00:00Z' GIT_COMMITTER_DATE='2026-01-01T00:00:00Z' \
        git commit --quiet --message "vLLM $version ($tag)"
    git tag "$tag"
}

import_tree() {
    [ ! -e "$tree" ] || die "$tree exists; remove it or give another folder"
    local archives sdist wheel
    archives=${TIDE_VLLM_ARCHIVES:-$scratch}
    sdist=$("$python" "$here/scripts/fetch_vllm.py" sdist "$archives" | tail -1)
    wheel=$("$python" "$here/scripts/fetch_vllm.py" wheel "$archives" | tail -1)
    mkdir -p "$tree" "$scratch/unpacked"
    "$python" - "$sdist" "$wheel" "$scratch/unpacked" <<'PY'
import sys, tarfile, zipfile
sdist, wheel, out = sys.argv[1:]
with tarfile.open(sdist) as archive:
    for member in archive:
        _, _, name = member.name.partition("/")
        if member.isfile() and name.startswith("vllm/") and name.endswith(".py"):
            member.name, member.mode = f"sdist/{name}", 0o644
            archive.extract(member, out, filter="data")
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if name.startswith("vllm/") and name.endswith(".py"):
            archive.extract(name, f"{out}/wheel")
PY
    cd "$tree"
    git init --quiet --initial-branch upstream
    git config user.name "vllm_tide maintainers"
    git config user.email "maintainers@vllm-tide.invalid"
    git config core.autocrlf false
    git config gc.auto 0
    cp -r "$scratch/unpacked/sdist/vllm" .
    commit_base sdist
    git checkout --quiet --orphan patches
    git rm --quiet -rf .
    cp -r "$scratch/unpacked/wheel/vllm" .
    commit_base wheel
    grep -v '^#' "$patches/series" 2>/dev/null | while read -r name; do
        [ -z "$name" ] || git am --quiet --committer-date-is-author-date \
            "$patches/vllm-$version/$name.patch" || die "$name does not apply"
    done
    echo "$tree: $(git rev-list --count wheel..HEAD) patches on vLLM $version"
}

export_tree() {
    [ -d "$tree/.git" ] || die "$tree is no patch tree: run 'scripts/patches.sh import'"
    [ -z "$(git -C "$tree" status --porcelain)" ] || die "$tree has uncommitted changes"
    local commit name file
    mkdir -p "$scratch/new" "$patches/vllm-$version"
    {
        echo "# The order in which the patches apply. Written by scripts/patches.sh export."
        for commit in $(git -C "$tree" rev-list --reverse wheel..HEAD); do
            name=$(git -C "$tree" log -1 --format=%s "$commit" | tr '[:upper:]' '[:lower:]' |
                sed -E 's/[^a-z0-9]+/-/g; s/^-+//; s/-+$//')
            [ ! -e "$scratch/new/$name.patch" ] || die "two commits are named $name"
            git -C "$tree" -c core.abbrev=40 -c diff.algorithm=myers \
                -c diff.noprefix=false -c diff.mnemonicPrefix=false \
                format-patch -1 --stdout --zero-commit --no-signature --full-index \
                --no-stat --no-numbered --no-renames --unified=3 \
                "$commit" > "$scratch/new/$name.patch"
            echo "$name"
        done
    } > "$scratch/series"
    for name in wheel sdist; do
        mkdir -p "$scratch/$name"
        git -C "$tree" archive "$name" vllm | tar -x -C "$scratch/$name"
    done
    rm -f "$patches/vllm-$version/"*.patch
    for file in "$scratch/new/"*.patch; do
        [ ! -e "$file" ] || cp "$file" "$patches/vllm-$version/"
    done
    cp "$scratch/series" "$patches/series"
    tide patch check --patches "$patches" --update-manifest \
        --pristine "$scratch/wheel" --pristine "$scratch/sdist"
}

case $action in
    import) import_tree ;;
    export) export_tree ;;
    *) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
