"""Adapters that the patches call; the only package that imports vLLM.

`arguments.py` runs while vLLM parses the command line, `scheduler.py` in the engine
core, `worker.py` and its parts in every worker.
"""
