// The arithmetic of pictures: which group a rank is in, and which lines stand for many nodes.
// The same as lines.py and repeats.py, so that a page holds layouts and no list of ranks.
"use strict";

const N_DRAWN_WHOLE = 16; // nodes: as many are drawn one by one
const N_DRAWN_PARTS = 8; // parts of a run: as many short ones are drawn one by one
const MOST_LINES = 48; // where more are left after folding, most of them are left out
const MOST_RANKS_IN_LINE = 128; // of larger nodes, a line is a piece
const RANKS_IN_LINE = 8; // where nobody knows the nodes

/** The number that a position's digits make: of these sizes, strides apart, the last fastest. */
function numberOf(layout, position) {
  return layout.sizes.reduce(
    (number, size, i) => number * size + (Math.floor(position / layout.strides[i]) % size), 0);
}

/** The position that a number's digits make: the other way round. */
function positionAt(layout, number) {
  let position = 0;
  for (let i = layout.sizes.length - 1; i >= 0; i -= 1) {
    position += (number % layout.sizes[i]) * layout.strides[i];
    number = Math.floor(number / layout.sizes[i]);
  }
  return position;
}

/** Which rank is at each position. */
class RankMap {
  constructor(world, ranks) {
    this.size = world;
    this.ranks = ranks; // null: 0, 1, 2, ...
    this.positions = ranks && new Map(ranks.map((rank, position) => [rank, position]));
    this.sorted = ranks && [...ranks].sort((a, b) => a - b);
  }
  rankAt(position) { return this.ranks ? this.ranks[position] : position; }
  positionOf(rank) {
    if (this.ranks) return this.positions.has(rank) ? this.positions.get(rank) : null;
    return Number.isInteger(rank) && rank >= 0 && rank < this.size ? rank : null;
  }
  lowest() { return this.ranks ? this.sorted[0] : 0; }
  highest() { return this.ranks ? this.sorted[this.size - 1] : this.size - 1; }
}

/** Ranks of the group that a position is in, in group-rank order; of a large one the first few. */
function ranksOf(groups, rankMap, position, most = Infinity) {
  const first = positionAt(groups.offsets, numberOf(groups.offsets, position));
  const sorts = rankMap.ranks && !groups.keepsOrder;
  const count = sorts ? groups.size : Math.min(groups.size, most);
  const ranks = Array.from({ length: count }, (_, i) =>
    rankMap.rankAt(first + positionAt(groups.axis, i)));
  if (sorts) ranks.sort((a, b) => a - b);
  return ranks.slice(0, most);
}

/** The ranks by node: lists of ascending ranks, a line each. */
function piecesOf(rankMap, nodeSize) {
  const pieces = [];
  let piece = [];
  let key = null;
  for (let i = 0; i < rankMap.size; i += 1) {
    const rank = rankMap.ranks ? rankMap.sorted[i] : i;
    const node = nodeSize ? Math.floor(rank / nodeSize) : Math.floor(i / RANKS_IN_LINE);
    if (node !== key || piece.length === MOST_RANKS_IN_LINE) {
      piece = [];
      pieces.push(piece);
      key = node;
    }
    piece.push(rank);
  }
  return pieces;
}

// --- what repeats: a row is {rel, span}, a run {part, count, step, span}, a block {parts, span} ---

function fold(rows, seams) {
  const known = new Map();
  const same = (key, part) => {
    if (!known.has(key)) known.set(key, { ...part, id: known.size });
    return known.get(key);
  };
  let items = rows.map((row) => {
    const rel = row.map((number) => number - row[0]);
    return [same(`row ${rel}`, { rel, span: 1 }), row[0]];
  });
  for (const seam of seams) items = runs(items, same, seam);
  for (;;) {
    const before = items.length;
    items = runs(items, same, rows.length + 1);
    if (items.length === before) items = blocks(items, same);
    if (items.length === before) return items;
  }
}

function runs(items, same, seam) {
  const out = [];
  let row = 0;
  for (let start = 0; start < items.length;) {
    const [part, first] = items[start];
    const most = Math.max(1, Math.floor((seam - (row % seam)) / part.span));
    let stop = start + 1;
    let step = 0;
    if (stop < items.length && items[stop][0] === part) {
      step = items[stop][1] - first;
      while (stop < items.length && stop - start < most && items[stop][0] === part
          && items[stop][1] === first + step * (stop - start)) stop += 1;
    }
    const count = stop - start;
    const span = count * part.span;
    out.push(count === 1 ? items[start]
      : [same(`run ${part.id} ${count} ${step}`, { part, count, step, span }), first]);
    start = stop;
    row += span;
  }
  return out;
}

function blocks(items, same) {
  for (let period = 2; period <= Math.min(64, Math.floor(items.length / 2)); period += 1) {
    const whole = items.length - (items.length % period);
    const relative = (at, i) => items[at + i][1] - items[at][1];
    let fits = true;
    for (let at = period; fits && at < whole; at += period) {
      for (let i = 0; fits && i < period; i += 1) {
        fits = items[at + i][0] === items[i][0] && relative(at, i) === relative(0, i);
      }
    }
    if (!fits) continue;
    const parts = items.slice(0, period).map(([part], i) => [part, relative(0, i)]);
    const span = parts.reduce((sum, [part]) => sum + part.span, 0);
    const block = same(`block ${parts.map(([part, add]) => [part.id, add])}`, { parts, span });
    const out = [];
    for (let at = 0; at < whole; at += period) out.push([block, items[at][1]]);
    return out.concat(items.slice(whole));
  }
  return items;
}

function nLines(part) {
  if (part.rel) return 1;
  if (part.part) return nLines(part.part) * (part.step ? part.count : 1);
  return part.parts.reduce((sum, [inner]) => sum + nLines(inner), 0);
}

/** The first number of a part, to which what is added to the part is added. */
function leastOf(part) {
  while (!part.rel) part = part.part || part.parts[0][0];
  return part.rel[0];
}

function hasGroup(part, add, group) {
  if (group === null) return false;
  if (part.rel) return part.rel.includes(group - add);
  if (part.part) {
    for (let k = 0; k < (part.step ? part.count : 1); k += 1) {
      if (hasGroup(part.part, add + k * part.step, group)) return true;
    }
    return false;
  }
  return part.parts.some(([inner, more]) => hasGroup(inner, add + more, group));
}

const covers = (part, start, index) => index !== null && start <= index && index < start + part.span;
const inOrder = (numbers) => [...new Set(numbers)].sort((a, b) => a - b);
const range = (n) => Array.from({ length: n }, (_, i) => i);

/** The lines of one axis: {label, cells, times}, and {gap} for what is left out. */
function linesOf(groups, rankMap, nodeSize, rank) {
  const pieces = piecesOf(rankMap, nodeSize);
  const groupOf = (one) => numberOf(groups.offsets, rankMap.positionOf(one));
  const rows = pieces.map((piece) => piece.map(groupOf));
  const position = rankMap.positionOf(rank);
  const mine = position === null ? null : numberOf(groups.offsets, position);
  const myPiece = position === null ? null : pieces.findIndex((piece) => piece.includes(rank));
  const out = [];

  const label = (index, times) => {
    let span = 1;
    const follows = [...times].sort((a, b) => a[1] - b[1]).every(([count, step]) => {
      const next = step === span;
      span *= count;
      return next;
    });
    const first = pieces[index];
    const last = pieces[follows ? index + span - 1 : index];
    if (!nodeSize) return `ranks ${first[0]}-${last[last.length - 1]}`;
    const [node, lastNode] = [first[0], last[0]].map((one) => Math.floor(one / nodeSize));
    if (nodeSize > MOST_RANKS_IN_LINE) return `node ${node}: ${first[0]}-${last[last.length - 1]}`;
    return node === lastNode ? `node ${node}` : `nodes ${node}-${lastNode}`;
  };
  const nTimes = (times) => times.reduce((n, [count]) => n * count, 1);
  const line = (index, times, me) => {
    const here = me === index ? pieces[myPiece].indexOf(rank) : -1;
    out.push({
      label: label(index, times),
      times: nTimes(times),
      cells: pieces[index].map((one, i) => ({
        rank: one, group: rows[index][i], mine: rows[index][i] === mine, me: i === here,
      })),
    });
  };
  const gap = (start, stop, times, alike) => {
    const n = stop - start;
    const what = nodeSize && nodeSize <= MOST_RANKS_IN_LINE ? "node" : "line";
    let [lowest, highest] = [Infinity, -Infinity];
    for (let i = start; i < stop; i += 1) {
      for (const group of rows[i]) {
        lowest = Math.min(lowest, group);
        highest = Math.max(highest, group);
      }
    }
    const repeated = nTimes(times) > 1 ? ` (x${inWords(nTimes(times))})` : "";
    out.push({
      gap: `${inWords(n)} more ${what}${n === 1 ? "" : "s"}${alike ? " like these" : ""}, `
        + `groups ${lowest} to ${highest}${repeated}`,
    });
  };
  const drawShown = (shown, startOf, draw, times, alike) => {
    let last = -1;
    for (const k of shown) {
      if (k > last + 1) gap(startOf(last + 1), startOf(k), times, alike);
      draw(k);
      last = k;
    }
  };
  /** Which parts have me, and the first few that have ranks of my group. */
  const mineOf = (parts, me) => {
    const found = [];
    const near = [];
    parts.forEach(([part, start], i) => {
      if (covers(part, start, me)) found.push(i);
      if (near.length < N_DRAWN_PARTS && hasGroup(part, rows[start][0] - leastOf(part), mine)) near.push(i);
    });
    return found.concat(near);
  };
  const drawParts = (parts, start, times, me) => {
    const starts = [];
    for (const [part] of parts) {
      starts.push(start);
      start += part.span;
    }
    let shown = range(parts.length);
    if (parts.length > N_DRAWN_WHOLE) {
      const near = mineOf(parts.map(([part], i) => [part, starts[i]]), me);
      shown = inOrder([...range(N_DRAWN_WHOLE / 2), ...near, parts.length - 1]);
    }
    drawShown(shown, (k) => starts[k], (k) => drawPart(parts[k][0], starts[k], times, me), times,
      false);
  };
  const drawRun = (run, start, times, me) => {
    const inner = run.part.span;
    if (run.step === 0) {
      const there = covers(run, start, me) ? start + ((me - start) % inner) : me;
      drawPart(run.part, start, [...times, [run.count, inner]], there);
      return;
    }
    let shown = range(run.count);
    if (run.count * nLines(run.part) > N_DRAWN_PARTS) {
      const near = mineOf(shown.map((k) => [run.part, start + k * inner]), me);
      shown = inOrder([0, ...near, run.count - 1]);
    }
    drawShown(shown, (k) => start + k * inner,
      (k) => drawPart(run.part, start + k * inner, times, me), times, true);
  };
  const drawPart = (part, start, times, me) => {
    if (part.rel) line(start, times, me);
    else if (part.part) drawRun(part, start, times, me);
    else drawParts(part.parts, start, times, me);
  };

  if (rows.length <= N_DRAWN_WHOLE) range(rows.length).forEach((index) => line(index, [], myPiece));
  else drawParts(fold(rows, seamsOf(groups, rankMap, pieces)), 0, [], myPiece);
  if (out.length > MOST_LINES) {
    out.length = 0;
    drawParts(rows.map((rel) => [{ rel, span: 1 }, 0]), 0, [], myPiece);
  }
  return out;
}

/** Numbers of lines after which a digit of the layouts changes. */
function seamsOf(groups, rankMap, pieces) {
  if (rankMap.ranks) return [];
  const inLine = pieces[0].length;
  return inOrder([...groups.axis.strides, ...groups.offsets.strides])
    .filter((stride) => stride && stride % inLine === 0).map((stride) => stride / inLine);
}

const inWords = (number) => number.toLocaleString("en-US");
