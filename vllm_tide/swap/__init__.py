"""New draft weights: checked before they are let in, installed between two steps.

`stage.py` and `verify.py` run in a thread of the worker, off the critical path;
`../engine/install.py` is the part that touches vLLM's modules.
"""
