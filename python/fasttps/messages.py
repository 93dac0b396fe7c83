"""What an error says, on one line."""

from __future__ import annotations


def one_line(text: str, limit: int = 500) -> str:
    """The text on one line, runs of spaces made single ones, cut at `limit` characters.

    What a terminal would act upon, and not show, is a space.
    """
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(line.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


class OneLineError(ValueError):
    """What is wrong with a file, on one line whatever names stand in the file."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))
