"""Triton kernels, one op per file, each with a reference in Torch.

They run in the vLLM worker (`pack_rows`, `gather_step`, `topk_teacher`, `ngram_memory`)
and in the trainer (`kl_loss`). A file contains the reference, the kernels and a wrapper
that selects the kernels for tensors on a GPU (CUDA or ROCm, or any device with Triton's
interpreter), else the reference. So every op also runs on a CPU, and the package can be
imported without Triton. `ngram_memory` has no reference, because Model Runner V2 needs
Triton anyway.

No kernel is tuned at import, uses inline assembly or vendor libraries, or assumes 32
threads per warp. No wrapper blocks on the device. `compile_all` compiles the kernels
for all supported GPUs without having one.
"""
