"""Arrays of a V1 runner, and steps of `ControlV1` over them, without vLLM."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_tide.config import ControlConfig
from vllm_tide.engine.control_v1 import ControlV1
from vllm_tide.engine.worker_v1 import landed_step

K, N = 3, 2
REQS = [f"r{i}" for i in range(N)]
PROMPT = 5


def request(**xargs):
    """Return the state of a request that decodes for long."""
    params = SimpleNamespace(
        max_tokens=1000,
        temperature=0.0,
        structured_outputs=None,
        extra_args=xargs or None,
    )
    return SimpleNamespace(num_prompt_tokens=PROMPT, sampling_params=params)


class Engine:
    """Requests that decode, and one step over them; `replace` brings others.

    The target always predicts token 7 and the draft token 1.
    """

    def __init__(
        self, agree=lambda value: value, leader=True, reqs=REQS, memory=False, **config
    ):
        self.reqs, self.ended = list(reqs), []
        self.batch = SimpleNamespace(
            req_ids=self.reqs,
            num_computed_tokens_cpu=np.full(len(reqs), 50),
            num_tokens_no_spec=np.full(len(reqs), 51),
            num_prompt_tokens=np.full(len(reqs), PROMPT),
            token_ids_cpu=np.arange(2000 * len(reqs), dtype=np.int32).reshape(-1, 2000),
        )
        runner = SimpleNamespace(
            max_num_reqs=2 * len(reqs),
            max_model_len=2000,
            max_num_tokens=128,
            input_ids=SimpleNamespace(np=np.zeros(128, np.int32)),
            dtype=torch.float32,
            requests={name: request() for name in reqs},
            input_batch=self.batch,
            query_start_loc=SimpleNamespace(np=np.zeros(len(reqs) + 1, np.int64)),
            discard_request_mask=SimpleNamespace(np=np.zeros(len(reqs), bool)),
        )
        self.runner = runner
        config = ControlConfig(**{"policy": "threshold"} | config)
        self.control = ControlV1(runner, config, K, 1, 4, agree, leader, memory)
        self.drafts = {}

    def replace(self, place, name, **xargs):
        """End a request and begin another in its place, at its prompt."""
        self.ended.append(self.reqs[place])
        self.reqs[place] = name
        self.runner.requests[name] = request(**xargs)
        self.batch.num_computed_tokens_cpu[place] = 0
        self.batch.num_tokens_no_spec[place] = PROMPT

    def remove(self):
        """End the last request."""
        self.ended.append(self.reqs.pop())

    def step(self, sure=0.9):
        """Run a step; return draft passes and next drafts. All drafts are rejected."""
        control, reqs = self.control, self.reqs
        num = len(reqs)
        spec = {r: d for r, d in self.drafts.items() if d and r in reqs}
        computed = self.batch.num_computed_tokens_cpu
        rows = [
            1 + len(spec.get(r, ())) if computed[i] else PROMPT
            for i, r in enumerate(reqs)
        ]
        self.runner.query_start_loc.np[: num + 1] = np.cumsum([0, *rows])
        goes_on = [r for i, r in enumerate(reqs) if computed[i]]
        output = SimpleNamespace(
            finished_req_ids=self.ended,
            scheduled_cached_reqs=SimpleNamespace(req_ids=goes_on),
            scheduled_spec_decode_tokens=spec,
            num_scheduled_tokens=dict(zip(reqs, rows, strict=True)),
            total_num_scheduled_tokens=sum(rows),
            scheduled_new_reqs=[r for i, r in enumerate(reqs) if not computed[i]],
        )
        control.begin(output)
        self.ended = []
        sampled = torch.full((num, 1 + K), -1)
        sampled[:, 0] = 7
        for i, r in enumerate(reqs):
            accepted = list(spec.get(r, ())).count(7)  # of one source, so all or none
            sampled[i, : 1 + accepted] = 7
        features = [torch.zeros(128, 4)]
        steps, more = 0, True
        planned = control.plan(output, sampled, features, None)
        while steps < planned and more:
            steps += 1
            control.on_draft_logits(torch.full((num,), sure))
            more = steps == planned or control.go_on()
        committed = [row[row >= 0].tolist() for row in sampled]
        self.ended_step = step = landed_step(self.runner, output, committed, 0)
        control.fill(step)
        self.cost, self.explored_slots = step.cost, dict(step.explored)
        control.end()
        # As the scheduler does: a request without an entry has no drafts.
        made = control.choose(reqs, [[1] * steps for _ in reqs])
        self.drafts = dict(zip(reqs, made, strict=False))
        for i in range(num):
            emitted, known = int((sampled[i] >= 0).sum()), self.batch.num_tokens_no_spec
            self.batch.token_ids_cpu[i, known[i] : known[i] + emitted] = 7
            computed[i] += emitted if computed[i] else PROMPT
            known[i] += emitted
        return planned, [len(self.drafts.get(r, ())) for r in reqs]
