"""From a model and a plan to a running `vllm serve`: checks, the exact command, and proof that the plan is in force."""

from eplb_cli.serve.launch import Launch, prepare, without_plan
from eplb_cli.serve.server import InForce, Server

__all__ = ["InForce", "Launch", "Server", "prepare", "without_plan"]
