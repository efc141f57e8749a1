"""Entry point of `python -m vllm_tide`, equal to the `vllm-tide` command."""

import sys

from vllm_tide.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
