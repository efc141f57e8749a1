"""Models for the quickstart, the benchmarks and the tests.

`fetch_model.py` downloads and converts a published model, and `train_draft.py` trains a
draft for it. `target`, `draft` and `prompts` are a small model pair for tests.
"""
