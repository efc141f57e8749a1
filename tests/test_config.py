"""The bad-input table: inputs and their messages, word for word."""

from __future__ import annotations

import json

import pytest

from vllm_tide.cli.config import example_names
from vllm_tide.cli.main import main
from vllm_tide.config import ConfigError, parse_tide
from vllm_tide.speculative import notes, read_json_object

BAD_SECTIONS = [
    ([], "tide: must be an object like {}, got []."),
    ({"captur": {}}, "tide.captur: unknown key; did you mean 'capture'?"),
    (
        {"state_dir": "/drafts"},
        "tide.state_dir: unknown key; did you mean 'tide.train.state_dir'?",
    ),
    (
        {"train": {"sample_rate": 0.5}},
        "tide.train.sample_rate: unknown key; did you mean 'tide.capture.sample_rate'?",
    ),
    (
        {"capture": {"sampel_rate": 1}},
        "tide.capture.sampel_rate: unknown key; did you mean 'sample_rate'?",
    ),
    (
        {"zzz": 1},
        "tide.zzz: unknown key; known: preset, run_dir, capture, train, control, "
        "test_time, swap, schedule, deploy, fresh, spool.",
    ),
    (
        {"capture": {"sample_rate": 2}},
        "tide.capture.sample_rate: must be at most 1, got 2.",
    ),
    (
        {"train": {"ttt_steps": 0}},
        "tide.train.ttt_steps: must be at least 1, got 0.",
    ),
    (
        {"capture": {"teacher": "all"}},
        "tide.capture.teacher: must be 'hidden' or 'topk', got \"all\".",
    ),
    (
        {"train": {"device": "gpu"}},
        'tide.train.device: must be cpu, cuda or cuda:N, got "gpu".',
    ),
    ({"train": {"loss": {}}}, "tide.train.loss: must have at least 1 entry, got {}."),
    (
        {"run_dir": "runs/x"},
        "tide.run_dir: must be an absolute path, because processes have different "
        'folders, got "runs/x".',
    ),
    (
        {"capture": {"ring_mib": "big"}},
        'tide.capture.ring_mib: must be an integer, got "big".',
    ),
    (
        {"swap": {"enabled": "yes"}},
        'tide.swap.enabled: must be true or false, got "yes".',
    ),
]


@pytest.mark.parametrize(("section", "sentence"), BAD_SECTIONS)
def test_a_bad_section_gives_one_line(section, sentence):
    with pytest.raises(ConfigError) as refused:
        parse_tide(section)
    assert str(refused.value) == sentence


# Section, other keys of the file, the note on it.
NOTED = [
    (
        {"preset": "control", "train": {"device": "cuda"}},
        {},
        "tide.train.device: has no effect: no request is captured, as tide.preset is "
        "'control'.",
    ),
    (
        {"preset": "control", "capture": {"sample_rate": 0.5}},
        {},
        "tide.capture.sample_rate: has no effect: tide.preset is 'control'.",
    ),
    (
        {"capture": {"consent": "off"}, "train": {"device": "cuda"}},
        {},
        "no request is captured, as tide.capture.consent is 'off'.",
    ),
    (
        {"capture": {"enabled": False, "consent": "opt_in"}},
        {},
        "tide.capture.consent: has no effect: tide.capture.enabled is false.",
    ),
    (
        {"control": {"policy": "static", "slo_tpot_ms": 50}},
        {},
        "tide.control.slo_tpot_ms: has no effect: tide.control.policy is 'static'.",
    ),
    (
        {"capture": {"sample_rate": 0}},
        {},
        "tide.capture.sample_rate: 0 captures no request, so nothing is trained.",
    ),
    (
        {"preset": "observe", "test_time": {"memory": "ngram"}},
        {},
        "tide.test_time.memory: drafts from the requests' own text although "
        "tide.preset is 'observe'.",
    ),
    ({"test_time": {"stride": 8}}, {}, "tide.test_time.adapt is 'off'."),
    ({"capture": {"teacher_topk": 8}}, {}, "tide.capture.teacher is 'hidden'."),
    ({"deploy": {"canary": False, "canary_requests": 9}}, {}, "deploy.canary is false"),
    ({"swap": {"enabled": False}, "deploy": {"min_seconds": 9}}, {}, "swap.enabled is"),
    ({"train": {"metrics_host": "::"}}, {}, "tide.train.metrics_port is 0."),
    ({"spool": {"max_gib": 2}}, {}, "tide.spool.url is null."),
    ({"fresh": {"draft_vocab_size": 99}}, {"model": "a/b"}, "model is not 'fresh'."),
    ({"train": {"metrics_port": 8000}}, {}, "8000 is also the port of vllm serve"),
    ({"spool": {"url": "s3://a:b@c"}}, {}, "tide.spool.url: contains credentials"),
    ({}, {"num_speculative_tokens": 99}, "num_speculative_tokens: 99 is more than"),
]


@pytest.mark.parametrize(("section", "keys", "note"), NOTED)
def test_a_knob_without_effect_is_noted(section, keys, note, capsys):
    whole = {"model": "fresh", "num_speculative_tokens": 3, "tide": section} | keys
    assert main(["config", "check", json.dumps(whole)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("the inline JSON: valid.")
    (line,) = captured.err.splitlines()
    assert line.startswith("note: ") and note in line and "b@c" not in line


@pytest.mark.parametrize(
    ("url", "hint"), [("s4://u:secret@b", "'s3'"), ("nonsense://u:secret@b", "fsspec")]
)
def test_a_spool_of_an_unknown_protocol_is_refused(url, hint, capsys):
    assert main(["config", "check", json.dumps({"tide": {"spool": {"url": url}}})]) == 2
    error = capsys.readouterr().err
    assert "tide.spool.url: must be a directory or a URL of fsspec" in error
    assert hint in error and "secret" not in error


@pytest.mark.parametrize("preset", ["full", "observe", "control", "learn"])
def test_a_preset_alone_is_not_noted(preset):
    assert list(notes(parse_tide({"preset": preset}))) == []


def parts(tide):
    """Return the enabled parts and the policy."""
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


@pytest.mark.parametrize("name", example_names())
def test_every_example_is_valid(name, capsys, tmp_path):
    assert main(["config", "example", name]) == 0
    file = tmp_path / "example.json"
    text = capsys.readouterr().out
    file.write_text(text)
    parse_tide(read_json_object(str(file))["tide"])
    assert main(["config", "check", str(file)]) == 2
    assert capsys.readouterr().err.startswith("error: model: no draft at 'path/to/dr")
    file.write_text(text.replace("path/to/draft", "fresh"))
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().err == ""


WHOLE = {
    "method": "eagle3",
    "model": "fresh",
    "num_speculative_tokens": 3,
    "tide": {"control": {"policy": "static"}},
}
COMMENTED = """{ // a comment behind
"method": "eagle3", /* one
of two lines */ "model": "fresh",
"num_speculative_tokens": 3, // "tide": 1,
"tide": {"control": {"policy": "static",},},
}"""
YAML = """method: eagle3
model: fresh
num_speculative_tokens: 3
tide:
  control: {policy: static}  # fixed
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tide.json", json.dumps(WHOLE)),
        ("tide.json", COMMENTED),
        ("tide.yaml", YAML),
        ("serve.yml", "speculative-config:\n  " + YAML.replace("\n", "\n  ")),
        ("serve.yml", f"port: 8000\nspeculative_config: '{json.dumps(WHOLE)}'"),
    ],
)
def test_every_form_that_vllm_takes_is_read(tmp_path, capsys, name, text):
    file = tmp_path / name
    file.write_text(text)
    assert read_json_object(str(file)) == WHOLE
    assert main(["config", "check", str(file)]) == 0
    if name.endswith("json"):
        assert read_json_object(text) == WHOLE
        assert main(["config", "check", text]) == 0


def test_a_comment_sign_in_a_string_is_no_comment():
    text = '{"tide": {"spool": {"url": "s3://b/,}"}}, "a": "\\"//,]"}'
    assert read_json_object(text) == json.loads(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.json",
            '{"tide": {"capture": {"enabled": true},\n"capture": {"enabled": false}}}',
        ),
        ("a.yaml", "tide:\n  capture: {enabled: true}\n  capture: {enabled: false}\n"),
    ],
)
def test_a_key_given_twice_is_refused(tmp_path, capsys, name, text):
    file = tmp_path / name
    file.write_text(text)
    assert main(["config", "check", str(file)]) == 2
    message = "capture: given twice; leave one."
    assert capsys.readouterr().err == f"error: {message}\n"
    if name == "a.json":
        with pytest.raises(ConfigError, match="^capture: given twice"):
            read_json_object(text)
    # Without us vLLM parses it and takes the last.
    assert read_json_object('{"model": 1, "model": 2}') == {"model": 2}


def checked(config, capsys):
    """Return status and errors of a whole configuration."""
    status = main(["config", "check", json.dumps(config)])
    return status, capsys.readouterr().err.splitlines()


MEMORY = {"test_time": {"memory": "ngram"}}
TABLE = {"num_speculative_tokens_per_batch_size": [[1, 8, 3]]}
MISTAKES = [
    (
        {"method": "ngram"},
        "method: tide trains EAGLE-3 and DFlash drafts; set it to 'eagle3' or "
        "'dflash', not 'ngram'.",
    ),
    ({"model": ""}, "model: missing; give the directory or hub name of the draft, "),
    ({"model": "path/to/draft"}, "model: no draft at 'path/to/draft': neither a "),
    ({"num_speculative_tokens": None}, "num_speculative_tokens: missing; set the "),
    (
        {
            "num_speculative_tokens": None,
            "num_speculative_tokens_per_batch_size": [[1, 8, 3]],
            "tide": {"control": {"policy": "static"}},
        },
        "num_speculative_tokens: missing; set the ",
    ),
    (
        {"num_speculative_tokens": None, "num_spec_tokens": 3},
        "num_speculative_tokens: missing (or misspelt: 'num_spec_tokens'); set",
    ),
    (
        {"tide": {"train": {"loss": {"forwardkl": 1}}}},
        "tide.train.loss.forwardkl: unknown key; did you mean 'forward_kl'?",
    ),
    (
        {"tide": MEMORY, "draft_sample_method": "probabilistic"},
        "tide.test_time.memory: its tokens have no draft probability",
    ),
    ({"tide": MEMORY, "parallel_drafting": True}, "parallel_drafting: tide.test_time"),
    ({"tide": MEMORY, **TABLE}, "num_speculative_tokens_per_batch_size: tide.test_ti"),
    (
        {"tide": {"control": {"policy": "adaspec"}}, **TABLE},
        "num_speculative_tokens_per_batch_size: tide.control chooses the length",
    ),
    (
        {"tide": {"capture": {"sample_rate": 0}, "test_time": {"adapt": "shared"}}},
        "tide.test_time.adapt: 'shared' trains on rows of running requests, but none "
        "are captured; change tide.capture.enabled, consent or sample_rate, or set",
    ),
]


@pytest.mark.parametrize(("change", "start"), MISTAKES)
def test_a_mistake_next_to_the_section_is_named(change, start, capsys):
    status, (message,) = checked(WHOLE | change, capsys)
    assert status == 2 and message.startswith(f"error: {start}")


def test_an_integral_float_is_a_whole_number():
    train = parse_tide({"train": {"max_passes": 4.0, "cpus": [0.0, 2]}}).train
    assert (train.max_passes, train.cpus) == (4, [0, 2])
    assert type(train.max_passes) is type(train.cpus[0]) is int
    for wrong in (4.5, True, "4", float("inf")):
        with pytest.raises(ConfigError, match=r"max_passes: must be an integer"):
            parse_tide({"train": {"max_passes": wrong}})


@pytest.mark.parametrize(
    ("section", "hidden", "rows", "mib"),
    [
        ({}, 576, 2048, 256),
        ({}, 4096, 8192, 512),  # two prefill chunks of an 8B
        ({"teacher": "topk"}, 8192, 8192, 768),
        ({"ring_mib": 64}, 4096, 8192, 64),
    ],
)
def test_the_ring_has_space_for_two_of_the_largest_steps(section, hidden, rows, mib):
    config = parse_tide({"capture": section}).capture
    assert config.ring_bytes(3, hidden, rows) == mib << 20
