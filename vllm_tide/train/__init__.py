"""Training a draft from captured rows: assemble, pack, step, evaluate, publish.

Runs in the trainer process. Data flow: Record -> Assembler -> Sample -> SampleBuffer ->
PackedBatch -> TrainStep -> evaluate -> candidate tensors. Imports torch, never vllm.
"""
