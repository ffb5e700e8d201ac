"""
Which fields of a training a published config may have.

Every field of [`DARTSGRPOConfig`], [`~trl.ModelConfig`] and the script's arguments is in one of two classes, and a
test fails where a new TRL adds one that is in neither. Until someone has looked at it, it is refused like an unknown
one.
"""

_OPTIMISATION = """
per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
optim weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules gradient_accumulation_steps
average_tokens_across_devices max_grad_norm label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32
gradient_checkpointing gradient_checkpointing_kwargs torch_compile use_liger_kernel liger_kernel_config use_cache
neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size use_cpu seed data_seed full_determinism
"""
_LOGS_AND_CHECKPOINTS = """
logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen
log_level log_level_replica disable_tqdm eval_strategy eval_steps eval_delay per_device_eval_batch_size
prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit
enable_jit_checkpoint load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
restore_callback_states_from_checkpoint skip_memory_metrics do_train do_eval do_predict log_completions log_multimodal
num_completions_to_print log_unique_prompts save_rollout_trace
"""
_DATA_LOADING_AND_PROCESSES = """
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
train_sampling_strategy length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
ddp_static_graph ddp_backend ddp_timeout
"""
_GRPO = """
router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 num_generations num_generations_eval max_completion_length
ds3_gather_for_generation shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation temperature
top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty cache_implementation beta num_iterations
epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation scale_rewards loss_type
mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef
use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
off_policy_mask_threshold use_bias_correction_kl use_transformers_continuous_batching use_transformers_paged
"""
_VLLM = """
use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_timeout
vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction
vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
vllm_importance_sampling_cap vllm_request_timeout_s vllm_connect_timeout_s vllm_first_token_timeout_s
vllm_token_timeout_s vllm_health_timeout_s vllm_rollout_timeout_s on_generation_error weight_sync
"""
_DARTS = """
schedule max_num_generations target_redundancy redundancy_cost_weight length_ema num_longest tail_pruning
long_end_patience selection prompt_oversampling max_partial_age mask_stale_after sorted_group_batches
sorted_mode length_ranked num_long_servers long_share stream_logprobs stream_chunk_tokens
stream_batch_tokens stream_cache_gib stream_rewards stream_reward_timeout_s
"""
_MODEL = """
model_name_or_path model_revision dtype attn_implementation use_peft lora_r lora_alpha lora_dropout lora_target_modules
lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora load_in_8bit load_in_4bit
bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage
"""
_SCRIPT = """
dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers
reward_model_name_or_path reward_funcs num_prompts prompt_column solution_column system_prompt soft_punish_cache
"""

PUBLIC = frozenset(
    " ".join(
        (
            _OPTIMISATION,
            _LOGS_AND_CHECKPOINTS,
            _DATA_LOADING_AND_PROCESSES,
            _GRPO,
            _VLLM,
            _DARTS,
            _MODEL,
            _SCRIPT,
        )
    ).split()
)

_PATH = "a path of one machine"
_ADDRESS = "an address of one network"
_SECRET = "a secret"
_ACCOUNT = "an account, or what is sent to it"
_PLACE = "a matter of one machine's launch"
_CODE = "a way to load code or files"
WITHHELD = {
    "output_dir": _PATH,
    "resume_from_checkpoint": _PATH,
    "latency_curve": _PATH,
    "weight_sync_dir": _PATH,
    "vllm_server_base_url": _ADDRESS,
    "vllm_server_host": _ADDRESS,
    "vllm_server_port": _ADDRESS,
    "vllm_group_port": _ADDRESS,
    "hub_token": _SECRET,
    "push_to_hub": _ACCOUNT,
    "hub_model_id": _ACCOUNT,
    "hub_private_repo": _ACCOUNT,
    "hub_strategy": _ACCOUNT,
    "hub_always_push": _ACCOUNT,
    "hub_revision": _ACCOUNT,
    "log_completions_hub_repo": _ACCOUNT,
    "report_to": _ACCOUNT,
    "run_name": _ACCOUNT,
    "project": _ACCOUNT,
    "trackio_space_id": _ACCOUNT,
    "trackio_bucket_id": _ACCOUNT,
    "trackio_static_space_id": _ACCOUNT,
    "local_rank": _PLACE,
    "fsdp": _PLACE,
    "fsdp_config": _PLACE,
    "deepspeed": _PLACE,
    "accelerator_config": _PLACE,
    "parallelism_config": _PLACE,
    "debug": _PLACE,
    "torch_compile_backend": _PLACE,
    "torch_compile_mode": _PLACE,
    "transformers_continuous_batching_config": _PLACE,
    "trust_remote_code": _CODE,
    "model_init_kwargs": _CODE,
    "optim_args": _CODE,
    "env": _CODE,  # no field: `TrlParser` sets environment variables from it
}

# Keys of fields that are dictionaries. Others are refused: `custom_generate` loads code, and `token` says what it is.
KEYS = {
    "lr_scheduler_kwargs": "num_cycles power lr_end min_lr min_lr_rate min_lr_ratio num_decay_steps num_stable_steps "
    "warmup_type decay_type timescale",
    "gradient_checkpointing_kwargs": "use_reentrant preserve_rng_state determinism_check early_stop",
    "liger_kernel_config": "rope swiglu geglu rms_norm layer_norm cross_entropy fused_linear_cross_entropy",
    "generation_kwargs": "n stop stop_token_ids stop_strings eos_token_id include_stop_str_in_output ignore_eos "
    "min_tokens min_new_tokens min_length length_penalty presence_penalty frequency_penalty repetition_penalty "
    "no_repeat_ngram_size bad_words skip_special_tokens spaces_between_special_tokens typical_p "
    "epsilon_cutoff eta_cutoff top_k top_p min_p temperature seed do_sample",
    "chat_template_kwargs": "enable_thinking thinking thinking_budget reasoning_effort date_string",
}
