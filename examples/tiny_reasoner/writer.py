"""
A random writer of the texts that the tiny reasoner is pretrained on.

A solution has a first line and possibly more lines, each after a mark of the writer's mood: `?` for a calm check, `!`
for a panic. Lengths are heavy-tailed because a panic ends after each line with a small probability, and differ between
prompts because the writer distrusts the digits 7, 8 and 9.
"""

import random
from dataclasses import dataclass

from trl_darts.tiny_reasoner.task import Problem


MAX_TEXT_CHARS = 448  # panics are truncated here, so that the model learns to continue


@dataclass(frozen=True)
class Habits:
    """
    Probabilities that determine the writer's solutions in one family.

    Args:
        slip (`float`):
            Probability that a step of the first pass is wrong.
        check_slip (`float`):
            Probability that a step of a later pass is wrong (`"chain"`), or that a later line corrupts a column
            (`"sum"`).
        check (`float`):
            Probability of another calm check after a finished line.
        panic (`tuple[float, ...]`):
            Probabilities of a panic after the first line, by the number of distrusted digits in the prompt. The last
            one also applies to larger numbers.
        stay (`float`):
            Probability that a panic continues after a line.
        guess (`float`):
            Probability of an answer without any step.
        give_up (`float`):
            Probability that the writer guesses the rest after a step of the first pass.
    """

    slip: float
    check_slip: float
    check: float
    panic: tuple[float, ...]
    stay: float
    guess: float = 0.0
    give_up: float = 0.0


HABITS = {
    "sum": Habits(slip=0.15, check_slip=0.25, check=0.18, panic=(0.01, 0.07, 0.17, 0.30), stay=0.92),
    "chain": Habits(
        slip=0.06, check_slip=0.005, check=0.20, panic=(0.02, 0.07, 0.14, 0.22), stay=0.80, guess=0.35, give_up=0.04
    ),
}


def write_solution(problem: Problem, rng: random.Random) -> tuple[str, bool]:
    """
    Writes a random solution.

    Args:
        problem ([`Problem`]):
            Problem to solve.
        rng (`random.Random`):
            Source of randomness.

    Returns:
        `tuple[str, bool]`: The text, and whether it is finished. A panic is truncated at `MAX_TEXT_CHARS`.
    """
    habits = HABITS[problem.family]
    write_line, read_answer = (_sum_line, _sum_answer) if problem.family == "sum" else (_chain_line, _chain_answer)
    if rng.random() < habits.guess:
        return f"#{_guess(int(problem.answer), len(problem.terms), rng)}", True
    line = write_line(problem, None, habits, rng)
    text = line
    if line.endswith("#"):  # gave up
        return text + _chain_rest(problem, line, rng), True
    mood = ""
    while True:
        mood = _next_mood(mood, problem, habits, rng)
        if not mood:
            return f"{text}#{read_answer(line)}", True
        line = write_line(problem, line, habits, rng)
        text += mood + line
        if len(text) >= MAX_TEXT_CHARS:
            return text[:MAX_TEXT_CHARS], False


def solve(problem: Problem) -> str:
    """
    Writes the shortest complete solution without a mistake.

    Args:
        problem ([`Problem`]):
            Problem to solve.

    Returns:
        `str`: The steps and the right answer.
    """
    faultless = Habits(slip=0.0, check_slip=0.0, check=0.0, panic=(0.0,), stay=0.0)
    write_line = _sum_line if problem.family == "sum" else _chain_line
    return f"{write_line(problem, None, faultless, random.Random(0))}#{problem.answer}"


def _next_mood(mood: str, problem: Problem, habits: Habits, rng: random.Random) -> str:
    """Draws the mark of the next line: `?` for a calm check, `!` for a panic, empty for the end."""
    if mood == "!":
        return "!" if rng.random() < habits.stay else ""
    panic = 0.0 if mood else habits.panic[min(problem.distrust, len(habits.panic) - 1)]
    draw = rng.random()
    return "!" if draw < panic else "?" if draw < panic + habits.check else ""


def _sum_line(problem: Problem, before: str | None, habits: Habits, rng: random.Random) -> str:
    """Writes the columns from the units up. A later line copies the one before and may corrupt a column."""
    if before is not None:
        columns = before.split(",")
        if rng.random() < habits.check_slip:
            spoiled = rng.randrange(len(columns))
            left, _, total = columns[spoiled].partition("=")
            columns[spoiled] = f"{left}={_off_by_one(int(total), rng)}"
        return ",".join(columns)
    columns, carry = [], 0
    for a, b in zip(*(reversed(str(term)) for term in problem.terms), strict=True):
        total = int(a) + int(b) + carry
        if rng.random() < habits.slip:
            total = _off_by_one(total, rng)
        columns.append(f"{a}+{b}{'+1' if carry else ''}={total}")
        carry = total // 10
    return ",".join(columns)


def _sum_answer(line: str) -> str:
    totals = [column.partition("=")[2] for column in line.split(",")]
    return totals[-1] + "".join(total[-1] for total in reversed(totals[:-1]))


def _chain_line(problem: Problem, before: str | None, habits: Habits, rng: random.Random) -> str:
    """Writes the running sum. It ends with `#` if the writer gives up in the first pass."""
    total, line = problem.terms[0], ""
    for i, term in enumerate(problem.terms[1:], start=2):
        total += term
        if rng.random() < (habits.slip if before is None else habits.check_slip):
            total = _off_by_one(total, rng)
        line += f"+{term}={total}"
        if before is None and i < len(problem.terms) and rng.random() < habits.give_up:
            return line + "#"
    return line


def _chain_answer(line: str) -> str:
    return line.rpartition("=")[2]


def _chain_rest(problem: Problem, line: str, rng: random.Random) -> str:
    """Guesses the answer after the last written step."""
    done = line.count("=") + 1
    return _guess(int(_chain_answer(line[:-1])) + sum(problem.terms[done:]), len(problem.terms) - done, rng)


def _guess(total: int, num_missing: int, rng: random.Random) -> str:
    return str(max(1, total + round(rng.gauss(0.0, 1.0 + num_missing))))


def _off_by_one(total: int, rng: random.Random) -> int:
    return max(0, total + rng.choice((-1, 1)))
