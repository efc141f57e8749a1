"""Structured text of the demo's corpus."""

import json
import re
import sqlite3

import pytest

from demo import records

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


def test_json_sql_html_and_diffs_are_what_they_say(module):
    text = records.json_text(module)
    decoder, at, found = json.JSONDecoder(), 0, []
    while at < len(text.rstrip()):
        value, at = decoder.raw_decode(text, at)
        found.append(value)
        at += len(text[at:]) - len(text[at:].lstrip())
    assert "read" in json.dumps(found)
    tags = re.findall(r"<(/?)(?!meta|!)\w", records.html_text(module))
    assert len(tags) == 2 * tags.count("/")
    for place in range(6):  # the path chooses the form
        path = f"pkg/m{place}.py"
        other = records.read_module(path, SOURCE)
        assert list(records.texts(path, SOURCE)) == list(records.texts(path, SOURCE))
        sqlite3.connect(":memory:").executescript(records.sql_text(other))
        diff = records.diff_text(other)
        assert diff.startswith(f"diff --git a/Lib/{path} b/Lib/{path}\nindex ")
        lines = diff.splitlines()
        old = [line[1:] for line in lines if line[:1] in "- " and line[:3] != "---"]
        assert set(old) <= set(SOURCE.splitlines())
