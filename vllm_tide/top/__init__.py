"""A live view of engines, trainers and servers: `vllm-tide top`.

`collect` looks and keeps what it saw for a few seconds, `figures` makes rates, ratios
and a verdict of it (what `--json` prints), `view` draws them.
"""
