"""Compare what a commit and this tree compute: nothing of it is stored.

    python tests/goldens.py --base COMMIT [--base-python PYTHON] [--seconds S]

Each golden runs in a process of its own, once in a worktree of the commit and once in
this tree: rows of the simulator (`--suite published`), bytes of 30 records in a ring,
losses and weights of five seeds (bit for bit), verdicts of the canary and of the gate,
and greedy texts of Model Runner V1, V2 and V2 with asynchronous scheduling. Prints a
line for each and returns 1 if one differs. `--base-python` is an environment whose vLLM
has the patches of the commit; without it the texts are made by this one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
ARMS = ("none", "static1", "static3", "threshold", "vllm_dynamic", "adaspec")
PROMPTS = [
    list(b"hello world"),
    list(b"def main(argv):\n    return 0 " * 4),
    list(b"abc abc abc"),
    [7],
]


def digest(*arrays: Any) -> str:
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()[:16]


def simulator(seconds: float) -> Any:
    """Rows of the published suite."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        argv = ["scripts/sim/run.py", "--suite", "published", "--seed", "0"]
        argv += ["--seconds", str(seconds), "--json", str(out)]
        argv += [arg for arm in ARMS for arg in ("--arm", arm)]
        subprocess.run([sys.executable, *argv], check=True, stderr=subprocess.DEVNULL)
        rows = json.loads(out.read_text())["rows"]
        for row in rows:
            row.pop("causes", None)  # of an arm that only the base has
            for name in ("slo_met", "slo_missed"):
                row["control"].pop(name, None)
        return rows


def records(_: float) -> Any:
    """The data area of rings after ten steps of each kind: 30 records and more."""
    from tests.transport.samples import make_spec
    from tests.transport.step_rows import request_rows, step_rows
    from vllm_tide.capture.policy import Ticket
    from vllm_tide.capture.step import lay_out
    from vllm_tide.transport import RingWriter
    from vllm_tide.transport.shm import DATA_AT

    result = []
    for teacher, dtype in (("hidden", "bfloat16"), ("topk", "float32")):
        spec = make_spec(teacher, dtype, hidden_size=4, topk=3, layers=(1, 2))
        writer = RingWriter.create(spec, 1 << 16)
        for seed in range(10):
            rng = np.random.default_rng(seed)
            drafts = rng.integers(0, 4, 3)
            known = np.where(rng.random(3) < 0.5, 1, rng.integers(1, 20, 3))
            count = known + drafts
            committed = rng.integers(1, drafts + 2)
            ids = rng.integers(2**63, size=6)
            tickets = [
                Ticket(key=int(key), refusal=None, tenant=int(tenant))
                for key, tenant in zip(ids[:3], ids[3:], strict=True)
            ]
            ends = np.cumsum(count)
            requests = request_rows(
                tickets, 0.5, 1.25, low=ends - count, first=ends - count, count=count,
                drafts=drafts, start=rng.integers(0, 2**40, 3),
                logit_end=np.cumsum(drafts + 1), committed=committed,
                num_prompt_tokens=rng.integers(1, 2**31, 3),
                next_token=rng.integers(0, 100, 3),
            )  # fmt: skip
            rows, outputs = int(ends[-1]), int((drafts + 1).sum())
            features = rng.standard_normal((rows, 8)).astype(np.float32)
            hidden = features[:, :4]
            if dtype == "bfloat16":
                features = (features.view(np.uint32) >> 16).astype("u2")
                hidden = np.ascontiguousarray(features[:, :4])
            topk = (
                rng.integers(100, size=(outputs, 3), dtype=np.int32),
                rng.standard_normal((outputs, 3)).astype(np.float32),
                rng.standard_normal(outputs).astype(np.float32),
            )
            step = step_rows(
                token_ids=rng.integers(100, size=rows, dtype=np.int32),
                features=features,
                hidden=hidden if teacher == "hidden" else None,
                topk=topk if teacher == "topk" else None,
                version=7,
                concurrency=3,
                cost=1.25,
            )
            frames, _ = lay_out(requests, step, spec, 3 * (teacher == "topk"), 7)
            writer.write(frames)
            assert not frames.status.any()
        head, _ = writer.level()
        data = np.frombuffer(writer._segment.buf, np.uint8)[DATA_AT : DATA_AT + head]
        result.append([head, digest(data)])
        del data
        writer.close()
    return result


def training(_: float) -> Any:
    """Losses and weights after each of two cycles, for five seeds."""
    import random

    import torch

    from tests.train.toys import KNOBS, TOY, VOCAB
    from vllm_tide.config import TrainConfig
    from vllm_tide.train.trainer import Trainer

    torch.set_num_threads(1)
    result = []
    for seed in range(5):
        torch.manual_seed(seed)
        trainer = Trainer(TOY.draft(seed), TOY.rows, TrainConfig(**KNOBS))
        rng = random.Random(seed)
        trainer.add_samples(
            TOY.document(rng.randrange(VOCAB), 20, 3, rng.getrandbits(64))
            for _ in range(30)
        )
        for _ in range(2):
            loss = trainer.train_cycle().loss
            weights = [p.detach().numpy() for p in trainer.draft.parameters()]
            result.append([loss.hex(), digest(*weights)])
    return result


@dataclass(slots=True)
class Row:
    """The fields of a record that `ServedRequests` reads."""

    key: int
    start: int
    num_accepted: int
    token_ids: np.ndarray
    draft_version: int
    cost: float
    concurrency: int = 8
    phase: int = 1
    num_prompt_tokens: int = 16
    finished: bool = False
    tenant: int = 0
    verify_chance: float = 1.0
    memory: bool = False


def canary(_: float) -> Any:
    """Verdicts on drafts that accept as much, less and more than the one before."""
    from vllm_tide.config import DeployConfig
    from vllm_tide.deploy.canary import Canary
    from vllm_tide.deploy.served import ServedRequests

    result = []
    for seed in range(24):
        rng = np.random.default_rng(seed)
        served, watch = ServedRequests(max_open=1 << 20), Canary(DeployConfig())
        chances = 0.7, 0.7 + (-0.3, -0.1, 0.0, 0.1)[seed % 4]
        verdict, key, now = None, 0, 0.0
        for version, requests in ((1, 120), (2, 400)):
            if version == 2:
                watch.begin("", 2)
            for _ in range(requests):
                start, key = 16, key + 1
                for _ in range(int(rng.integers(4, 30))):
                    accepted = int(
                        (rng.random(3) < chances[version - 1]).cumprod().sum()
                    )
                    row = Row(key, start, accepted, np.zeros(4, np.int32), version, 1.3)
                    served.add(row, "", now)
                    start, now = start + accepted + 1, now + 0.01
                end = Row(key, 0, 0, np.zeros(0, np.int32), 0, 1.0, finished=True)
                for request in served.add(end, "", now):
                    watch.observe(request)
                verdict = watch.poll() if version == 2 else None
                if verdict is not None:
                    break
        result.append(
            [verdict.decision, verdict.requests] if verdict is not None else None
        )
    return result


def gate(_: float) -> Any:
    """Requests until the gate publishes, for true gains from -0.1 to 0.3 tokens."""
    import random

    from vllm_tide.config import TrainConfig
    from vllm_tide.train.evaluate import FORMS, Evaluation
    from vllm_tide.train.judgement import Evidence, Pair, judge

    def evaluation(by_key: dict[int, float]) -> Evaluation:
        made = Evaluation(3)
        made.reached = {form: [0.0] * 3 for form in FORMS}
        for key, more in by_key.items():
            made.requests[key] = [100.0] + [100 * (3 + more)] * len(FORMS)
        return made

    # Pair of the base commit begins with the samples.
    first: list[Any] = [[]] if "samples" in Pair.__dataclass_fields__ else []

    def pair_of(gains: dict[int, float]) -> Pair:
        live = dict.fromkeys(gains, 0.0)
        return Pair(*first, evaluation(gains), evaluation(live))

    result: list[Any] = []
    for seed in range(40):
        rng, evidence = random.Random(seed), Evidence()
        gain, published = (-0.1, 0.0, 0.05, 0.1, 0.3)[seed % 5], None
        nothing = pair_of({})
        for cycle in range(30):
            gains = {
                1000 * cycle + i: gain + rng.gauss(0, 0.15)
                for i in range(rng.randint(3, 8))
            }
            pair = pair_of(gains)
            evidence.add(list(pair.gains("served").values()))
            if judge(1, 0.0, nothing, pair, TrainConfig(), "served", evidence).publish:
                published = evidence.requests
                break
        result.append([published, evidence.wealth.hex()])
    return result


def texts(runner: str) -> Any:
    """Greedy tokens of a toy target with a random draft of length 3."""
    from tests import toys
    from tests.engine.offline_engine import OfflineEngine

    with tempfile.TemporaryDirectory() as folder:
        target = toys.make_target(Path(folder) / "target")
        draft = toys.make_draft(Path(folder) / "draft", target)
        speculative = {
            "method": "eagle3",
            "model": str(draft),
            "num_speculative_tokens": 3,
            "tide": {"run_dir": str(Path(folder) / "run")},
        }
        case = {
            "target": str(target),
            "speculative_config": speculative,
            "runner": runner,
            "engine": {"max_num_seqs": 4, "block_size": 32},
        }
        with OfflineEngine(case) as engine:
            return engine.work(PROMPTS, params={"max_tokens": 24})["tokens"]


GOLDENS = {
    "simulator": simulator,
    "records": records,
    "training": training,
    "canary": canary,
    "gate": gate,
    "texts-v1": lambda _: texts("v1"),
    "texts-v2": lambda _: texts("v2"),
    "texts-v2-async": lambda _: texts("v2-async"),
}


def compute(name: str, tree: Path, python: str, seconds: float) -> Any:
    """Run a golden in a tree; return its value or the end of its error."""
    environment = os.environ | {
        "PYTHONPATH": f"{tree}:{tree / 'scripts'}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # This file, whichever tree it computes for.
    argv = [python, str(Path(__file__).resolve()), "--emit", name]
    done = subprocess.run(
        [*argv, "--seconds", str(seconds)],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [x for x in lines if re.match(r"[\w.]+Error", x)] or lines[-3:]
        return f"error ({done.returncode}): {errors[-1]}"
    return json.loads(done.stdout.splitlines()[-1])


def worktree(base: str, folder: Path) -> Path:
    """Check a commit out, with the C++ extension of this tree."""
    git = ["git", "-C", str(ROOT)]
    tree = folder / "base"
    subprocess.run([*git, "worktree", "add", "-q", "--detach", tree, base], check=True)
    for library in (ROOT / "vllm_tide").glob("_shm*.so"):
        (tree / "vllm_tide" / library.name).write_bytes(library.read_bytes())
    return tree


def main() -> int:
    """Compare; return 1 if a golden differs or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base")
    parser.add_argument("--base-python", default=sys.executable)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each trace")
    parser.add_argument("--only", choices=GOLDENS, action="append")
    parser.add_argument("--emit", choices=GOLDENS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.emit:
        # Imports come from the working directory, not from this file's folder.
        sys.path[0] = os.getcwd()
        value = GOLDENS[args.emit](args.seconds)
        print("\n" + json.dumps(value))
        return 0
    if not args.base:
        parser.error("--base names the commit to compare with")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="goldens_") as folder:
        tree = worktree(args.base, Path(folder))
        try:
            for name in args.only or GOLDENS:
                before = compute(name, tree, args.base_python, args.seconds)
                after = compute(name, ROOT, sys.executable, args.seconds)
                broken = any(str(v).startswith("error (") for v in (before, after))
                equal = before == after and not broken
                failed += not equal
                size = len(json.dumps(after))
                print(f"{name}: {'equal' if equal else 'DIFFERS'} ({size} characters)")
                if not equal:
                    print(f"  base: {before}\n  here: {after}"[:4000])
        finally:
            git = ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)]
            subprocess.run(git, check=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
