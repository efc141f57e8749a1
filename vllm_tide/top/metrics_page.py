"""One reading of a server's `/metrics`."""

from __future__ import annotations

import http.client
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

_KEPT = (
    "vllm_tide:",
    "vllm:spec_decode_",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens",
    "vllm:prompt_tokens",
)
_SECONDS = 3.0
_MOST_BYTES = 16 << 20

Labels = tuple[tuple[str, str], ...]


class PageError(RuntimeError):
    """There is no page to be had; the message says why in a few words."""


@dataclass(frozen=True, slots=True)
class Page:
    """Samples of a page.

    Attributes:
        t_s: When it was read (monotonic clock).
        values: Value by sample name and labels.
    """

    t_s: float
    values: Mapping[tuple[str, Labels], float]

    def value(self, name: str) -> float | None:
        """Sum over all labels; None if the server does not export it."""
        found = [v for (sample, _), v in self.values.items() if sample == name]
        return sum(found) if found else None

    def most(self, name: str) -> float | None:
        """The largest over all labels; None if the server does not export it."""
        found = [v for (sample, _), v in self.values.items() if sample == name]
        return max(found, default=None)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: dict[str, float] = {}
        for (sample, labels), value in self.values.items():
            key = dict(labels).get(label)
            if sample == name and key is not None:
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def models(self) -> list[str]:
        """Names of the models served."""
        return sorted({dict(labels).get("model_name", "") for _, labels in self.values})


@dataclass(frozen=True, slots=True)
class Address:
    """Where a page is."""

    url: str
    https: bool
    host: str
    port: int
    path: str


def parse_address(text: str) -> Address:
    """Read "host:port" or a URL, with or without "/metrics" behind it.

    Raises:
        ValueError: It is neither.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        named = parts.port
    except ValueError:
        parts, named = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is no http address")
    https = parts.scheme == "https"
    port = named or (443 if https else 80)
    path = parts.path.rstrip("/")
    path = path if path.endswith("/metrics") else f"{path}/metrics"
    # Without a password, if one was given.
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    url = f"{parts.scheme}://{host}:{port}{path.removesuffix('/metrics')}"
    return Address(url, https, parts.hostname, port, path)


def fetch(address: Address, seconds: float = _SECONDS) -> Page:
    """Read a page.

    Args:
        address: Of the server.
        seconds: Longest wait for it.

    Raises:
        PageError: Nobody answers, or not with metrics.
    """
    kind = http.client.HTTPSConnection if address.https else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=seconds)
    try:
        connection.request("GET", address.path)
        response = connection.getresponse()
        if response.status != 200:
            raise PageError(f"answers {response.status} {response.reason}")
        text = response.read(_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise PageError(f"does not answer ({why})") from error
    finally:
        connection.close()
    return parse_page(text, time.monotonic())


def parse_page(text: str, t_s: float) -> Page:
    """Read a Prometheus text exposition.

    Args:
        text: The page.
        t_s: When it was read.

    Raises:
        PageError: It is none.
    """
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[tuple[str, Labels], float] = {}
    # Parsing is slow, and most of the page is of no interest here.
    kept = [
        line
        for line in text.splitlines()
        if line.removeprefix("# TYPE ").startswith(_KEPT) and "_bucket{" not in line
    ]
    try:
        for family in text_string_to_metric_families("\n".join(kept) + "\n"):
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                if math.isfinite(sample.value):
                    values[key] = float(sample.value)
    except (ValueError, IndexError, KeyError) as error:
        raise PageError("answers with no metrics") from error
    if not values:
        raise PageError("answers with no metrics of vLLM")
    return Page(t_s, values)
