"""Training of a draft, from records to a candidate evaluated on held-out requests.

Data flow: Record -> Assembler -> Sample -> SampleBuffer -> PackedBatch -> TrainStep ->
evaluate -> judge -> candidate tensors. Imports torch, not vllm.
"""
