# One image for vLLM servers and for the trainer. Not built or run yet.
#
#   docker build --target server --tag trl-darts-server .
#   docker build --target trainer --tag trl-darts-trainer .
#
# Servers on all GPUs but the first four, then training on these. `--network host` lets the weights' NCCL groups connect,
# `--ipc host` gives NCCL and the server's processes shared memory. For the data set and the model, mount the Hub's cache.
#
#   export VLLM_API_KEY=$(openssl rand -hex 16)
#   docker run --rm --gpus all --network host --ipc host --env VLLM_API_KEY trl-darts-server \
#       Qwen/Qwen3-8B --num-servers 4 --devices 4,5,6,7 --max-model-len 10240
#   docker run --rm --gpus '"device=0,1,2,3"' --network host --ipc host --env VLLM_API_KEY \
#       --volume "$PWD/outputs:/workspace/outputs" trl-darts-trainer \
#       accelerate launch --config_file configs/accelerate/fsdp2.yaml --num_processes 4 \
#       examples/train_grpo.py --config configs/qwen3_8b_8gpu.yaml

# Has CUDA, PyTorch and vLLM that fit together. Its version is within the extra `vllm` of pyproject.toml, which TRL takes.
FROM vllm/vllm-openai:v0.31.0 AS base
WORKDIR /workspace
COPY pyproject.toml README.md LICENSE ./
COPY trl_darts trl_darts
COPY examples examples
# The base's own vLLM and PyTorch satisfy our requirements, and stay.
RUN uv pip install --system --no-cache '.[deepspeed,math,peft,ray]'

FROM base AS server
ENTRYPOINT ["trl-darts", "serve"]

FROM base AS trainer
COPY configs configs
# The base's entry point is a server.
ENTRYPOINT []
CMD ["bash"]
