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

The control benchmark (``vllm-tide bench``) compares speculation policies:

* ``run_options``, ``control_run``, ``target_run``: what is asked for, the run, its
  share of one target;
* ``control_arms``, ``arm_servers``, ``server_pool``: arms, and their servers, of which
  one runs while the others wait; ``visits``: in which order;
* ``dynamic_table``: tunes vLLM's own schedule; ``sizes``: inflated targets;
* ``prompt_pool``, ``traces``, ``workload``: what is sent;
* ``closed_loop``, ``open_loop``, ``measure``: how;
* ``counters``, ``request_figures``, ``attainment``, ``outputs``: what came of it;
* ``document``, ``control_summary``, ``control_plots``, ``html_report``, ``html_parts``,
  ``learning_html``, ``progress``: what a person gets.
"""
