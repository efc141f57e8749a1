"""vllm_tide: a vLLM server whose speculative decoding improves itself.

The way of one step, and who runs each part:

1. `vllm serve` reads the `tide` section (`config.py`, `engine/arguments.py`) and
   refuses what cannot work before a model loads.
2. Each vLLM worker makes its `engine/worker.py`: ring, weights segment, capture,
   swapper; rank 0 announces them in the run directory (`transport/rendezvous.py`).
3. In every step the patched model runner shows the worker the tensors it already
   holds; seams for each of vLLM's two runners (`engine/worker_v1.py`,
   `engine/worker_v2.py`) fill a `Step` (`engine/steps.py`). `engine/capture.py` takes
   its rows, `capture/` says whose may leave and what their record
   (`transport/record.py`) holds; control and timing read the same `Step`.
4. Records go into the signal ring (`transport/ring.py`): shared memory, never
   blocking.
5. The sidecar (`vllm-tide train`, `sidecar/loop.py`) drains the ring, assembles
   samples, trains the draft (`train/`) and compares it with the live one on held-out
   requests.
6. A better draft is published into the weights segment (`transport/weights.py`);
   served traffic decides whether it stays (`deploy/`).
7. A thread of the worker verifies it, the scheduler orders the swap at one step for
   all ranks (`engine/scheduler.py`), and `engine/install.py` installs it.
8. Numbers travel worker, scheduler, API server, `/metrics` (`metrics.py`).

Imports point one way: config, transport, capture and draft, train and memory, deploy
and engine, sidecar, cli.
Only `engine/` imports vLLM.

Glossary (one term per concept; a new term needs a line here):

* *target*, *draft*: the served model, and the EAGLE-3 model that proposes its tokens;
  `lm_head`: a model's output rows. A draft's *version* counts publications; 0 is the
  checkpoint's.
* *decode step*: one step of the engine; *verify step*: one with drafts; *depth*: draft
  passes of a step; *length*: drafted tokens of a request that are verified.
* *confidence*: probability that the draft gives a token it drafted; *acceptance*:
  share of verified tokens that the target keeps; *acceptance length*: tokens per
  verify step.
* *memory*: drafts from a request's own text (`memory/`), which need no draft pass;
  *proposal*: its tokens for a step; *match*: how many tokens before it occurred before.
* *row*: hidden states and token of one position; *record*: a request's rows of one
  step, as they travel; *sample*: what is trained on, rows of one request.
* *held-out*: never trained on; *candidate*: a draft of the trainer that is not
  published; *gate*: decides on held-out requests whether a candidate is published;
  *canary*: decides on served speed whether a published one stays; *roll back*:
  publish the one before.
* *day 0*: a start from an untrained draft; *frozen*: a draft that is never trained.
* *segment*: named shared memory; *ring*: of records; *weights segment*: of drafts;
  *spool*: the same through storage; *run directory*: where processes meet.
* *step costs*: predicted times by depth and length.
"""
