"""Checks of installation, configuration and machine for `vllm-tide doctor`.

Can run next to a serving engine: it takes no lock, claims no segment, creates no CUDA
context and leaves no file behind. Does not import vLLM, and imports torch only to
compare a draft with its target.
"""
