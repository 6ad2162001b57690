"""What runs inside vLLM's processes. Imported by vLLM through the entry point `vllm.general_plugins`."""


def register() -> None:
    """Called by vLLM in every process; does nothing unless a plan or a recording was asked for."""
