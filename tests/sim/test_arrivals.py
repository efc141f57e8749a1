import gzip
import re

import numpy as np
import pytest

from sim.arrivals import PATTERNS, SimError, load, synthetic

HEAD = "arrival_s,input_tokens,output_tokens\n"


def test_reads_csv_and_gzip_in_order_of_arrival(tmp_path):
    text = HEAD + "2.5,10,3\n0.5,20,4\n"
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.csv", "b.csv.gz"):
        trace = load(tmp_path / name)
        assert trace.name == name[0]
        assert trace.arrival.tolist() == [0.5, 2.5]
        assert trace.prompt.tolist() == [20, 10]
        assert trace.output.tolist() == [4, 3]


def test_a_file_without_a_trace_is_named(tmp_path):
    texts = "time,in,out\n1,2,3\n", HEAD + "1,2\n", HEAD + "nan,2,3\n", HEAD, ""
    files = {f"bad{i}.csv": text.encode() for i, text in enumerate(texts)}
    whole = gzip.compress((HEAD + "1,2,3\n" * 50).encode())
    files |= {"broken.csv.gz": b"not gzip", "cut.csv.gz": whole[:-12]}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in (*files, "gone.csv"):
        with pytest.raises(SimError, match=re.escape(name)):
            load(tmp_path / name)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_synthetic_traces_keep_rate_and_seed(pattern):
    trace = synthetic(pattern, 600.0, 5.0, seed=3)
    again = synthetic(pattern, 600.0, 5.0, seed=3)
    other = synthetic(pattern, 600.0, 5.0, seed=4)
    assert abs(len(trace) / 3000 - 1) < 0.1
    assert np.array_equal(trace.arrival, again.arrival)
    assert not np.array_equal(trace.output, other.output[: len(trace)])
    assert (np.diff(trace.arrival) >= 0).all()
    assert trace.arrival[0] >= 0 and trace.arrival[-1] < 600
    assert trace.prompt.min() >= 1 and trace.output.min() >= 1
