"""Find words in files that have a better one in words.txt, beside this file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

_RULES = Path(__file__).with_name("words.txt")
_GAP = r"(?:\s|#|//)+"  # a space in a rule: words of a comment may stand on two lines


def _rules() -> list[tuple[re.Pattern[str], str]]:
    lines = _RULES.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("  ->  ") for line in lines if line and not line.startswith("#")]
    return [
        (re.compile(word.replace(" ", _GAP), re.IGNORECASE | re.MULTILINE), cure)
        for word, cure in pairs
    ]


def findings(path: Path) -> Iterator[str]:
    """Yield a line for each word in a file: where it is, and what to write instead."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for word, cure in _rules():
        for found in word.finditer(text):
            number = text.count("\n", 0, found.start()) + 1
            if "word: ok" not in lines[number - 1]:
                yield f"{path}:{number}: {' '.join(found[0].split())!r}: write {cure}"


if __name__ == "__main__":
    found = [line for name in sys.argv[1:] for line in findings(Path(name))]
    sys.exit("\n".join(found) or None)
