"""A small server in vLLM's place, on PYTHONPATH as the package `vllm`: what `serve` starts, watches and ends."""
