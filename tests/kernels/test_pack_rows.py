"""Row packing gives the reference's bytes in every dtype."""

from __future__ import annotations

import pytest
import torch

from vllm_tide.kernels import pack_rows as op
from vllm_tide.kernels.pack_rows import pack_rows, pack_rows_reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def inputs(num_rows, hidden, dtype, seed=0, layers=3):
    """Return strided rows of some layers."""
    random = torch.Generator().manual_seed(seed)

    def layer():
        wide = torch.randn(num_rows, hidden + 5, generator=random) * 7
        return wide.to(dtype)[:, 3 : 3 + hidden]

    return [layer() for _ in range(layers)]


def packed(monkeypatch, features, rows, stored, padding=0):
    """Pack with the kernel and with the reference; the reference must not be called."""
    shape = (len(rows) + padding, len(features) * features[0].shape[1])
    ours, expected = (torch.full(shape, 7, dtype=stored) for _ in range(2))
    rows = torch.tensor(rows, dtype=torch.int32)
    pack_rows_reference(features, rows, expected)
    monkeypatch.setattr(op, "pack_rows_reference", None)
    pack_rows(features, rows, ours)
    assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))
    return ours


SOME = [(0, 0), (0, 1), (2, 0)]  # places in DTYPES; the others at night
PAIRS = [
    pytest.param(
        DTYPES[given],
        DTYPES[stored],
        marks=() if (given, stored) in SOME else pytest.mark.nightly,
        id=f"{name_of(DTYPES[given])}-{name_of(DTYPES[stored])}",
    )
    for given in range(3)
    for stored in range(3)
]


@pytest.mark.interpreted
@pytest.mark.parametrize(("given", "stored"), PAIRS)
def test_the_kernel_writes_the_references_bytes(monkeypatch, given, stored):
    features = inputs(9, 1025, given)
    out = packed(monkeypatch, features, range(9), stored, padding=2)
    assert torch.equal(out[:9], torch.cat(features, -1).to(stored))
    assert out[9:].eq(7).all()


@pytest.mark.interpreted
def test_only_the_named_rows_are_packed(monkeypatch):
    features = inputs(9, 40, torch.bfloat16)
    for rows in ([1, 2, 5, 8], [3, 3, 0], []):
        with monkeypatch.context() as patch:
            out = packed(patch, features, rows, torch.bfloat16, padding=1)
        assert torch.equal(out[:-1], torch.cat([f[rows] for f in features], -1))
        assert out[-1].eq(7).all()


@pytest.mark.interpreted
@pytest.mark.parametrize("layers", [1, 2, 4, 5, 6])
def test_any_number_of_layers_is_packed(monkeypatch, layers):
    features = inputs(4, 40, torch.bfloat16, layers=layers)
    out = packed(monkeypatch, features, [0, 2, 3], torch.bfloat16, padding=1)
    assert torch.equal(out[:-1], torch.cat([f[[0, 2, 3]] for f in features], -1))
    assert out[-1].eq(7).all()


@pytest.mark.interpreted
def test_nan_stays_nan_in_every_dtype(monkeypatch):
    features = inputs(1, 4, torch.float32)
    features[0][0] = torch.tensor([float("nan"), -float("nan"), float("inf"), -0.0])
    monkeypatch.setattr(op, "pack_rows_reference", None)
    for stored in DTYPES:
        out = torch.zeros(1, 12, dtype=stored)
        pack_rows(features, torch.zeros(1, dtype=torch.int32), out)
        values = out[0, :4].float()
        assert values.isnan().tolist() == [True, True, False, False]
        assert values[2] == float("inf") and torch.signbit(values[3])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"features": 0}, "as wide together as out"),
        ({"features": 2}, "as wide together as out"),
        ({"hidden": 9}, "as wide together as out"),
        ({"rows": torch.arange(4, dtype=torch.int32)}, "do not fit"),
        ({"rows": torch.ones(2, 1)}, "rows must be"),
        ({"out": torch.empty(3, 24, dtype=torch.float64)}, "out must be"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_inputs_give_a_message(change, says):
    dtype, hidden = change.get("dtype", torch.float32), change.get("hidden", 8)
    features = inputs(3, hidden, dtype)
    with pytest.raises(ValueError, match=says):
        pack_rows(
            features[: change.get("features", 3)],
            change.get("rows", torch.arange(2, dtype=torch.int32)),
            change.get("out", torch.empty(3, 24, dtype=torch.float16)),
        )
