"""vllm_tide: online training of the draft for speculative decoding in vLLM.

Path of one step, and the module of each part:

1. `vllm serve` reads the `tide` section (`config.py`, `engine/arguments.py`) and
   rejects invalid combinations before a model is loaded.
2. Each vLLM worker creates its `engine/worker.py`: ring, weights segment, capture,
   swapper. Rank 0 writes their manifest to the run directory
   (`transport/rendezvous.py`).
3. In every step the patched model runner passes tensors to hooks for each of vLLM's two
   runners (`engine/worker_v1.py`, `engine/worker_v2.py`), which fill a `Step`
   (`capture/step.py`). `capture/` chooses the captured requests, `engine/capture.py`
   copies their rows into records (`transport/record.py`), and control and timing read
   the same `Step`.
4. Records are written to the ring (`transport/ring.py`) in shared memory, without
   blocking.
5. The sidecar (`vllm-tide train`, `sidecar/loop.py`) drains the ring, assembles
   samples, trains the draft (`train/`) and compares it with the live one on held-out
   requests.
6. A better draft is published to the weights segment (`transport/weights.py`). Its
   served speed decides whether it stays live (`deploy/`).
7. A thread of the worker verifies it, the scheduler sends all ranks a directive to swap
   at the same step (`engine/scheduler.py`), and `engine/install.py` installs it.
8. Metrics pass from worker to scheduler, API server and `/metrics` (`metrics.py`).

Imports are in this order only: config, transport, capture and draft, train and memory,
deploy and engine, sidecar, cli. Only `engine/` imports vLLM.

Glossary (one term per concept; a new term needs a line here):

* *target*, *draft*: the served model, and the EAGLE-3 model that proposes its tokens;
  `lm_head`: a model's output layer. A draft's *version* counts publications; 0 is the
  checkpoint.
* *decode step*: one step of the engine; *verify step*: one with drafts; *depth*: draft
  passes of a step; *length*: drafted tokens of a request that are verified.
* *confidence*: the draft's probability of a token that it drafted; *acceptance*: share
  of verified tokens that are accepted; *acceptance length*: tokens per verify step.
* *memory*: drafts from a request's own text (`memory/`), without a draft pass;
  *proposal*: its tokens for a step; *match*: length of the repeated text before it.
* *row*: hidden states and token of one position; *record*: a request's rows of one
  step in the ring; *sample*: rows of one request for training.
* *held-out*: never trained on; *candidate*: a draft of the trainer that is not
  published; *gate*: decides on held-out requests whether a candidate is published;
  *canary*: decides on served speed whether a published one stays; *roll back*:
  publish the previous one.
* *day 0*: a start from an untrained draft; *frozen*: a draft that is never trained.
* *segment*: named shared memory; *ring*: segment of records; *weights segment*: segment
  of drafts; *spool*: both in storage; *run directory*: files of server and trainer.
* *landed*: step with results on the host; *directive*: the scheduler's to all workers.
* *step costs*: predicted times by depth and length.
"""
