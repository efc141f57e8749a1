"""vllm_tide: a vLLM server whose speculative decoding improves itself.

Who runs what is the first question; the packages answer it.

1. `vllm serve` reads the `tide` section (`config.py`, `engine/arguments.py`) and
   refuses what cannot work before a model loads.
2. Each vLLM worker makes its `engine/worker.py`: ring, weights segment, capture,
   swapper; rank 0 announces them in the run directory (`transport/rendezvous.py`).
3. In every step the patched model runner shows the worker the tensors it already
   holds; an adapter for each of vLLM's two runners (`engine/capture_v1.py`,
   `engine/capture_v2.py`) says where a request's rows lie, `capture/` whose rows may
   leave and what their record (`transport/record.py`) says.
4. Records go into the signal ring (`transport/ring.py`): shared memory, never
   blocking.
5. The sidecar (`vllm-tide train`, `train/sidecar.py`) drains the ring, assembles
   samples, trains the draft (`draft/eagle3.py`) and compares it with the live one on
   held-out requests.
6. A better draft is published into the weights segment (`transport/weights.py`).
7. A thread of the worker verifies it (`swap/`), the scheduler orders the swap at one
   step for all ranks (`engine/scheduler.py`), and `engine/install.py` installs it.
8. Numbers travel worker, scheduler, API server, `/metrics` (`metrics.py`).

Imports point one way: config, transport, capture and draft, train and swap and engine,
cli. Only `engine/` imports vLLM.
"""
