"""The compiled kernels on a GPU equal the references, at real sizes too."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_ngram_memory import live
from vllm_tide.kernels.kl_loss import kl_rows, kl_rows_reference
from vllm_tide.kernels.launch import runs_triton
from vllm_tide.kernels.pack_rows import pack_rows, pack_rows_reference
from vllm_tide.kernels.topk_teacher import topk_teacher, topk_teacher_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
VOCAB = 262_144
BEYOND = (1 << 31) // VOCAB + 2  # rows of that vocabulary with more than 2**31 elements
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def draw(*shape, dtype=torch.float32, scale=2.0, seed=0):
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=random) * scale).to(dtype).cuda()


def require_memory(gigabytes):
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * (1 << 30):
        pytest.skip(f"needs {gigabytes} GiB of GPU memory")


@pytest.mark.parametrize("stored", FLOATS, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
def test_pack_rows(given, stored):
    features = [draw(300, 4100, dtype=given, seed=i)[:, 2:4098] for i in range(3)]
    rows = torch.arange(300, dtype=torch.int32)[::2].contiguous()
    ours = torch.full((151, 3 * 4096), 7, dtype=stored)
    block = ours.cuda()
    assert runs_triton(block)
    pack_rows(features, rows.cuda(), block)
    pack_rows_reference([f.cpu() for f in features], rows, ours)
    assert torch.equal(block.cpu(), ours)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("vocab", [7, 4096, 128_256, VOCAB])
def test_topk_teacher(vocab, dtype):
    logits = draw(5, vocab, dtype=dtype, scale=3.0)
    result, expected = (
        topk_teacher(logits, 64),
        topk_teacher_reference(logits.cpu(), 64),
    )
    assert torch.equal(result.ids.cpu(), expected.ids)
    close = {"rtol": 2e-6, "atol": 1e-5}
    torch.testing.assert_close(result.logprobs.cpu(), expected.logprobs, **close)
    mass = result.tail_logprob.cpu().exp()
    torch.testing.assert_close(mass, expected.tail_logprob.exp(), **close)


def test_topk_teacher_beyond_two_gigaelements():
    require_memory(8)
    logits = torch.zeros(BEYOND, VOCAB, dtype=torch.bfloat16, device="cuda")
    logits[-1] = draw(VOCAB, dtype=torch.bfloat16)
    last = topk_teacher(logits, 8).ids[-1].cpu()
    assert torch.equal(last, topk_teacher_reference(logits[-1:].cpu(), 8).ids[0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("vocab", [7, 9_000, VOCAB])
def test_kl_rows(vocab, reverse, dtype):
    z, t = draw(3, vocab, dtype=dtype), draw(3, vocab, dtype=dtype, seed=1)
    weights = torch.tensor([0.2, 1.0, 0.7])
    grad, expected_grad = torch.empty_like(z), z.cpu().double()
    values = kl_rows(z, t, weights.cuda(), reverse=reverse, grad_out=grad)
    expected = kl_rows_reference(
        z.cpu().double(),
        t.cpu().double(),
        weights.double(),
        reverse=reverse,
        grad_out=expected_grad,
    )
    torch.testing.assert_close(values.cpu().double(), expected, rtol=1e-5, atol=1e-4)
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(grad.cpu().double(), expected_grad, rtol=step, atol=1e-6)


def test_kl_rows_beyond_two_gigaelements():
    require_memory(20)
    z = torch.zeros(BEYOND, VOCAB, dtype=torch.bfloat16, device="cuda")
    t, grad = torch.zeros_like(z), torch.empty_like(z)
    t[-1] = draw(VOCAB, dtype=torch.bfloat16)
    weights = torch.ones(BEYOND, device="cuda")
    values = kl_rows(z, t, weights, reverse=False, grad_out=grad)
    alone = torch.empty_like(z[-1:])
    one = kl_rows(z[-1:], t[-1:], weights[-1:], reverse=False, grad_out=alone)
    assert torch.equal(values[-1:], one) and torch.equal(grad[-1:], alone)
    assert not grad[:-1].any()


@pytest.mark.parametrize("window", [256, 1 << 15])
def test_ngram_memory(window):
    with torch.device("cuda"):
        live(window, 200)
