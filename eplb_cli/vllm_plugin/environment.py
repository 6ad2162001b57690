"""What the installed vLLM sees of this machine: `python -m eplb_cli.vllm_plugin.environment` prints one JSON object.

Runs in a process of its own, because importing vLLM takes seconds and a broken one may end the process.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

__all__ = ["main"]


def main() -> dict[str, Any]:
    """vLLM's version and platform ("cuda", "rocm", "xpu", "cpu", ...), and the names of torch's devices."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    devices = []
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            devices += [module.get_device_name(index) for index in range(module.device_count())]
    return {"vllm": vllm.__version__, "platform": current_platform.device_name or "unknown", "devices": devices}


if __name__ == "__main__":
    # vLLM logs to stdout while it is imported; the answer stands alone.
    with contextlib.redirect_stdout(sys.stderr):
        _answer = main()
    sys.stdout.write(json.dumps(_answer) + "\n")
