"""Known bugs of speculative decoding: answers to unusual parameters stay the same.

Each was reported against speculative decoding in vLLM, SGLang or TensorRT-LLM. The
answers of an engine with random draft lengths are compared with those of an engine
without speculation.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.engine.offline_engine import OfflineEngine
from tests.engine.shared_engine import DEMO, KINDS, engine_case
from tests.engine.test_shared_v1_control import VARIED

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ENGINE = "v1-control"
TOKENIZER = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
# Texts after which the demo's draft is often right.
PROMPTS = [
    TOKENIZER.encode(text).ids
    for text in (
        '{"id": "queue.Queue", "line": 12, "name": "',
        "SELECT name, count(*) FROM users WHERE id = ",
        "2026-03-01 12:00:01 INFO server started on port ",
        "def main(argv):\n    if len(argv) < 2:\n        return ",
    )
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {
            "type": "array",
            "items": {"enum": ["a", "b", "c"]},
            "minItems": 1,
            "maxItems": 4,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "SELECT " col " FROM " col\ncol ::= [a-z]+'
STRUCTURES = [
    {"json": SCHEMA},
    {"regex": "[a-z]{3,8}(-[0-9]{2,4}){1,3}"},
    {"choice": ["positive", "negative", "neutral and long enough"]},
    {"grammar": GRAMMAR},
    {"json_object": True},
]
CASES: dict[str, list[dict[str, Any]]] = {
    "stop strings": [
        {"stop": [","]},
        {"stop": [","], "include_stop_str_in_output": True},
        {"stop": ["er", '":'], "logprobs": 2},
        {"stop": ["e"], "min_tokens": 21},
    ],
    "penalties": [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.9},
    ],
    "words": [
        {"bad_words": ["the", "in"]},
        {"bad_words": [" = ", "("]},
        {"allowed_token_ids": list(range(10, 300))},
    ],
    "logprobs": [
        {"logprobs": 2},
        {"logprobs": 0},
        {"prompt_logprobs": 2},
        {"prompt_logprobs": 1, "logprobs": 1},
    ],
    "structures": [{"structured_outputs": given} for given in STRUCTURES],
    "lengths": [{"max_tokens": count} for count in range(1, 8)],
}
CASES["mixed"] = [each[0] for each in CASES.values()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfflineEngine]:
    """The engine of the file's kind without speculation."""
    case = engine_case(tmp_path_factory.mktemp("plain"), KINDS[ENGINE])
    with OfflineEngine(case | {"speculative_config": None, "steered": False}) as one:
        yield one


def both(served, plain, prompts, each, script=VARIED, **params: Any) -> tuple[Any, Any]:
    """Return the answers of the two engines."""
    work = {"each": each, "answers": True, "forget": True}
    params = {"max_tokens": 48, **params}
    got = served(prompts, params=params, script=script, **work)
    assert got["faults"] == got["control_faults"] == {} and not got["lost"]
    want = plain.work(prompts, params=params, **work)
    return got["answers"], want["answers"]


def assert_same(got: Any, want: Any) -> None:
    """Assert equality, with a tolerance for sums of another batch."""
    assert json.loads(json.dumps(got), parse_float=lambda _: None) == json.loads(
        json.dumps(want), parse_float=lambda _: None
    )
    assert numbers(got) == pytest.approx(numbers(want), abs=2e-3)


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for entry in value for number in numbers(entry)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("case", CASES)
def test_answers_equal_those_without_speculation(served, plain, case):
    each = [params for params in CASES[case] for _ in PROMPTS]
    got, want = both(served, plain, PROMPTS * len(CASES[case]), each)
    assert_same(got, want)
    for completions, params in zip(got, each, strict=True):
        for one in completions:
            assert one["token_ids"], "an empty answer compares nothing"
            if "logprobs" in params:
                assert len(one["logprobs"]) == len(one["token_ids"])


def test_a_stop_token_inside_a_draft_ends_the_answer_there(served, plain):
    _, free = both(served, plain, PROMPTS, [{}] * len(PROMPTS))
    prompts, each = [], []
    for prompt, (one,) in zip(PROMPTS, free, strict=True):
        for place in (7, 23, 37):
            stop = one["token_ids"][place]
            prompts.append(prompt)
            each.append({"stop_token_ids": [stop]})
    got, want = both(served, plain, prompts, each, logprobs=1)
    assert_same(got, want)
    assert {one["finish_reason"] for (one,) in got} == {"stop"}


@pytest.mark.xfail(
    strict=True,
    reason="vLLM forbids stop tokens after the last draft of a step by the number of "
    "tokens before the step (MinTokensLogitsProcessor.apply on the bonus row)",
)
def test_a_stop_token_may_come_in_the_step_that_reaches_min_tokens(served, plain):
    _, free = both(served, plain, PROMPTS, [{}] * len(PROMPTS))
    prompts, each = [], []
    for prompt, (one,) in zip(PROMPTS, free, strict=True):
        for place in range(14, 23):
            prompts.append(prompt)
            stop = [one["token_ids"][place]]
            each.append({"stop_token_ids": stop, "min_tokens": place})
    got, want = both(served, plain, prompts, each, script=[[5, 5]])
    assert_same(got, want)


NAMED = {"logprob_token_ids": [5, 17, 200]}


def test_a_request_with_allowed_tokens_is_answered(served, plain):
    got, want = both(served, plain, PROMPTS, [NAMED] * len(PROMPTS))
    for answers in (got, want):
        for (one,) in answers:
            del one["logprobs"]
    assert_same(got, want)


@pytest.mark.xfail(strict=True, reason="vllm#44727: the rejection sampler has none")
def test_a_request_with_logprob_token_ids_gets_their_logprobs(served, plain):
    assert_same(*both(served, plain, PROMPTS, [NAMED] * len(PROMPTS)))


def test_the_last_tokens_of_the_context_are_right(served, plain):
    tokens = (PROMPTS[0] * 20)[:256]
    places = (255, 254, 253, 252, 251, 250, 249, 245, 220)
    prompts = [tokens[:place] for place in places]
    got, want = both(served, plain, prompts, [{"max_tokens": 256 - n} for n in places])
    assert_same(got, want)
    assert [len(one["token_ids"]) for (one,) in got] == [256 - n for n in places]


def test_a_cached_prompt_gets_the_same_answer_as_a_cold_one(served, plain):
    """The last whole block is used, since its draft rows are recomputed."""
    long = [(prompt * 12)[:180] for prompt in PROMPTS]
    params = {"max_tokens": 40}
    cold = served(long, params=params, script=VARIED, answers=True, forget=True)
    warm = served(long, params=params, script=VARIED, answers=True)
    assert warm["answers"] == cold["answers"]
    longer = [
        prompt + one["token_ids"][:20] + [7]
        for prompt, (one,) in zip(long, cold["answers"], strict=True)
    ]
    got = served(longer, params=params, script=VARIED, answers=True)["answers"]
    want = plain.work(longer, params=params, answers=True, forget=True)["answers"]
    assert_same(got, want)


def test_sampled_answers_follow_their_grammar(served):
    params = {"max_tokens": 120, "temperature": 1.0, "ignore_eos": False}
    each = [{"structured_outputs": {"json": SCHEMA}}] * 12
    work = {"each": each, "answers": True, "script": VARIED, "forget": True}
    got = served((PROMPTS * 3), params=params, **work)
    ended = [one for (one,) in got["answers"] if one["finish_reason"] == "stop"]
    assert ended, "no document was finished"
    for one in ended:
        assert set(json.loads(one["text"])) == {"name", "age", "tags"}
    assert got["control_faults"] == {}


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"logit_bias": {"5": 2.0}}])
def test_unsupported_parameters_are_refused_in_one_line(served, params):
    """A temperature of 0 drops `min_p` before it is checked."""
    sampled = {"temperature": 1.0, **params}
    error = served(PROMPTS[:1], params=sampled, script=VARIED)["error"]
    assert "min_p and logit_bias" in error
    assert served(PROMPTS[:1], params={"max_tokens": 4}, script=VARIED)["tokens"]


def test_min_p_of_a_greedy_request_changes_nothing(served, plain):
    got, want = both(served, plain, PROMPTS, [{"min_p": 0.1}] * len(PROMPTS))
    assert_same(got, want)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["max_model_len", "max_position_embeddings"])
def test_a_draft_with_a_shorter_context_loses_drafts_but_no_answer(
    plain, tmp_path, how
):
    """vLLM then drafts nothing for a batch that contains a long request."""
    case = engine_case(tmp_path / "run", KINDS[ENGINE])
    speculative = case["speculative_config"]
    if how == "max_model_len":
        speculative[how] = 96
    else:
        draft = shutil.copytree(DEMO / "draft", tmp_path / "draft")
        config = json.loads((draft / "config.json").read_text())
        (draft / "config.json").write_text(json.dumps(config | {how: 96}))
        speculative["model"] = str(draft)
    prompts = [(PROMPTS[0] * 12)[:80], *PROMPTS[1:]]
    each = [{"max_tokens": 120}, *[{"max_tokens": 60}] * 3]
    work = {"each": each, "answers": True, "forget": True}
    want = plain.work(prompts, **work)["answers"]
    with OfflineEngine(case) as engine:
        got = engine.work(prompts, script=[[5, 5]], **work)
        assert_same(got["answers"], want)
        assert got["faults"] == got["control_faults"] == {} and not got["lost"]
        after = engine.work(PROMPTS[1:], params={"max_tokens": 40}, script=[[5, 5]])
    assert after["outcomes"]["accepted"] > 10, "drafted for again"
