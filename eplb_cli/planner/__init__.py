"""Placement algorithms: arrays in, arrays out; no files, no printing."""
