// The page selects and draws what the core computed (crossframe/explorer/data.py describes the data).
// All text enters the page as text nodes and attributes, never as markup, so that names need no escaping.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const BAR = 26, GAP = 7, FONT = 12, CHARACTER = 7.3, SANS = 6.6, // the width of a character, of monospace and other text
  MOST_BARS = 24, LAST_BARS = 6, MOST_CELLS = 64, AREA = 150;

// What the reader selected, as strings. `event` is empty until the reader selects one: then the peak of memory is shown.
const state = {world: "", layout: "", strategy: "", dtype: "", unit: "0", element: "", event: "", ...data.start};
function readFragment() {
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) if (key in state) state[key] = value;
}

// --- elements and texts ---
function node(namespace, name, attributes, ...children) {
  const made = document.createElementNS(namespace, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const html = (...parts) => node("http://www.w3.org/1999/xhtml", ...parts);
const svg = (...parts) => node("http://www.w3.org/2000/svg", ...parts);
const text = (x, y, content, kind = "") => svg("text", {x, y, class: kind}, content);
// A class "hatch-..." is filled with that hatch.
const fillOf = (kind) => (kind.startsWith("hatch-") ? {fill: `url(#crossframe-${kind.slice(6)})`} : {});
const rect = (x, y, width, height, kind, about = "") =>
  svg("rect", {x, y, width: Math.max(0, width), height, class: kind, ...fillOf(kind)}, ...(about ? [svg("title", {}, about)] : []));
const path = (d, kind) => svg("path", {d, class: kind});
const count = (number) => number.toLocaleString("en-US");
const three = (value) => value.toLocaleString("en-US", {minimumFractionDigits: value < 9.995 ? 2 : value < 99.95 ? 1 : 0, maximumFractionDigits: value < 9.995 ? 2 : value < 99.95 ? 1 : 0});
function bytesText(bytes) {
  let unit = 0;
  for (; unit < 5 && bytes >= (unit ? 999.5 : 1024); unit++) bytes /= 1024;
  return unit ? `${three(bytes)} ${["KiB", "MiB", "GiB", "TiB", "PiB"][unit - 1]}` : `${count(bytes)} B`;
}
function secondsText(seconds) {
  const [unit, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]].find(([, each]) => seconds >= 0.9995 * each) ?? ["ns", 1e-9];
  return seconds ? `${three(seconds / size)} ${unit}` : "0 s";
}
function ranksText(first, number, step = 1) {
  const rank = (k) => count(first + k * step);
  if (number > 2 && step === 1) return `${rank(0)} … ${rank(number - 1)}`;
  if (number <= 3) return Array.from({length: number}, (_, k) => rank(k)).join(", ");
  return `${rank(0)}, ${rank(1)} … ${rank(number - 1)}`;
}
// Names differ at their ends.
function cut(content, width) {
  const most = Math.floor(width / SANS);
  return content.length <= most ? content : `…${content.slice(content.length - Math.max(1, most - 1))}`;
}

// --- selection ---
let chosen, units, step, plan, located;
const key = (strategy) => [state.world, strategy, state.layout, state.dtype].join(" ");
function select() {
  const names = data.dtypes.map((dtype) => dtype.name);
  for (const [id, values] of [["world", data.world_sizes.map(String)], ["layout", data.layouts], ["dtype", names]])
    if (!values.includes(state[id])) state[id] = id === "world" ? values.at(-1) : values[0];
  if (!(key(state.strategy) in data.combinations)) state.strategy = data.strategies[0];
  chosen = data.combinations[key(state.strategy)];
  units = data.shardings[chosen.sharding] ?? [];
  step = data.steps[chosen.step];
  plan = step && data.plans[step.plan];
}
const column = (index) => data.columns[index];
const memoryAt = (event) => Object.values(step.memory).reduce((sum, index) => sum + column(index)[event], 0);
function eventShown() {
  const events = plan.events.map((_, event) => event);
  if (/^\d+$/.test(state.event)) return Math.min(Number(state.event), events.length - 1);
  return events.reduce((best, event) => (memoryAt(event) > memoryAt(best) ? event : best), 0);
}
const fullName = (unit, name, row) => (name ? `${name}.${row.label}` : row.label);
// The ranks of the mesh that hold a shard.
const ranksOf = (shard) => ranksText(shard, chosen.mesh[0], chosen.mesh[1]);
const rankWord = (number) => (number > 1 ? "ranks" : "rank");
function groupText([first, number]) {
  if (number > 1) return `${chosen.mesh[0] > 1 ? "shards" : "ranks"} ${ranksText(first, number)}`;
  return `${rankWord(chosen.mesh[0])} ${ranksOf(first)}`;
}

// Where "parameter[index]" lies: {at, row, group, rank, offset, says}, or {says} if there is no such element.
function locate(asked) {
  if (!asked) return null;
  const [, name, inside = ""] = /^([^]+?)(?:\[([^\[\]]*)\])?$/.exec(asked);
  for (const [at, unit] of units.entries()) {
    for (const owner of unit.names) {
      const row = unit.rows.find((each) => !each.padding && fullName(unit, owner, each) === name);
      if (!row) continue;
      const parts = inside.split(",").filter((part) => part.trim());
      const sizes = parts.length === 1 ? [row.numel] : row.shape;
      const valid = parts.length === sizes.length && parts.every((part, i) => /^\s*\d+\s*$/.test(part) && Number(part) < sizes[i]);
      if (!valid) return {says: `${asked}: expected an index for each dim of shape (${row.shape.join(", ")}), or one below ${count(row.numel)}`};
      const element = parts.reduce((sum, part, i) => sum * sizes[i] + Number(part), 0);
      for (const [group, start, stop, from] of row.held) {
        const [first, number] = unit.groups[group], each = stop - start;
        if (element < from || element >= from + number * each) continue;
        const rank = first + Math.floor((element - from) / each), offset = start + ((element - from) % each);
        const replicas = chosen.mesh[0];
        const says = `${asked}: element ${count(element)} of ${count(row.numel)}, in unit '${owner}', on ${rankWord(replicas)} ` +
          `${ranksOf(rank)} at offset ${count(offset)} of ${replicas > 1 ? "their shards" : "its shard"}`;
        return {at, row, group, rank, offset, owner, says};
      }
    }
  }
  return {says: `no parameter is named '${name}': expected parameter[index]`};
}
// Each row of a unit and what the groups of ranks hold of it, as the table of `crossframe layout` lists it.
function table(unit) {
  const line = (tag, cells) => html("tr", {}, ...cells.map((cell) => html(tag, {}, cell)));
  const lines = unit.rows.flatMap((row) => (row.held.length ? row.held : [[null, 0, 0, 0, "·"]]).map(([group, start, stop, , words], at) => line("td", [
    at ? "" : row.padding ? `${row.padding} padding` : row.label, at || row.padding ? "" : `(${row.shape.join(", ")})`,
    group === null ? "none" : groupText(unit.groups[group]), words, group === null ? "" : `${count(start)}:${count(stop)}`])));
  return [line("th", ["parameter", "shape", "ranks", "hold", "in the shard"]), ...lines];
}
// The element at an offset of the shard of a group's first rank.
function elementAt(unit, group, offset) {
  for (const row of unit.rows) {
    for (const [at, start, stop, from, words] of row.held) {
      if (at !== group || offset < start || offset >= stop) continue;
      const rank = `${rankWord(chosen.mesh[0])} ${ranksOf(unit.groups[group][0])}, offset ${count(offset)}`;
      if (row.padding) return {says: `${rank}: ${row.padding} padding (${words})`};
      let rest = from + offset - start;
      const index = row.shape.map((_, dim) => {
        const size = row.shape.slice(dim + 1).reduce((product, each) => product * each, 1), digit = Math.floor(rest / size);
        rest -= digit * size;
        return digit;
      });
      const name = `${fullName(unit, located?.at === Number(state.unit) ? located.owner : unit.names[0], row)}[${index}]`;
      return {name, says: `${rank}: ${name}`};
    }
  }
  return {says: ""};
}

// --- drawings ---
function drawBars() {
  const unit = units[state.unit], width = byId("bars").clientWidth, mark = located?.at === Number(state.unit) ? located : null;
  const left = Math.min(width / 3, 12 + SANS * Math.max(...unit.groups.map((group) => groupText(group).length)));
  const scale = (width - left - 1) / Math.max(1, unit.shard_numel), drawn = [], tops = new Map();
  let y = 2;
  unit.groups.forEach((group, at) => {
    if (at >= MOST_BARS - LAST_BARS && at < unit.groups.length - LAST_BARS && mark?.group !== at) {
      if (!tops.get(at - 1)) return;
      drawn.push(text(left, y + FONT, "the next ranks are not drawn", "soft"));
      y += FONT + GAP + 4;
      return;
    }
    tops.set(at, y);
    drawn.push(text(left - 8, y + 17, cut(groupText(group), left - 8), "end soft"));
    for (const row of unit.rows) for (const [, start, stop, , words] of row.held.filter((held) => held[0] === at)) {
      const name = row.padding ? `${row.padding} padding` : row.label, room = (stop - start) * scale;
      drawn.push(rect(left + start * scale, y, room, BAR, row.padding ? `hatch-${row.padding}` : row.fill, `${name} ${words}`));
      const label = [name, name.split(".").slice(-2).join("."), name.split(".").at(-1)].find((each) => each.length * CHARACTER + 6 < room);
      if (label && !row.padding) drawn.push(text(left + ((start + stop) / 2) * scale, y + 17, label, "name middle"));
    }
    if (unit.shard_numel > 1 && unit.shard_numel <= MOST_CELLS)
      drawn.push(path(Array.from({length: unit.shard_numel - 1}, (_, i) => `M${left + (i + 1) * scale} ${y}v${BAR}`).join(""), "cells"));
    drawn.push(rect(left, y, unit.shard_numel * scale, BAR, "frame"));
    if (mark?.group === at) {
      const wide = Math.max(5, scale);
      drawn.push(rect(Math.min(left + (mark.offset + 0.5) * scale - wide / 2, width - wide - 1), y, wide, BAR, "outline"));
    }
    y += BAR + GAP;
  });
  drawn.push(text(left, y + FONT, "0", "soft"), text(width - 2, y + FONT, `${count(unit.shard_numel)} elements`, "soft end"));
  const drawing = svg("svg", {class: "crossframe", width, height: y + 18, role: "img", "aria-label": `${unit.title}: ${unit.about}`}, ...drawn);
  const pointedAt = (event) => {
    const box = drawing.getBoundingClientRect(), offset = Math.floor((event.clientX - box.left - left) / scale);
    const bar = [...tops].find(([, top]) => event.clientY - box.top >= top && event.clientY - box.top < top + BAR);
    return bar ? elementAt(unit, bar[0], offset) : {says: ""};
  };
  drawing.addEventListener("pointermove", (event) => { byId("pointed").textContent = pointedAt(event).says || HINT; });
  drawing.addEventListener("click", (event) => { const {name} = pointedAt(event); if (name) change({element: name}); });
  byId("bars").replaceChildren(drawing);
}
const HINT = "Point at an element; click it, or type it above, to keep it.";

function drawStep() {
  const events = plan.events, shown = eventShown(), width = byId("timeline").clientWidth;
  const left = Math.min(width / 4, 12 + SANS * Math.max(9, ...plan.units.map((unit) => unit.length)));
  const wide = (width - left - 1) / events.length, x = (event) => left + event * wide, drawn = [];
  const high = Math.max(4, Math.min(20, 440 / plan.units.length)), labelled = Math.ceil(FONT / high), thin = wide < 4 ? " thin" : "";
  plan.units.forEach((unit, row) => {
    const y = row * high;
    const named = located?.at !== undefined && (located.owner || data.root) === unit;
    if (row % labelled === 0) drawn.push(text(left - 8, y + high / 2 + 4, cut(unit, left - 8), `end ${named ? "bold" : "soft"}`));
    drawn.push(rect(left, y, width - left, high - 1, "panel"));
    for (const [start, stop] of plan.full[row]) drawn.push(rect(x(start), y, x(stop) - x(start), high - 1, `${data.purposes["full parameters"][1]} thin`, `${unit}: full parameters`));
  });
  events.forEach(([kind, unit], event) => {
    if (kind in data.kinds) drawn.push(rect(x(event), unit * high, Math.max(1, wide), high - 1, data.kinds[kind][1] + thin, happens(event)));
  });
  const top = plan.units.length * high + 26, bottom = top + AREA;
  const peak = Math.max(1, ...events.map((_, event) => memoryAt(event))), y = (bytes) => bottom - (bytes / peak) * AREA;
  let below = events.map(() => 0);
  for (const [purpose, index] of Object.entries(step.memory)) {
    const above = column(index).map((bytes, event) => below[event] + bytes);
    const outline = (levels) => levels.flatMap((level, event) => [`${x(event)} ${y(level)}`, `${x(event + 1)} ${y(level)}`]);
    drawn.push(path(`M${[...outline(above), ...outline(below).reverse()].join("L")}Z`, data.purposes[purpose][1]));
    below = above;
  }
  drawn.push(path(`M${left} ${top}H${width}M${left} ${(top + bottom) / 2}H${width}`, "grid"), path(`M${left} ${bottom}H${width}`, "frame"));
  for (const [level, words] of [[peak, bytesText(peak)], [peak / 2, bytesText(peak / 2)], [0, "0"]]) drawn.push(text(left - 8, y(level) + 4, words, "end soft"));
  drawn.push(text(left, top - 8, "memory", "soft"), text(left, bottom + 17, "events in the order of issue", "soft"));
  drawn.push(rect(x(shown), 0, Math.max(2, wide), bottom, "cursor"));
  const drawing = svg("svg", {class: "crossframe", width, height: bottom + 24, role: "img", "aria-label": "Units with full parameters, and memory, after each event"}, ...drawn);
  drawing.addEventListener("click", ({clientX}) => {
    const event = Math.floor((clientX - drawing.getBoundingClientRect().left - left) / wide);
    if (event >= 0) change({event: String(Math.min(event, events.length - 1))});
  });
  byId("timeline").replaceChildren(drawing);
}
// An event as a sentence.
function happens(event) {
  const [kind, unit, phase, dtype] = plan.events[event], bytes = bytesText(column(step.bytes)[event]), name = plan.units[unit];
  const among = step.ranks[kind] ? ` among ranks ${step.ranks[kind]}` : "";
  const verb = {all_gather: "gathers", cast: "casts", free: "frees", reduce_scatter: "reduce-scatters the gradients of", all_reduce: "all-reduces the gradients of"}[kind];
  if (kind === "step") return "the optimizer steps";
  return verb ? `${phase}: ${verb} ${name}, ${bytes} of ${dtype}${among}` : `${phase} of ${name}`;
}

// --- the page ---
const swatch = (kind) => svg("svg", {class: "crossframe", width: 14, height: 14, "aria-hidden": "true"}, rect(1, 1, 12, 12, kind));
const entry = (kind, ...words) => html("li", {}, swatch(kind), html("span", {}, ...words));
function options(id, values, impossible = () => false) {
  const made = values.map(([value, words]) => html("option", {value, ...(impossible(value) ? {disabled: ""} : {})}, words));
  byId(id).replaceChildren(...made);
  byId(id).value = state[id];
}
function update() {
  select();
  located = locate(state.element.trim());
  if (located?.at !== undefined) state.unit = String(located.at);
  if (!(state.unit in units)) state.unit = "0";
  options("world", data.world_sizes.map((size) => [String(size), `${count(size)} rank${size > 1 ? "s" : ""}`]));
  for (const id of ["layout", "dtype", "strategy"]) {
    const values = {layout: data.layouts, dtype: data.dtypes.map(({name}) => name), strategy: data.strategies}[id];
    options(id, values.map((value) => [value, value]), (value) => id === "strategy" && !(key(value) in data.combinations));
  }
  byId("mesh").textContent = chosen.mesh_text;
  byId("refused").textContent = chosen.refused ?? "";
  byId("refused").hidden = !chosen.refused;
  byId("shown").hidden = Boolean(chosen.refused);
  if (!chosen.refused) show();
  history.replaceState(null, "", `#${new URLSearchParams(Object.entries(state).filter(([, value]) => value !== ""))}`);
}
function show() {
  const unit = units[state.unit], event = eventShown();
  options("unit", units.map(({title}, at) => [String(at), title]));
  byId("parameters").replaceChildren(...units.flatMap((each) => each.names.flatMap((name) =>
    each.rows.filter((row) => !row.padding).map((row) => html("option", {value: `${fullName(each, name, row)}[0]`})))));
  byId("where").textContent = located?.says ?? "Type parameter[index], for instance an entry of the list.";
  byId("about").textContent = unit.about;
  byId("pointed").textContent = HINT;
  const padded = new Set(unit.rows.filter((row) => row.padding).map((row) => row.padding));
  byId("legend").replaceChildren(
    ...unit.rows.filter((row) => !row.padding).map((row) => entry(row.fill, `${row.label} (${row.shape.join(", ")})`)),
    ...[...padded].map((kind) => entry(`hatch-${kind}`, `${kind} padding`)));
  byId("table").replaceChildren(...table(unit));
  byId("summary").replaceChildren(...step.summary.flatMap(([head, line]) => [...(head ? [html("dt", {}, head)] : []), html("dd", {}, line)]));
  Object.assign(byId("event"), {max: plan.events.length - 1, value: event});
  byId("event").setAttribute("aria-valuetext", happens(event));
  const full = plan.units.filter((_, row) => plan.full[row].some(([start, stop]) => start <= event && event < stop));
  byId("happens").textContent = `event ${event + 1} of ${plan.events.length}, at ${secondsText(column(step.seconds)[event])}: ${happens(event)}\n` +
    `full parameters after it: ${full.length > 8 ? `${full.length} units` : full.join(", ") || "none"}\nmemory after it: ${bytesText(memoryAt(event))}`;
  const kinds = new Set(plan.events.map(([kind]) => kind));
  byId("kinds").replaceChildren(...Object.entries(data.kinds).filter(([kind]) => kinds.has(kind)).map(([, [words, fill]]) => entry(fill, words)),
    entry(data.purposes["full parameters"][1], "holds full parameters"));
  byId("memory").replaceChildren(...Object.entries(step.memory).map(([purpose, index]) => entry(data.purposes[purpose][1], `${purpose} ${bytesText(column(index)[event])}`)));
  const dtype = data.dtypes.find(({name}) => name === state.dtype), [replicas, shard] = chosen.mesh;
  const common = `--world-size ${state.world} --layout ${state.layout} --dtype ${dtype.stored}`;
  byId("commands").textContent =
    `crossframe layout ${data.command} ${common}${dtype.compute && state.layout === "flat" ? ` --compute-dtype ${dtype.compute}` : ""}${replicas > 1 ? ` --replicate ${replicas}` : ""}\n` +
    `crossframe plan ${data.command} ${common} --strategy ${state.strategy}${state.strategy.startsWith("hybrid") ? ` --shard ${shard}` : ""}${dtype.compute ? ` --param-dtype ${dtype.compute}` : ""}`;
  drawBars();
  drawStep();
}
function change(values) {
  Object.assign(state, values);
  byId("element").value = state.element;
  update();
}
for (const id of ["world", "layout", "strategy", "dtype"]) byId(id).addEventListener("change", ({target}) => change({[id]: target.value}));
// Another unit hides an element that lies elsewhere.
byId("unit").addEventListener("change", ({target}) => change({unit: target.value, element: ""}));
byId("element").addEventListener("input", ({target}) => change({element: target.value}));
byId("event").addEventListener("input", ({target}) => change({event: target.value}));
addEventListener("hashchange", () => { readFragment(); change({}); });
addEventListener("resize", () => { if (!chosen.refused) drawBars(), drawStep(); });
readFragment();
change({});
