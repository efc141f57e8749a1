"""Structured text made of facts of the standard library: JSON, SQL, logs, HTML, diffs.

Servers answer in such formats most of the time, and CPython carries little of them as
files.  So they are written from what it does carry: functions, classes and imports
of each module as `ast` sees them, sizes of files, names of tests.  Choices
are drawn by the hash of the source's name: the same Python gives the same text.
"""

import ast
import difflib
import hashlib
import html
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

DOMAINS = ("json", "sql", "logs", "html", "diffs")

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
_PAGE = 12  # records of one answer, at most


@dataclass(frozen=True)
class Definition:
    """A function or class of one module."""

    id: int
    kind: str
    name: str
    owner: str | None
    line: int
    lines: int
    parameters: list[str]
    returns: str | None
    decorators: list[str]
    summary: str


@dataclass(frozen=True)
class Module:
    """What is told of one file."""

    path: str
    text: str
    imports: list[str]
    definitions: list[Definition]

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")

    def random(self, purpose: str) -> random.Random:
        digest = hashlib.sha256(f"{purpose}:{self.path}".encode()).digest()
        return random.Random(digest)


def read_module(path: str, text: str) -> Module | None:
    """Facts of a file; None where it is not Python of this version, or too little."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    imports: list[str] = []
    definitions: list[Definition] = []

    def visit(node: ast.AST, owner: str | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                imports.extend(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                imports.append(child.module)
            if isinstance(child, _FUNCTIONS | ast.ClassDef):
                definitions.append(_definition(child, owner, len(definitions) + 1))
            inside = child.name if isinstance(child, ast.ClassDef) else owner
            visit(child, inside)

    visit(tree, None)
    if len(definitions) < 3:
        return None
    return Module(path, text, sorted(set(imports)), definitions)


def _definition(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
    owner: str | None,
    number: int,
) -> Definition:
    doc = ast.get_docstring(node) or ""
    summary = " ".join(doc.split("\n\n")[0].split())[:120]
    parameters, returns = [], None
    if isinstance(node, _FUNCTIONS):
        parameters = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
        returns = ast.unparse(node.returns) if node.returns else None
    return Definition(
        id=number,
        kind="class" if isinstance(node, ast.ClassDef) else "function",
        name=node.name,
        owner=owner,
        line=node.lineno,
        lines=(node.end_lineno or node.lineno) - node.lineno + 1,
        parameters=parameters,
        returns=returns,
        decorators=[ast.unparse(d) for d in node.decorator_list],
        summary=summary,
    )


def _pages(rows: list[Any], size: int = _PAGE) -> list[list[Any]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _times(rng: random.Random, seconds: float) -> Iterator[datetime]:
    now = _BEGIN + timedelta(seconds=rng.randrange(300 * 86_400))
    while True:
        yield now
        now += timedelta(seconds=rng.expovariate(1.0 / seconds))


def _json_row(module: Module, one: Definition, shape: int) -> dict[str, Any]:
    row = asdict(one)
    if shape == 0:
        return row
    if shape == 1:
        return {
            "name": one.name,
            "type": one.kind,
            "module": module.name,
            "location": {"file": module.path, "line": one.line},
            "signature": {"parameters": one.parameters, "returns": one.returns},
        }
    return {
        "id": f"{module.name}.{one.name}",
        "parent": one.owner,
        "range": {"start": one.line, "end": one.line + one.lines - 1},
        "documented": bool(one.summary),
        "description": one.summary,
    }


def json_text(module: Module) -> str:
    """Answers of an API, records as lines, or one list of them."""
    rng = module.random("json")
    shape, form = rng.randrange(3), rng.randrange(3)
    rows = [_json_row(module, one, shape) for one in module.definitions]
    if form == 0:
        return "".join(json.dumps(row) + "\n" for row in rows)
    if form == 1:
        return json.dumps(rows, indent=2) + "\n"
    pages = _pages(rows)
    answers = [
        {
            "object": "list",
            "module": module.name,
            "imports": module.imports,
            "page": page,
            "pages": len(pages),
            "total": len(rows),
            "data": data,
            "next": f"/v1/modules/{module.name}?page={page + 1}"
            if page < len(pages)
            else None,
        }
        for page, data in enumerate(pages, 1)
    ]
    return "\n".join(json.dumps(answer, indent=2) for answer in answers) + "\n"


def _quoted(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    return "'" + str(value).replace("'", "''") + "'"


def sql_text(module: Module) -> str:
    """A dump of a table, and statements that read and change it."""
    rng = module.random("sql")
    table = re.sub(r"\W", "_", module.name)
    columns = ["id", "kind", "name", "owner", "line", "lines", "returns", "summary"]
    kept = [c for c in columns if c in ("id", "name") or rng.random() < 0.7]
    number = ("id", "line", "lines")
    kinds = [f"    {c} {'INTEGER' if c in number else 'TEXT'}" for c in kept]
    kinds[0] += " PRIMARY KEY"
    out = [f"DROP TABLE IF EXISTS {table};", f"CREATE TABLE {table} ("]
    out += [",\n".join(kinds), ");", f"CREATE INDEX {table}_name ON {table} (name);"]
    many = rng.random() < 0.5
    rows = [
        "(" + ", ".join(_quoted(getattr(one, c)) for c in kept) + ")"
        for one in module.definitions
    ]
    head = f"INSERT INTO {table} ({', '.join(kept)}) VALUES"
    if many:
        for chunk in _pages(rows):
            out.append(head + "\n    " + ",\n    ".join(chunk) + ";")
    else:
        out += [f"{head} {row};" for row in rows]
    for one in rng.sample(module.definitions, min(8, len(module.definitions))):
        name = _quoted(one.name)
        out.append(
            rng.choice(
                (
                    f"SELECT {', '.join(kept)} FROM {table} WHERE name = {name};",
                    f"SELECT COUNT(*) FROM {table} WHERE id > {one.id};",
                    f"UPDATE {table} SET name = {name} WHERE id = {one.id};",
                    f"DELETE FROM {table} WHERE id = {one.id} AND name = {name};",
                    f"SELECT name FROM {table} WHERE id < {one.id} "
                    "ORDER BY name LIMIT 10;",
                )
            )
        )
    return "\n".join(out) + "\n"


def log_text(module: Module) -> str:
    """What a server, an importer or a test runner says of the module."""
    rng = module.random("logs")
    form = rng.randrange(3)
    lines = []
    levels = ("INFO",) * 6 + ("DEBUG",) * 3 + ("WARNING",)
    process = rng.randrange(200, 40_000)
    size = len(module.text)
    for when, one in zip(_times(rng, 2.0), module.definitions, strict=False):
        full = f"{module.name}.{one.owner + '.' if one.owner else ''}{one.name}"
        took = 0.1 * one.lines * rng.uniform(0.8, 1.2)
        if form == 0:
            millis = f"{when:%Y-%m-%d %H:%M:%S},{when.microsecond // 1000:03d}"
            lines.append(
                f"{millis} {rng.choice(levels)} [{process}] {module.name}: "
                f"{one.kind} {one.name} at line {one.line} done in {took:.1f} ms"
            )
        elif form == 1:
            status = rng.choice((200,) * 12 + (304, 304, 404, 500))
            lines.append(
                f"10.0.{one.lines % 256}.{one.id % 256} - - "
                f"[{when:%d/%b/%Y:%H:%M:%S} +0000] "
                f'"GET /lib/{module.path}?symbol={one.name} HTTP/1.1" '
                f'{status} {size // one.id} "-" "Python-urllib/3.11"'
            )
        else:
            result = rng.choice(("ok",) * 14 + ("skipped", "FAIL"))
            lines.append(f"{one.name} ({full}) ... {result}")
    return "\n".join(lines) + "\n"


def html_text(module: Module) -> str:
    """The page of a manual."""
    name = html.escape(module.name)
    out = ["<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">']
    out += [f"<title>{name}</title>", "</head>", "<body>"]
    out += [f'<section id="module-{name}">', f"<h1><code>{name}</code></h1>"]
    if module.imports:
        out.append("<ul>")
        out += [
            f'<li><a href="{i}.html"><code>{i}</code></a></li>' for i in module.imports
        ]
        out.append("</ul>")
    for one in module.definitions:
        full = html.escape(f"{module.name}.{one.name}")
        out += [f'<dl class="{one.kind}">', f'<dt id="{full}">']
        out.append(f'<span class="name">{html.escape(one.name)}</span>')
        if one.parameters:
            inside = "</em>, <em>".join(one.parameters)
            out.append(f'<span class="params">(<em>{inside}</em>)</span>')
        out.append(f'<a class="source" href="{module.path}#L{one.line}">[source]</a>')
        out.append("</dt>")
        if one.summary:
            out.append(f"<dd><p>{html.escape(one.summary)}</p></dd>")
        out.append("</dl>")
    return "\n".join([*out, "</section>", "</body>", "</html>"]) + "\n"


def _renamed(lines: list[str], one: Definition, rng: random.Random) -> list[str]:
    own = [p for p in one.parameters if len(p) > 2 and p not in ("self", "cls")]
    if not own:
        return lines
    old = rng.choice(own)
    new = rng.choice((f"{old}_", f"new_{old}", f"{old}_value", f"the_{old}"))
    return [re.sub(rf"\b{old}\b", new, line) for line in lines]


def _logged(lines: list[str], one: Definition, rng: random.Random) -> list[str]:
    for place, line in enumerate(lines):
        if line.rstrip().endswith(":") and place + 1 < len(lines):
            indent = re.match(r"\s*", lines[place + 1])
            blank = indent.group() if indent else ""
            call = f'{blank}logger.debug("{one.name} called")\n'
            return [*lines[: place + 1], call, *lines[place + 1 :]]
    return lines


def _recounted(lines: list[str], one: Definition, rng: random.Random) -> list[str]:
    places = [i for i, line in enumerate(lines) if re.search(r"\b\d+\b", line)]
    if not places:
        return lines
    place = rng.choice(places)
    more = re.sub(r"\b\d+\b", lambda m: str(int(m[0]) + 1), lines[place], count=1)
    return [*lines[:place], more, *lines[place + 1 :]]


_EDITS: tuple[Callable[[list[str], Definition, random.Random], list[str]], ...]
_EDITS = _renamed, _logged, _recounted


def diff_text(module: Module) -> str:
    """Commits that each edit some functions of the file."""
    rng = module.random("diffs")
    lines = module.text.splitlines(keepends=True)
    functions = [d for d in module.definitions if d.kind == "function" and d.lines > 3]
    rng.shuffle(functions)
    out = []
    for chosen in islice(_pages(functions, 3), 6):
        after = list(lines)
        for one in sorted(chosen, key=lambda d: d.line, reverse=True):
            begin, end = one.line - 1, one.line - 1 + one.lines
            after[begin:end] = rng.choice(_EDITS)(after[begin:end], one, rng)
        path = f"Lib/{module.path}"
        body = list(difflib.unified_diff(lines, after, f"a/{path}", f"b/{path}"))
        if body:
            old, new = (
                hashlib.sha256("".join(text).encode("utf-8", "replace")).hexdigest()
                for text in (lines, after)
            )
            out += [f"diff --git a/{path} b/{path}\n"]
            out += [f"index {old[:11]}..{new[:11]} 100644\n", *body]
    return "".join(out)


_WRITERS = (json_text, sql_text, log_text, html_text, diff_text)


def texts(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield (domain, text) of one Python file of the library.

    Args:
        path: Below the library's folder, with forward slashes.
    """
    module = read_module(path, text)
    if module is not None:
        for domain, write in zip(DOMAINS, _WRITERS, strict=True):
            yield domain, write(module)
