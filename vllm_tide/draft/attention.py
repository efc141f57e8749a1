"""Training-time-test attention over packed documents.

At step i, row t of a document attends to the step-0 keys of rows 0..t (the trunk) and
to its own keys of steps 1..i (the diagonals), under one softmax. Cost R^2 + iR.

Shapes: N packed rows, Q query rows (a sorted subset), D documents, j diagonals,
n_h query heads, n_kv key heads, g = n_h / n_kv, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DocSlice:
    """One document: query rows [q_lo, q_hi) see trunk rows [k_lo, k_hi), causally."""

    q_lo: int
    q_hi: int
    k_lo: int
    k_hi: int
    blocked: Tensor  # bool [q_hi - q_lo, k_hi - k_lo], True = may not attend


def slice_documents(active: Tensor, doc_starts: list[int]) -> list[DocSlice]:
    """Cut query rows by document.

    Args:
        active: int64 [Q], sorted row indices of the queries.
        doc_starts: D + 1 row offsets of the documents.
    """
    bounds = torch.searchsorted(
        active, torch.tensor(doc_starts, device=active.device)
    ).tolist()
    out = []
    for doc in range(len(doc_starts) - 1):
        lo, hi = bounds[doc], bounds[doc + 1]
        if lo == hi:
            continue
        start = doc_starts[doc]
        local = active[lo:hi] - start
        keys = int(local[-1]) + 1
        blocked = torch.arange(keys, device=active.device)[None, :] > local[:, None]
        out.append(DocSlice(lo, hi, start, start + keys, blocked))
    return out


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
        docs: list[DocSlice],
        scale: float,
    ) -> Tensor:
        """See `packed_attention`."""
        rows, heads, dim = q.shape
        kv = k0.shape[1]
        group = heads // kv
        wide = torch.promote_types(q.dtype, torch.float32)
        qh = q.view(rows, kv, group, dim).permute(1, 2, 0, 3)  # [kv,g,Q,d]
        kh, vh = k0.transpose(0, 1), v0.transpose(0, 1)  # [kv,N,d]
        diag = None
        if kd is not None:
            keys = kd.permute(0, 2, 1, 3)[:, :, None]  # [j,kv,1,Q,d]
            diag = (qh[None] * keys).sum(-1, dtype=wide) * scale  # [j,kv,g,Q]
        out = torch.empty(kv, group, rows, dim, dtype=q.dtype, device=q.device)
        probs: list[Tensor] = []
        for doc in docs:
            n, m = doc.q_hi - doc.q_lo, doc.k_hi - doc.k_lo
            qd = qh[:, :, doc.q_lo : doc.q_hi].reshape(kv, group * n, dim)
            scores = torch.bmm(qd, kh[:, doc.k_lo : doc.k_hi].transpose(1, 2))
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
            od = torch.bmm(pc, vh[:, doc.k_lo : doc.k_hi])
            out[:, :, doc.q_lo : doc.q_hi] = od.view(kv, group, n, dim)
        if diag is not None and vd is not None:
            values = vd.permute(0, 2, 1, 3)[:, :, None]
            out += (diag[..., None].to(q.dtype) * values).sum(0)
        ctx.docs, ctx.scale, ctx.probs, ctx.diag = docs, scale, probs, diag
        ctx.save_for_backward(q, k0, v0, kd, vd, out)
        return out.permute(2, 0, 1, 3).reshape(rows, heads, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k0, v0, kd, vd."""
        q, k0, v0, kd, vd, out = ctx.saved_tensors
        rows, heads, dim = q.shape
        kv = k0.shape[1]
        group = heads // kv
        scale = ctx.scale
        wide = torch.promote_types(q.dtype, torch.float32)
        qh = q.view(rows, kv, group, dim).permute(1, 2, 0, 3)
        go = grads[0].view(rows, kv, group, dim).permute(1, 2, 0, 3).contiguous()
        kh, vh = k0.transpose(0, 1), v0.transpose(0, 1)
        delta = (go * out).sum(-1, dtype=wide)  # [kv,g,Q]
        gq = torch.zeros(kv, group, rows, dim, dtype=q.dtype, device=q.device)
        gk = torch.zeros(kv, k0.shape[0], dim, dtype=q.dtype, device=q.device)
        gv = torch.zeros_like(gk)
        for doc, p in zip(ctx.docs, ctx.probs, strict=True):
            n, m = doc.q_hi - doc.q_lo, doc.k_hi - doc.k_lo
            rows_q, rows_k = slice(doc.q_lo, doc.q_hi), slice(doc.k_lo, doc.k_hi)
            god = go[:, :, rows_q].reshape(kv, group * n, dim)
            qd = qh[:, :, rows_q].reshape(kv, group * n, dim)
            torch.bmm(p.transpose(1, 2), god, out=gv[:, rows_k])
            gp = torch.bmm(god, vh[:, rows_k].transpose(1, 2)).to(wide)
            gp.sub_(delta[:, :, rows_q].reshape(kv, group * n, 1))
            gs = gp.mul_(p).mul_(scale).to(q.dtype)
            gq[:, :, rows_q] = torch.bmm(gs, kh[:, rows_k]).view(kv, group, n, dim)
            gk[:, rows_k] = torch.bmm(gs.transpose(1, 2), qd)
            del m
        gkd = gvd = None
        if ctx.diag is not None:
            keys = kd.permute(0, 2, 1, 3)[:, :, None]
            values = vd.permute(0, 2, 1, 3)[:, :, None]
            gp = (go[None] * values).sum(-1, dtype=wide).sub_(delta)
            gs = gp.mul_(ctx.diag).mul_(scale).to(q.dtype)[..., None]
            gq += (gs * keys).sum(0)
            gkd = (gs * qh[None]).sum(2).permute(0, 2, 1, 3)
            pd = ctx.diag.to(q.dtype)[..., None]
            gvd = (pd * go[None]).sum(2).permute(0, 2, 1, 3)
        gq = gq.permute(2, 0, 1, 3).reshape(rows, heads, dim)
        return gq, gk.transpose(0, 1), gv.transpose(0, 1), gkd, gvd, None, None


def packed_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    kd: Tensor | None,
    vd: Tensor | None,
    docs: list[DocSlice],
) -> Tensor:
    """Attend to the trunk and the diagonals.

    Args:
        q: [Q, n_h, d] queries of the active rows, rotated.
        k0: [N, n_kv, d] step-0 keys of all rows, rotated.
        v0: [N, n_kv, d] step-0 values.
        kd: [j, Q, n_kv, d] later keys of the active rows, or None at step 0.
        vd: [j, Q, n_kv, d] later values, or None.
        docs: From `slice_documents`; together they cover all Q rows.

    Returns:
        [Q, n_h, d].
    """
    scale = q.shape[-1] ** -0.5
    out: Tensor = _PackedAttention.apply(q, k0, v0, kd, vd, docs, scale)
    return out


def reference_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    kd: Tensor | None,
    vd: Tensor | None,
    active: Tensor,
    doc_ids: Tensor,
) -> Tensor:
    """The same by one dense mask over (i + 1) * N keys; for tests only.

    Args:
        q: As in `packed_attention`, and so k0, v0, kd, vd.
        k0: Step-0 keys.
        v0: Step-0 values.
        kd: Later keys.
        vd: Later values.
        active: int64 [Q], row index of each query.
        doc_ids: int64 [N], document of each row.
    """
    rows, group = k0.shape[0], q.shape[1] // k0.shape[1]
    keys, values = [k0], [v0]
    own = torch.arange(rows)[None, :] == active[:, None]
    causal = torch.arange(rows)[None, :] <= active[:, None]
    allow = [causal & (doc_ids[None, :] == doc_ids[active][:, None])]
    if kd is not None and vd is not None:
        for k, v in zip(kd, vd, strict=True):
            keys.append(torch.zeros_like(k0).index_copy(0, active, k))
            values.append(torch.zeros_like(v0).index_copy(0, active, v))
            allow.append(own)
    k = torch.cat(keys).repeat_interleave(group, 1)
    v = torch.cat(values).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.cat(allow, 1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
