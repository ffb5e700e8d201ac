"""
Sharded models on the CPU. Accelerate 1.15 turns FSDP on only for accelerators' distributed types, and trains as DDP on
the CPU without a word; torch's `fully_shard` itself runs on gloo. DeepSpeed compiles a collective in shared memory, a
minute's work in each new environment, and gloo has it too.
"""

import os

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def allow_fsdp_on_cpu() -> None:
    """Call before the first trainer is made. The device stays the CPU, and the backend gloo."""
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    original = AcceleratorState.__init__

    def init(self, *args, **kwargs):
        state = PartialState._shared_state
        if state.get("distributed_type") == DistributedType.MULTI_CPU:
            state["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, **kwargs)

    AcceleratorState.__init__ = init


def compile_no_collective() -> None:
    """Call before the first trainer is made."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return
    import deepspeed.ops

    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
