"""Row packing: the bytes of the reference, whatever the dtypes."""

from __future__ import annotations

import pytest
import torch

from vllm_tide.kernels import pack_rows as op
from vllm_tide.kernels.pack_layout import PackLayout
from vllm_tide.kernels.pack_rows import pack_rows, pack_rows_reference
from vllm_tide.transport.record import Phase, Record, decode, encode

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def inputs(num_rows, hidden, dtype, seed=0):
    """Strided rows of three layers, and tokens."""
    random = torch.Generator().manual_seed(seed)

    def layer():
        wide = torch.randn(num_rows, hidden + 5, generator=random) * 7
        return wide.to(dtype)[:, 3 : 3 + hidden]

    tokens = torch.randint(0, 1 << 18, (num_rows,), generator=random)
    return [layer() for _ in range(3)], tokens


def filled(layout):
    return torch.full((layout.num_bytes,), 7, dtype=torch.uint8)


def same_bytes(monkeypatch, features, tokens, layout, rows=None):
    """Pack with the kernel and with the reference; the reference may not help."""
    ours, wanted = filled(layout), filled(layout)
    if rows is None:
        rows = torch.arange(len(tokens), dtype=torch.int32)
    pack_rows_reference(features, tokens, layout, wanted, rows)
    monkeypatch.setattr(op, "pack_rows_reference", None)
    pack_rows(features, tokens, layout, ours, rows)
    assert torch.equal(ours, wanted)
    return layout.views(ours)


@pytest.mark.interpreted
@pytest.mark.parametrize("stored", DTYPES, ids=name_of)
@pytest.mark.parametrize("given", DTYPES, ids=name_of)
def test_kernel_writes_the_reference_s_bytes(monkeypatch, given, stored):
    features, tokens = inputs(9, 77, given)
    out = same_bytes(monkeypatch, features, tokens, PackLayout(11, 77, stored))
    assert out.token_ids.tolist() == [*tokens.tolist(), *[0x07070707] * 2]
    wanted = torch.cat(features, -1).to(stored)
    assert torch.equal(out.features[:9], wanted)


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [[0], [8], [1, 2, 5, 8], [3, 3, 0]])
def test_only_the_rows_that_are_named_are_packed(monkeypatch, rows):
    features, tokens = inputs(9, 40, torch.bfloat16)
    layout = PackLayout(4, 40)
    out = same_bytes(
        monkeypatch, features, tokens, layout, torch.tensor(rows, dtype=torch.int32)
    )
    assert out.token_ids[: len(rows)].tolist() == tokens[rows].tolist()
    wanted = torch.cat([f[rows] for f in features], -1)
    assert torch.equal(out.features[: len(rows)], wanted)


@pytest.mark.interpreted
@pytest.mark.parametrize("hidden", [1, 16, 1024, 1025])
def test_any_width_and_index_dtype(monkeypatch, hidden):
    features, tokens = inputs(2, hidden, torch.bfloat16)
    same_bytes(monkeypatch, features, tokens.int(), PackLayout(2, hidden))


@pytest.mark.interpreted
@pytest.mark.parametrize("stored", DTYPES, ids=name_of)
def test_no_rows(monkeypatch, stored):
    out = same_bytes(
        monkeypatch, *inputs(0, 8, torch.float32), PackLayout(3, 8, stored)
    )
    assert out.token_ids.tolist() == [0x07070707] * 3


@pytest.mark.interpreted
def test_nan_stays_nan_in_every_dtype(monkeypatch):
    features, tokens = inputs(1, 4, torch.float32)
    features[0][0] = torch.tensor([float("nan"), -float("nan"), float("inf"), -0.0])
    monkeypatch.setattr(op, "pack_rows_reference", None)
    for stored in DTYPES:
        layout = PackLayout(1, 4, stored)
        block = filled(layout)
        pack_rows(features, tokens, layout, block)
        found = layout.views(block).features[0, :4].float()
        assert found.isnan().tolist() == [True, True, False, False]
        assert found[2] == float("inf") and torch.signbit(found[3])


def test_packed_rows_are_a_record_without_a_copy():
    """What the ring takes: slices of the block, encoded and decoded."""
    features, tokens = inputs(6, 8, torch.bfloat16)
    layout = PackLayout(6, 8)
    block = filled(layout)
    pack_rows(features, tokens, layout, block)
    out = layout.views(block)
    width = out.features.view(torch.int16).numpy().view("uint16")
    record = Record(
        key=1,
        phase=Phase.PREFILL,
        start=0,
        num_prompt_tokens=9,
        num_accepted=2,
        next_token=-1,
        draft_version=0,
        token_ids=out.token_ids.numpy()[1:4],
        features=width[1:4],
        teacher_start=3,
    )
    parts, size = encode(record, "bfloat16")
    arrays = (record.token_ids, record.features)
    assert all(p is a for p, a in zip(parts[1:], arrays, strict=True))
    body = b"".join(bytes(p) + bytes(-memoryview(p).nbytes % 8) for p in parts)
    assert len(body) == size
    back = torch.from_numpy(decode(memoryview(body)).features.view("int16").copy())
    wanted = torch.cat([f[1:4] for f in features], -1)
    assert torch.equal(back.view(torch.bfloat16), wanted)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"features": 2}, "three layers"),
        ({"hidden": 9}, "a layer must be"),
        ({"dtype": torch.float64}, "one dtype"),
        ({"rows": 4}, "do not fit"),
        ({"tokens": torch.ones(2, 1)}, "token_ids must be"),
        ({"block": torch.empty(10, dtype=torch.uint8)}, "a staging block needs"),
        ({"block": torch.empty(500)}, "contiguous run of uint8"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_inputs_say_what_is_wrong(change, says):
    dtype, hidden = change.get("dtype", torch.float32), change.get("hidden", 8)
    features, tokens = inputs(change.get("rows", 2), hidden, dtype)
    layout = PackLayout(3, 8, torch.float16)
    with pytest.raises(ValueError, match=says):
        pack_rows(
            features[: change.get("features", 3)],
            change.get("tokens", tokens),
            layout,
            change.get("block", filled(layout)),
        )


def test_wrong_layouts_say_what_is_wrong():
    with pytest.raises(ValueError, match="cannot be packed as torch.float64"):
        PackLayout(1, 1, torch.float64)
    with pytest.raises(ValueError, match="holds nothing"):
        PackLayout(0, 1)
