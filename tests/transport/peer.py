"""A producer or consumer process of its own, to be killed at any moment.

python -m tests.transport.peer produce      creates a ring, prints its name, writes
python -m tests.transport.peer consume RING reads for ever

Records follow from their number alone, so that a reader can tell a whole one from a
made-up one. Each ends itself after a minute, should the test die first.
"""

import sys
import time
from functools import cache

from tests.transport.samples import identity, make_record, make_spec, write_record
from vllm_tide.transport import RingReader, RingWriter

SPEC = make_spec("topk", hidden_size=16, topk=4)
NUM_RECORDS = 64
CAPACITY_BYTES = 40_000
_DEADLINE = time.monotonic() + 60


@cache
def record_of(number):
    return make_record(SPEC, number % NUM_RECORDS, num_rows=number % 11)


@cache
def known_identities():
    return {identity(record_of(number)) for number in range(NUM_RECORDS)}


def produce():
    writer = RingWriter.create(SPEC, CAPACITY_BYTES)
    print(writer.name, flush=True)
    number = 0
    while time.monotonic() < _DEADLINE:
        if write_record(writer, record_of(number % NUM_RECORDS)):
            number += 1
        elif number % 16 == 0:
            writer.heartbeat()


def consume(name):
    reader = RingReader.attach(name)
    print("attached", flush=True)
    while time.monotonic() < _DEADLINE:
        record = reader.read()
        if record is not None and identity(record) not in known_identities():
            sys.exit("made up a record")


if __name__ == "__main__":
    {"produce": produce, "consume": consume}[sys.argv[1]](*sys.argv[2:])
