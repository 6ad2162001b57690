"""Everything that the plugin touches in vLLM: what it is called, where it is, and what it is for.

`declaration` looks for these in vLLM's sources before anything else happens. A test holds that the plugin touches
nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DISPENSABLE", "PARTS", "Part", "Task"]

Task = Literal["plan", "dispatch", "physical", "record", "llama4", "endpoint", "metrics"]
"""What needs a part: starting from a plan, choosing copies by load, starting from a `physical` checkpoint, recording;
the others are DISPENSABLE."""

DISPENSABLE: frozenset[Task] = frozenset({"llama4", "endpoint", "metrics"})
"""What is left out, with a line in the log, by a vLLM that lacks a part of it."""


@dataclass(frozen=True)
class Part:
    """One thing of vLLM.

    Args:
        task: what needs it.
        places: modules that may hold it, the newest vLLM's first.
        name: a module's function or class, or `Class.attribute`; alternatives are separated by `|`.
        purpose: what the plugin does with it.
        takes: parameters that it must have, in any order.
        used_in: a function of the same module that must read an attribute or call a function of this name; else the
            plugin's replacement would never be asked.
        optional: versions without it are served all the same; how is part of the purpose.
    """

    task: Task
    places: str
    name: str
    purpose: str
    takes: tuple[str, ...] = ()
    used_in: str = ""
    optional: bool = False


_EPLB = "vllm.distributed.eplb"
_STATE = f"{_EPLB}.eplb_state"
_MOE = "vllm.model_executor.layers.fused_moe"
_LAYER = f"{_MOE}.runner.moe_runner {_MOE}.layer"
_ROUTER = f"{_MOE}.router.base_router"
_INTERFACES = "vllm.model_executor.models.interfaces"
_GROUPS = "vllm.distributed.parallel_state"
_WORKER = "vllm.v1.worker.worker_base"
_LOADER = "vllm.model_executor.model_loader"
_STEP = "vllm.v1.core.sched.output"
_CONFIG = "vllm.config"

PARTS = (
    # Start from a plan -----------------------------------------------------------------------------------------------
    Part("plan", _STATE, "EplbState.add_model", "start when a model is registered", ("model", "model_config")),
    Part(
        "plan",
        _STATE,
        "EplbState.add_model",
        "see that a start scales a server up",
        ("global_expert_load",),
        optional=True,
    ),
    Part("plan", _STATE, "EplbState.model_states", "find the maps of the model that was added"),
    Part("plan", _STATE, "EplbState.parallel_config", "see elastic expert parallelism"),
    Part("plan", _STATE, "EplbState.policy", "put a watched policy in its place", used_in="EplbState.rearrange"),
    Part("plan", _STATE, "EplbState.rearrange", "keep a static plan static", ("is_profile",), used_in="EplbState.step"),
    Part("plan", _STATE, "EplbState.step", "take a dummy step, to see that the policy is asked", ("is_profile",)),
    Part("plan", _STATE, "EplbState.expert_rearrangement_step", "begin a full interval", used_in="EplbState.step"),
    Part("plan", _STATE, "EplbState.expert_rearrangement_step_interval", "never end it", used_in="EplbState.step"),
    Part("plan", _STATE, "EplbModelState.physical_to_logical_map", "write the plan"),
    Part("plan", _STATE, "EplbModelState.logical_to_physical_map", "write the plan"),
    Part("plan", _STATE, "EplbModelState.logical_replica_count", "write the plan"),
    Part("plan", _STATE, "EplbModelState.expert_load_pass", "forget the load before the start"),
    Part("plan", _STATE, "EplbModelState.model", "tell how many bytes a rebalance moves"),
    Part("plan", _STATE, "EplbModelState.expert_buffer", "move weights, where the transfer wants it", optional=True),
    Part("plan", _STATE, "EplbModelState.communicator", "move weights, where the transfer wants it", optional=True),
    Part(
        "plan",
        f"{_EPLB}.rebalance_execute",
        "rearrange_expert_weights_inplace",
        "move weights",
        ("old_global_expert_indices", "new_global_expert_indices", "expert_weights", "ep_group"),
    ),
    Part(
        "plan",
        f"{_EPLB}.rebalance_execute",
        "rearrange_expert_weights_inplace",
        "move weights, where it wants them",
        ("expert_buffer", "communicator"),
        optional=True,
    ),
    Part(
        "plan",
        f"{_EPLB}.policy.default",
        "DefaultEplbPolicy.rebalance_experts",
        "see loads and the live placement",
        ("weight", "old_global_expert_indices"),
    ),
    Part("plan", _INTERFACES, "MixtureOfExperts.num_logical_experts", "compare the model with the plan"),
    Part("plan", _INTERFACES, "MixtureOfExperts.num_physical_experts", "compare the model with the plan"),
    Part("plan", _INTERFACES, "MixtureOfExperts.expert_weights", "move weights"),
    Part("plan", _INTERFACES, "MixtureOfExperts.moe_layers", "find the rows of the plan"),
    Part("plan", _LAYER, "MoERunner.layer_name|FusedMoE.layer_name", "tell a layer's number"),
    Part("plan", _LAYER, "MoERunner.get_expert_weights|FusedMoE.get_expert_weights", "read the slots' bytes"),
    Part("plan", _LAYER, "MoERunner.expert_map|FusedMoE.expert_map", "tell which slots a rank holds"),
    Part("plan", _LAYER, "MoERunner.router|FusedMoE.router", "read the router's table", optional=True),
    Part(
        "plan",
        f"{_LAYER} {_MOE}.router.base_router",
        "MoERunner.eplb_state|FusedMoE.eplb_state|FusedMoE.logical_to_physical_map",
        "read the router's table",
    ),
    Part(
        "plan",
        f"{_STATE} {_MOE}.layer",
        "EplbLayerState.logical_to_physical_map|FusedMoE.logical_to_physical_map",
        "read the router's table",
    ),
    Part(
        "plan",
        f"{_STATE} {_MOE}.layer",
        "EplbLayerState.logical_replica_count|FusedMoE.logical_replica_count",
        "read the router's table",
    ),
    Part("plan", _GROUPS, "get_ep_group", "find the ranks that share the experts"),
    Part("plan", _GROUPS, "get_pp_group", "tell the pipeline stage"),
    Part("plan", _GROUPS, "GroupCoordinator.rank_in_group", "tell the rank"),
    Part("plan", _GROUPS, "GroupCoordinator.world_size", "compare the ranks with the plan"),
    Part("plan", _GROUPS, "GroupCoordinator.ranks", "tell groups apart"),
    Part("plan", _GROUPS, "GroupCoordinator.cpu_group", "gather checksums"),
    Part("plan", _GROUPS, "GroupCoordinator.device_group", "move weights"),
    Part("plan", _CONFIG, "get_current_vllm_config", "tell a drafter from the model"),
    Part("plan", f"{_CONFIG}.vllm {_CONFIG}", "VllmConfig.speculative_config", "tell a drafter from the model"),
    Part(
        "plan",
        f"{_CONFIG}.speculative {_CONFIG}",
        "SpeculativeConfig.draft_model_config",
        "tell a drafter from the model",
    ),
    Part(
        "plan",
        f"{_CONFIG}.model {_CONFIG}",
        "ModelConfig.runner_type|ModelConfig.runner",
        "tell a drafter from the model",
    ),
    Part("plan", f"{_CONFIG}.model {_CONFIG}", "ModelConfig.runner", "tell a drafter from the model"),
    Part(
        "plan",
        f"{_CONFIG}.parallel",
        "ParallelConfig.enable_elastic_ep",
        "refuse elastic expert parallelism",
        optional=True,
    ),
    Part("plan", _WORKER, "WorkerWrapperBase.initialize_from_config", "stop a worker without the plan"),
    Part("plan", "vllm.v1.worker.gpu_worker", "Worker.reload_weights", "refuse new weights", optional=True),
    # Choose copies by load -------------------------------------------------------------------------------------------
    Part(
        "dispatch",
        _ROUTER,
        "BaseRouter._apply_eplb_mapping",
        "choose copies by load",
        ("topk_ids",),
        used_in="BaseRouter._select_experts|BaseRouter.select_experts",
    ),
    Part(
        "dispatch",
        _ROUTER,
        "eplb_map_to_physical_and_record",
        "do all that it does, with another choice",
        (
            "topk_ids",
            "expert_load_view",
            "logical_to_physical_map",
            "logical_replica_count",
            "record_enabled",
            "num_unpadded_tokens",
        ),
        used_in="BaseRouter._apply_eplb_mapping",
    ),
    Part(
        "dispatch",
        _ROUTER,
        "dbo_current_ubatch_id",
        "leave the padding of each micro-batch out",
        used_in="BaseRouter._apply_eplb_mapping",
    ),
    Part("dispatch", "vllm.v1.worker.ubatching", "dbo_current_ubatch_id", "tell micro-batches apart"),
    Part(
        "dispatch",
        f"{_MOE}.router.fused_moe_router {_ROUTER}",
        "FusedMoERouter.eplb_state|BaseRouter.eplb_state",
        "read the live map",
    ),
    Part("dispatch", _ROUTER, "BaseRouter.top_k", "try the rule on a batch"),
    Part("dispatch", _STATE, "EplbLayerState.expert_load_view", "record the load"),
    Part("dispatch", _STATE, "EplbLayerState.should_record_tensor", "record the load when vLLM wants it"),
    Part("dispatch", _STATE, "EplbLayerState.num_unpadded_tokens_tensors", "leave padding out"),
    Part("dispatch", _STATE, "EplbState.step", "compare the ranks' choices", ("is_dummy", "is_profile")),
    Part("dispatch", _LAYER, "MoERunner.do_naive_dispatch_combine", "tell whose tokens a router sees"),
    Part("dispatch", _LAYER, "MoERunner.moe_config", "tell whose tokens a router sees"),
    Part("dispatch", f"{_MOE}.config", "FusedMoEConfig.is_sequence_parallel", "tell whose tokens a router sees"),
    Part("dispatch", f"{_CONFIG}.parallel", "ParallelConfig.data_parallel_size", "tell whose tokens a router sees"),
    Part("dispatch", f"{_CONFIG}.parallel", "ParallelConfig.tensor_parallel_size", "tell whose tokens a router sees"),
    Part(
        "dispatch",
        f"{_CONFIG}.parallel",
        "ParallelConfig.prefill_context_parallel_size",
        "refuse split batches",
        optional=True,
    ),
    # Llama 4 ---------------------------------------------------------------------------------------------------------
    Part(
        "llama4",
        "vllm.model_executor.models.llama4",
        "Llama4Model.load_moe_expert_weights",
        "load fused tensors with redundant experts",
        ("name", "loaded_weight", "fused"),
        used_in="Llama4Model.load_weights",
        optional=True,
    ),
    Part("llama4", "vllm.model_executor.models.llama4", "Llama4Model.num_experts", "tell fused tensors", optional=True),
    Part(
        "llama4",
        "vllm.model_executor.models.llama4",
        "Llama4Model.n_redundant_experts",
        "tell fused tensors",
        optional=True,
    ),
    # A `physical` checkpoint -----------------------------------------------------------------------------------------
    Part(
        "physical",
        f"{_CONFIG}.model",
        "get_config",
        "give the config its true expert count",
        used_in="ModelConfig.__post_init__",
    ),
    Part(
        "physical",
        f"{_MOE}.routed_experts {_MOE}.layer",
        "EplbState",
        "name the tensors by slot",
    ),
    Part(
        "physical",
        _STATE,
        "EplbState.build_initial_global_physical_to_logical_map",
        "name the tensors by slot",
        ("num_routed_experts", "num_redundant_experts"),
    ),
    Part(
        "physical",
        f"{_LOADER}.default_loader",
        "DefaultModelLoader._init_ep_weight_filter",
        "read only a rank's own slots",
        ("model_config",),
        optional=True,
    ),
    Part(
        "physical",
        f"{_LOADER}.default_loader",
        "DefaultModelLoader.local_expert_ids",
        "read only a rank's own slots",
        optional=True,
    ),
    Part("physical", f"{_CONFIG}.vllm {_CONFIG}", "VllmConfig.model_config", "tell a drafter from the model"),
    # Recording -------------------------------------------------------------------------------------------------------
    Part(
        "record",
        f"{_LOADER}.base_loader",
        "BaseModelLoader.load_model",
        "watch the routers",
        ("vllm_config", "model_config"),
    ),
    Part("record", _WORKER, "WorkerWrapperBase.execute_model", "count the steps", ("scheduler_output",)),
    Part("record", _WORKER, "WorkerWrapperBase.worker", "count dummy steps"),
    Part("record", "vllm.v1.worker.gpu_worker", "Worker.execute_dummy_batch", "count dummy steps"),
    Part("record", _WORKER, "WorkerBase.model_runner", "tell prompt from answer"),
    Part("record", _ROUTER, "BaseRouter.set_capture_fn", "see the chosen experts"),
    Part(
        "record",
        _ROUTER,
        "BaseRouter.capture_fn",
        "see the chosen experts",
        used_in="BaseRouter._select_experts|BaseRouter.select_experts",
    ),
    Part("record", _ROUTER, "BaseRouter.top_k", "size the buffers"),
    Part("record", _LAYER, "MoERunner.router|FusedMoE.router", "see the chosen experts"),
    Part("record", _LAYER, "MoERunner.moe_config|FusedMoE.moe_config", "find the MoE layers"),
    Part("record", _LAYER, "MoERunner.layer_name|FusedMoE.layer_name", "tell a layer's number"),
    Part(
        "record",
        _LAYER,
        "MoERunner._quant_method|FusedMoE.quant_method|MoERunner.quant_method",
        "refuse kernels that route inside",
    ),
    Part(
        "record",
        f"{_MOE}.fused_moe_method_base",
        "FusedMoEMethodBase.is_monolithic",
        "refuse kernels that route inside",
    ),
    Part("record", f"{_MOE}.config", "FusedMoEConfig.is_sequence_parallel", "refuse split tokens", optional=True),
    Part("record", _GROUPS, "get_dp_group", "name the file"),
    Part("record", _GROUPS, "get_tp_group", "let one of the ranks with the same tokens write"),
    Part("record", _GROUPS, "get_pp_group", "name the file"),
    Part("record", _GROUPS, "GroupCoordinator.rank_in_group", "name the file"),
    Part("record", _GROUPS, "GroupCoordinator.world_size", "name the file"),
    Part("record", "vllm.forward_context", "get_forward_context", "refuse rows of other ranks"),
    Part("record", "vllm.forward_context", "ForwardContext.dp_metadata", "refuse rows of other ranks"),
    Part("record", "vllm.forward_context", "DPMetadata.num_tokens_across_dp_cpu", "refuse rows of other ranks"),
    Part("record", f"{_CONFIG}.vllm {_CONFIG}", "VllmConfig.parallel_config", "refuse split prompts"),
    Part("record", f"{_CONFIG}.vllm {_CONFIG}", "VllmConfig.model_config", "name the model"),
    Part("record", f"{_CONFIG}.vllm {_CONFIG}", "VllmConfig.scheduler_config", "size the buffers"),
    Part("record", f"{_CONFIG}.vllm {_CONFIG}", "VllmConfig.device_config", "place the buffers"),
    Part("record", f"{_CONFIG}.device", "DeviceConfig.device", "place the buffers"),
    Part("record", f"{_CONFIG}.scheduler", "SchedulerConfig.max_num_batched_tokens", "size the buffers"),
    Part(
        "record",
        f"{_CONFIG}.parallel",
        "ParallelConfig.prefill_context_parallel_size",
        "refuse split prompts",
        optional=True,
    ),
    Part("record", f"{_CONFIG}.model", "ModelConfig.get_num_experts", "size the counts"),
    Part("record", f"{_CONFIG}.model", "ModelConfig.model", "name the model"),
    Part("record", f"{_CONFIG}.model", "ModelConfig.hf_config", "name the architecture"),
    Part("record", _STEP, "SchedulerOutput.total_num_scheduled_tokens", "leave padding out"),
    Part("record", _STEP, "SchedulerOutput.num_scheduled_tokens", "tell prompt from answer"),
    Part("record", _STEP, "SchedulerOutput.scheduled_new_reqs", "tell prompt from answer"),
    Part("record", _STEP, "SchedulerOutput.scheduled_cached_reqs", "tell prompt from answer"),
    Part("record", _STEP, "SchedulerOutput.finished_req_ids", "forget finished requests"),
    Part("record", _STEP, "NewRequestData.req_id", "tell prompt from answer"),
    Part("record", _STEP, "NewRequestData.prompt_token_ids", "tell prompt from answer"),
    Part("record", _STEP, "NewRequestData.prompt_embeds", "tell prompt from answer", optional=True),
    Part("record", _STEP, "NewRequestData.num_computed_tokens", "tell prompt from answer"),
    Part("record", _STEP, "CachedRequestData.req_ids", "tell prompt from answer"),
    Part("record", _STEP, "CachedRequestData.num_computed_tokens", "tell prompt from answer"),
    Part(
        "record",
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.input_batch",
        "tell prompt from answer",
        optional=True,
    ),
    Part("record", "vllm.v1.worker.gpu_input_batch", "InputBatch.req_ids", "tell prompt from answer", optional=True),
    # What is live ----------------------------------------------------------------------------------------------------
    Part("endpoint", _WORKER, "WorkerBase.model_runner", "ask a worker", optional=True),
    Part(
        "endpoint",
        "vllm.v1.worker.gpu_model_runner vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.eplb_state|GPUModelRunner.eplb",
        "ask a worker",
        optional=True,
    ),
    Part(
        "endpoint",
        "vllm.v1.worker.gpu.eplb_utils vllm.v1.worker.gpu_model_runner",
        "EPLBController.state|GPUModelRunner.eplb_state",
        "ask a worker",
        optional=True,
    ),
    Part("endpoint", "vllm.engine.protocol", "EngineClient.collective_rpc", "ask the workers", optional=True),
    Part(
        "endpoint",
        "vllm.entrypoints.launchers.cli_args vllm.entrypoints.openai.cli_args",
        "FrontendArgs.api_key",
        "ask for the server's key",  # else it would answer whoever asks
        optional=True,
    ),
    Part("metrics", "vllm.v1.metrics.prometheus", "get_prometheus_registry", "add gauges", optional=True),
)
