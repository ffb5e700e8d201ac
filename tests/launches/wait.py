"""One of two processes, whose collectives fail after three seconds: `accelerate launch … wait.py OUT`."""

import sys
import time
from datetime import timedelta
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from tests.launches.leaving import leave
from trl_darts.engines.main_process import MainProcess


def main() -> None:
    limit = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=3))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
    main_process = MainProcess(accelerator)
    values = [
        main_process.broadcast(lambda: "at once"),
        main_process.broadcast(lambda: time.sleep(8) or "after a while"),
    ]
    try:
        main_process.run(lambda: 1 / 0)
    except ZeroDivisionError as error:
        values.append(str(error))
    Path(sys.argv[1], f"rank{accelerator.process_index}.txt").write_text("\n".join(values))
    leave(accelerator)


if __name__ == "__main__":
    main()
