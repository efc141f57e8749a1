"""Drives real `vllm serve` processes over HTTP and measures what they do.

Runs outside the server, as an ordinary client: nothing here imports vLLM, and
nothing here runs in a serving process.

* ``stream``: the requests, their order and the concurrency in force;
* ``server``: one server process: start, pin, sample memory, stop;
* ``client``: sends the stream, keeps times and token ids of every request;
* ``scrape``: reads ``/metrics`` once a second;
* ``summary``: the figures of one arm; ``identity``: are the outputs the same;
* ``picture``, ``live``: what a person looks at;
* ``arm``: one server and one stream; ``quickstart``: three arms and a verdict.
"""
