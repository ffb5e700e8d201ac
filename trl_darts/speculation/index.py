"""Where the last tokens of a text have occurred before, in several texts that grow."""

from collections.abc import Sequence


GRAM = 3  # tokens that must agree at least
MAX_MATCH = 16  # how far back agreement is looked for
MAX_PLACES = 8  # how many earlier places are looked at, newest first
_TOKEN_BITS = 21  # more than any vocabulary needs
_GRAM_MASK = (1 << GRAM * _TOKEN_BITS) - 1
_PLACE_BITS = 32


class SuffixIndex:
    """
    Drafts what followed the longest suffix of a text where it occurred before, in the text itself or in another one.

    For each sequence of `GRAM` tokens it has the newest place where one ended, and for each place the next older one,
    as in the hash chains of LZ77. Adding a token takes constant time.
    """

    def __init__(self) -> None:
        self.num_tokens = 0  # of all texts
        self._texts: list[list[int]] = []
        self._grams: list[int] = []  # by text: its last `GRAM` tokens
        self._newest: dict[int, int] = {}  # by gram: text and number of tokens before the place
        self._older: list[list[int]] = []  # by text, and number of tokens before the place - 1

    def add(self, tokens: Sequence[int]) -> int:
        """A new text. Returns its number."""
        self._texts.append([])
        self._grams.append(0)
        self._older.append([])
        self.extend(len(self._texts) - 1, tokens)
        return len(self._texts) - 1

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """More tokens of a text."""
        words, older, newest = self._texts[text], self._older[text], self._newest
        gram, place = self._grams[text], (text << _PLACE_BITS) + len(words)
        for token in tokens:
            gram = (gram << _TOKEN_BITS | token + 1) & _GRAM_MASK  # 0 is no token: a text begins with it
            place += 1
            older.append(newest.get(gram, -1))
            newest[gram] = place
        words += tokens
        self.num_tokens += len(tokens)
        self._grams[text] = gram

    def propose(self, text: int, num_tokens: int) -> list[int]:
        """What may follow a text, at most `num_tokens`: by a vote of the places that agree with most of its end."""
        words = self._texts[text]
        place = self._newest.get(self._grams[text], -1)
        longest = GRAM
        places: list[tuple[list[int], int]] = []
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            other, end = place >> _PLACE_BITS, place & (1 << _PLACE_BITS) - 1
            source = self._texts[other]
            place = self._older[other][end - 1]
            if end == len(source):  # nothing follows; the text itself is among these
                continue
            length = _common_suffix(words, source, end)
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append((source, end))
        return _follow(places, num_tokens)


def _common_suffix(words: list[int], source: list[int], end: int) -> int:
    length, most = 0, min(len(words), end, MAX_MATCH)
    while length < most and words[-1 - length] == source[end - 1 - length]:
        length += 1
    return length


def _follow(places: list[tuple[list[int], int]], num_tokens: int) -> list[int]:
    """The most frequent next token again and again; of equally frequent ones the newest."""
    draft: list[int] = []
    while len(places) > 1 and len(draft) < num_tokens:
        votes: dict[int, int] = {}
        for source, end in places:
            if end < len(source):
                votes[source[end]] = votes.get(source[end], 0) + 1
        if not votes:
            return draft
        winner = max(votes, key=votes.__getitem__)  # the first of equals
        draft.append(winner)
        places = [(source, end + 1) for source, end in places if end < len(source) and source[end] == winner]
    for source, end in places:
        draft += source[end : end + num_tokens - len(draft)]
    return draft
