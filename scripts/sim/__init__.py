"""A discrete-event model of continuous batching that runs the real control code.

`engine` runs the same policies as the adapter on vLLM's runner, with the same calls, on
a time model and an acceptance process in simulated seconds. In contrast to a server,
the acceptance probability of every possible draft token is known here, so the best
length of each step and the regret can be computed.

* ``published``: time models from papers;
* ``arrivals``: traces, from files or synthetic; ``acceptance``: acceptance process;
* ``truth``: true step times; ``engine``: the event loop;
* ``clairvoyant``: the best length and verification set for known probabilities;
* ``dynamic``: vLLM's schedule by batch size; ``tide_gate``: TIDE's equation 5;
* ``one_depth``: control of Model Runner V2 with asynchronous scheduling;
* ``suite``: cells and arms; ``table``: Markdown of the rows.
"""
