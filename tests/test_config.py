"""The bad-input table: what was tried and what it says, word for word."""

from __future__ import annotations

import json

import pytest

from vllm_tide.cli.config import example_names, reference
from vllm_tide.cli.main import main
from vllm_tide.config import (
    ConfigError,
    TideConfig,
    package_version,
    parse_tide,
    read_json_object,
)

BAD_SECTIONS = [
    ([], "tide: must be an object like {}, got list."),
    ({"captur": {}}, "tide.captur: unknown key; did you mean 'capture'?"),
    (
        {"capture": {"sampel_rate": 1}},
        "tide.capture.sampel_rate: unknown key; did you mean 'sample_rate'?",
    ),
    (
        {"zzz": 1},
        "tide.zzz: unknown key; known: preset, run_dir, capture, train, control, swap, "
        "schedule, deploy, fresh, spool.",
    ),
    (
        {"preset": "watch"},
        "tide.preset: Input should be 'full', 'observe', 'control' or 'learn', got "
        "'watch'.",
    ),
    (
        {"capture": {"sample_rate": 2}},
        "tide.capture.sample_rate: Input should be less than or equal to 1, got 2.",
    ),
    (
        {"capture": {"ring_mib": "big"}},
        "tide.capture.ring_mib: Input should be a valid integer, got 'big'.",
    ),
    (
        {"train": {"ttt_steps": 0}},
        "tide.train.ttt_steps: Input should be greater than or equal to 1, got 0.",
    ),
    (
        {"capture": {"teacher": "all"}},
        "tide.capture.teacher: Input should be 'hidden', 'topk' or 'both', got 'all'.",
    ),
    (
        {"train": {"cpus": [-1]}},
        "tide.train.cpus.0: Input should be greater than or equal to 0, got -1.",
    ),
    (
        {"train": {"device": "gpu"}},
        "tide.train.device: String should match pattern '^(cpu|cuda(:[0-9]+)?)$', "
        "got 'gpu'.",
    ),
    (
        {"swap": {"enabled": "yes"}},
        "tide.swap.enabled: Input should be a valid boolean, got 'yes'.",
    ),
]


@pytest.mark.parametrize(("section", "sentence"), BAD_SECTIONS)
def test_bad_section_gets_one_sentence(section, sentence):
    with pytest.raises(ConfigError) as refused:
        parse_tide(section)
    assert str(refused.value) == sentence


def test_defaults_are_the_documented_ones():
    assert parse_tide({}) == TideConfig()
    assert parse_tide(TideConfig().model_dump()) == TideConfig()


def parts(tide):
    """What runs, and under which policy."""
    return (
        tide.capture.enabled,
        tide.train.autostart,
        tide.deploy.canary,
        tide.swap.enabled,
        tide.control.policy,
    )


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (None, (True, True, True, True, "adaspec")),
        ("full", (True, True, True, True, "adaspec")),
        ("observe", (True, False, True, False, "static")),
        ("control", (False, False, True, False, "adaspec")),
        ("learn", (True, True, True, True, "static")),
    ],
)
def test_a_preset_changes_defaults_only(preset, expected):
    section = {} if preset is None else {"preset": preset}
    assert parts(parse_tide(section)) == expected
    assert section == ({} if preset is None else {"preset": preset})
    given = {
        "capture": {"enabled": True, "ring_mib": 8},
        "train": {"autostart": True},
        "swap": {"enabled": True},
        "control": {"policy": "threshold"},
    }
    tide = parse_tide({**section, **given})
    assert parts(tide) == (True, True, True, True, "threshold")
    assert tide.capture.ring_mib == 8
    dumped = parse_tide(section).model_dump()
    assert parse_tide(dumped) == parse_tide(section)  # as a manifest carries it


@pytest.mark.parametrize("broken", [{"control": []}, {"control": None}, {"preset": []}])
def test_a_preset_hides_no_bad_section(broken):
    with pytest.raises(ConfigError, match=r"tide\.(control|preset): "):
        parse_tide({"preset": "learn", **broken})


def test_inline_json_and_file_say_the_same(tmp_path):
    text = '{"method": "eagle3",\n// a comment\n"tide": {}}'
    file = tmp_path / "tide.json"
    file.write_text(text)
    assert read_json_object(text) == read_json_object(str(file))
    assert read_json_object(f"@{file}") == {"method": "eagle3", "tide": {}}


def test_unreadable_files_get_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read .No such file"):
        read_json_object(str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match="cannot be read .Is a directory"):
        read_json_object(str(tmp_path))
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_json_object(str(binary))
    broken = tmp_path / "broken.json"
    broken.write_text('{"a": 1,}')
    with pytest.raises(ConfigError, match="is not valid JSON: .* at line 1, column 9"):
        read_json_object(str(broken))
    listing = tmp_path / "list.json"
    listing.write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        read_json_object(str(listing))


@pytest.mark.parametrize("name", example_names())
def test_every_example_is_valid(name, capsys, tmp_path):
    assert main(["config", "example", name]) == 0
    file = tmp_path / "example.json"
    file.write_text(capsys.readouterr().out)
    parse_tide(read_json_object(str(file))["tide"])
    assert main(["config", "check", str(file)]) == 0


def test_unknown_example_names_the_known_ones(capsys):
    assert main(["config", "example", "nope"]) == 2
    assert "adapt" in capsys.readouterr().err


def test_check_refuses_with_status_2(capsys, tmp_path):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({"tide": {"trian": {}}}))
    assert main(["config", "check", str(file)]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


def test_reference_lists_every_knob_with_its_meaning():
    lines = list(reference())
    text = "\n".join(lines)
    assert "`tide.capture.sample_rate`" in text
    assert "`tide.swap.max_norm_ratio`" in text
    assert not [line for line in lines if line.endswith("| None |")]


def test_knobs_of_another_version_are_ignored_in_one_sentence(caplog):
    later = {"dream": {}, "train": {"sleep": 1, "nice": 3}, "preset": "observe"}
    told = parse_tide(later, "9.9\n")
    assert told == parse_tide({"train": {"nice": 3}, "preset": "observe"})
    (said,) = [r.getMessage() for r in caplog.records]
    assert "'9.9\\n'" in said
    assert "dream" in said
    assert "train.sleep" in said
    assert later["train"]["sleep"] == 1
    for version in (None, package_version()):
        with pytest.raises(ConfigError, match=r"unknown key"):
            parse_tide(later, version)
    with pytest.raises(ConfigError, match=r"tide\.train\.nice"):
        parse_tide({"dream": 1, "train": {"nice": "x"}}, "9.9")
