"""A deny-list of words for identifiers, docstrings, comments and messages.

Denied are lone participles, everyday metaphors and personified components, in the
package, the scripts and the tests. `python tests/test_language.py` prints every place.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("vllm_tide", "scripts", "tests")
ALLOWED = {
    ("scripts/bench/harness/server.py", "eager_"),  # vLLM's `enforce_eager`
    ("tests/e2e/test_serve.py", "says"),  # of a prompt
}
# Whole names, or parts of a name between underscores, matched without leading ones.
DENIED_NAMES = frozenset(
    {
        *("found", "kept", "told", "said", "held", "wanted", "given_up", "believed"),
        *(
            "look",
            "looks",
            "looked",
            "lot",
            "doubt",
            "rest",
            "rests",
            "rested",
            "lesson",
        ),
        *(
            "word",
            "words",
            "turn",
            "turns",
            "room",
            "hurt",
            "farewell",
            "wish",
            "wishes",
        ),
        *(
            "heed",
            "keeper",
            "keepers",
            "wish",
            "wishes",
            "luck",
            "surprise",
            "eager",
            "overspent",
        ),
        *("round", "rounds", "canvas", "study", "put_back", "go_back", "made_up"),
    }
)
# Whole words of docstrings, comments and messages.
DENIED_WORDS = re.compile(
    r"\b(whose|whoever|nobody|says|say|said|tells|told|wants|wanted|knows|believes|"
    r"believed|heeds|lies|owns|lives|asks|lets|beside|of its own|hurts?|doubts?|"
    r"rounds?|(?<!LM )(?<!/)(?<!attention )heads?|farewell|lessons?|no longer)\b",
    re.IGNORECASE,
)


def denied_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and word of each denied name that is defined in a module."""
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.append(node.name)
            case ast.arg():
                names.append(node.arg)
            case ast.Name(ctx=ast.Store()):
                names.append(node.id)
            case ast.Attribute(ctx=ast.Store()):
                names.append(node.attr)
        for name in names:
            plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_")
            for word in {plain, *plain.split("_")} & DENIED_NAMES:
                yield node.lineno, f"{word}_"


def denied_words(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and word of each denied word in a comment or a string."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and " " in token.string
        ):
            for match in DENIED_WORDS.finditer(token.string):
                line = token.start[0] + token.string.count("\n", 0, match.start())
                yield line, match[0].lower()


def places(paths: list[Path]) -> list[tuple[str, int, str]]:
    """Return file, line and word of everything denied; a name ends with `_`."""
    result = []
    for path in paths:
        source = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        result += [(name, line, word) for line, word in denied_words(source)]
        result += [(name, line, word) for line, word in denied_names(ast.parse(source))]
    return sorted(result)


def sources() -> list[Path]:
    here = Path(__file__)
    paths = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    return sorted(path for path in paths if path != here)


def test_no_word_is_denied():
    denied = [place for place in places(sources()) if place[::2] not in ALLOWED]
    assert denied == []


def test_names_comments_and_strings_are_read():
    source = (
        '"""It says so."""\nfound = 1\n# whose\nx.told_of = "a word"\nplain = "says"\n'
    )
    names = sorted(denied_names(ast.parse(source)))
    assert names == [(2, "found_"), (4, "told_")]
    assert list(denied_words(source)) == [(1, "says"), (3, "whose")]


if __name__ == "__main__":
    for file, line, word in places(sources()):
        sys.stdout.write(f"{file}:{line}: {word}\n")
