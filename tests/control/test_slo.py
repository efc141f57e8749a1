import numpy as np

from vllm_tide.control.slo import SloBook


def test_without_a_budget_there_is_no_limit():
    book = SloBook(2)
    book.add(0, None)
    book.advance(np.array([0]), np.ones(1), 1.0)
    book.add(1, 0.03)  # no token yet: its budget has not begun
    assert np.isinf(book.limits(np.array([0, 1]), 5.0)).all()


def test_credit_is_spent_and_debt_is_shown():
    book = SloBook(2)
    slots = np.array([0, 1])
    for slot in slots:
        book.add(slot, 0.1)
        book.advance(np.array([slot]), np.ones(1), 0.0)
    np.testing.assert_allclose(book.limits(slots, 0.0), 0.1)
    book.advance(slots, np.array([4, 1]), 0.2)
    # 0: 5 tokens' budget, 0.2 s gone; 1: 2 tokens' budget, all of it gone.
    np.testing.assert_allclose(book.limits(slots, 0.2), [0.3, 0.0], atol=1e-12)


def test_first_emission_starts_the_budget():
    book = SloBook(1)
    book.add(0, 0.1)
    book.advance(np.array([0]), np.array([0]), 1.0)
    book.advance(np.array([0]), np.array([3]), 2.0)
    np.testing.assert_allclose(book.limits(np.array([0]), 2.0), 0.3)


def test_attainment_is_the_average():
    book = SloBook(3)
    slots = np.arange(3)
    for slot in slots:
        book.add(slot, 0.1 if slot < 2 else None)
        book.advance(np.array([slot]), np.ones(1), 0.0)
    book.advance(slots, np.array([1, 1, 1]), 0.3)
    book.advance(np.array([0]), np.array([4]), 0.5)  # 5 tokens in 0.5 s: met
    assert book.finish(0) is True
    assert book.finish(1) is False
    assert book.finish(2) is None
    assert (book.met, book.missed) == (1, 1)
