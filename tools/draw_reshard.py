"""Draws docs/reshard.svg: a weight before and after a run, elements in the colors of senders.

python tools/draw_reshard.py docs/reshard.svg
"""

import sys
from pathlib import Path

from meshverse._core import AxisLayout, Holders, Layout, RankMap, plan_reshard
from meshverse.tools.pictures.palette import COLORS, INKS

ROWS, COLUMNS, CELL = 8, 8, 22
TRAINERS, GENERATORS = range(4), range(4, 6)


def main():
    ranks = RankMap.identity(6)
    trainer = Holders(ranks, 0, Layout([AxisLayout(2, 2), AxisLayout(2, 1)]))  # dp, tp
    generator = Holders(ranks, 4, Layout([AxisLayout(2, 1)]))  # tp
    # Rows over tp, then over dp, as FSDP2 does with what tensor parallelism has split; to columns.
    transfer = ((ROWS, COLUMNS), 4, (0, [0, 0], [2, 1], True), (1, [1], [1], False))
    both, senders = [trainer, generator], {}
    for rank in GENERATORS:
        for cell, sender in cells_of(rank, plan_reshard(both, [transfer], rank, 6, 4096)):
            senders[cell] = (sender, rank)
    left = ['<text x="20" y="30" class="title">on the trainer: dp 2 x tp 2</text>']
    right = ['<text x="420" y="30" class="title">on the generator: tp 2</text>']
    for (row, column), (sender, rank) in sorted(senders.items()):
        left.append(cell_at(20, row, column, sender, sender))
        right.append(cell_at(420 + 14 * (rank - 4), row, column, sender, sender))
    for rank in TRAINERS:
        row = min(row for (row, _), (sender, _) in senders.items() if sender == rank)
        left.append(label(20 + COLUMNS * CELL + 8, 50 + row * CELL + CELL + 4, f"rank {rank}"))
    for rank in GENERATORS:
        x = 420 + (rank - 4) * (COLUMNS // 2 * CELL + 14)
        right.append(label(x, 50 + ROWS * CELL + 18, f"rank {rank}"))
    line = "M 290 138 H 395 m -8 -6 l 8 6 l -8 6"
    arrow = f'<path d="{line}" fill="none" stroke="#888" stroke-width="2"/>'
    words = label(288, 128, "each element once")
    Path(sys.argv[1]).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 {ROWS * CELL + 84}" role="img" '
        'aria-label="A weight of 8 rows and 8 columns before and after a run of a Reshard">'
        f"\n{STYLE}\n" + "\n".join([*left, *right, arrow, words]) + "\n</svg>\n"
    )


def cells_of(rank, plan):
    """(row, column) of the whole weight and who sends it, for every element that a rank gets."""
    messages, boxes = plan[0].tolist(), plan[1].tolist()
    first_column = (rank - 4) * COLUMNS // 2
    for _, _, peer, is_sent, _, at, n_boxes in messages:
        assert not is_sent
        for _ in range(n_boxes):
            (row, column), (rows, columns) = boxes[at + 3 : at + 5], boxes[at + 5 : at + 7]
            for i in range(rows):
                for j in range(columns):
                    yield (row + i, first_column + column + j), peer
            at += 7


def cell_at(x, row, column, rank, text):
    left, top = x + column * CELL, 50 + row * CELL
    side, middle = CELL - 2, left + CELL / 2 - 1
    return (
        f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="{COLORS[rank]}"/>'
        f'<text x="{middle}" y="{top + 15}" class="number" style="fill:{INKS[rank]}">{text}</text>'
    )


def label(x, y, text):
    return f'<text x="{x}" y="{y}" class="label">{text}</text>'


STYLE = (
    "<style>text{font-family:system-ui,sans-serif;fill:#57606a}.title{font-size:15px}"
    ".label{font-size:13px}.number{font-size:11px;text-anchor:middle}</style>"
)

if __name__ == "__main__":
    main()
