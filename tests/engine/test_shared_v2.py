"""Model Runner V2 with synchronous scheduling."""

import pytest

from tests.engine.v2_cases import *  # noqa: F403

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ENGINE = "v2"


def test_scheduling_is_synchronous(served):
    report = served([[7]], max_tokens=2)
    assert report["async"] is False
