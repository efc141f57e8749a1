"""Structured text of the demo's corpus."""

import json
import sqlite3
from html.parser import HTMLParser

import pytest

from demo import corpus, records, target, tokens

SOURCE = '''\
"""Doc."""
import os
from a.b import c


class Reader:
    """Reads 'lines'."""

    @property
    def size(self) -> int:
        return len(self.path) + 1

    def read(self, limit, *, strict=False):
        """Read a part.

        More.
        """
        for place in range(limit):
            yield place + 10


def main(argument, other):
    return argument + other
'''


@pytest.fixture(scope="module")
def module():
    return records.read_module("pkg/reader.py", SOURCE)


def test_facts_are_of_the_file(module):
    names = [d.name for d in module.definitions]
    assert names == ["Reader", "size", "read", "main"]
    read = module.definitions[2]
    assert (read.owner, read.parameters) == ("Reader", ["self", "limit", "strict"])
    assert read.summary == "Read a part."
    assert module.imports == ["a.b", "os"]


def test_the_same_file_gives_the_same_text(module):
    again = records.read_module("pkg/reader.py", SOURCE)
    assert list(records.texts("pkg/reader.py", SOURCE)) == [
        (domain, write(again))
        for domain, write in zip(records.DOMAINS, records._WRITERS, strict=True)
    ]


def test_json_is_json(module):
    text = records.json_text(module)
    decoder, at, found = json.JSONDecoder(), 0, []
    while at < len(text.rstrip()):
        value, at = decoder.raw_decode(text, at)
        found.append(value)
        while at < len(text) and text[at].isspace():
            at += 1
    assert "read" in json.dumps(found)


@pytest.mark.parametrize("path", [f"pkg/m{i}.py" for i in range(6)])
def test_sql_runs(path):
    found = records.read_module(path, SOURCE)
    database = sqlite3.connect(":memory:")
    database.executescript(records.sql_text(found))


def test_html_is_balanced(module):
    class Parser(HTMLParser):
        depth = 0

        def handle_starttag(self, tag, attrs):
            self.depth += tag != "meta"

        def handle_endtag(self, tag):
            self.depth -= 1

    parser = Parser()
    parser.feed(records.html_text(module))
    assert parser.depth == 0


@pytest.mark.parametrize("path", [f"pkg/m{i}.py" for i in range(4)])
def test_a_diff_has_the_file_s_lines(path):
    found = records.read_module(path, SOURCE)
    text = records.diff_text(found)
    assert text.startswith(f"diff --git a/Lib/{path} b/Lib/{path}\nindex ")
    old = [
        line[1:] for line in text.splitlines() if line[:1] in "- " and line[:3] != "---"
    ]
    assert set(old) <= set(SOURCE.splitlines())


def test_every_domain_is_trained_and_sampled():
    assert set(target.MIX) == set(corpus.DOMAINS) == set(tokens.SAMPLE_BYTES)
    assert sum(target.MIX.values()) == pytest.approx(1.0)
