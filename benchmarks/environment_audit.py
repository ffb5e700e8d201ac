"""Conversations in environments, some of which are killed or hang while servers are, for `faults.py`."""

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.agent_audit import AgentAudit, agent_trainer
from trl_darts import EnvironmentLost


TIMEOUT_S = 2.0  # of a call
HANG_S = 8.0
NOT_YET = 20  # calls before the first one that hangs
APART = 40  # calls between two that hang
# Answers each line after its seconds.
WORKER = """
import sys, time
for line in sys.stdin:
    number, seconds = line.split()
    time.sleep(float(seconds))
    print(number, flush=True)
"""


class Sandboxes:
    """Environments that are processes of their own. Of the calls, `hangs` take too long."""

    def __init__(self, seed: int, hangs: int) -> None:
        self._rng, self._lock = random.Random(seed), threading.Lock()
        self._num_calls, self._num_hangs = 0, hangs
        self.acting: set[Any] = set()  # those that are being called
        self.processes: list[subprocess.Popen[str]] = []

    def begin(self, sandbox: Any) -> float:
        """Returns the seconds of a sandbox's call."""
        with self._lock:
            self._num_calls += 1
            self.acting.add(sandbox)
            hangs = self._num_hangs > 0 and self._num_calls >= NOT_YET and self._num_calls % APART == 0
            self._num_hangs -= hangs
            return HANG_S if hangs else self._rng.uniform(0.05, 0.5)

    def end(self, sandbox: Any) -> None:
        """Ends its call."""
        with self._lock:
            self.acting.discard(sandbox)

    def kill(self) -> None:
        """Kills one that is being called."""
        while True:
            with self._lock:
                if self.acting:
                    self._rng.choice(sorted(self.acting, key=id)).process.kill()
                    return
            time.sleep(0.05)

    def factory(self) -> Callable[[], Any]:
        """Returns what makes an environment."""
        sandboxes = self

        class Sandbox:
            def reset(self, **kwargs: Any) -> None:
                self._num_calls = 0
                if getattr(self, "process", None) is None or self.process.poll() is not None:
                    command = [sys.executable, "-I", "-S", "-c", WORKER]
                    pipe = subprocess.PIPE
                    self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
                    weakref.finalize(self, _end, self.process)
                    sandboxes.processes.append(self.process)

            def wait(self, job: int) -> str:
                """
                Waits for a job.

                Args:
                    job: Its number.
                """
                self._num_calls += 1
                number, seconds = self._num_calls, sandboxes.begin(self)
                try:
                    assert self.process.stdin is not None
                    assert self.process.stdout is not None
                    print(number, seconds, file=self.process.stdin, flush=True)
                    answer = self.process.stdout.readline().strip()
                except BrokenPipeError:
                    answer = ""
                finally:
                    sandboxes.end(self)
                if not answer:
                    raise EnvironmentLost("its process was killed")
                return f"job {answer}"

        return Sandbox


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


class EnvironmentAudit(AgentAudit):
    """
    Kills environments, and compares what each conversation was told with what its environment was asked. `kills` of
    them follow each other by seconds.
    """

    def __init__(self, trainer: Any, sandboxes: Sandboxes, seed: int, kills: int) -> None:
        super().__init__(trainer)
        self._sandboxes = sandboxes
        self._rng, self._kills = random.Random(seed), kills
        self._killer = threading.Thread(target=self._kill, daemon=True)
        self._killer.start()

    def _kill(self) -> None:
        for _ in range(self._kills):
            time.sleep(self._rng.uniform(5.0, 15.0))
            self._sandboxes.kill()
            self.counts["environments killed"] += 1

    def _count(self, result: Any, source: Any) -> None:
        super()._count(result, source)
        self.counts["environments lost"] += source._num_lost
        for own in source._played.values():
            num_calls = source._tool_players.acted_on[own.candidate_id]._num_calls
            said = [m["content"] for m in own.outcome[1][0] if m["role"] == "tool"]
            told = [int(text.split()[1]) for text in said if text.startswith("job")]
            late = sum("no answer within" in text for text in said)
            self.counts["calls"] += num_calls
            self.counts["late"] += late
            self.counts["busy"] += sum("still busy" in text for text in said)
            asked = set(range(1, num_calls + 1))
            # One may be left over whose answer was too long for the conversation.
            fits = set(told) <= asked and len(asked) - len(told) - late in (0, 1)
            self.counts["wrong"] += not (fits and told == sorted(set(told)))

    @property
    def nothing_lost(self) -> bool:
        self._killer.join(60)
        counts, trainer = self.counts, self.trainer
        pools = [*trainer._environment_pool.values(), trainer.environments, [tool.__self__ for tool in trainer.tools]]
        time.sleep(HANG_S + 2)  # what hangs is over then
        gc.collect()
        used = {own.process for pool in pools for own in pool if hasattr(own, "process")}
        alive = [own for own in self._sandboxes.processes if own.poll() is None]
        counts["processes left"] = sum(own not in used for own in alive)
        return not (counts["processes left"] or counts["wrong"]) and self.is_complete


def audited_trainer(
    urls: list[str], model_dir: Path, seed: int, output_dir: str, kills: int, hangs: int, **fields: Any
) -> EnvironmentAudit:
    """Returns the audit of a trainer whose conversations act on processes, of which some are killed and some hang."""
    sandboxes = Sandboxes(seed, hangs)
    tools = {"environment_factory": sandboxes.factory()}
    trainer = agent_trainer(urls, model_dir, seed, output_dir, tools, tool_timeout_s=TIMEOUT_S, **fields)
    return EnvironmentAudit(trainer, sandboxes, seed, kills)
