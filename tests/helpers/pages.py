"""The code blocks of README.md, CONTRIBUTING.md and docs/, and what each says of how it is run.

A comment before a block says it. CONTRIBUTING.md ("Write examples in the documentation") has them:

    <!-- run: 4 ranks -->               real gloo processes, in one world
    <!-- run: fake 32, rank 13 -->      one process, which plays a rank of a world
    <!-- run: alone -->                 one process, which begins without process groups
    <!-- run: torchrun 4 -->            a script of its own
    <!-- run apart: 4 ranks -->         the same, for this block only
    <!-- quotes: examples/train.py -->  lines of a file
    <!-- not run: the reason -->        this block only
    <!-- prints -->                     a text block: all that the program before it prints
    <!-- error: 4 ranks -->             a text block: what the program in the comment raises or logs

`run` begins a program. All later Python blocks of the page belong to it, up to the next comment.
Lines below the first of a comment are part of the program too, and not shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ROOT", "Block", "Marker", "Program", "blocks_of", "pages", "programs_of"]

ROOT = Path(__file__).parents[2]
_PART = re.compile(
    r"^ *<!-- (?P<word>run apart|run|quotes|not run|prints|error)(?:: *(?P<how>[^\n]*?))?"
    r"(?:\n(?P<hidden>.*?))? ?-->"
    r"|^(?P<indent> *)```(?P<language>[\w+-]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_PRINTED = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Marker:
    """The directives in a comment about the block below it.

    Attributes:
        word: "run", "run apart", "quotes", "not run", "prints" or "error".
        how: the rest of its first line.
        hidden: the lines below.
        hidden_line: of the page, where these begin.
    """

    word: str
    how: str
    hidden: str
    hidden_line: int


@dataclass(frozen=True)
class Block:
    """One code block.

    Attributes:
        page: path in the repository.
        line: of the page, of its first line of code.
        language: that its fence names.
        text: the code.
        marker: of the comment before it, if there is one.
    """

    page: str
    line: int
    language: str
    text: str
    marker: Marker | None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Program:
    """Blocks of one page that run together.

    Attributes:
        page: path in the repository.
        line: of the page, where it begins.
        how: it is run.
        pieces: code by the line of the page on which it begins.
        prints: all that it prints; None if no text block says so.
        error: what it raises or logs; None if it ends well.
    """

    page: str
    line: int
    how: str
    pieces: dict[int, str] = field(default_factory=dict)
    prints: str | None = None
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.how})"

    @property
    def source(self) -> str:
        """The code, each line on its line of the page, so that tracebacks name that line.

        What raises an error that a page shows is the same wherever it stands on the page.
        """
        if self.error is not None:
            return "".join(self.pieces.values())
        source = ""
        for line, code in sorted(self.pieces.items()):
            source += "\n" * (line - 1 - source.count("\n")) + code
        return source

    @property
    def file(self) -> str:
        """The file name in tracebacks and in errors that name a line of the program."""
        return "train.py" if self.error is not None else str(ROOT / self.page)

    @property
    def printed(self) -> list[str]:
        """The output that its comments announce."""
        return _PRINTED.findall(self.source)


def pages() -> list[str]:
    """Return the pages that have code, as paths in the repository."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in found]


def blocks_of(page: str) -> list[Block]:
    """Return the code blocks of a page, from top to bottom.

    Raises:
        ValueError: a comment is not right before a block.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks, marker, end = [], None, 0
    for part in _PART.finditer(text):
        if marker is not None and text[end : part.start()].strip():
            raise ValueError(f"{page}: no block follows the comment {marker.word}: {marker.how}")
        end = part.end()
        if part["word"]:
            hidden = part["hidden"] or ""
            line = 1 + text.count("\n", 0, part.start("hidden")) if hidden else 0
            marker = Marker(part["word"], part["how"] or "", hidden and f"{hidden}\n", line)
        else:
            line = 1 + text.count("\n", 0, part.start("text"))
            blocks.append(Block(page, line, part["language"], part["text"], marker))
            marker = None
    return blocks


def programs_of(page: str) -> list[Program]:
    """Return the programs of a page.

    Raises:
        ValueError: a Python block belongs to none, and does not say why.
    """
    programs: list[Program] = []
    current: Program | None = None
    for block in blocks_of(page):
        word = block.marker.word if block.marker else ""
        if block.marker is not None and word in ("run", "run apart", "error"):
            begun = Program(page, block.line, block.marker.how)
            if block.marker.hidden:
                begun.pieces[block.marker.hidden_line] = block.marker.hidden
            programs.append(begun)
            if word == "run":
                current = begun
            elif word == "error":
                begun.error = block.text
            else:
                begun.pieces[block.line] = block.text
                continue
        if block.language != "python" and word != "prints":
            continue
        if word in ("quotes", "not run"):
            continue
        if current is None:
            raise ValueError(
                f"{block.where}: nothing says how this block is run. Write a comment before it; "
                f"{__name__} lists them."
            )
        if word == "prints":
            current.prints = block.text
        else:
            current.pieces[block.line] = block.text
    return programs
