"""Least squares with coefficients that cannot be negative, and its robust form."""

from __future__ import annotations

import numpy as np

_HUBER = 1.345
_ROUNDS = 12


def robust_nonnegative(design: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Huber regression of relative residuals with coefficients >= 0.

    Args:
        design: [samples, coefficients].
        measured: [samples], positive.

    Returns:
        [coefficients] float64.
    """
    scaled = design / measured[:, None]
    # Columns of similar size: a context token costs 1e-7 s, a forward 1e-2.
    size = np.linalg.norm(scaled, axis=0)
    size[size == 0.0] = 1.0
    scaled = scaled / size
    weight = np.ones(len(measured))
    found = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weight)
        before, found = found, nonnegative(scaled * root[:, None], root)
        residual = np.abs(1.0 - scaled @ found)
        spread = max(1.4826 * float(np.median(residual)), 1e-6)
        weight = np.minimum(1.0, _HUBER * spread / np.maximum(residual, 1e-12))
        if np.abs(found - before).max() <= 1e-9 * max(float(found.max()), 1e-12):
            break
    return np.asarray(found / size)


def nonnegative(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with coefficients >= 0 (Lawson and Hanson's active set).

    Args:
        design: [samples, coefficients].
        target: [samples].

    Returns:
        [coefficients] float64.
    """
    num = design.shape[1]
    gram, moment = design.T @ design, design.T @ target
    # Unsupported columns would make a subsystem singular.
    gram = gram + 1e-12 * max(float(gram.trace()) / num, 1e-300) * np.eye(num)
    tolerance = 1e-10 * max(float(np.abs(moment).max()), 1e-300)
    value, free = np.zeros(num), np.zeros(num, bool)
    for _ in range(10 * num):
        slope = np.where(free, -np.inf, moment - gram @ value)
        if slope.max() <= tolerance:
            break
        free[int(slope.argmax())] = True
        while True:
            trial = np.zeros(num)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            if trial[free].min() > 0.0:
                break
            falling = free & (trial <= 0.0)
            step = (value[falling] / (value[falling] - trial[falling])).min()
            value = value + step * (trial - value)
            free &= value > 1e-14 * max(float(value.max()), 1e-300)
            value[~free] = 0.0
            if not free.any():
                trial = np.zeros(num)
                break
        value = trial
    return value
