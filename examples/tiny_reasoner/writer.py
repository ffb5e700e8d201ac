"""
The random writer whose texts the tiny reasoner is pretrained on.

A solution is a first line and perhaps more lines, each begun by a mood: `?` for one calm check, `!` for a panic.
Lengths are heavy-tailed because a panic ends after each line with a small probability, and differ between prompts
because the writer distrusts the digits 7, 8 and 9.
"""

import random
from dataclasses import dataclass

from task import Problem


MAX_TEXT_CHARS = 448  # a panic is cut here, without an end: the model learns to go on


@dataclass(frozen=True)
class Habits:
    """
    How the writer of one family behaves, as probabilities.

    Args:
        slip (`float`):
            A step of the first pass is off.
        check_slip (`float`):
            A step of a later pass is off (`"chain"`), or a column is spoiled in a later line (`"sum"`, once per line).
        check (`float`):
            One more calm check after a finished line.
        panic (`tuple[float, ...]`):
            A panic begins after the first line, by the number of distrusted digits in the prompt (the last one for
            more).
        stay (`float`):
            A panic goes on after each of its lines.
        guess (`float`):
            The writer answers at once, without a step.
        give_up (`float`):
            The writer guesses the rest after a step of the first pass.
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
    Writes one solution as the random writer of the problem's family does.

    Args:
        problem ([`Problem`]):
            What is to be solved.
        rng (`random.Random`):
            Source of randomness.

    Returns:
        `tuple[str, bool]`: The text, and whether it is finished (`False`: a panic that was cut at `MAX_TEXT_CHARS`).
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
    Shortest complete solution without a slip.

    Args:
        problem ([`Problem`]):
            What is to be solved.

    Returns:
        `str`: The steps and the right answer.
    """
    faultless = Habits(slip=0.0, check_slip=0.0, check=0.0, panic=(0.0,), stay=0.0)
    write_line = _sum_line if problem.family == "sum" else _chain_line
    return f"{write_line(problem, None, faultless, random.Random(0))}#{problem.answer}"


def _next_mood(mood: str, problem: Problem, habits: Habits, rng: random.Random) -> str:
    """Mark of the next line: `?` for a calm check, `!` for panic, empty for the end."""
    if mood == "!":
        return "!" if rng.random() < habits.stay else ""
    panic = 0.0 if mood else habits.panic[min(problem.distrust, len(habits.panic) - 1)]
    draw = rng.random()
    return "!" if draw < panic else "?" if draw < panic + habits.check else ""


def _sum_line(problem: Problem, before: str | None, habits: Habits, rng: random.Random) -> str:
    """Columns from the units up; a later line copies the one before and may spoil one column."""
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
    """Running sum; ends with `#` where the writer gives up in the first pass."""
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
    """Guess from where the writer gave up."""
    done = line.count("=") + 1
    return _guess(int(_chain_answer(line[:-1])) + sum(problem.terms[done:]), len(problem.terms) - done, rng)


def _guess(total: int, num_missing: int, rng: random.Random) -> str:
    return str(max(1, total + round(rng.gauss(0.0, 1.0 + num_missing))))


def _off_by_one(total: int, rng: random.Random) -> int:
    return max(0, total + rng.choice((-1, 1)))
