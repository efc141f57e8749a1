"""Drives real `vllm serve` processes over HTTP and measures what they do.

Runs outside the server, as an ordinary client: nothing here imports vLLM, and nothing
here runs in a serving process. An experiment is one module of `bench.suites`.

* `options`, `session`: what a suite is asked for; its report, clock and arms;
* `models`, `arms`, `server`: what is served; arms, and their servers;
* `stream`, `client`, `measure`, `arm`: what is sent, and how;
* `scrape`, `trainers`: the server's metrics, the trainers' status and events;
* `summary`, `identity`: figures of an arm; are the outputs the same;
* `plots`: what a person gets.
"""
