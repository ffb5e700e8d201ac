"""The fields of the config that decide what the trainer does while candidates decode."""

from dataclasses import dataclass, field


@dataclass
class StreamArguments:
    r"""
    Arguments of streaming ([DARTS](https://huggingface.co/papers/2605.30859), Section 4.3.2): what the trainer
    computes while vLLM servers still write the last long answers.

    Parameters:
        > Parameters that control the streaming of log-probs

        stream_logprobs (`bool`, *optional*, defaults to `False`):
            Whether log-probs of the policy, and of the reference model where `beta` is not zero, are computed as
            tokens arrive, instead of all of them after the rollout. Only with `vllm_mode="server"`, and with text.
        stream_chunk_tokens (`int`, *optional*, defaults to `256`):
            Fewest new tokens of a candidate that is scored while it goes on decoding. What is left is scored when it
            has come to its end.
        stream_batch_tokens (`int`, *optional*, defaults to `8192`):
            Most tokens of one such forward pass, padding included.
        stream_cache_gib (`float`, *optional*, defaults to `4.0`):
            GiB for keys and values on each process: a third for what is kept, the rest for the pass in work. Where
            there is no more room, candidates wait until others have ended. A row that does not fit by itself is scored
            as without streaming.

        > Parameters that control the streaming of rewards

        stream_rewards (`bool`, *optional*, defaults to `False`):
            Whether reward functions are called for each group once its rows are chosen, while others decode, instead
            of once for the whole batch. The same for functions that look at each sample by itself; one that compares
            samples across groups means something else then.
        stream_reward_timeout_s (`float`, *optional*, defaults to `60.0`):
            Deadline of one call of a reward function in seconds. Rows of a late one get no reward from it (`None`).
    """

    stream_logprobs: bool = field(
        default=False,
        metadata={"help": "Whether log-probs are computed as tokens arrive. Only with `vllm_mode='server'`."},
    )
    stream_chunk_tokens: int = field(
        default=256, metadata={"help": "Fewest new tokens of a candidate that is scored while it goes on decoding."}
    )
    stream_batch_tokens: int = field(
        default=8192, metadata={"help": "Most tokens of one such forward pass, padding included."}
    )
    stream_cache_gib: float = field(
        default=4.0,
        metadata={
            "help": "GiB for keys and values on each process. Over it, candidates wait until others have ended."
        },
    )
    stream_rewards: bool = field(
        default=False,
        metadata={
            "help": "Whether reward functions are called for each group once its rows are chosen, instead of once for "
            "the whole batch."
        },
    )
    stream_reward_timeout_s: float = field(
        default=60.0,
        metadata={"help": "Deadline of one call of a reward function in seconds; its rows get no reward then."},
    )
