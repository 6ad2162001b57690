#!/usr/bin/env bash
# Serve the demo's balanced checkpoint with a real vLLM on the CPU: four EP ranks, run-time EPLB kept still by --static.
# vLLM's CPU build knows no expert parallelism; a plugin of the tests (tests/vllm_cpu/shim) teaches it, on this build only.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/out"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_LOGGING_LEVEL=WARNING
export VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 TORCHDYNAMO_DISABLE=1
export EPLB_CPU_SHIM=1
port=${PORT:-8011}

command=(eplb serve model-balanced --static --host 127.0.0.1 --port "$port" --served-model-name demo
    --dtype float32 --max-model-len 256 --max-num-seqs 8 --enforce-eager
    --eplb-config '{"communicator": "torch_gloo"}')
printf '$'
printf ' %q' "${command[@]}"
printf '\n'
"${command[@]}" > serve.log 2>&1 &
server=$!
trap 'kill "$server" 2> /dev/null || true; wait "$server" || true' EXIT

echo "Waiting for the server (a minute or two; its output goes to demo/out/serve.log) ..."
for _ in $(seq 300); do
    if python - "$port" 2> /dev/null <<'PY'
import sys, urllib.request
urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=2)
PY
    then break; fi
    if ! kill -0 "$server" 2> /dev/null; then
        tail -20 serve.log
        echo "The server stopped."
        exit 1
    fi
    sleep 1
done
grep -E "plan in force|slots verified" serve.log || { tail -20 serve.log; echo "The server did not confirm the plan."; exit 1; }

python - "$port" <<'PY'
import json, sys, urllib.request

for prompt in ("def main():", "Return the value of", '{"id": 7, "module": "'):
    body = {"model": "demo", "prompt": prompt, "max_tokens": 32, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{sys.argv[1]}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    answer = json.load(urllib.request.urlopen(request, timeout=120))
    print(f"  {prompt!r} -> {answer['choices'][0]['text']!r}")
PY
echo "Served from the plan; stopping the server."
