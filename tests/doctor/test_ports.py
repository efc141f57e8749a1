"""Ports on real sockets."""

import socket

from tests.doctor.samples import make_subject
from tests.top.page_server import serve_page
from vllm_tide.doctor import ports
from vllm_tide.doctor.finding import Status


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def test_a_free_port_is_ok(tmp_path):
    first, second = ports.check(make_subject(tmp_path, port=free_port()))
    assert first.status is Status.OK
    assert second.status is Status.SKIPPED


def test_a_port_taken_by_somebody_else_fails(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        first, _ = ports.check(make_subject(tmp_path, port=port))
    assert first.status is Status.FAILED
    assert "--port" in first.advice


def test_a_running_server_is_told_from_somebody_else(tmp_path):
    with serve_page("# TYPE vllm:num_requests_running gauge\n") as page:
        first, _ = ports.check(make_subject(tmp_path, port=page.port))
    assert first.status is Status.WARNING
    assert "running server" in first.sentence


def test_the_trainer_s_port_is_looked_at_too(tmp_path):
    with serve_page("vllm_tide:trainer_steps_total 1\n") as page:
        section = {"train": {"metrics_port": page.port}}
        subject = make_subject(tmp_path, section, port=free_port())
        _, second = ports.check(subject)
        assert second.status is Status.WARNING
        page.text = "something else"
        _, second = ports.check(subject)
    assert second.status is Status.FAILED
    assert "tide.train.metrics_port" in second.advice
