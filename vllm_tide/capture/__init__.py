"""Records of live traffic, and the choice of requests that are captured.

Runs in the vLLM worker, on the model's thread. It does not block and raises no
exception into serving: `guard.py` catches all of them.
"""
