import numpy as np

from tests.control.test_time_fit import TRUTH, sample
from vllm_tide.control.online_time import RoundSample
from vllm_tide.engine.profiler import Recorder


def taking(seconds):
    return RoundSample(2, 100, 0, 0, 0, 0, target_s=seconds)


def test_the_faster_half_counts():
    recorder = Recorder()
    for seconds in (4.0, 1.0, 30.0, 2.0, 3.0):
        recorder.add("a", taking(seconds))
    recorder.add("b", taking(9.0))
    assert [found.target_s for found in recorder.samples()] == [1.0, 2.0, 3.0, 9.0]


def test_a_shape_is_settled_once_its_fastest_repeats_agree():
    recorder = Recorder()
    for seconds, settled in ((1.0, False), (5.0, False), (1.04, False), (1.02, True)):
        recorder.add("a", taking(seconds))
        assert recorder.settled("a") is settled
    assert not recorder.settled("b")


def test_draft_passes_count_and_what_was_not_run_does_not():
    rng, recorder = np.random.default_rng(0), Recorder()
    for steps in (0, 1, 3):
        shape = (2, 100, 0, 0, steps, 2 if steps else 0)
        for _ in range(3):
            recorder.add(steps, sample(TRUTH, shape, rng))
        assert recorder.settled(steps)
