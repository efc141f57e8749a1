"""Train in float32, so that small numbers can be compared; spool in small shards."""

from tests.train.conftest import in_float32
from tests.transport.spool_toys import small_shards

__all__ = ["in_float32", "small_shards"]
