"""The adapters that the patches call; the only package that imports vLLM.

`arguments.py` runs while the command line is read, `scheduler.py` in the engine core,
`worker.py` and what it owns in every worker.
"""
