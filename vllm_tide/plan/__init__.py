"""Where to train: `vllm-tide plan` (TIDE, arXiv 2602.05145, figures 10 to 12).

`cluster` reads what an operator knows, `throughput` has the formulas, `allocate` looks
for the best share of each class of accelerator, `report` says what follows.
"""
