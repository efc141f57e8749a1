"""On the null GPU each step samples one token per request: null kernels write none."""

import faulthandler
import importlib.abc
import importlib.util
import os
import signal
import sys
from typing import Any

MODULE = "vllm.v1.worker.gpu.async_utils"


class Finder(importlib.abc.MetaPathFinder):
    """Patches vLLM's module when it is imported."""

    busy = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != MODULE or Finder.busy:
            return None
        Finder.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            Finder.busy = False
        execute = spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            output = module.AsyncOutput
            inner = output.__init__

            def init(self: Any, *args: Any, **named: Any) -> None:
                inner(self, *args, **named)
                self.num_sampled_tokens_np[:] = 1

            output.__init__ = init

        spec.loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, Finder())
if os.environ.get("NULL_GPU_DEBUG"):
    faulthandler.register(signal.SIGUSR1)
