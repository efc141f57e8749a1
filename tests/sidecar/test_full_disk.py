"""Files of the trainer on a full disk."""

from vllm_tide.sidecar.report import Report, TrainerStatus


def test_failed_writes_are_counted_for_the_operator(tmp_path):
    report = Report(tmp_path / "absent", "e")
    report.add("cycle")
    assert report.failed_writes == 1
    report.write(TrainerStatus())
    assert report.failed_writes == 2
