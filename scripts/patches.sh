#!/usr/bin/env bash
# Edit the patch series as git commits.
#
#   scripts/patches.sh import [DIR]   create DIR: pristine vLLM, then one commit per patch
#   scripts/patches.sh export [DIR]   rewrite patches/ from the commits of DIR
#   scripts/patches.sh rebase VERSION [DIR]   apply patches/ to another release and report
#
# DIR defaults to $TIDE_PATCHTREE or .patchtree. In DIR the tag `wheel` is the Python
# source of the CPU wheel (the base of the commits) and the tag `sdist` that of the sdist
# (the GPU wheel's version of the few files that differ). Export is byte-stable: an import
# followed by an export changes nothing. The file of an unchanged commit is kept, because
# its hunks may have less context than git writes: only the context common to all releases.
# The manifest also covers the sdist of the newer release that the patches fit.
#
# Rebase imports DIR if it does not exist, and applies the patches to the sources of
# VERSION with git am --3way. It prints a line per patch: `applies`, `moved` (to other
# lines, or merged because lines around it changed: read it), `upstream already`, or
# `conflict` with its files; exit 1 after a conflict. DIR gets the tag vllm-VERSION and
# the branch patches-VERSION with the patches that fit.
#
# PYTHON (default: python3) needs pip. The archives are downloaded with pip's configuration
# to the folder TIDE_VLLM_ARCHIVES, if it is set; archives already there are used.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
export LC_ALL=C
version=0.32.0
newer=0.33.0
patches=$here/patches
action=${1:-}
[ "$action" != rebase ] || { release=${2:-}; shift || :; }
tree=${2:-${TIDE_PATCHTREE:-$here/.patchtree}}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

die() { echo "patches.sh: $*" >&2; exit 1; }
tide() { PYTHONPATH=$here "$python" -m vllm_tide.cli.main "$@"; }

# Commit with fixed dates, so that the commit id depends on the content only.
commit_base() {
    local tag=$1
    git add --all
    GIT_AUTHOR_DATE='2026-01-01T00:00:00Z' GIT_COMMITTER_DATE='2026-01-01T00:00:00Z' \
        git commit --quiet --message "vLLM ${2:-$version} ($tag)"
    git tag --force "$tag" > /dev/null
}

# unpack_sdist ARCHIVE DIR: unpack vllm/**/*.py.
unpack_sdist() {
    "$python" - "$@" <<'PY'
import sys, tarfile
with tarfile.open(sys.argv[1]) as archive:
    for member in archive:
        _, _, name = member.name.partition("/")
        plain = member.isfile() and ".." not in name.split("/")
        if plain and name.startswith("vllm/") and name.endswith(".py"):
            member.name, member.mode = name, 0o644
            # Python 3.11.3 and older have no filters.
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extract(member, sys.argv[2], **safe)
PY
}

# same_commit FILE COMMIT: succeed if the patch FILE applied to the parent gives COMMIT.
same_commit() {
    local was=$scratch/was show=(log -1 --format=%T%n%an%n%ae%n%at%n%B)
    git -C "$was" checkout --quiet --force --detach "$2^"
    if ! git -C "$was" am --quiet "$1" > /dev/null 2>&1; then
        git -C "$was" am --abort
        return 1
    fi
    [ "$(git -C "$was" "${show[@]}")" = "$(git -C "$was" "${show[@]}" "$2")" ]
}

import_tree() {
    [ ! -e "$tree" ] || die "$tree exists; remove it or give another folder"
    local archives sdist wheel
    archives=${TIDE_VLLM_ARCHIVES:-$scratch}
    sdist=$("$python" "$here/scripts/fetch_vllm.py" sdist "$archives" | tail -1)
    wheel=$("$python" "$here/scripts/fetch_vllm.py" wheel "$archives" | tail -1)
    mkdir -p "$tree" "$scratch/unpacked"
    unpack_sdist "$sdist" "$scratch/unpacked/sdist"
    "$python" - "$wheel" "$scratch/unpacked/wheel" <<'PY'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as archive:
    for name in archive.namelist():
        if name.startswith("vllm/") and name.endswith(".py"):
            archive.extract(name, sys.argv[2])
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
    [ -d "$tree/.git" ] || die "$tree is not a patch tree: run 'scripts/patches.sh import'"
    [ -z "$(git -C "$tree" status --porcelain)" ] || die "$tree has uncommitted changes"
    local commit name file old sdist
    mkdir -p "$scratch/new" "$patches/vllm-$version"
    git -C "$tree" worktree add --quiet --detach "$scratch/was" wheel
    {
        echo "# The order in which the patches apply. Written by scripts/patches.sh export."
        for commit in $(git -C "$tree" rev-list --reverse wheel..HEAD); do
            name=$(git -C "$tree" log -1 --format=%s "$commit" | tr '[:upper:]' '[:lower:]' |
                sed -E 's/[^a-z0-9]+/-/g; s/^-+//; s/-+$//')
            [ ! -e "$scratch/new/$name.patch" ] || die "two commits are named $name"
            old=$patches/vllm-$version/$name.patch
            if [ -e "$old" ] && same_commit "$old" "$commit"; then
                cp "$old" "$scratch/new/"
            else
                git -C "$tree" -c core.abbrev=40 -c diff.algorithm=myers \
                    -c diff.noprefix=false -c diff.mnemonicPrefix=false \
                    format-patch -1 --stdout --zero-commit --no-signature --full-index \
                    --no-stat --no-numbered --no-renames --unified=3 \
                    "$commit" > "$scratch/new/$name.patch"
            fi
            echo "$name"
        done
    } > "$scratch/series"
    git -C "$tree" worktree remove --force "$scratch/was"
    sdist=$("$python" "$here/scripts/fetch_vllm.py" sdist "$newer" \
        "${TIDE_VLLM_ARCHIVES:-$scratch}" | tail -1)
    unpack_sdist "$sdist" "$scratch/newer"
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
        --pristine "$scratch/wheel" --pristine "$scratch/sdist" \
        --pristine "$scratch/newer"
}

# fit PATCH: commit the patch here if it fits; print the verdict.
fit() {
    local patch=$1 way='' head lines files
    head=$(git rev-parse HEAD)
    lines=$(git apply --check --verbose "$patch" 2>&1) || way=--3way
    if ! git am --quiet $way "$patch" > "$scratch/am.log" 2>&1; then
        files=$(git diff --name-only --diff-filter=U | paste -sd ' ')
        git am --abort
        echo "conflict in ${files:-$(sed -n 's/^error: //p' "$scratch/am.log" | head -1)}"
    elif [ -z "$way" ]; then
        lines=$(grep -c 'succeeded at' <<< "$lines") || { echo applies; return; }
        echo "moved (hunks at other lines: $lines)"
    elif [ "$head" = "$(git rev-parse HEAD)" ]; then
        echo "upstream already"
    else
        echo "moved (merged, because lines around it changed: read it)"
    fi
}

parses() {
    "$python" -c 'import ast, sys; ast.parse(sys.stdin.buffer.read())' 2> /dev/null
}

rebase_series() {
    [ -n "$release" ] || die "rebase: give the release, such as $newer"
    local sdist name verdict total=0 conflicts=0 broken=0
    tree=$(realpath -m "$tree")
    if [ ! -d "$tree/.git" ]; then
        import_tree
    fi
    sdist=$("$python" "$here/scripts/fetch_vllm.py" sdist "$release" \
        "${TIDE_VLLM_ARCHIVES:-$scratch}" | tail -1)
    unpack_sdist "$sdist" "$scratch/release"
    git -C "$tree" worktree prune
    git -C "$tree" worktree add --quiet --detach "$scratch/onto" wheel
    cd "$scratch/onto"
    git checkout --quiet --orphan "unborn-$release"
    git rm --quiet -rf .
    cp -r "$scratch/release/vllm" .
    commit_base "vllm-$release" "$release"
    git checkout --quiet --detach
    git branch --quiet -D "unborn-$release"
    while read -r name; do
        verdict=$(fit "$patches/vllm-$version/$name.patch")
        echo "$name: $verdict"
        total=$((total + 1))
        [[ $verdict != conflict* ]] || conflicts=$((conflicts + 1))
    done < <(grep -v -e '^#' -e '^$' "$patches/series")
    for name in $(git diff --name-only "vllm-$release" HEAD); do
        if git show "vllm-$release:$name" | parses && ! parses < "$name"; then
            echo "$name: not valid Python after the patches"
            broken=1
        fi
    done
    git branch --force "patches-$release" HEAD
    cd "$here"
    git -C "$tree" worktree remove --force "$scratch/onto"
    echo "vLLM $version to $release: $((total - conflicts)) of $total patches fit"
    [ "$conflicts$broken" = 00 ]
}

case $action in
    import) import_tree ;;
    export) export_tree ;;
    rebase) rebase_series ;;
    *) sed -n '2,22s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
       case ${1:-} in -h | --help) exit 0 ;; esac; exit 2 ;;
esac
