"""What runs inside vLLM's processes. Imported by vLLM through the entry point `vllm.general_plugins`."""

import os


def register() -> None:
    """Called by vLLM in every process; imports and patches nothing unless a plan or a recording was asked for."""
    if "EPLB_PLAN" in os.environ or "EPLB_RECORD_DIR" in os.environ:
        from eplb_cli.vllm_plugin.activation import activate

        activate()
