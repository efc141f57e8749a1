"""An answer with a seed is the same bits whatever was drafted, and a fair sample."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.vllm

VOCAB = 12
SEED = 2**62 + 17


@pytest.fixture(scope="module")
def vllm() -> Any:
    """The real samplers of the CPU backend."""
    import vllm.platforms

    if not vllm.platforms.current_platform.is_cpu():
        pytest.skip("the CPU backend is not the platform here")
    vllm.platforms.current_platform.import_kernels()
    vllm.platforms.current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample import logits_processor, metadata, rejection_sampler, sampler
    from vllm.v1.spec_decode import metadata as spec_metadata

    return SimpleNamespace(
        Sampler=sampler.Sampler,
        RejectionSampler=rejection_sampler.RejectionSampler,
        SamplingMetadata=metadata.SamplingMetadata,
        LogitsProcessors=logits_processor.LogitsProcessors,
        SpecDecodeMetadata=spec_metadata.SpecDecodeMetadata,
    )


class Runner:
    """What `SeededSampling` reads of vLLM's runner, with vLLM's own samplers.

    Requests whose seed is None have none.
    """

    def __init__(self, vllm: Any, seeds: list[int | None], **options: Any) -> None:
        from vllm_tide.engine.seeded import SeededSampling

        self.vllm, self.options = vllm, options
        self.sampler = vllm.Sampler()
        self.rejection_sampler = vllm.RejectionSampler(self.sampler)
        self.names = [str(i) for i in range(len(seeds))]
        self.requests = {
            name: SimpleNamespace(
                sampling_params=SimpleNamespace(seed=seed), output_token_ids=[]
            )
            for name, seed in zip(self.names, seeds, strict=True)
        }
        generators = {
            i: torch.Generator().manual_seed(seed)
            for i, seed in enumerate(seeds)
            if seed is not None
        }
        self.input_batch = SimpleNamespace(req_ids=self.names, generators=generators)
        self.seeded = self.rejection_sampler.tide = SeededSampling(self)

    def metadata(self) -> Any:
        n = len(self.names)
        none = torch.zeros(n)
        varied = {"temperature": torch.full((n,), 0.8), "top_p": None, "top_k": None}
        return self.vllm.SamplingMetadata(
            all_greedy=False,
            all_random=True,
            generators=self.input_batch.generators,
            max_num_logprobs=None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=none,
            presence_penalties=none,
            repetition_penalties=none,
            output_token_ids=[],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=self.vllm.LogitsProcessors(),
            **varied | self.options,
        )

    def step(self, drafts: list[list[int]], logits: Any) -> list[list[int]]:
        """One step of the target.

        Args:
            drafts: Of each request.
            logits: float32 [sum of 1 + drafts, V].
        """
        told = {name: row for name, row in zip(self.names, drafts, strict=True) if row}
        self.seeded.begin(told)
        if told:
            metadata = self.vllm.SpecDecodeMetadata.make_dummy(drafts, "cpu")
            ends = torch.tensor([1 + len(row) for row in drafts]).cumsum(0)
            # make_dummy leaves the indices of the logits open.
            metadata.bonus_logits_indices = ends - 1
            is_bonus = torch.zeros(len(logits), dtype=torch.bool)
            is_bonus[ends - 1] = True
            metadata.target_logits_indices = torch.nonzero(~is_bonus).flatten()
            output = self.rejection_sampler(metadata, None, logits, self.metadata())
        else:
            output = self.sampler(logits, self.metadata())
        emitted = [
            [token for token in row if token >= 0]
            for row in output.sampled_token_ids.tolist()
        ]
        for name, tokens in zip(self.names, emitted, strict=True):
            self.requests[name].output_token_ids += tokens
        return emitted


def answers(
    vllm: Any, seeds: list[int | None], length: int, drafter: Any, **options: Any
) -> list[list[int]]:
    """Answers of a target whose logits are a function of the last token.

    Args:
        vllm: Its classes.
        seeds: Of the requests.
        length: Tokens of each answer.
        drafter: Gives a request's drafts from its output so far.
        options: Of the sampling metadata.
    """
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    runner = Runner(vllm, seeds, **options)
    outputs = [runner.requests[name].output_token_ids for name in runner.names]
    while min(len(output) for output in outputs) < length:
        drafts = [drafter(i, output) for i, output in enumerate(outputs)]
        given = [
            [*(output[-1:] or [0]), *draft]
            for output, draft in zip(outputs, drafts, strict=True)
        ]
        runner.step(drafts, table[[token for row in given for token in row]])
    return [output[:length] for output in outputs]


def plainly(_: int, __: list[int]) -> list[int]:
    return []


CASES = [
    {},
    {"top_k": torch.tensor([4] * 3)},
    {"top_p": torch.tensor([0.7] * 3)},
    {"temperature": torch.tensor([0.5, 1.0, 1.5])},
]


@pytest.mark.parametrize("options", CASES)
def test_every_length_and_draft_gives_the_same_bits(vllm, options):
    seeds = [SEED, 7, -1]
    expected = answers(vllm, seeds, 40, plainly, **options)
    assert len({tuple(row) for row in expected}) == 3
    random = np.random.default_rng(0)

    def at_random(_: int, __: list[int]) -> list[int]:
        return random.integers(0, VOCAB, random.integers(0, 6)).tolist()

    def right(i: int, output: list[int]) -> list[int]:
        return expected[i][len(output) : len(output) + int(random.integers(0, 6))]

    def placeholder(_: int, __: list[int]) -> list[int]:
        return [-1, -1]

    drafters = [lambda _, __, k=k: [1] * k for k in range(5)]
    for drafter in (at_random, right, placeholder, *drafters):
        assert answers(vllm, seeds, 40, drafter, **options) == expected


def test_a_right_draft_is_accepted_whole(vllm):
    expected = answers(vllm, [SEED], 6, plainly)
    runner = Runner(vllm, [SEED])
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    draft = expected[0][:5]
    assert runner.step([draft], table[[0, *draft]]) == expected


def test_requests_without_a_seed_are_sampled_as_upstream_does(vllm):
    """The same global numbers, beside a request with a seed and without tide."""

    def unseeded(tide: bool) -> list[list[int]]:
        runner = Runner(vllm, [None, None])
        if not tide:
            runner.rejection_sampler.tide = None
        torch.manual_seed(5)
        logits = torch.randn(7, VOCAB)
        return runner.step([[1, 2, 3], [4, 5]], logits)

    assert unseeded(True) == unseeded(False)
    runner = Runner(vllm, [SEED, None])
    before = runner.input_batch.generators.copy()
    runner.seeded.begin({})
    assert before.keys() == runner.input_batch.generators.keys() == {0}


def test_an_unfinished_prefill_takes_nothing_back(vllm):
    """Upstream's `set_offset` ends the engine: a CPU generator has no offset."""
    runner = Runner(vllm, [SEED])
    expected = Runner(vllm, [SEED]).step([[]], torch.zeros(1, VOCAB))
    runner.step([[]], torch.zeros(1, VOCAB))
    runner.requests["0"].output_token_ids.clear()  # the token is discarded
    generator = runner.input_batch.generators[0]
    generator.set_offset(generator.get_offset() - 4)
    assert runner.step([[]], torch.zeros(1, VOCAB)) == expected


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    from scipy.stats import chisquare

    return float(chisquare(counts, counts.sum() * probabilities).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("drafted", [True, False])
def test_a_million_tokens_have_the_targets_distribution(vllm, drafted):
    """Over seeds and over positions; marginally, and each token given the last."""
    n = 512
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(9))
    target = (logits.double() / 0.8).softmax(-1).numpy()
    guess = target.argmax(-1)
    pairs = np.zeros(VOCAB * VOCAB)
    runner = Runner(vllm, list(range(n)))
    last = np.zeros(n, np.int64)
    while pairs.sum() < 1_000_000:
        chain = [last]
        for _ in range(2 if drafted else 0):
            chain.append(guess[chain[-1]])
        given = np.stack(chain, 1)
        rows = runner.step(given[:, 1:].tolist(), logits[given.ravel()])
        seen = [
            before * VOCAB + token
            for first, row in zip(last.tolist(), rows, strict=True)
            for before, token in zip([first, *row], row, strict=False)
        ]
        pairs += np.bincount(seen, minlength=len(pairs))
        last = np.array([row[-1] for row in rows])
    pairs = pairs.reshape(VOCAB, VOCAB)
    # 12 tests of a false-alarm rate of 1e-8 each.
    for before in range(VOCAB):
        assert chi_square(pairs[before], target[before]) > 1e-8, before
