"""An index that finds earlier occurrences of a text's last tokens, in several growing texts."""

from collections.abc import Sequence


GRAM = 3  # fewest tokens of a match
MAX_MATCH = 16  # longest match that is compared
MAX_PLACES = 8  # earlier places that are compared, newest first
_TOKEN_BITS = 21  # enough for any vocabulary
_GRAM_MASK = (1 << GRAM * _TOKEN_BITS) - 1
_PLACE_BITS = 32


class SuffixIndex:
    """
    Drafts the tokens that followed an earlier occurrence of a text's longest matching suffix, in any text.

    For each sequence of `GRAM` tokens it stores the newest place where it ended, and for each place the next older
    one, as in the hash chains of LZ77. Adding a token takes constant time.
    """

    def __init__(self) -> None:
        self.num_tokens = 0  # of all texts
        self._texts: list[list[int]] = []
        self._grams: list[int] = []  # by text: its last `GRAM` tokens
        self._newest: dict[int, int] = {}  # place by gram; a place is a text and the number of tokens before it
        self._older: list[list[int]] = []  # next older place by text and number of tokens before the place, minus 1

    def add(self, tokens: Sequence[int]) -> int:
        """Adds a text and returns its number."""
        self._texts.append([])
        self._grams.append(0)
        self._older.append([])
        self.extend(len(self._texts) - 1, tokens)
        return len(self._texts) - 1

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """Appends tokens to a text."""
        target, older, newest = self._texts[text], self._older[text], self._newest
        gram, place = self._grams[text], (text << _PLACE_BITS) + len(target)
        for token in tokens:
            gram = (gram << _TOKEN_BITS | token + 1) & _GRAM_MASK  # 0 stands for no token, before the text's start
            place += 1
            older.append(newest.get(gram, -1))
            newest[gram] = place
        target += tokens
        self.num_tokens += len(tokens)
        self._grams[text] = gram

    def propose(self, text: int, num_tokens: int) -> list[int]:
        """Proposes at most `num_tokens` next tokens of a text, by a vote of the places with the longest match."""
        target = self._texts[text]
        place = self._newest.get(self._grams[text], -1)
        longest, num_compared = GRAM, 0
        places: list[tuple[list[int], int]] = []
        while place >= 0 and num_compared < MAX_PLACES:
            other, end = place >> _PLACE_BITS, place & (1 << _PLACE_BITS) - 1
            source = self._texts[other]
            place = self._older[other][end - 1]
            if end == len(source):  # nothing follows yet: the text itself, or a sibling at the same place
                continue
            num_compared += 1
            length = _common_suffix(target, source, end)
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append((source, end))
        return _follow(places, num_tokens)


def _common_suffix(target: list[int], source: list[int], end: int) -> int:
    length, most = 0, min(len(target), end, MAX_MATCH)
    while length < most and target[-1 - length] == source[end - 1 - length]:
        length += 1
    return length


def _follow(places: list[tuple[list[int], int]], num_tokens: int) -> list[int]:
    """Repeatedly drafts the most frequent next token. Ties go to the newest place."""
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
