"""Runs eplb and prints the most memory that its process has held, in bytes: `python -m tests.peak_memory ARGS...`."""

from __future__ import annotations

import sys
from pathlib import Path

from eplb_cli.cli import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    sys.stdout.write(f"{peak}\n")
    sys.exit(code)
