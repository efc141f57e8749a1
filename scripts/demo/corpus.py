"""Corpus stage: the running CPython's own files, in named domains.

Reads the standard library, its test data and its C headers; never
``site-packages``, whose content depends on what else is installed.  A document
goes to the held-out part by the hash of its source name, so the split is the
same on every machine with the same Python, and the docstrings and records of a
held-out Python file are held out with it.
"""

import ast
import hashlib
import importlib
import io
import json
import pkgutil
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import records

DOMAINS = (
    *("python", "docs_en", "c", "markup", "decimal_tests", "charmaps", "tests"),
    *records.DOMAINS,
)

# Share of documents held out, in percent.  Small domains need more, or their
# held-out part is too short for a few hundred distinct prompts.
HELD_OUT_PERCENT = {
    "python": 6,
    "docs_en": 12,
    "c": 15,
    "markup": 12,
    "decimal_tests": 10,
    "charmaps": 10,
    "tests": 4,
    **dict.fromkeys(records.DOMAINS, 8),
}
BLOCK_BYTES = 32_768
SKIPPED_DIRS = {"site-packages", "__pycache__", "_bundled", "lib-dynload"}
MARKUP_SUFFIXES = {".html", ".xml", ".json", ".rst", ".types", ".toml", ".cfg"}
C_SUFFIXES = {".h", ".c", ".cpp"}


@dataclass(frozen=True)
class Document:
    """One piece of text and where it came from.

    ``source`` names the unit that is held out or trained on as a whole.
    """

    domain: str
    source: str
    text: str


def is_held_out(document: Document) -> bool:
    """Decide the split from the source name alone."""
    digest = hashlib.sha256(document.source.encode()).digest()
    bucket = int.from_bytes(digest[:4], "big") % 100
    return bucket < HELD_OUT_PERCENT[document.domain]


def _blocks(text: str) -> Iterator[str]:
    """Cut a long text at line starts into pieces of about ``BLOCK_BYTES``."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= BLOCK_BYTES:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def _read_text(path: Path) -> str | None:
    """Return the text of a file, or None where it is not text we can use."""
    try:
        if path.suffix == ".py":
            with tokenize.open(path) as handle:
                return handle.read()
        return path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, SyntaxError, LookupError):
        return None


def _python_docstrings(text: str) -> str:
    """Return the docstrings of one file, in order, as plain English text."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    parts = []
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            doc = ast.get_docstring(node)
            if doc and len(doc) > 120:
                parts.append(doc)
    return "\n\n".join(parts)


def _python_domain(relative: Path) -> str:
    if relative.parts[0] == "test" or "tests" in relative.parts:
        return "tests"
    if "test" in relative.parts or "idle_test" in relative.parts:
        return "tests"
    if relative.parts[0] == "encodings" and re.match(
        r"(cp|iso|koi|mac_|tis|hp_|kz)", relative.name
    ):
        return "charmaps"
    return "python"


def _library_documents(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if SKIPPED_DIRS & set(relative.parts) or not path.is_file():
            continue
        if relative.name == "topics.py" and relative.parts[0] == "pydoc_data":
            continue  # taken apart by topic below
        if relative.name.startswith("_sysconfigdata"):
            continue  # paths of the build machine
        if path.stat().st_size > 2_000_000:
            continue
        suffix = path.suffix
        source = f"lib/{relative.as_posix()}"
        if suffix == ".py":
            text = _read_text(path)
            if text is None or "bad" in relative.name:
                continue
            domain = _python_domain(relative)
            yield Document(domain, source, text)
            if domain == "python":
                yield Document("docs_en", source, _python_docstrings(text))
                for name, made in records.texts(relative.as_posix(), text):
                    yield Document(name, source, made)
        elif suffix == ".decTest":
            text = _read_text(path)
            if text is not None:
                for i, block in enumerate(_blocks(text)):
                    yield Document("decimal_tests", f"{source}#{i}", block)
        elif suffix in C_SUFFIXES:
            text = _read_text(path)
            if text is not None:
                yield Document("c", source, text)
        elif suffix in MARKUP_SUFFIXES or relative.name == "Makefile":
            text = _read_text(path)
            if text is not None:
                for i, block in enumerate(_blocks(text)):
                    yield Document("markup", f"{source}#{i}", block)
        elif suffix == ".txt" or relative.name in {"README", "ChangeLog"}:
            text = _read_text(path)
            if text is not None:
                prose = relative.parts[0] != "test"
                for i, block in enumerate(_blocks(text)):
                    yield Document(
                        "docs_en" if prose else "markup", f"{source}#{i}", block
                    )


def _header_documents(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.h")):
        text = _read_text(path)
        if text is not None:
            name = path.relative_to(root).as_posix()
            yield Document("c", f"include/{name}", text)


def _topic_documents() -> Iterator[Document]:
    topics = importlib.import_module("pydoc_data.topics").topics
    for name, text in sorted(topics.items()):
        for i, block in enumerate(_blocks(text)):
            yield Document("docs_en", f"topic/{name}#{i}", block)


def _extension_documents(library: Path) -> Iterator[Document]:
    """Docstrings of modules written in C; they have no source file to read."""
    dynload = sorted(
        info.name
        for info in pkgutil.iter_modules([str(library / "lib-dynload")])
        if not info.name.startswith(("_test", "xx"))
    )
    for name in sorted(set(sys.builtin_module_names)) + dynload:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        parts = []
        for attribute in sorted(vars(module)):
            value = vars(module)[attribute]
            members = [value]
            if isinstance(value, type):
                members += [vars(value)[key] for key in sorted(vars(value))]
            for member in members:
                doc = getattr(member, "__doc__", None)
                if isinstance(doc, str) and len(doc) > 120:
                    parts.append(doc)
        yield Document("docs_en", f"extension/{name}", "\n\n".join(parts))


def collect() -> Iterator[Document]:
    """Yield every usable document of this installation once."""
    library = Path(sysconfig.get_paths()["stdlib"])
    include = Path(sysconfig.get_paths()["include"])
    seen: set[bytes] = set()
    streams = (
        _library_documents(library),
        _header_documents(include),
        _topic_documents(),
        _extension_documents(library),
    )
    for stream in streams:
        for document in stream:
            text = document.text.replace("\r\n", "\n").replace("\f", "")
            if len(text.strip()) < 200:
                continue
            key = hashlib.sha256(text.strip().encode("utf-8", "replace")).digest()
            if key in seen:
                continue
            seen.add(key)
            yield Document(document.domain, document.source, text)


def build(work: Path) -> dict[str, object]:
    """Write ``<domain>.<split>.jsonl`` under ``work/corpus`` and a summary."""
    folder = work / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    out: dict[tuple[str, str], io.TextIOBase] = {}
    for domain in DOMAINS:
        for split in ("train", "held_out"):
            path = folder / f"{domain}.{split}.jsonl"
            out[domain, split] = path.open("w", encoding="utf-8")
    counts = {d: {"train": [0, 0], "held_out": [0, 0]} for d in DOMAINS}
    whole = hashlib.sha256()
    for document in collect():
        split = "held_out" if is_held_out(document) else "train"
        line = json.dumps({"source": document.source, "text": document.text})
        out[document.domain, split].write(line + "\n")
        whole.update(line.encode())
        count = counts[document.domain][split]
        count[0] += 1
        count[1] += len(document.text.encode("utf-8", "replace"))
    for handle in out.values():
        handle.close()
    summary: dict[str, object] = {
        "python": sys.version.split()[0],
        "sha256": whole.hexdigest(),
        "domains": {
            d: {
                s: {"documents": counts[d][s][0], "bytes": counts[d][s][1]}
                for s in counts[d]
            }
            for d in DOMAINS
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    return summary


def read(work: Path, domain: str, split: str) -> Iterator[Document]:
    """Yield the documents of one domain and split, as written by ``build``."""
    path = work / "corpus" / f"{domain}.{split}.jsonl"
    with path.open(encoding="utf-8") as handle:
        for line in handle:
            row = json.loads(line)
            yield Document(domain, row["source"], row["text"])
