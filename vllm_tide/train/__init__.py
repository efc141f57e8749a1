"""Training a draft: records in, a candidate out that was judged on held-out requests.

Data flow: Record -> Assembler -> Sample -> SampleBuffer -> PackedBatch -> TrainStep ->
evaluate -> judge -> candidate tensors. Imports torch, never vllm.
"""
