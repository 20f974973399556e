from typing import Any

def order(tokens: Any, /) -> bytes:
    """See `matching.order`."""

class Matcher:
    """The positions of a new response in earlier responses. It begins without either."""

    def add(self, tokens: Any, order: Any, weight: float, /) -> None:
        """Add an earlier response: its int32 tokens, their `order`, and its weight. Raises ValueError above `MOST`."""

    def propose(self, most: int, threshold: float, branches: int, /) -> tuple[list[int], list[int]]:
        """A tree of at most `most` next tokens with probabilities of at least `threshold`, the likeliest first, and at
        most `branches` children of each: the tokens, and the position of each one's parent, -1 for first tokens."""

    def accept(self, tokens: Any, /) -> int:
        """Add int32 tokens of the new response. Returns the number of leading tokens that agree with the last
        proposal."""

    def chances(self) -> list[tuple[float, float]]:
        """By the length of the match (0, 1, 2 to 3, 4 to 7, ...): the numbers of accepted and of proposed tokens."""

    def set_chances(self, chances: list[tuple[float, float]], /) -> None:
        """Replace the statistics by the `chances` of another matcher."""
