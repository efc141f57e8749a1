"""Readers of another process's output read damaged bytes, or refuse them."""

import importlib
import os

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.attempt import attempt

PARSERS = {
    "memory": ("record", "ring", "weights", "publication"),
    "spool": ("spool_reader", "spool_states", "spool_drafts"),
    "files": ("rendezvous",),
    "orders": ("admin_server", "admin_client"),
}
EXAMPLES = int(os.environ.get("TIDE_FUZZ_EXAMPLES", "1000"))
by_name = pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in PARSERS.items() for name in names],
    ids=lambda value: value,
)


def give(module, name, max_examples, derandomize):
    parsers = importlib.import_module(f"tests.fuzz.{module}").parsers()
    (parser,) = (each for each in parsers if each.name == name)

    @settings(
        max_examples=max_examples,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(parser.inputs)
    def one(value):
        attempt(parser, value)

    one()


@by_name
def test_damaged_bytes_are_read_or_refused_as_documented(module, name):
    give(module, name, 15, derandomize=True)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@by_name
def test_many_damaged_bytes_are_read_or_refused_as_documented(module, name):
    give(module, name, EXAMPLES, derandomize=False)
