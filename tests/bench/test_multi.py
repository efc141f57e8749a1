from bench.suites.multi import MultiOptions, before_first_swap, multi_streams
from tests.bench.toys import options_for, scrape


def test_each_server_has_a_domain_in_four_stretches(tmp_path):
    options = options_for(MultiOptions, "multi", tmp_path, requests=(8, 5))
    streams = multi_streams(options)
    assert list(streams) == ["c", "charmaps"]
    assert [r.segment for r in streams["c"]][::2] == ["0 c", "1 c", "2 c", "3 c"]
    assert len({r.segment for r in streams["charmaps"]}) == 3  # 2 + 2 + 1


def test_the_first_drafts_acceptance_ends_with_the_first_swap():
    samples = [
        scrape(t, drafts=t, accepted=t if t < 5 else 3 * t, swaps=t // 5)
        for t in range(10)
    ]
    assert before_first_swap(samples) == 2.0
    assert before_first_swap([]) is None
