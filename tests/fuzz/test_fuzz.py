"""A few of the inputs that scripts/fuzz.sh gives to every parser, always the same."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.attempt import attempt
from tests.fuzz.every import ALL, parser_named

few = settings(
    max_examples=15,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("name", ALL)
def test_damaged_bytes_are_read_or_refused_as_documented(name):
    if name == "http_admin":
        pytest.importorskip("fastapi")
    parser = parser_named(name)

    @few
    @given(parser.inputs)
    def one(value):
        attempt(parser, value)

    one()
