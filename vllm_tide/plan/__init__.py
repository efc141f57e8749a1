"""Where to train: `vllm-tide plan` (TIDE, arXiv 2602.05145, figures 10 to 12).

`cluster` reads the description of a cluster, `throughput` has the formulas, `allocate`
enumerates allocations of accelerators, `report` prints the comparison.
"""
