"""`tide_k_max` as it is read; tests of the shared engines check it in engines."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.engine.idle_scheduler import idle_scheduler
from vllm_tide.config import ControlConfig, TideConfig
from vllm_tide.engine.requests import Requests
from vllm_tide.engine.scheduler import SchedulerTide

K = 3
BAD = [-1, 1.0, "2", True, []]


class Request(SimpleNamespace):
    """The part of vLLM's configuration that the scheduler's part reads."""


@pytest.mark.parametrize("bad", BAD)
def test_an_invalid_length_is_counted_and_ignored(bad):
    requests = {str(i): Request(cache_salt=None, num_prompt_tokens=1) for i in range(3)}
    tide = SchedulerTide(K, idle_scheduler(requests), TideConfig())
    new = [
        SimpleNamespace(
            req_id=str(i),
            num_computed_tokens=0,
            sampling_params=SimpleNamespace(extra_args={"tide_k_max": asked}),
        )
        for i, asked in enumerate((bad, 1, 0))
    ]
    tide.control(new)
    tide.control(new)  # preempted, and back
    for request in requests.values():
        request.spec_token_ids = [-1] * K
    assert [len(r.spec_token_ids) for r in requests.values()] == [K, 1, 0]
    tide.observe({"staged": 0})
    assert tide.stats()["malformed_limits"] == 1


def book_of(asked, **control):
    book = Requests(2, 4096, ControlConfig(**control))
    params = SimpleNamespace(
        extra_args=asked, max_tokens=100, temperature=0.0, structured_outputs=None
    )
    slot, _ = book.add("a", set(), 10, params)
    book.slo.advance(np.array([slot]), np.ones(1), 0.0)
    slots = np.array([slot])
    limits, asked = book.slo.limits(slots, 0.0), book.slo.asked(slots, 0.0)
    return book, slots, limits[0], None if asked is None else asked[0]


@pytest.mark.parametrize(
    ("asked", "caps"),
    [(0, 0), (2, 2), (3, 3), (K + 4, K), (10**400, K), *((b, K) for b in BAD)],
)
def test_policies_plan_no_more_than_requested(asked, caps):
    book, slots, *_ = book_of({"tide_k_max": asked})
    assert book.caps(slots, np.array([20]), K).tolist() == [caps]


@pytest.mark.parametrize("bad", [10**400, -(10**400), -1, 0, "soon", [1], float("nan")])
def test_an_invalid_limit_is_counted_and_ignored(bad):
    book, _, limit, asked = book_of(
        {"tide_slo_tpot_ms": bad}, slo_tpot_ms=50, client_slo_tpot_ms=1
    )
    assert (book.malformed_limits, limit, asked) == (1, 0.05, None)


@pytest.mark.parametrize(
    ("operator", "least", "given", "limit", "asked"),
    [
        (None, None, 5, np.inf, None),  # clients may set none
        (50, None, 5, 0.05, None),
        (None, 20, 5, np.inf, 0.02),  # raised to the least
        (None, 20, 30, np.inf, 0.03),
        (50, 20, 5, 0.05, 0.02),
        (50, 20, 80, 0.08, None),  # looser: must not affect other requests
    ],
)
def test_clients_set_limits_where_the_operator_allows(
    operator, least, given, limit, asked
):
    control = {"slo_tpot_ms": operator, "client_slo_tpot_ms": least}
    book, _, *limits = book_of({"tide_slo_tpot_ms": given}, **control)
    assert limits == [limit, asked]
    assert book.ignored_limits == (least is None)
