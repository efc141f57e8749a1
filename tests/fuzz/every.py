"""Every parser by name; importing what a parser needs takes seconds, so on demand."""

from __future__ import annotations

import importlib

from tests.fuzz.attempt import Parser

NAMES = {
    "memory": ("header", "ring_frames", "ring_spec", "record", "ring", "weights",
               "publication", "peek", "extension"),
    "spool": ("spool_shard", "spool_reader", "spool_words", "identity",
              "spool_models", "spool_drafts"),
    "files": ("rendezvous", "purge", "checkpoint", "head_store"),
    "orders": ("admin_server", "admin_client", "http_admin"),
}  # fmt: skip
ALL = [name for names in NAMES.values() for name in names]


def parser_named(name: str) -> Parser:
    """One parser.

    Raises:
        KeyError: There is none of this name.
    """
    for file, names in NAMES.items():
        if name in names:
            found = importlib.import_module(f"tests.fuzz.{file}").parsers()
            return next(parser for parser in found if parser.name == name)
    raise KeyError(name)
