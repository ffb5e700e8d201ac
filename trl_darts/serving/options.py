"""What the user asks for."""

from __future__ import annotations

from dataclasses import dataclass, field


API_KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's own name: its servers read the key there
WEIGHT_SYNCS = ("auto", "nccl", "gloo", "filesystem")
SPECULATIVE_METHODS = ("suffix", "ngram")


@dataclass(frozen=True)
class ServeOptions:
    """
    The servers that are wanted. Nothing is checked here, see [`check_options`].

    Args:
        model (`str`):
            Directory of a checkpoint, or a model of the Hugging Face Hub.
        num_servers (`int`, *optional*, defaults to `1`):
            Number of servers. All serve the same model.
        tensor_parallel_size (`int`, *optional*, defaults to `1`):
            GPUs that share one copy of the model.
        devices (`tuple[str, ...]`, *optional*):
            GPUs of all servers together, as in `CUDA_VISIBLE_DEVICES`. By default the last ones, as many as needed.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address that the servers listen on.
        port (`int`, *optional*, defaults to `8000`):
            Port of the first server. The next server takes the next one.
        speculative (`str`, *optional*):
            `"suffix"` or `"ngram"`.
        max_model_len (`int`, *optional*):
            Tokens of prompt and completion together. The model's own limit by default.
        weight_sync (`str`, *optional*, defaults to `"auto"`):
            As in [`DARTSGRPOConfig`]; `"auto"` is NCCL on CUDA and gloo elsewhere.
        api_key (`str`, *optional*):
            Key that requests to vLLM's `/v1` must carry.
        vllm_flags (`tuple[str, ...]`, *optional*):
            Further flags of vLLM, handed to every server.
    """

    model: str
    num_servers: int = 1
    tensor_parallel_size: int = 1
    devices: tuple[str, ...] | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    speculative: str | None = None
    max_model_len: int | None = None
    weight_sync: str = "auto"
    api_key: str | None = field(default=None, repr=False)
    vllm_flags: tuple[str, ...] = ()

    @property
    def ports(self) -> range:
        """One port per server."""
        return range(self.port, self.port + self.num_servers)
