"""What `vllm-tide doctor` looks at: one module per question, each answered by findings.

Runs in the operator's shell, also beside a serving engine: it takes no lock, claims no
segment, makes no CUDA context and writes nothing that outlives it. Imports neither vLLM
nor, unless a draft is compared with its target, torch.
"""
