"""Triton kernels of the hot paths: one op a file, each with its reference in Torch.

Runs in the vLLM worker (`pack_rows`, `gather_step`, `topk_teacher`, `ngram_memory`) and
in the trainer (`kl_loss`). A file holds a reference in Torch, the kernels, and one
wrapper that picks: the kernels for tensors on a GPU (CUDA and ROCm alike, or anywhere
under Triton's interpreter), else the reference. So every op also runs on a CPU, and
this package imports where Triton is missing. `ngram_memory` alone is kernels only: it
is Model Runner V2's, which needs Triton itself.

No kernel here is tuned at import, uses inline assembly or a vendor's library, or counts
on 32 threads in a warp; no wrapper waits for the device. `compile_all` compiles them
for the supported GPUs without having one.
"""
