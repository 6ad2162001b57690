"""One module an engine: a Placement to its placement file, and back."""
