"""Records generated from a seed, and helpers to compare them."""

import os
from dataclasses import fields, replace

import numpy as np

from vllm_tide.transport import Phase, Record, RingSpec
from vllm_tide.transport.record import (
    DTYPE_CODES,
    FINISHED,
    FORMAT_VERSION,
    HIDDEN,
    MEMORY,
    META,
    SAMPLED,
    TOPK,
    Frames,
)
from vllm_tide.transport.rendezvous import (
    EngineManifest,
    release_manifest,
    write_manifest,
)

SHAPES = {"hidden": (True, False), "topk": (False, True)}


def make_spec(
    teacher="hidden", feature_dtype="bfloat16", hidden_size=8, topk=3, layers=(1, 2, 5)
):
    return RingSpec(
        engine_id="engine-1",
        hidden_size=hidden_size,
        aux_layer_ids=layers,
        vocab_size=100,
        feature_dtype=feature_dtype,
        teacher=teacher,
        teacher_topk=topk,
    )


def _floats(rng, shape, feature_dtype):
    values = rng.standard_normal(shape).astype(np.float32)
    if feature_dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(feature_dtype)


def make_record(spec, seed=0, num_rows=4, phase=Phase.VERIFY, teacher_start=0):
    """Return a random record of a ring; every field depends on the seed."""
    rng = np.random.default_rng(seed)
    n, rows = num_rows, num_rows - teacher_start
    verify = phase == Phase.VERIFY
    hidden, topk = SHAPES[spec.teacher]
    k = spec.teacher_topk
    logprobs = -np.sort(rng.exponential(size=(rows, k)).astype(np.float32), axis=1)
    return Record(
        key=int(rng.integers(2**64, dtype=np.uint64)),
        phase=phase,
        start=int(rng.integers(2**40)),
        num_prompt_tokens=int(rng.integers(2**31)),
        num_accepted=int(rng.integers(n)) if verify and n else n - 1,
        next_token=int(rng.integers(-1, spec.vocab_size)),
        draft_version=seed,
        token_ids=rng.integers(spec.vocab_size, size=n, dtype=np.int32),
        features=_floats(rng, (n, spec.feature_width), spec.feature_dtype),
        teacher_start=teacher_start,
        teacher_hidden=_floats(rng, (rows, spec.hidden_size), spec.feature_dtype)
        if hidden
        else None,
        teacher_topk_ids=rng.integers(spec.vocab_size, size=(rows, k), dtype=np.int32)
        if topk
        else None,
        teacher_topk_logprobs=logprobs if topk else None,
        teacher_tail_logprob=np.full(rows, -np.inf, np.float32) if topk else None,
        sampled=bool(seed % 2),
        memory=seed % 5 == 4,
        concurrency=int(rng.integers(2**10)),
        cost=float(rng.random(dtype=np.float32) + np.float32(0.5)),
        verify_chance=float(rng.random(dtype=np.float32)),
        finished=bool(seed % 2),
        tenant=int(rng.integers(2**64, dtype=np.uint64)),
    )


def without_teacher(record):
    parts = ("hidden", "topk_ids", "topk_logprobs", "tail_logprob")
    return replace(record, **{f"teacher_{part}": None for part in parts})


def make_metadata_only(spec, seed=0, num_rows=4, phase=Phase.VERIFY):
    """Return the record without features and teacher."""
    record = without_teacher(make_record(spec, seed, num_rows, phase))
    return replace(record, features=record.features[:, :0], teacher_start=num_rows)


def make_manifest(engine_id="e1", **changes):
    """Return a manifest of this process that serves the draft of `make_spec`."""
    fields = {
        "engine_id": engine_id,
        "pid": os.getpid(),
        "ring": "vllm_tide2_ring_0",
        "weights": "vllm_tide2_weights_0",
        "target_path": "/models/t",
        "draft_path": "/models/d",
        "target_dtype": "bfloat16",
        "hidden_size": 8,
        "vocab_size": 100,
        "draft_vocab_size": 50,
        "aux_layer_ids": (1, 2, 5),
        "teacher": "hidden",
        "teacher_topk": 3,
        "feature_dtype": "bfloat16",
        "num_speculative_tokens": 5,
        "tide": {"capture": {"enabled": True}},
        "created_unix": 1.5,
    }
    return EngineManifest(**{**fields, **changes})


def write_dead_manifest(run_dir, *args, **changes):
    """Write the manifest of an engine that was killed."""
    release_manifest(write_manifest(run_dir, make_manifest(*args, **changes)))


def parts_of(record, feature_dtype):
    """Return its fixed part, and its arrays in the order of a body."""
    teacher = (
        record.teacher_hidden,
        record.teacher_topk_ids,
        record.teacher_topk_logprobs,
        record.teacher_tail_logprob,
    )
    hidden, topk, *_ = teacher
    meta = np.zeros(1, META)
    for name in META.names:
        if hasattr(record, name):
            meta[name] = getattr(record, name)
    meta["rows"], meta["feature_width"] = record.features.shape
    meta["hidden_width"] = 0 if hidden is None else hidden.shape[1]
    meta["topk"] = 0 if topk is None else topk.shape[1]
    meta["dtype"], meta["format"] = DTYPE_CODES[feature_dtype], FORMAT_VERSION
    meta["flags"] = (
        FINISHED * record.finished
        | HIDDEN * (hidden is not None)
        | TOPK * (topk is not None)
        | SAMPLED * record.sampled
        | MEMORY * record.memory
    )
    arrays = record.token_ids, record.features, *teacher
    return meta, [np.ascontiguousarray(part) for part in arrays if part is not None]


def body_of(record, spec=None):
    """Return its bytes as a ring stores them."""
    meta, arrays = parts_of(record, (spec or make_spec()).feature_dtype)
    body = b"".join(
        part.tobytes().ljust(-(-part.nbytes // 8) * 8, b"\0")
        for part in (meta, *arrays)
    )
    return np.frombuffer(body, np.uint8).copy()


def frames_of(records, feature_dtype="bfloat16", follows=None):
    """Return records with the same arrays, to be written at once."""
    record_parts = [parts_of(record, feature_dtype) for record in records]
    n, spans, sources = len(records), [], []
    for column in zip(*(arrays for _, arrays in record_parts), strict=True):
        at, sizes = 0, []
        for part in column:
            sizes.append((at, part.nbytes))
            at += part.nbytes
        spans.append(sizes)
        sources.append(np.concatenate([part.ravel() for part in column]))
    return Frames(
        np.concatenate([meta for meta, _ in record_parts]),
        np.array(spans, np.int64).swapaxes(0, 1).copy(),
        np.array([False] * n if follows is None else follows),
        tuple(sources),
        np.zeros(n, np.uint8),
    )


def write_record(ring, record):
    """Write one record; return False if it was dropped, which is counted."""
    frames = frames_of([record], ring.spec.feature_dtype)
    ring.write(frames)
    ring.count(frames)
    return not frames.status[0]


def identity(record):
    """Return every field of a record, hashable and exact to the bit."""
    values = []
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            value = (str(value.dtype), value.shape, value.tobytes())
        values.append(value)
    return tuple(values)
