"""
Questions about a price list, for an agent with two tools: "3 Norvan + 4 Belmir" asks what three of one and four of the
other cost. Prices are in a database that the agent can search, and a calculator works out the rest.
"""

import random
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset


DATABASE = Path(__file__).parent / "prices.db"
MOST = 9  # of an item
TEST_SHARE = 0.2  # of all questions
# What the calculator's process may do, and does.
CALCULATE = """
import resource, sys
for limit, most in ((resource.RLIMIT_CPU, 1), (resource.RLIMIT_AS, 1 << 28), (resource.RLIMIT_NPROC, 0)):
    resource.setrlimit(limit, (most, most))
print(eval(sys.argv[1], {"__builtins__": {}}))
"""


def open_database() -> sqlite3.Connection:
    """Opens the price list, which can't be changed."""
    return sqlite3.connect(f"file:{DATABASE}?mode=ro&immutable=1", uri=True)


def prices() -> dict[str, int]:
    """Returns the price of each item."""
    connection = open_database()
    try:
        return {text.split()[0]: int(text.split()[-1]) for (text,) in connection.execute("SELECT text FROM prices")}
    finally:
        connection.close()


def search(query: str) -> str:
    """
    Searches the price list.

    Args:
        query: Words to look for.

    Returns:
        The first line that has them.
    """
    connection = open_database()
    try:
        words = '"' + query.replace('"', "") + '"'
        found = connection.execute("SELECT text FROM prices WHERE prices MATCH ? LIMIT 1", [words]).fetchone()
    finally:
        connection.close()
    return found[0] if found else "nothing"


def calculate(expression: str) -> str:
    """
    Calculates.

    Args:
        expression: Numbers with + and *.

    Returns:
        The result.
    """
    if not re.fullmatch(r"\d{1,4}([+*]\d{1,4}){0,7}", expression):
        raise ValueError("only numbers with + and *")
    command = [sys.executable, "-I", "-S", "-c", CALCULATE, expression]
    result = subprocess.run(command, capture_output=True, text=True, timeout=5, env={}, check=True)
    return result.stdout.strip()


TOOLS = [search, calculate]


def draw_question(rng: random.Random, items: list[str]) -> list[tuple[int, str]]:
    """Draws a question: one or two items, and how many of each."""
    return [(rng.randint(2, MOST), item) for item in rng.sample(items, rng.randint(1, 2))]


def is_test(question: list[tuple[int, str]]) -> bool:
    """Whether a question is never trained on."""
    return random.Random(repr(question)).random() < TEST_SHARE


def make_dataset(size: int, seed: int, split: str = "train") -> Dataset:
    """Makes questions with their answers. Those of the split `"test"` are never trained on, also not before GRPO."""
    rng, price_of = random.Random(f"{split} {seed}"), prices()
    rows: list[dict[str, Any]] = []
    while len(rows) < size:
        question = draw_question(rng, sorted(price_of))
        if is_test(question) == (split == "test"):
            text = " + ".join(f"{count} {item}" for count, item in question)
            answer = sum(count * price_of[item] for count, item in question)
            rows.append({"prompt": [{"role": "user", "content": text}], "answer": answer})
    return Dataset.from_list(rows)


def accuracy_reward(completions: list[list[dict[str, Any]]], answer: list[int], **kwargs: Any) -> list[float]:
    """1 if the conversation ends with the answer, else 0."""
    last = [messages[-1].get("content") or "" for messages in completions]
    return [float(text.strip() == str(own)) for text, own in zip(last, answer, strict=True)]
