#!/usr/bin/env bash
# The whole path on something real: a small Qwen3-MoE that is trained here, and the routing of real text through it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$here/out
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TRANSFORMERS_VERBOSITY=error TQDM_DISABLE=1

step() { printf '\n\033[1m%s\033[0m\n' "$1"; }
run() {
    printf '$'
    printf ' %s' "$@"
    printf '\n'
    "$@"
}

rm -rf "$out"
mkdir -p "$out"
cd "$out"

step "0. A model and its traffic"
echo "A small Qwen3-MoE is trained here on texts of this machine; then two recordings are made of the experts that its"
echo "routers really choose for other texts. The model is a toy; every number below is measured on it."
python "$here/build_model.py" model
python "$here/record.py" model monday.npz --split record
python "$here/record.py" model tuesday.npz --split replay

step "1. Routing becomes loads"
run eplb profile monday.npz --model model -o monday.safetensors
run eplb profile tuesday.npz --model model -o tuesday.safetensors --format quiet

step "2. Loads become a plan: 4 ranks, 4 redundant experts, a layout that an unmodified vLLM starts with"
run eplb plan monday.safetensors --tensor-parallel-size 4 --num-redundant-experts 4 --strategy stock --model model -o plan.json

step "   ... scored on traffic that the planner has not seen"
run eplb score plan.json tuesday.safetensors

step "   ... and on one page to look at: demo/out/report.html"
run eplb report monday.safetensors plan.json --model model -o report.html

step "3. The plan becomes a checkpoint"
run eplb convert model plan.json -o model-balanced

step "4. ... proven tensor by tensor"
run eplb verify model model-balanced --level full

step "5. The command that serves it"
run eplb serve model-balanced --dry-run

printf '\nThe results are in demo/out. Serve it for real, on the CPU:  make demo-serve\n'
