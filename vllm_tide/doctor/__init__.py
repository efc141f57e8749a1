"""Examines installation, configuration and machine for `vllm-tide doctor`.

Runs in the operator's shell, also beside a serving engine: it takes no lock, claims no
segment, makes no CUDA context and writes nothing that outlives it. Imports neither vLLM
nor, unless a draft is compared with its target, torch.
"""
