"""Row packing: the bytes of the reference, whatever the dtypes and the rows."""

from __future__ import annotations

import pytest
import torch

from vllm_tide.kernels import pack_rows as op
from vllm_tide.kernels.fp8 import LARGEST, MIN_SCALE
from vllm_tide.kernels.pack_layout import PackLayout
from vllm_tide.kernels.pack_rows import pack_rows, pack_rows_reference
from vllm_tide.transport.record import Phase, Record, decode, encode

PLAIN = (torch.bfloat16, torch.float16, torch.float32)
STORED = (*PLAIN, *LARGEST)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def inputs(num_rows, hidden, dtype, seed=0):
    """Strided rows of three layers, tokens and verdicts."""
    random = torch.Generator().manual_seed(seed)

    def layer():
        wide = torch.randn(num_rows, hidden + 5, generator=random) * 7
        return wide.to(dtype)[:, 3 : 3 + hidden]

    tokens = torch.randint(0, 1 << 18, (num_rows,), generator=random)
    verdicts = torch.rand(num_rows, generator=random) < 0.5
    return [layer() for _ in range(3)], tokens, verdicts


def filled(layout):
    return torch.full((layout.num_bytes,), 7, dtype=torch.uint8)


def same_bytes(monkeypatch, features, tokens, verdicts, rows, layout):
    """Pack with the kernel and with the reference; the reference may not help."""
    ours, wanted = filled(layout), filled(layout)
    pack_rows_reference(features, tokens, verdicts, rows, layout, wanted)
    monkeypatch.setattr(op, "pack_rows_reference", None)
    pack_rows(features, tokens, verdicts, rows, layout, ours)
    assert torch.equal(ours, wanted)
    return layout.views(ours)


@pytest.mark.interpreted
@pytest.mark.parametrize("stored", STORED, ids=name_of)
@pytest.mark.parametrize("given", PLAIN, ids=name_of)
def test_kernel_writes_the_reference_s_bytes(monkeypatch, given, stored):
    rows = torch.tensor([3, 0, -1, 8, 4, 9, 4, -7])
    packed = inputs(9, 77, given)
    out = same_bytes(monkeypatch, *packed, rows, PackLayout(11, 77, stored))
    # -1, -7 and 9 are no rows.
    tokens = packed[1][[3, 0, 0, 8, 4, 0, 4, 0]]
    tokens[[2, 5, 7]] = -1
    assert out.token_ids[:8].tolist() == tokens.tolist()
    assert out.verdicts[:8].tolist() == [
        int(packed[2][r]) if 0 <= r < 9 else 0 for r in rows
    ]


@pytest.mark.interpreted
@pytest.mark.parametrize("hidden", [1, 16, 1024, 1025])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=name_of)
def test_any_width_and_index_dtype(monkeypatch, hidden, stored):
    features, tokens, verdicts = inputs(2, hidden, torch.bfloat16)
    layout = PackLayout(2, hidden, stored)
    rows = torch.tensor([1], dtype=torch.int32)
    narrow = tokens.int(), verdicts.to(torch.int8)
    same_bytes(monkeypatch, features, *narrow, rows, layout)


@pytest.mark.interpreted
@pytest.mark.parametrize("stored", STORED, ids=name_of)
def test_no_rows_and_nothing_to_choose_from(monkeypatch, stored):
    layout = PackLayout(3, 8, stored)
    none = torch.empty(0, dtype=torch.int64)
    packed = inputs(2, 8, torch.float32)
    out = same_bytes(monkeypatch, *packed, none, layout)
    assert out.token_ids.tolist() == [0x07070707] * 3
    monkeypatch.undo()
    packed = inputs(0, 8, torch.float32)
    out = same_bytes(monkeypatch, *packed, torch.tensor([0, 1]), layout)
    assert out.token_ids[:2].tolist() == [-1, -1]


@pytest.mark.interpreted
@pytest.mark.parametrize("stored", LARGEST, ids=name_of)
def test_every_code_is_the_nearest_value(monkeypatch, stored):
    """All finite values of the format, the midpoints between them, and beyond."""
    codes = torch.arange(256, dtype=torch.uint8).view(stored).float()
    values = codes[codes.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2
    bits = middle.view(torch.int32)
    beside = [(bits + step).view(torch.float32) for step in (-1, 1)]
    row = torch.cat([values, middle, *beside])
    # The row's largest is the format's, so the scale is one.
    layers = [row[None], torch.full_like(row, -0.0)[None], row.flip(0)[None]]
    layout = PackLayout(1, row.numel(), stored)
    one = torch.zeros(1, dtype=torch.int64)
    out = same_bytes(monkeypatch, layers, one, one.bool(), one, layout)
    assert out.scales[0] == 1.0
    assert torch.equal(out.decoded(1)[0, : values.numel()], values)


@pytest.mark.interpreted
@pytest.mark.parametrize("stored", LARGEST, ids=name_of)
def test_zeros_tiny_values_and_infinities(monkeypatch, stored):
    features, tokens, verdicts = inputs(5, 9, torch.float32)
    for layer in features:
        layer[0], layer[1] = 0.0, 1e-38
        layer[4] *= 1e30
    features[1][2, 3], features[2][3, 8] = float("inf"), float("nan")
    layout = PackLayout(5, 9, stored)
    monkeypatch.setattr(op, "pack_rows_reference", None)
    block = filled(layout)
    pack_rows(features, tokens, verdicts, torch.arange(5), layout, block)
    out = layout.views(block)
    decoded = out.decoded(5)
    assert out.scales[0] == out.scales[1] == MIN_SCALE
    assert not decoded[:2].any()
    assert decoded[2:4].isnan().all() and out.scales[2:4].isnan().all()
    wanted = torch.cat(features, -1)[4]
    assert ((decoded[4] - wanted).abs() <= wanted.abs().amax() / 16).all()


@pytest.mark.interpreted
def test_nan_stays_nan_in_every_dtype(monkeypatch):
    features, tokens, verdicts = inputs(1, 4, torch.float32)
    features[0][0] = torch.tensor([float("nan"), -float("nan"), float("inf"), -0.0])
    monkeypatch.setattr(op, "pack_rows_reference", None)
    for stored in PLAIN:
        layout = PackLayout(1, 4, stored)
        block = filled(layout)
        pack_rows(features, tokens, verdicts, torch.tensor([0]), layout, block)
        found = layout.views(block).features[0, :4].float()
        assert found.isnan().tolist() == [True, True, False, False]
        assert found[2] == float("inf") and torch.signbit(found[3])


def test_packed_rows_are_a_record_without_a_copy():
    """What the ring takes: slices of the block, encoded and decoded."""
    features, tokens, verdicts = inputs(6, 8, torch.bfloat16)
    layout = PackLayout(6, 8)
    block = filled(layout)
    rows = torch.tensor([5, 1, 2, 4])
    pack_rows(features, tokens, verdicts, rows, layout, block)
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
        draft_probs=torch.empty(0).numpy(),
        features=width[1:4],
        teacher_start=3,
    )
    parts, size = encode(record, "bfloat16")
    arrays = (record.token_ids, record.draft_probs, record.features)
    assert all(p is a for p, a in zip(parts[1:], arrays, strict=True))
    body = b"".join(bytes(p) + bytes(-memoryview(p).nbytes % 8) for p in parts)
    assert len(body) == size
    back = torch.from_numpy(decode(memoryview(body)).features.view("int16").copy())
    wanted = torch.cat([f[rows[1:]] for f in features], -1)
    assert torch.equal(back.view(torch.bfloat16), wanted)


def test_a_prefix_of_the_block_holds_the_first_rows():
    for stored in STORED:
        layout = PackLayout(7, 5, stored)
        features, tokens, verdicts = inputs(7, 5, torch.float32)
        whole, cut = filled(layout), filled(layout)
        pack_rows(features, tokens, verdicts, torch.arange(3), layout, whole)
        used = layout.used_bytes(3)
        cut[:used] = whole[:used]
        a, b = layout.views(whole), layout.views(cut)
        assert torch.equal(a.token_ids[:3], b.token_ids[:3])
        assert torch.equal(a.decoded(3), b.decoded(3))
        assert torch.equal(whole[used:], filled(layout)[used:])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"features": 2}, "three layers"),
        ({"hidden": 9}, "a layer must be"),
        ({"dtype": torch.float64}, "one dtype"),
        ({"rows": torch.tensor([0.0])}, "rows must be"),
        ({"rows": torch.arange(4)}, "do not fit"),
        ({"verdicts": torch.ones(3)}, "verdicts must be"),
        ({"tokens": torch.ones(2, 1)}, "token_ids must be"),
        ({"block": torch.empty(10, dtype=torch.uint8)}, "a staging block needs"),
        ({"block": torch.empty(500)}, "contiguous run of uint8"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_inputs_say_what_is_wrong(change, says):
    dtype, hidden = change.get("dtype", torch.float32), change.get("hidden", 8)
    features, tokens, verdicts = inputs(2, hidden, dtype)
    layout = PackLayout(3, 8, torch.float16)
    with pytest.raises(ValueError, match=says):
        pack_rows(
            features[: change.get("features", 3)],
            change.get("tokens", tokens),
            change.get("verdicts", verdicts),
            change.get("rows", torch.tensor([0])),
            layout,
            change.get("block", filled(layout)),
        )


def test_wrong_layouts_say_what_is_wrong():
    with pytest.raises(ValueError, match="cannot be packed as torch.float64"):
        PackLayout(1, 1, torch.float64)
    with pytest.raises(ValueError, match="holds nothing"):
        PackLayout(0, 1)
