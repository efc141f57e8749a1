"""Bring-up: GPU tests, and captured rows compared with Transformers."""

from __future__ import annotations

from typing import Any

import torch
from place import DEMO, Place

AUX = (1, 3, 5)  # auxiliary layers of the demo draft


def tests(place: Place) -> None:
    """Run the GPU tests of kernels and trainer, or of attention."""
    attention = ["tests/draft/test_attention.py"]
    others = ["tests/kernels/test_on_gpu.py", "tests/train/test_gpu.py"]
    # Override the options of pyproject.toml, which need plugins missing here.
    command = ["-m", "pytest", "-q", "-m", "gpu", "--durations=5"]
    command += ["-o", "addopts=--import-mode=importlib"]
    command += attention if place.data["stage"] == "attention_tests" else others
    command += ["--collect-only"] * place.dry
    place.part("tests", lambda: place.command(command, "tests"))


def rows(place: Place) -> None:
    """Check each captured row of requests with prefill and decode in one batch."""
    result = place.part("rows", lambda: _rows(place))
    place.check(result["modes"].get("PIECEWISE", 0) > 0, "no step ran PIECEWISE graphs")
    place.check(not result["dropped"], f"rows were dropped: {result['dropped']}")
    place.check(result["compared"] > 1000, f"only {result['compared']} rows captured")
    worst = min(result["cosine"].values())
    place.check(worst > 0.99, f"a captured row differs from the target's: {result}")


def _rows(place: Place) -> dict[str, Any]:
    from inprocess import Engine

    from vllm_tide.transport.ring import RingReader

    tide = {"preset": "observe", "capture": {"ring_mib": 64}}
    limits = {"max_num_seqs": 16, "kv_cache_memory_bytes": 2 << 30}
    limits |= {"gpu_memory_utilization": 0.3}
    engine = Engine(place, (DEMO / "target", DEMO / "draft"), 3, tide, **limits)
    reader, records = RingReader.attach(engine.tide._ring.name), []
    for i in range(12 if place.dry else 96):
        prompt = [(7 * i + j) % 4000 + 5 for j in range(20 + 5 * (i % 30))]
        engine.add(prompt, 16 + i % 40)
    while engine.engine.has_unfinished_requests():
        engine.step()
        while (record := reader.read()) is not None:
            records.append(record)
    reader.close()
    tide = engine.tide
    lost = {
        "dropped": dict(tide._ring.dropped_rows),
        "left": dict(tide.capture.dropped),
    }
    return _compare(records) | {"modes": dict(engine.modes), **lost}


def _compare(records: list[Any]) -> dict[str, Any]:
    """Return the lowest cosine similarity and the number of committed rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    model, requests = model.cuda().eval(), {}  # type: ignore[var-annotated]
    for record in records:
        tokens, parts = requests.setdefault(record.key, ({}, []))
        good = min(record.num_accepted + 1, record.num_rows)  # other rows are rejected
        for i in range(good):
            tokens[record.start + i] = int(record.token_ids[i]) % 4096
        parts.append((record, good))
    worst, compared = {"features": 1.0, "hidden": 1.0}, 0
    for tokens, parts in requests.values():
        ids = [tokens.get(i, 0) for i in range(min(max(tokens, default=0) + 1, 1024))]
        with torch.no_grad():
            out = model(torch.tensor([ids]).cuda(), output_hidden_states=True)
        states = out.hidden_states
        features, hidden = torch.cat([states[i][0] for i in AUX], -1), states[-1][0]
        for record, good in parts:
            first = min(record.teacher_start, good)
            inputs = ("features", features, record.features[:good], record.start)
            teacher = record.teacher_hidden[: good - first], record.start + first
            for name, expected, captured, at in (inputs, ("hidden", hidden, *teacher)):
                rows = torch.from_numpy(captured.copy()).view(torch.bfloat16).cuda()
                truth = expected[at : at + len(rows)]
                near = torch.cosine_similarity(rows[: len(truth)].float(), truth, -1)
                worst[name] = min([worst[name], *near.nan_to_num(-1).tolist()])
            compared += good
    return {"cosine": worst, "compared": compared}
