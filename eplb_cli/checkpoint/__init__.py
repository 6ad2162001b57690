"""Checkpoints: safetensors headers and index, model families, rewriting, verification."""
