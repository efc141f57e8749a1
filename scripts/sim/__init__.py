"""A discrete-event model of continuous batching that runs the real control code.

What the engine's adapter drives on vLLM's runner, `engine` drives on a time model and
an acceptance process: the same policies, call by call, in simulated seconds. So the
simulator can do what a server cannot: know the acceptance probability of every token
that could be drafted, hence the best length of each step, hence regret.

* ``published``: time models to be found in print;
* ``arrivals``: traces, read or made up; ``acceptance``: what the draft gets right;
* ``truth``: seconds as they pass; ``engine``: the event loop;
* ``clairvoyant``: the best length and verification set, given the probabilities;
* ``dynamic``: vLLM's schedule by batch size; ``tide_gate``: TIDE's equation 5;
* ``one_depth``: control of Model Runner V2 with asynchronous scheduling;
* ``suite``: cells and arms; ``table``: Markdown of the rows.
"""
