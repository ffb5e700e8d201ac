"""The end of a launched process."""

import os
import sys

from accelerate import Accelerator


def leave(accelerator: Accelerator) -> None:
    """
    Ends the process without finalizing the interpreter, in which one launch in some ten on a busy machine aborts
    ("terminate called without an active exception"), after everything is done, also where the process group was ended
    before. A thread of torch's is still in native code then; which one is not known.
    """
    accelerator.end_training()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
