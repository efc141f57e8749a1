"""Hide newer instruction sets from vLLM, which detects them with torch.cpu.

scripts/with_isa.sh adds this folder to PYTHONPATH and sets TIDE_ISA, besides the
variables of ATen and oneDNN. Without TIDE_ISA this module has no effect.
"""

import importlib.util
import os
import sys

HIDDEN = {
    "avx512_core": ("avx512_bf16", "vnni", "amx_tile", "amx_fp16"),
    "avx2": ("avx512", "avx512_bf16", "vnni", "amx_tile", "amx_fp16"),
}


class Hide:
    """Import finder that overrides the support checks of torch.cpu."""

    def find_spec(self, name, path=None, target=None):
        """Return the module's spec with a loader that overrides the checks."""
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
