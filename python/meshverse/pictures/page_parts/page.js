// The page: what is chosen, and what it shows. All text goes in as text, never as HTML.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const rankMap = new RankMap(data.world, data.ranks);
const ALL = { title: "all groups", axes: data.groups.map((groups, i) => [groups.names.join(", "), i]) };
const numbered = data.views.map((view, i) => ({ ...view, title: `${i + 1}: ${view.title}` }));
const views = [...numbered, ALL];
const splits = (view) => view.axes.filter(([, index]) => data.groups[index].size > 1).length > 1;
const chosen = { view: Math.max(0, views.findIndex(splits)), axis: 0, rank: data.rank };
const MOST_LISTED = 4096;

const $ = (id) => document.getElementById(id);

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

function inBytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  for (; count >= 1024 && i < units.length - 1; i += 1) count /= 1024;
  const digits = count >= 100 || Number.isInteger(count) ? 0 : 1;
  return `${count.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${units[i]}`;
}

const plural = (n, what) => `${inWords(n)} ${what}${n === 1 ? "" : "s"}`;
const colourOf = (group) => (group + 3 * Math.floor(group / data.nColours)) % data.nColours;
const axesNow = () => views[chosen.view].axes;
const groupsNow = () => data.groups[axesNow()[chosen.axis][1]];
const myPosition = () => rankMap.positionOf(chosen.rank);

function nodesOf(groups, position) {
  if (!data.nodeSize || groups.size > 1e5) return null;
  const ranks = ranksOf(groups, rankMap, position);
  return new Set(ranks.map((rank) => Math.floor(rank / data.nodeSize))).size;
}

// --- what is chosen ----------------------------------------------------------------------------

function choose(change) {
  Object.assign(chosen, change);
  if (chosen.axis >= axesNow().length) chosen.axis = 0;
  show();
}

function showViews() {
  $("view").replaceChildren(...views.map((view, i) => element("option", { value: i }, view.title)));
  $("view").addEventListener("change", (event) => {
    const name = axesNow()[chosen.axis][0];
    const view = Number(event.target.value);
    const kept = views[view].axes.findIndex(([other]) => other === name);
    choose({ view, axis: Math.max(0, kept) });
  });
}

function showAxes() {
  const radios = axesNow().map(([name, index], i) => {
    const input = element("input", { type: "radio", name: "axis", value: i, id: `axis-${i}` });
    input.checked = i === chosen.axis;
    input.addEventListener("change", () => choose({ axis: i }));
    const size = element("small", {}, ` ${inWords(data.groups[index].size)}`);
    return element("span", { class: "choice" }, input, element("label", { for: `axis-${i}` }, name, size));
  });
  const focused = document.activeElement && document.activeElement.name === "axis";
  $("axes").replaceChildren(...radios);
  if (focused) $(`axis-${chosen.axis}`).focus();
}

function listenToRank() {
  const input = $("rank");
  input.min = rankMap.lowest();
  input.max = rankMap.highest();
  input.form.addEventListener("submit", (event) => event.preventDefault()); // by Enter
  input.addEventListener("input", () => {
    const rank = input.value === "" ? null : Number(input.value);
    const known = rank !== null && rankMap.positionOf(rank) !== null;
    input.setAttribute("aria-invalid", String(!known));
    if (known) choose({ rank });
    else say(`There is no such rank: the ranks are ${rankMap.lowest()} to ${rankMap.highest()}${rankMap.ranks ? ", not all of them" : ""}.`);
  });
}

// --- what it shows -----------------------------------------------------------------------------

const say = (text) => { $("status").textContent = text; };

function describe() {
  const [name] = axesNow()[chosen.axis];
  const groups = groupsNow();
  const position = myPosition();
  if (position === null) return `Rank ${chosen.rank} is in none of these groups: pick another one.`;
  const place = views[chosen.view] === ALL ? "" : axesNow()
    .filter(([, index]) => data.groups[index].size > 1)
    .map(([axis, index]) => `${axis}=${numberOf(data.groups[index].axis, position)}`).join(", ");
  const node = data.nodeSize ? ` on node ${Math.floor(chosen.rank / data.nodeSize)}` : "";
  const first = ranksOf(groups, rankMap, position, 8);
  const rest = groups.size > first.length ? `, and ${inWords(groups.size - first.length)} more` : "";
  const where = [node, place && ` at ${place}`].filter(Boolean).join(",");
  return `Rank ${chosen.rank}${where && ` is${where}`}. Its ${name} group is number `
    + `${numberOf(groups.offsets, position)} of ${plural(groups.count, "group")} of `
    + `${groups.size}: ${first.join(", ")}${rest}.`;
}

function showPicture() {
  const [name] = axesNow()[chosen.axis];
  const groups = groupsNow();
  $("caption").textContent = `${name}: ${plural(groups.count, "group")} of ${inWords(groups.size)}`;
  const lines = linesOf(groups, rankMap, data.nodeSize, chosen.rank);
  const columns = Math.max(...lines.map((line) => (line.cells ? line.cells.length : 0)));
  const inRow = Math.min(columns, 16);
  const rows = lines.flatMap((line) => rowsOf(line, inRow));
  $("cells").replaceChildren(...rows);
  const start = $("cells").querySelector('[data-me="true"]') || $("cells").querySelector("[data-rank]");
  if (start) start.tabIndex = 0;
}

function rowsOf(line, inRow) {
  if (line.gap) {
    const text = element("td", { colspan: inRow + 2, role: "gridcell", class: "gap" }, `... ${line.gap}`);
    return [element("tr", { role: "row" }, text)];
  }
  const rows = [];
  for (let start = 0; start < line.cells.length; start += inRow) {
    const cells = line.cells.slice(start, start + inRow).map((cell) => cellOf(cell, line));
    const head = start === 0 ? line.label : "";
    const times = line.times > 1 && start + inRow >= line.cells.length ? `x${inWords(line.times)}` : "";
    const padding = inRow - cells.length;
    rows.push(element("tr", { role: "row" },
      element("th", { scope: "row", role: "rowheader" }, head), ...cells,
      ...(padding ? [element("td", { colspan: padding, role: "gridcell" })] : []),
      element("td", { class: "times", role: "gridcell" }, times)));
  }
  return rows;
}

function cellOf(cell, line) {
  const words = [`rank ${cell.rank}, group ${cell.group}`];
  if (cell.mine) words.push(`the group of rank ${chosen.rank}`);
  if (line.times > 1) words.push(`the same on ${line.times} ${data.nodeSize ? "nodes" : "lines"}`);
  return element("td", {
    role: "gridcell",
    tabindex: "-1",
    class: `cell c${colourOf(cell.group)}${cell.mine ? " mine" : ""}${cell.me ? " me" : ""}`,
    "data-rank": cell.rank,
    "data-me": String(cell.me),
    "aria-selected": String(cell.me),
    "aria-label": words.join(", "),
    title: words.join(", "),
  }, String(cell.group));
}

function listenToPicture() {
  const cells = $("cells");
  const pick = (cell) => {
    if (!cell) return;
    const rank = Number(cell.dataset.rank);
    choose({ rank });
    const again = cells.querySelector(`[data-rank="${rank}"]`) || cells.querySelector('[tabindex="0"]');
    if (again) focusOn(again);
  };
  cells.addEventListener("click", (event) => pick(event.target.closest("[data-rank]")));
  cells.addEventListener("keydown", (event) => {
    const cell = event.target.closest("[data-rank]");
    if (!cell) return;
    if (event.key === "Enter" || event.key === " ") pick(cell);
    else if (!move(cell, event)) return;
    event.preventDefault();
  });
}

function focusOn(cell) {
  for (const other of $("cells").querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  cell.tabIndex = 0;
  cell.focus();
}

function move(cell, event) {
  const rows = [...$("cells").rows].map((row) => [...row.querySelectorAll("[data-rank]")])
    .filter((row) => row.length);
  const y = rows.findIndex((row) => row.includes(cell));
  const x = rows[y].indexOf(cell);
  const last = rows[y].length - 1;
  const to = {
    ArrowLeft: [y, x - 1], ArrowRight: [y, x + 1], ArrowUp: [y - 1, x], ArrowDown: [y + 1, x],
    Home: [event.ctrlKey ? 0 : y, 0], End: event.ctrlKey ? [rows.length - 1, Infinity] : [y, last],
  }[event.key];
  if (!to) return false;
  const row = rows[to[0]];
  const target = row && row[Math.min(to[1], row.length - 1)];
  if (target) focusOn(target);
  return true;
}

function usersOf(index) {
  return data.views.flatMap((view, i) => view.axes.filter(([, other]) => other === index)
    .map(([name]) => ({ name, view: i + 1 })));
}

function showGroups() {
  $("groups-title").textContent = `The groups of rank ${chosen.rank}`;
  const position = myPosition();
  $("groups").replaceChildren(...data.groups.map((groups, index) => {
    const shown = index === axesNow()[chosen.axis][1];
    const button = element("button", { type: "button", "aria-pressed": String(shown) }, groups.names.join(", "));
    button.addEventListener("click", () => {
      const at = axesNow().findIndex(([, other]) => other === index);
      if (at >= 0) choose({ axis: at });
      else choose({ view: views.length - 1, axis: index });
      $("groups").rows[index].querySelector("button").focus();
    });
    const nodes = position === null ? null : nodesOf(groups, position);
    return element("tr", shown ? { class: "shown" } : {},
      element("th", { scope: "row" }, button),
      element("td", { class: "number" }, inWords(groups.size)),
      element("td", { class: "number" }, inWords(groups.count)),
      element("td", { class: "number" }, position === null ? "–" : String(numberOf(groups.offsets, position))),
      element("td", {}, position === null ? "none" : rankList(groups, position)),
      ...(data.nodeSize ? [element("td", { class: "number" }, nodes === null ? "–" : inWords(nodes))] : []),
      element("td", {}, sharing(index)),
      element("td", { class: "number held" }, holds(groups.made, groups.bytes)),
      element("td", { class: "number held" }, holds(groups.stock, groups.bytes)),
      element("td", {}, facts(groups)));
  }));
}

function rankList(groups, position) {
  const ranks = ranksOf(groups, rankMap, position, MOST_LISTED);
  if (ranks.length <= 8) return ranks.join(", ");
  const more = groups.size > ranks.length ? `, and ${inWords(groups.size - ranks.length)} more` : "";
  const last = more ? " …" : `, … ${ranks[ranks.length - 1]}`;
  const label = `Ranks of the ${groups.names.join(", ")} group`;
  return element("details", { "aria-label": label }, element("summary", {}, ranks.slice(0, 4).join(", ") + last),
    ranks.join(", ") + more);
}

function sharing(index) {
  const users = usersOf(index);
  if (users.length < 2) return "–";
  return element("ul", {}, ...users.map(({ name, view }) =>
    element("li", {}, element("b", {}, name), ` of view ${view}`)));
}

function holds(count, bytes) {
  if (count === null) return "unknown";
  if (count === 0) return "0";
  return bytes ? `${count} (${inBytes(count * bytes)})` : String(count);
}

function facts(groups) {
  return element("ul", {}, ...Object.entries(groups.facts).map(([title, text]) =>
    element("li", {}, element("small", {}, `${title}: `), text)));
}

function showTotals() {
  const sum = (what) => data.groups.reduce((all, groups) => all + groups[what], 0);
  const bytes = (what) => data.groups.reduce((all, groups) => all + groups[what] * groups.bytes, 0);
  if (data.groups.some((groups) => groups.made === null || groups.stock === null)) {
    for (const cell of document.querySelectorAll(".held")) cell.hidden = true;
    return;
  }
  const memory = (what) => (data.groups.every((groups) => groups.bytes !== null) && bytes("stock") > 0
    ? ` (about ${inBytes(bytes(what))} of device memory)` : "");
  $("totals").textContent = `Besides the default group, each rank holds ${plural(sum("made"), "communicator")}${memory("made")}. `
    + `Stock torch, which makes one for every request, would hold ${inWords(sum("stock"))}${memory("stock")}.`;
}

function show() {
  $("view").value = chosen.view;
  if (document.activeElement !== $("rank") || Number($("rank").value) !== chosen.rank) {
    $("rank").value = chosen.rank;
  }
  $("rank").setAttribute("aria-invalid", "false");
  showAxes();
  showPicture();
  showGroups();
  say(describe());
  showTotals();
}

$("node-column").hidden = !data.nodeSize;
$("notes").replaceChildren(...data.notes.map((note) => element("li", {}, note)));
$("notes-part").hidden = data.notes.length === 0;
showViews();
listenToRank();
listenToPicture();
show();
