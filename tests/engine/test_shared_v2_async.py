"""Model Runner V2 with asynchronous scheduling."""

import pytest

from tests.engine.v2_cases import *  # noqa: F403

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ENGINE = "v2-async"


def test_scheduling_is_asynchronous(served):
    report = served([[7]], max_tokens=2)
    assert report["async"] is True
