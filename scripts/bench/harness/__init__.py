"""Benchmark client that drives real `vllm serve` processes over HTTP.

The client runs outside the server, as an ordinary HTTP client. Only `time_slices`
imports vLLM. An experiment is one module of `bench.suites`.

* `options`, `session`: options of a suite; its report, clock and arms;
* `models`, `arms`, `server`: served models, arms and their servers;
* `stream`, `client`, `measure`, `arm`: the requests, and how they are sent;
* `interleave`, `time_slices`: arms that alternate on the same cores;
* `scrape`, `trainers`: the server's metrics, the trainers' status and events;
* `summary`, `identity`: figures of an arm, comparison of outputs;
* `plots`, `quickstart_report`: output for the user.
"""
