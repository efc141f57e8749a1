"""The configuration fails with the sentence that the server would say."""

import json

import pytest

from tests.test_config import BAD_SECTIONS
from vllm_tide.doctor import configuration
from vllm_tide.doctor.examination import examine
from vllm_tide.doctor.finding import Status
from vllm_tide.doctor.subject import make_subject


def whole(section):
    rest = {"model": "fresh", "num_speculative_tokens": 3}
    return json.dumps({**rest, "tide": section})


def examined(source, tmp_path):
    subject = make_subject(source, None, tmp_path / "run", 8000)
    (found,) = configuration.check(subject)
    return found


def test_a_valid_file_is_summed_up(tmp_path):
    file = tmp_path / "tide.json"
    file.write_text("// ours\n" + whole({"capture": {"ring_mib": 8}}))
    found = examined(str(file), tmp_path)
    assert found.status is Status.OK
    assert "ring 8 MiB" in found.sentence


@pytest.mark.parametrize(("section", "sentence"), BAD_SECTIONS)
def test_a_bad_knob_fails_in_the_product_s_words(tmp_path, section, sentence):
    found = examined(whole(section), tmp_path)
    assert (found.status, found.sentence) == (Status.FAILED, sentence)


def test_every_mistake_is_a_finding_of_its_own(tmp_path):
    source = '{"method": "ngram", "model": "a/b/c", "tide": {"captur": {}}}'
    subject = make_subject(source, None, tmp_path / "run", 8000)
    findings = list(configuration.check(subject))
    assert {finding.status for finding in findings} == {Status.FAILED}
    keys = [finding.sentence.split(":")[0] for finding in findings]
    assert sorted(keys) == ["method", "model", "num_speculative_tokens", "tide.captur"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "has no tide section"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_fails(tmp_path, text, part):
    file = tmp_path / "tide.json"
    if text is not None:
        file.write_text(text)
    found = examined(str(file), tmp_path)
    assert found.status is Status.FAILED
    assert part in found.sentence


def test_without_a_file_the_defaults_are_examined(tmp_path):
    assert examined(None, tmp_path).status is Status.SKIPPED


def test_what_needs_the_configuration_is_skipped_when_it_is_bad(tmp_path):
    subject = make_subject('{"tide": {"x": 1}}', None, tmp_path / "run", 8000)
    checks = ("fit", "cores", "profile", "state_directory", "spool")
    assert {f.status for f in examine(subject, checks)} == {Status.SKIPPED}


def test_the_run_directory_is_the_configuration_s(tmp_path):
    source = json.dumps({"tide": {"run_dir": str(tmp_path / "mine")}})
    assert make_subject(source, None, None, 8000).run_dir == tmp_path / "mine"
    assert make_subject(source, None, tmp_path, 8000).run_dir == tmp_path
