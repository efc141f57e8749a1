"""Hides newer instruction sets from vLLM, which asks torch for them.

Put on PYTHONPATH by scripts/with_isa.sh, which sets TIDE_ISA and what ATen and oneDNN
read themselves. Without it a Python process is left as it is.
"""

import importlib.util
import os
import sys

HIDDEN = {
    "avx512_core": ("avx512_bf16", "vnni", "amx_tile", "amx_fp16"),
    "avx2": ("avx512", "avx512_bf16", "vnni", "amx_tile", "amx_fp16"),
}


class Hide:
    """Finder that lets torch.cpu load and then denies what is hidden."""

    def find_spec(self, name, path=None, target=None):
        """The module's own spec, with a loader that goes on where it ends."""
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for part in HIDDEN[os.environ["TIDE_ISA"]]:
                setattr(module, f"_is_{part}_supported", lambda: False)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("TIDE_ISA") in HIDDEN:
    sys.meta_path.insert(0, Hide())
