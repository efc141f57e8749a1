"""Reading `/metrics` from a real server, and from what is none."""

import socket

import pytest

from tests.top.page_server import serve_page
from tests.top.samples import page_text
from vllm_tide.top.collect import fetch, parse_address, parse_page


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("http://localhost:8000/metrics", "http://localhost:8000"),
        ("https://host/prefix", "https://host/prefix"),
        ("http://user:secret@host", "http://host"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(text, url):
    assert parse_address(text) == url


@pytest.mark.parametrize("text", ["ftp://host", "http://", "host:port", ""])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError):
        parse_address(text)


def test_a_page_is_read_over_http():
    with serve_page(page_text()) as server:
        page = fetch(parse_address(server.url))
    assert page.value("vllm:num_requests_running") == 4
    assert page.by_label("vllm_tide:off_rounds_total", "reason") == {
        "no_gain": 90,
        "slo": 10,
    }
    assert page.models() == ["demo"]


def test_values_are_summed_over_engines_and_what_is_not_finite_is_left_out():
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 1\n'
        'vllm:num_requests_running{engine="1"} 2\n'
        "# TYPE vllm_tide:throughput_ratio gauge\n"
        "vllm_tide:throughput_ratio NaN\n"
        "# TYPE other gauge\nother 3\n"
    )
    page = parse_page(text, 0.0)
    assert page.value("vllm:num_requests_running") == 3
    assert page.value("vllm:num_requests_running", max) == 2
    assert page.value("vllm_tide:throughput_ratio") is None
    assert page.value("other") is None


def test_quotes_and_commas_in_a_label_are_kept():
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{model_name="a \\"b\\", c{d}"} 1\n'
    )
    assert parse_page(text, 0.0).models() == ['a "b", c{d}']


@pytest.mark.parametrize("text", ["", "<html></html>", "vllm_tide:x{ 1\n"])
def test_another_page_is_refused(text):
    assert "no metrics" in parse_page(text, 0.0)


def test_an_error_page_and_a_closed_port_are_told_in_words():
    with serve_page(None) as server:
        assert fetch(server.url) == "answers 503 Service Unavailable"
        url = server.url
    assert fetch(url) == "does not answer (Connection refused)"


def test_a_server_that_never_answers_is_given_up():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = parse_address(f"127.0.0.1:{silent.getsockname()[1]}")
        assert fetch(address, seconds=0.1) == "does not answer (TimeoutError)"


def test_a_server_that_speaks_something_else_is_told():
    import threading

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def greet():
            connection, _ = other.accept()
            connection.recv(1000)
            connection.sendall(b"220 smtp\r\n")
            connection.close()

        thread = threading.Thread(target=greet)
        thread.start()
        why = fetch(parse_address(f"127.0.0.1:{other.getsockname()[1]}"))
        assert why.startswith("does not answer (")
        thread.join()
