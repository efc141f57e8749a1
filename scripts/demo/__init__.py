"""Models for the quickstart, the benchmarks and the tests.

`fetch_model.py` makes a published model from the package index, and `train_draft.py` a
draft for it. `target`, `draft` and `prompts` are a small pair for tests.
"""
