"""Names in recipes of older versions of TRL and transformers and of other libraries, and what stands for them now."""

from collections.abc import Iterator, Mapping
from typing import Any


TRL, TRANSFORMERS = "TRL", "transformers"
LEAVE_OUT = "Leave it out"
NESTED = "Set `accelerator_config.{}`"
# By name: who has or had it, and what to do instead. A field's name alone means that this field stands for it now.
OTHER_NAMES = {
    "max_prompt_length": (TRL, "Leave it out, and filter the data set by the length of its prompts"),
    "truncate_prompt": (TRL, "Leave it out, and filter the data set by the length of its prompts"),
    "torch_dtype": (TRL, "dtype"),
    "wandb_log_unique_prompts": (TRL, "log_unique_prompts"),
    "vllm_guided_decoding_regex": (TRL, "vllm_structured_outputs_regex"),
    "vllm_max_model_len": (TRL, "vllm_max_model_length"),
    "vllm_sleep_mode_enabled": (TRL, "vllm_enable_sleep_mode"),
    "use_liger_loss": (TRL, "Leave it out: log-probs are computed without all logits by default"),
    "output_router_logits": (TRL, "router_aux_loss_coef"),
    "vllm_device": (TRL, "Set `vllm_mode`: 'server' or 'colocate'"),
    "vllm_server": (TRL, "Set `vllm_mode='server'`"),
    "use_vllm_server": (TRL, "Set `vllm_mode='server'`"),
    "vllm_dtype": (TRL, "Set `--dtype` of the server"),
    "vllm_quantization": (TRL, "Set `--quantization` of the server"),
    "vllm_enable_prefix_caching": (TRL, "Leave it out: it is vLLM's default"),
    "dataset_num_proc": (TRL, LEAVE_OUT),
    "evaluation_strategy": (TRANSFORMERS, "eval_strategy"),
    "warmup_ratio": (TRANSFORMERS, "Set `warmup_steps`, which takes a share below 1 too"),
    "overwrite_output_dir": (TRANSFORMERS, "Leave it out: only `resume_from_checkpoint` reads old checkpoints"),
    "logging_dir": (TRANSFORMERS, "Set the environment variable TENSORBOARD_LOGGING_DIR, for instance under `env`"),
    "no_cuda": (TRANSFORMERS, "use_cpu"),
    "use_mps_device": (TRANSFORMERS, "Leave it out: it is found by itself"),
    "per_gpu_train_batch_size": (TRANSFORMERS, "per_device_train_batch_size"),
    "per_gpu_eval_batch_size": (TRANSFORMERS, "per_device_eval_batch_size"),
    "save_safetensors": (TRANSFORMERS, "Leave it out: it is the only format"),
    "adafactor": (TRANSFORMERS, "Set `optim='adafactor'`"),
    "group_by_length": (TRANSFORMERS, "Leave it out: `trim_padding` puts rows of similar length together"),
    "include_inputs_for_metrics": (TRANSFORMERS, "include_for_metrics"),
    "include_tokens_per_second": (TRANSFORMERS, "include_num_input_tokens_seen"),
    "push_to_hub_model_id": (TRANSFORMERS, "hub_model_id"),
    "push_to_hub_organization": (TRANSFORMERS, "hub_model_id"),
    "push_to_hub_token": (TRANSFORMERS, "hub_token"),
    "fsdp_min_num_params": (TRANSFORMERS, "fsdp_config"),
    "fsdp_transformer_layer_cls_to_wrap": (TRANSFORMERS, "fsdp_config"),
    "xpu_backend": (TRANSFORMERS, "ddp_backend"),
    "torchdynamo": (TRANSFORMERS, "torch_compile_backend"),
    "dispatch_batches": (TRANSFORMERS, NESTED.format("dispatch_batches")),
    "split_batches": (TRANSFORMERS, NESTED.format("split_batches")),
    "gradient_accumulation_kwargs": (TRANSFORMERS, NESTED.format("gradient_accumulation_kwargs")),
    **dict.fromkeys(("fp16_backend", "half_precision_backend", "fp16_opt_level"), (TRANSFORMERS, LEAVE_OUT)),
    **dict.fromkeys(("use_ipex", "jit_mode_eval", "tpu_num_cores", "past_index"), (TRANSFORMERS, LEAVE_OUT)),
    **dict.fromkeys(("sharded_ddp", "mp_parameters", "ray_scope", "tpu_metrics_debug"), (TRANSFORMERS, LEAVE_OUT)),
    "dataset_prompt_column": ("open-r1", "prompt_column"),
    "dataset_mixture": ("open-r1", "datasets"),
    "wandb_project": ("open-r1", "Set the environment variable WANDB_PROJECT, for instance under `env`"),
    "wandb_entity": ("open-r1", "Set the environment variable WANDB_ENTITY, for instance under `env`"),
    "wandb_run_group": ("open-r1", "Set the environment variable WANDB_RUN_GROUP, for instance under `env`"),
    "chat_template": ("open-r1", "Save it with the model's tokenizer"),
    "pretrain": ("OpenRLHF", "model_name_or_path"),
    "prompt_data": ("OpenRLHF", "dataset_name"),
    "n_samples_per_prompt": ("OpenRLHF", "num_generations"),
    "generate_max_len": ("OpenRLHF", "max_completion_length"),
    "prompt_max_len": ("OpenRLHF", "Leave it out, and filter the data set by the length of its prompts"),
    "actor_learning_rate": ("OpenRLHF", "learning_rate"),
    "init_kl_coef": ("OpenRLHF", "beta"),
    "eps_clip": ("OpenRLHF", "epsilon"),
    "micro_train_batch_size": ("OpenRLHF", "per_device_train_batch_size"),
}
# Sections of verl's files, and what stands for their settings.
VERL_SECTIONS = {"actor_rollout_ref", "algorithm", "data", "trainer", "critic", "reward_model", "reward", "ray_kwargs"}
VERL_SECTIONS |= {"custom_reward_function", "ray_init", "global_profiler"}
VERL = {
    "data.train_files": "dataset_name",
    "data.prompt_key": "prompt_column",
    "data.max_response_length": "max_completion_length",
    "data.train_batch_size": "gradient_accumulation_steps",
    "data.shuffle": "shuffle_dataset",
    "actor_rollout_ref.model.path": "model_name_or_path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing",
    "actor_rollout_ref.model.lora_rank": "lora_r",
    "actor_rollout_ref.actor.optim.lr": "learning_rate",
    "actor_rollout_ref.actor.optim.weight_decay": "weight_decay",
    "actor_rollout_ref.actor.kl_loss_coef": "beta",
    "actor_rollout_ref.actor.clip_ratio": "epsilon",
    "actor_rollout_ref.actor.clip_ratio_low": "epsilon",
    "actor_rollout_ref.actor.clip_ratio_high": "epsilon_high",
    "actor_rollout_ref.actor.entropy_coeff": "entropy_coef",
    "actor_rollout_ref.actor.grad_clip": "max_grad_norm",
    "actor_rollout_ref.actor.loss_agg_mode": "loss_type",
    "actor_rollout_ref.actor.ppo_epochs": "num_iterations",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "actor_rollout_ref.rollout.n": "num_generations",
    "actor_rollout_ref.rollout.temperature": "temperature",
    "actor_rollout_ref.rollout.top_p": "top_p",
    "actor_rollout_ref.rollout.top_k": "top_k",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "vllm_tensor_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "algorithm.filter_groups.enable": "drop_uniform_groups",
    "algorithm.kl_ctrl.kl_coef": "beta",
    "trainer.total_epochs": "num_train_epochs",
    "trainer.total_training_steps": "max_steps",
    "trainer.save_freq": "save_steps",
    "trainer.test_freq": "eval_steps",
    "trainer.logger": "report_to",
    "trainer.experiment_name": "run_name",
    "trainer.default_local_dir": "output_dir",
    "custom_reward_function.path": "reward_funcs",
}


def other_name(name: str, value: Any = None) -> str | None:
    """Returns what a name means elsewhere and what to do, as it reads after the name. `None` if it is not known."""
    if (known := OTHER_NAMES.get(name)) is not None:
        owner, remedy = known
        has = f"was removed from {owner}" if owner in (TRL, TRANSFORMERS) else f"is a field of {owner}"
        return f"{has}. {f'Set `{remedy}` instead' if remedy.isidentifier() else remedy}."
    section = name.partition(".")[0]
    if section not in VERL_SECTIONS or not (isinstance(value, Mapping) or "." in name):
        return None
    found = [f"`{key}` is `{VERL[key]}`" for key in _flat(name, value) if key in VERL]
    here = f", whose settings have other names here: {', '.join(found)}" if found else ""
    return f"is a section of verl's files{here}. Write the fields of TRL's trainer instead, see docs/migrate.md."


def _flat(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name
