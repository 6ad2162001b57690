"""Imports vLLM once and forks a set of ranks for each engine that a test asks for.

Reads one JSON job a line on stdin and answers with one JSON object a line on stdout:

    {"model": folder, "ranks": N, "environment": {..}, "rank_environment": [{..}, ..], "llm": {LLM's arguments},
     "prompts": [..], "max_tokens": T, "rounds": K, "breakage": name or null, "log": folder, "timeout": seconds}
    -> {"ranks": [{"rounds": [[{"tokens": [..], "logprobs": [..]}, ..], ..], ..} or {"error": str, ..}, ..]}

Every rank is a plain process that runs vLLM's own worker, scheduler and EPLB (executor "external_launcher"); nothing of
vLLM is replaced but what the CPU shim adds. Imports are what a start costs on a small machine; forking saves them.
"""

import gc
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path

PRELOADED = (
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.models.llama4",
    "vllm.distributed.eplb.async_worker",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    "vllm.distributed.device_communicators.cpu_communicator",
)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _slots(model) -> list[list[str]]:
    """A digest of each of this rank's slots, for each MoE layer."""
    import hashlib

    digests = []
    for tensors in model.expert_weights:
        row = []
        for slot in range(tensors[0].shape[0]):
            digest = hashlib.sha256()
            for tensor in tensors:
                digest.update(tensor[slot].contiguous().numpy().tobytes())
            row.append(digest.hexdigest()[:16])
        digests.append(row)
    return digests


def _run(job, rank: int) -> dict:
    from vllm import LLM, SamplingParams

    if job.get("breakage"):
        from tests.vllm_cpu.breakage import BREAKAGES

        BREAKAGES[job["breakage"]](rank)
    llm = LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        seed=0,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_batched_tokens=256,
        distributed_executor_backend="external_launcher",
        kv_cache_memory_bytes=32 << 20,
        **job["llm"],
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, logprobs=1)
    answer: dict = {"rounds": []}
    for _ in range(job["rounds"]):
        outputs = llm.generate(job["prompts"], sampling, use_tqdm=False)
        answer["rounds"].append(
            [
                {
                    "tokens": list(output.outputs[0].token_ids),
                    "logprobs": [
                        step[token].logprob
                        for step, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
                    ],
                }
                for output in outputs
            ]
        )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    state = getattr(runner, "eplb_state", None)
    if state is not None and state.model_states:
        model_state = next(iter(state.model_states.values()))
        answer["physical_to_logical"] = model_state.physical_to_logical_map.tolist()
        answer["slots"] = _slots(model_state.model)
        answer["step"] = state.expert_rearrangement_step
        answer["rebalances"] = getattr(state.policy, "rebalances", None)
    from eplb_cli.vllm_plugin import recorder

    if recorder._recorder is not None:
        with recorder._recorder.lock:
            recorder._recorder.write()
    return answer


def _rank(job, rank: int, port: int) -> None:
    log = os.open(f"{job['log']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job["ranks"]),
            "LOCAL_WORLD_SIZE": str(job["ranks"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **job["environment"],
            **(job["rank_environment"][rank] if job.get("rank_environment") else {}),
        }
    )
    started = time.monotonic()
    try:
        answer = _run(job, rank)
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    answer["seconds"] = time.monotonic() - started
    Path(job["log"], f"rank{rank}.json").write_text(json.dumps(answer))
    os._exit(0)


def _serve(job) -> dict:
    port = _free_port()
    children = {}
    for rank in range(job["ranks"]):
        child = os.fork()
        if child == 0:
            _rank(job, rank, port)
        children[child] = rank
    deadline = time.monotonic() + job["timeout"]
    failed_at = None
    while children:
        child, _ = os.waitpid(-1, os.WNOHANG)
        if child:
            rank = children.pop(child)
            result = Path(job["log"], f"rank{rank}.json")
            if not result.exists() or "error" in json.loads(result.read_text()):
                failed_at = failed_at or time.monotonic()
        late = time.monotonic() > deadline
        # A rank that outlives a failed one by long is hanging in a collective.
        if late or (failed_at and time.monotonic() - failed_at > 20):
            for child in children:
                os.kill(child, 9)
                os.waitpid(child, 0)
            break
        time.sleep(0.05)
    # The shared memory of the CPU communicator; with this executor its name is the same for every job.
    for segment in Path("/dev/shm").glob("-*-cpushm_*"):  # noqa: S108
        segment.unlink()
    answers = []
    for rank in range(job["ranks"]):
        result = Path(job["log"], f"rank{rank}.json")
        answers.append(json.loads(result.read_text()) if result.exists() else {"error": "hang", "hang": True})
    return {"ranks": answers}


def main() -> None:
    import importlib

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # vLLM collects garbage while it starts, which would visit all that was imported
    for line in sys.stdin:
        answers.write(json.dumps(_serve(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
