"""
TRL's AsyncGRPOTrainer on a CPU, with what it lacks there: attention in plain torch instead of FlashAttention 3, and
weights through files instead of NCCL. All else is its own.

TRL's worker runs in a process of its own, which imports the benchmark's module and with it these replacements.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any


os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import requests
import torch
import trl.experimental.async_grpo.async_grpo_trainer as async_trainer
import trl.experimental.async_grpo.async_rollout_worker as worker
import trl.experimental.async_grpo.packing as packing
from safetensors.torch import save_file
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer


__all__ = ["AsyncGRPOTrainer", "FileTransfer", "async_args"]


def async_args(url: str, directory: str, **fields: Any) -> AsyncGRPOConfig:
    """Returns a config for a CPU and a server, that logs each step and saves no checkpoints."""
    return AsyncGRPOConfig(
        output_dir=directory,
        use_cpu=True,
        gradient_accumulation_steps=1,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        vllm_server_base_url=url,
        **fields,
    )


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """`flash_attn_varlen_func` in plain torch. Queries are the last ones of their keys."""
    out = torch.empty_like(q)
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for begin, end, first, last in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        own_q, own_k, own_v = (x.transpose(0, 1) for x in (q[begin:end], k[first:last], v[first:last]))
        own_k, own_v = (x.repeat_interleave(own_q.size(0) // x.size(0), 0) for x in (own_k, own_v))
        rows, columns = end - begin, last - first
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        attended = torch.nn.functional.scaled_dot_product_attention(
            own_q, own_k, own_v, attn_mask=mask, scale=softmax_scale
        )
        out[begin:end] = attended.transpose(0, 1)
    return out


def parse_text(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, str]:
    """Returns the message of an answer, which is plain text."""
    return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
async_trainer.get_peak_flops_per_device = lambda *_: None  # not known of a CPU
# On a CPU, vLLM 0.31 dies of a seeded request that a pause with "keep" preempts, so requests have no seed.
worker.random = SimpleNamespace(getrandbits=lambda bits: None)
worker.parse_response, worker.add_response_schema = parse_text, lambda tokenizer: tokenizer


class FileTransfer:
    """Sends weights as files, with the methods of TRL's `WeightTransferClient`."""

    def __init__(self, url: str, directory: str | Path) -> None:
        self.url, self.directory, self.version = url, Path(directory), 0
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["Connection"] = "close"  # a server resets connections that were idle for some seconds

    def post(self, path: str, **body: Any) -> None:
        """Sends a request to the server."""
        self._session.post(self.url + path, json=body or None, timeout=120).raise_for_status()

    def load(self, path: Path) -> None:
        """Has the server load the weights in a directory."""
        self.post("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(path)})
        self.post("/reset_prefix_cache?reset_running_requests=true")

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None:
        """Pauses the server, and keeps its requests."""
        self.post("/pause?mode=keep")

    def send_weights(self, parameters: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Writes the weights of the next version, and has the server load them."""
        self.version += 1
        path = self.directory / f"v{self.version}"
        path.mkdir()
        weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in parameters}
        save_file(weights, path / "model.safetensors")
        self.load(path)

    def resume(self) -> None:
        """Lets the server go on."""
        self.post("/resume")

    def destroy(self) -> None: ...
