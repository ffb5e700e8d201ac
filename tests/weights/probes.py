"""A server's log-probs, the expected ones, and simulated training steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.models import EOS_ID, VOCAB_SIZE
from benchmarks.vllm_server import VLLMServer


# Float32 on both sides: 1e-6 is usual. A stale LM head of a tied model is off by 0.1 to 1.1.
MAX_ERROR = 1e-3
PROBE = np.random.default_rng(7).integers(EOS_ID + 2, VOCAB_SIZE, 48).tolist()


def load_model(model_dir: Path) -> PreTrainedModel:
    """Loads the trainer's model in float32."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def perturb(model: PreTrainedModel, rng: np.random.Generator, scale: float = 0.02) -> None:
    """Changes every parameter, as an optimizer step would."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.from_numpy(rng.normal(0, scale, param.shape)).to(param.dtype))


def model_logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Returns the log-probs of tokens 1, 2, … given those before them: `(T - 1,)`."""
    with torch.no_grad():
        logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)  # (T, V)
    return logps[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def server_logprobs(server: VLLMServer, ids: list[int]) -> torch.Tensor:
    """Returns the same from the server."""
    payload = {"model": server.model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    entries = server.request("/v1/completions", payload)["choices"][0]["prompt_logprobs"][1:]
    return torch.tensor([entry[str(token)]["logprob"] for entry, token in zip(entries, ids[1:], strict=True)])


def max_error(server: VLLMServer, model: PreTrainedModel, ids: list[int] | None = None) -> float:
    """Returns the largest difference between the server's log-probs and a forward pass of `model`."""
    ids = ids or PROBE
    return (server_logprobs(server, ids) - model_logprobs(model, ids)).abs().max().item()


def greedy_error(server: VLLMServer, model: PreTrainedModel, num_tokens: int = 12) -> float:
    """Returns the same for a continuation that the server decodes greedily."""
    payload = {
        "model": server.model,
        "prompt": PROBE,
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    choice = server.request("/v1/completions", payload)["choices"][0]
    expected = model_logprobs(model, PROBE + choice["token_ids"])[-num_tokens:]
    return (torch.tensor(choice["logprobs"]["token_logprobs"]) - expected).abs().max().item()


def named_params(model: PreTrainedModel) -> tuple[list[tuple[str, str, list[int]]], list[tuple[str, torch.Tensor]]]:
    """Returns the arguments that TRL passes to `update_named_params`, with the iterator as a list."""
    params = [(name, param.data) for name, param in model.named_parameters()]
    return [(name, str(param.dtype).removeprefix("torch."), list(param.shape)) for name, param in params], params


def sync(client: object, model: PreTrainedModel) -> None:
    """Runs one weight sync, as TRL's `VLLMGeneration.sync_weights` does."""
    metadata, params = named_params(model)
    client.update_named_params(metadata, iter(params))
    client.reset_prefix_cache()
