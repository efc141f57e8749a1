"""Rows of live traffic that leave the engine as records, and who may be captured.

Runs in the vLLM worker, on the thread that runs the model. It never blocks and never
raises into serving: `guard.py` is the one boundary that catches everything.
"""
