"""No architectures: all are left to vLLM."""

from types import SimpleNamespace

ModelRegistry = SimpleNamespace(models={})
