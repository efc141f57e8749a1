"""Training-time-test attention over packed documents and their branches.

At step i, row t of a document attends to the step-0 keys of rows 0..t (the trunk) and
to its own keys of steps 1..i (the diagonals), under one softmax. Cost R^2 + iR. A row
of a branch attends to the trunk before its anchor and its branch up to itself instead
of rows 0..t; `RowLayout.spans` has the visible rows.

`packed_attention` runs on every device; `attention_gpu` has the other backends, and
`attention_backend` selects one.

Shapes: R step-0 rows, Q query rows (a sorted subset), j diagonals,
n_h = num_attention_heads, n_kv = num_key_value_heads, g = n_h / n_kv, d = head_dim.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vllm_tide.draft.config import DraftError
from vllm_tide.draft.rows import RowLayout

_MANY_QUERIES = 8  # of a row and key; then the diagonals' products are GEMMs


@dataclass(frozen=True)
class _Slice:
    """Query rows [q_lo, q_hi) with key rows [k_lo, k_hi) and [own_lo, own_hi).

    For a document the second range is empty. For all branches of a document, the first
    is the document up to the last anchor and the second the branches.
    """

    q_lo: int
    q_hi: int
    k_lo: int
    k_hi: int
    own_lo: int
    own_hi: int
    blocked: Tensor  # bool [n, m] over both ranges, True = may not attend

    def of(self, x: Tensor) -> Tensor:
        """Return rows [kv, m, d] of both ranges of x [kv, R, d]."""
        rows = x[:, self.k_lo : self.k_hi]
        if self.own_lo == self.own_hi:
            return rows
        return torch.cat([rows, x[:, self.own_lo : self.own_hi]], dim=1)

    def add(self, into: Tensor, part: Tensor) -> None:
        """Add [kv, m, d] to both ranges of `into` [kv, R, d]."""
        split = self.k_hi - self.k_lo
        into[:, self.k_lo : self.k_hi] += part[:, :split]
        into[:, self.own_lo : self.own_hi] += part[:, split:]


def _slices(active: Tensor, layout: RowLayout) -> list[_Slice]:
    """Split query rows by document; all branches of a document are one slice."""
    device = active.device
    groups = [0]  # branches [groups[i], groups[i + 1]) belong to one document
    for b in range(1, len(layout.docs)):
        if layout.docs[b] != layout.docs[b - 1]:
            groups.append(b)
    groups.append(len(layout.docs))
    edges = [*layout.doc_starts, *(layout.branch_starts[b] for b in groups[1:])]
    bounds = torch.searchsorted(active, torch.tensor(edges, device=device)).tolist()
    num_docs = len(layout.doc_starts) - 1
    out = []
    for doc in range(num_docs):
        lo, hi = bounds[doc], bounds[doc + 1]
        if lo == hi:
            continue
        start = layout.doc_starts[doc]
        local = active[lo:hi] - start
        keys = int(local[-1]) + 1
        blocked = torch.arange(keys, device=device)[None, :] > local[:, None]
        out.append(_Slice(lo, hi, start, start + keys, 0, 0, blocked))
    spans = layout.spans(active) if layout.docs else None
    for i, (first, end) in enumerate(pairwise(groups)):
        lo, hi = bounds[num_docs + i], bounds[num_docs + i + 1]
        if lo == hi or spans is None:
            continue
        k_lo = layout.doc_starts[layout.docs[first]]
        k_hi = max(layout.anchors[first:end])
        own_lo, own_hi = layout.branch_starts[first], int(active[hi - 1]) + 1
        trunk = torch.arange(k_lo, k_hi, device=device)
        own = torch.arange(own_lo, own_hi, device=device)
        part = (x[lo:hi] for x in spans)
        visible = _visible(active[lo:hi], torch.cat([trunk, own]), *part)
        out.append(_Slice(lo, hi, k_lo, k_hi, own_lo, own_hi, ~visible))
    return out


def _visible(
    rows: Tensor, keys: Tensor, own: Tensor, low: Tensor, high: Tensor
) -> Tensor:
    """Return bool [Q, m]: m step-0 rows visible to query rows (`RowLayout.spans`)."""
    k = keys[None, :]
    segment = (k >= own[:, None]) & (k <= rows[:, None])
    return segment | (k >= low[:, None]) & (k < high[:, None])


def by_head(x: Tensor, kv: int) -> Tensor:
    """Return the view [kv, g, Q, d] of rows [Q, n_h, d]."""
    return x.view(x.shape[0], kv, -1, x.shape[2]).permute(1, 2, 0, 3)


def by_row(x: Tensor) -> Tensor:
    """Return rows [Q, n_h, d] of [kv, g, Q, d]."""
    return x.permute(2, 0, 1, 3).reshape(x.shape[2], -1, x.shape[3])


def diagonal_products(x: Tensor, kd: Tensor, wide: torch.dtype) -> Tensor:
    """Multiply x [kv, g, Q, d] with keys (values) [j, Q, kv, d]: [j, kv, g, Q]."""
    if x.shape[1] >= _MANY_QUERIES:
        product = x.permute(2, 0, 1, 3) @ kd.permute(1, 2, 3, 0)  # [Q,kv,g,j]
        return product.permute(3, 1, 2, 0).to(wide)
    return (x[None] * kd.permute(0, 2, 1, 3)[:, :, None]).sum(-1, dtype=wide)


def diagonal_values(p: Tensor, vd: Tensor) -> Tensor:
    """Return [kv, g, Q, d]: values [j, Q, kv, d] weighted by p [j, kv, g, Q]."""
    if p.shape[2] >= _MANY_QUERIES:
        mixed = p.permute(3, 1, 2, 0) @ vd.permute(1, 2, 0, 3)  # [Q,kv,g,d]
        return mixed.permute(1, 2, 0, 3)
    return (p[..., None] * vd.permute(0, 2, 1, 3)[:, :, None]).sum(0)


def diagonal_gradients(
    qh: Tensor, kd: Tensor, vd: Tensor, go: Tensor, diag: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the diagonals' part of the gradient of q, and the gradients of kd, vd.

    Args:
        qh: [kv, g, Q, d] queries.
        kd: [j, Q, kv, d] keys.
        vd: [j, Q, kv, d] values.
        go: [kv, g, Q, d], gradient of the output.
        diag: [j, kv, g, Q] probabilities of the diagonals, under the full softmax.
        delta: [kv, g, Q], products of `go` with the output.
    """
    gp = diagonal_products(go, vd, diag.dtype).sub_(delta)
    gs = gp.mul_(diag).mul_(qh.shape[-1] ** -0.5).to(qh.dtype)
    pd = diag.to(qh.dtype)
    if qh.shape[1] >= _MANY_QUERIES:
        gkd = gs.permute(3, 1, 0, 2) @ qh.permute(2, 0, 1, 3)  # [Q,kv,j,d]
        gvd = pd.permute(3, 1, 0, 2) @ go.permute(2, 0, 1, 3)
        gkd, gvd = gkd.permute(2, 0, 1, 3), gvd.permute(2, 0, 1, 3)
    else:
        gkd = (gs[..., None] * qh[None]).sum(2).permute(0, 2, 1, 3)
        gvd = (pd[..., None] * go[None]).sum(2).permute(0, 2, 1, 3)
    return diagonal_values(gs, kd), gkd, gvd


class _PackedAttention(torch.autograd.Function):
    """Closed-form forward and backward, one pair of GEMMs per document."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        kd: Tensor | None,
        vd: Tensor | None,
        docs: list[_Slice],
        scale: float,
    ) -> Tensor:
        rows, heads, dim = q.shape
        kv = k0.shape[1]
        group = heads // kv
        wide = torch.promote_types(q.dtype, torch.float32)
        qh = by_head(q, kv)
        kh, vh = k0.transpose(0, 1), v0.transpose(0, 1)  # [kv,R,d]
        diag = None
        if kd is not None:
            diag = diagonal_products(qh, kd, wide) * scale
        out = torch.empty(kv, group, rows, dim, dtype=q.dtype, device=q.device)
        probs: list[Tensor] = []
        for doc in docs:
            n, m = doc.blocked.shape
            qd = qh[:, :, doc.q_lo : doc.q_hi].reshape(kv, group * n, dim)
            scores = torch.bmm(qd, doc.of(kh).transpose(1, 2))
            s = scores.view(kv, group, n, m).to(wide).mul_(scale)
            s.masked_fill_(doc.blocked, float("-inf"))
            if diag is None:
                p = torch.softmax(s, dim=-1)
            else:
                d = diag[..., doc.q_lo : doc.q_hi]
                top = torch.maximum(s.amax(-1), d.amax(0))
                p = s.sub_(top[..., None]).exp_()
                d.sub_(top).exp_()
                norm = p.sum(-1).add_(d.sum(0)).reciprocal_()
                p.mul_(norm[..., None])
                d.mul_(norm)
            pc = p.to(q.dtype).view(kv, group * n, m)
            probs.append(pc)
            od = torch.bmm(pc, doc.of(vh))
            out[:, :, doc.q_lo : doc.q_hi] = od.view(kv, group, n, dim)
        if diag is not None and vd is not None:
            out += diagonal_values(diag.to(q.dtype), vd)
        ctx.docs, ctx.scale, ctx.probs, ctx.diag = docs, scale, probs, diag
        ctx.save_for_backward(q, k0, v0, kd, vd, out)
        return by_row(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k0, v0, kd, vd."""
        q, k0, v0, kd, vd, out = ctx.saved_tensors
        rows, heads, dim = q.shape
        kv = k0.shape[1]
        group = heads // kv
        scale = ctx.scale
        wide = torch.promote_types(q.dtype, torch.float32)
        qh, go = by_head(q, kv), by_head(grads[0], kv).contiguous()
        kh, vh = k0.transpose(0, 1), v0.transpose(0, 1)
        delta = (go * out).sum(-1, dtype=wide)  # [kv,g,Q]
        gq = torch.zeros(kv, group, rows, dim, dtype=q.dtype, device=q.device)
        gk = torch.zeros(kv, k0.shape[0], dim, dtype=q.dtype, device=q.device)
        gv = torch.zeros_like(gk)
        for doc, p in zip(ctx.docs, ctx.probs, strict=True):
            n = doc.q_hi - doc.q_lo
            rows_q, rows_k = slice(doc.q_lo, doc.q_hi), slice(doc.k_lo, doc.k_hi)
            god = go[:, :, rows_q].reshape(kv, group * n, dim)
            qd = qh[:, :, rows_q].reshape(kv, group * n, dim)
            gp = torch.bmm(god, doc.of(vh).transpose(1, 2)).to(wide)
            gp.sub_(delta[:, :, rows_q].reshape(kv, group * n, 1))
            gs = gp.mul_(p).mul_(scale).to(q.dtype)
            gq[:, :, rows_q] = torch.bmm(gs, doc.of(kh)).view(kv, group, n, dim)
            if doc.own_lo == doc.own_hi:  # documents come first and are disjoint
                torch.bmm(p.transpose(1, 2), god, out=gv[:, rows_k])
                gk[:, rows_k] = torch.bmm(gs.transpose(1, 2), qd)
            else:
                doc.add(gv, torch.bmm(p.transpose(1, 2), god))
                doc.add(gk, torch.bmm(gs.transpose(1, 2), qd))
        gkd = gvd = None
        if ctx.diag is not None:
            more, gkd, gvd = diagonal_gradients(qh, kd, vd, go, ctx.diag, delta)
            gq += more
        return by_row(gq), gk.transpose(0, 1), gv.transpose(0, 1), gkd, gvd, None, None


def packed_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    kd: Tensor | None,
    vd: Tensor | None,
    active: Tensor,
    layout: RowLayout,
) -> Tensor:
    """Attend to visible step-0 rows and to the diagonals.

    Args:
        q: [Q, n_h, d] queries of the active rows, rotated.
        k0: [R, n_kv, d] step-0 keys of all rows, rotated.
        v0: [R, n_kv, d] step-0 values.
        kd: [j, Q, n_kv, d] later keys of the active rows, or None at step 0.
        vd: [j, Q, n_kv, d] later values, or None.
        active: int64 [Q], sorted row of each query.

    Returns:
        [Q, n_h, d].
    """
    scale = q.shape[-1] ** -0.5
    docs = _slices(active, layout)
    out: Tensor = _PackedAttention.apply(q, k0, v0, kd, vd, docs, scale)
    return out


Attention = Callable[..., Tensor]
"""Function with the arguments and result of `packed_attention`."""


def attention_backend(name: str, device: str) -> Attention:
    """Return the attention backend of a name.

    Raises:
        DraftError: It is unknown, not installed, or cannot train on this device.
    """
    if name == "auto":
        name = "flex" if device == "cuda" else "packed"
    if name == "packed":
        return packed_attention
    if name not in ("flex", "xformers"):
        raise DraftError(
            f"tide.train.attention is {name!r}; use auto, packed, flex or xformers."
        )
    if device != "cuda":
        raise DraftError(
            f"tide.train.attention is {name!r}, which cannot train on {device}; use "
            "packed or auto."
        )
    if name == "flex":
        from vllm_tide.draft.attention_gpu import flex_attention

        return flex_attention
    if importlib.util.find_spec("xformers") is None:
        raise DraftError(
            "tide.train.attention is 'xformers', which is not installed; install it or "
            "use flex or packed."
        )
    from vllm_tide.draft.attention_gpu import xformers_attention

    return xformers_attention
