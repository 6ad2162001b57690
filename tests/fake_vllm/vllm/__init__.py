"""Stands where vLLM would, in processes that tests start with this folder on PYTHONPATH."""

__version__ = "0.32.0"
