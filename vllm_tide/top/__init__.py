"""A live view of engines, trainers and servers: `vllm-tide top`.

`collect` takes samples and stores those of the last seconds, `figures` computes rates,
ratios and a verdict from them (printed by `--json`), `view` draws the screen.
"""
