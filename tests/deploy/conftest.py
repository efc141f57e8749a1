"""Train in float32, so that small numbers can be compared."""

from tests.train.conftest import in_float32

__all__ = ["in_float32"]
