// Quality against size: KL or a score over bits or GiB, a labelled point per cell.
import * as Plot from "@observablehq/plot";
import { useMemo } from "preact/hooks";
import type { Cell, Line, Overview } from "./data";
import { Figure, plot } from "./parts";
import { change, link, type State } from "./state";
import { kl, logTicks, measure, number, score } from "./units";

interface Point { cell: string; checkpoint: string; method: string; precision: string; size: number; value: number; low: number; high: number; best: boolean; text: string; href: string }

export function Quality({ overview, state }: { overview: Overview; state: State }) {
  const { lines, cells } = overview;
  const diverges = cells.some((cell) => cell.kl && Object.keys(cell.kl).length);
  const line = lines.find((item) => `${item.task} ${item.metric}` === state.metric) ?? (diverges ? undefined : lines[0]);
  const sized = cells.some((cell) => cell.gib); // not in older records
  const gib = sized && state.size === "gib";
  const [points, floor] = useMemo(() => {
    const all = cells.flatMap((cell): Point[] => {
      const size = gib ? cell.gib : cell.bits;
      const quality = line ? scoreOf(lines, line, cell) : klOf(cell, state.task);
      if (!size || !quality || !(quality.value > 0 || line) || (!line && !cell.quantized)) return [];
      const text = (value: number) => (line ? score(value / (line.percent ? 100 : 1), line) : number(value, 3));
      const interval = quality.low < quality.high ? ` [${text(quality.low)}, ${text(quality.high)}]` : "";
      return [{
        cell: cell.cell, checkpoint: cell.checkpoint, method: cell.title, precision: cell.quantizer, size, ...quality, best: false,
        text: `${cell.cell}: ${line ? measure(line) : "KL"} ${text(quality.value)}${interval}${line ? "" : " nats per token"} at ${number(size)} ${gib ? "GiB" : "bits per weight"}`,
        href: link({ view: "cell", folder: overview.folder, cells: [cell.cell] }),
      }];
    });
    const noise = cells.filter((cell) => cell.floor);
    const shown = all.filter((point) => line || !noise.some((cell) => cell.cell === point.cell));
    const beats = (a: Point, b: Point) => a.size <= b.size && (line?.higher_is_better ? a.value >= b.value : a.value <= b.value);
    for (const point of shown) point.best = !shown.some((other) => other.checkpoint === point.checkpoint && other !== point && beats(other, point));
    const levels = line ? [] : noise.flatMap((cell) => kl(cell, state.task)?.mean ?? []);
    return [shown, levels.length ? Math.max(...levels) : null] as const;
  }, [overview, line, state.task, gib]);
  const draw = useMemo(() => (width: number) => drawn(points, { width, floor, checkpoints: overview.checkpoints, logarithmic: !line,
    size: gib ? "GiB of all weights" : "bits per weight, scales and zeros counted", quality: line ? measure(line) : "KL, nats per token" }), [points, floor]);
  if (!cells.some((cell) => cell.bits)) return null;
  const scored = lines.filter((item, at) => lines.findIndex((other) => other.task === item.task && other.metric === item.metric) === at);
  const bars = points.some((point) => point.low < point.high);
  return (
    <>
      <p class="choice">
        <label>Quality{" "}
          <select value={line ? `${line.task} ${line.metric}` : `kl ${state.task}`} onChange={(event) => { const value = event.currentTarget.value; change(value.startsWith("kl ") ? { task: value.slice(3), metric: "" } : { task: "", metric: value }); }}>
            {diverges && <option value="kl ">KL on all tasks</option>}
            {overview.tasks.filter((task) => cells.some((cell) => kl(cell, task.name))).map((task) => <option value={`kl ${task.name}`}>KL on {task.label}</option>)}
            {scored.map((item) => <option value={`${item.task} ${item.metric}`}>{measure(item)}</option>)}
          </select></label>{" "}
        {sized && <label>against <select value={gib ? "gib" : ""} onChange={(event) => change({ size: event.currentTarget.value })}><option value="">bits per weight</option><option value="gib">GiB</option></select></label>}
      </p>
      <Figure title={`${line ? measure(line) : "KL divergence"} against ${gib ? "GiB" : "bits per weight"}`} name="quality-size" method={line ? "intervals" : "kl-divergence"} draw={draw} rows={points.map(({ text, href, ...rest }) => rest)}
        note={`${line ? "" : "Lower is closer to the unquantized model. "}A line joins the precisions of a method${bars ? "; bars are 95 % intervals" : ""}. Filled: no other precision of the same model is as small and as good. A click shows the cell.`} />
    </>
  );
}

function klOf(cell: Cell, task: string) {
  const of = kl(cell, task);
  return of && { value: of.mean, low: of.low ?? of.mean, high: of.high ?? of.mean };
}

function scoreOf(lines: Line[], line: Line, cell: Cell) {
  const of = lines.find((item) => item.task === line.task && item.metric === line.metric && item.quantizer === cell.quantizer)?.scores[cell.checkpoint];
  if (typeof of?.value !== "number") return null;
  const factor = line.percent ? 100 : 1;
  return { value: factor * of.value, low: factor * (of.low ?? of.value), high: factor * (of.high ?? of.value) };
}

interface Look { width: number; floor: number | null; checkpoints: string[]; logarithmic: boolean; size: string; quality: string }

function drawn(points: Point[], look: Look): Element {
  if (new Set(points.map((point) => point.size)).size === 1) return byPrecision(points, look);
  for (const height of [420, 540, 680, 860, 1100]) {
    const [figure, placed] = bySize(points, look, height);
    if (placed || height === 1100) return figure;
  }
  throw new Error("unreachable");
}

const COLOURS = { legend: true, scheme: "observable10" } as const;
const SYMBOLS = { legend: true, range: ["circle", "square", "triangle", "diamond", "star", "wye", "cross"] } as Plot.ScaleOptions;
const POINT = { stroke: "checkpoint", symbol: "method", r: 5, strokeWidth: 2, href: "href", ariaLabel: "text", title: "text", tip: { href: undefined, fill: "var(--paper)" } as any } as const;

/** Return an axis from a little below the least value or end of a bar to a little above the largest. */
function axis(points: Point[], { floor, logarithmic }: Look): Plot.ScaleOptions {
  const values = [...points.flatMap(({ value, low, high }) => [value, low, high]), ...(floor ? [floor] : [])].filter((value) => value > 0 || !logarithmic);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = (high - low || Math.abs(high) || 1) / 16;
  return logarithmic
    ? { type: "log", domain: [low / 1.5, high * 1.5], ticks: logTicks(low / 1.5, high * 1.5), tickFormat: (value: number) => number(value, 2) }
    : { domain: [low - room, high + room] };
}

/** Points over sizes, and whether all their labels found room. */
function bySize(points: Point[], look: Look, height: number): [Element, boolean] {
  let placed = true;
  const labels: Plot.Markish = ((_index: any, { x, y }: any, _values: any, frame: any) => {
    const at = points.map((point) => ({ point, x: x(point.size) as number, y: y(point.value) as number }));
    const taken: Box[] = at.flatMap(({ point, x, y: middle }) => [
      [x - 7, middle - 7, 14, 14] as Box, [x - 2, y(point.high), 4, y(point.low) - y(point.high)] as Box,
    ]);
    const alike = at.filter((spot, index) => !at.slice(0, index).some((other) => // two models' points of one precision share a label
      other.point.precision === spot.point.precision && Math.hypot(other.x - spot.x, other.y - spot.y) < 20));
    const group = document.createElementNS("http://www.w3.org/2000/svg", "g");
    for (const spot of alike) {
      const room: Box = [frame.marginLeft, frame.marginTop, frame.width - frame.marginLeft - 4, frame.height - frame.marginTop - frame.marginBottom];
      const place = roomFor(spot.point.precision, spot.x, spot.y, taken, room);
      if (!place) { placed = false; continue; }
      const [left, top, width] = place;
      const near = [Math.max(left, Math.min(left + width, spot.x)), Math.max(top, Math.min(top + 14, spot.y))];
      if (Math.hypot(near[0] - spot.x, near[1] - spot.y) > 14) group.append(svgElement("line", { x1: spot.x, y1: spot.y, x2: near[0], y2: near[1], stroke: "currentColor", "stroke-opacity": 0.35 }));
      group.append(svgElement("text", { x: left + width / 2, y: top + 11, "text-anchor": "middle", fill: "currentColor", stroke: "var(--paper)", "stroke-width": 4, "paint-order": "stroke", class: "label" }, spot.point.precision));
    }
    return group;
  }) as any;
  const figure = plot({
    width: look.width, height, marginLeft: 56, marginBottom: 48, marginTop: 28, marginRight: 20,
    x: { label: `${look.size} →`, labelOffset: 40, nice: true, grid: true }, y: { ...axis(points, look), label: `↑ ${look.quality}`, grid: true },
    color: { ...COLOURS, domain: look.checkpoints }, symbol: SYMBOLS,
    marks: [
      ...(look.floor ? [Plot.ruleY([look.floor], { stroke: "currentColor", strokeDasharray: "2,4" }), Plot.text([look.floor], { y: (value) => value, text: () => "noise floor", frameAnchor: "right", dy: -6 })] : []),
      Plot.line(points, { x: "size", y: "value", stroke: "checkpoint", z: (point: Point) => `${point.checkpoint} ${point.method}`, sort: "size", strokeOpacity: 0.3 }),
      Plot.ruleX(points, { x: "size", y1: "low", y2: "high", stroke: "checkpoint", strokeWidth: 2 }),
      labels,
      ...[false, true].map((best) => Plot.dot(points.filter((point) => point.best === best), { ...POINT, x: "size", y: "value", fill: best ? "checkpoint" : "var(--paper)" })),
    ],
  });
  return [figure, placed];
}

/** A row per precision, for cells of one size: their activations or caches alone are quantized. */
function byPrecision(points: Point[], look: Look): Element {
  const order = [...new Set([...points].sort((a, b) => a.value - b.value).map((point) => point.precision))];
  return plot({
    width: look.width, height: 90 + 22 * order.length, marginLeft: 16 + 6.6 * Math.max(...order.map((name) => name.length)), marginTop: 16, marginBottom: 48, marginRight: 20,
    x: { ...axis(points, look), label: `${look.quality} →`, labelOffset: 40, grid: true }, y: { type: "point", domain: order, label: null, grid: true },
    color: { ...COLOURS, domain: look.checkpoints }, symbol: SYMBOLS,
    marks: [
      ...(look.floor ? [Plot.ruleX([look.floor], { stroke: "currentColor", strokeDasharray: "2,4" })] : []),
      Plot.ruleY(points, { y: "precision", x1: "low", x2: "high", stroke: "checkpoint", strokeWidth: 2 }),
      ...[false, true].map((best) => Plot.dot(points.filter((point) => point.best === best), { ...POINT, x: "value", y: "precision", fill: best ? "checkpoint" : "var(--paper)" })),
    ],
  });
}

type Box = [left: number, top: number, width: number, height: number];
const apart = (a: Box, b: Box) => a[0] + a[2] <= b[0] || b[0] + b[2] <= a[0] || a[1] + a[3] <= b[1] || b[1] + b[3] <= a[1];

/** Return the box nearest to (x, y) for a label that covers nothing in `taken`, and take it; null: there is none in `frame`. */
function roomFor(text: string, x: number, y: number, taken: Box[], frame: Box): Box | null {
  const width = 6.7 * text.length + 4;
  for (let distance = 9; distance < 180; distance *= 1.3)
    for (const turn of [-1, 1, -7, 7, -2, 2, -6, 6, -4, 4, 0, 8, -3, 3, -5, 5]) {
      const [dx, dy] = [Math.cos((turn * Math.PI) / 8), Math.sin((turn * Math.PI) / 8)];
      const box: Box = [x + dx * (distance + width / 2) - width / 2, y + dy * (distance + 7) - 7, width, 14];
      const inside = box[0] >= frame[0] && box[1] >= frame[1] && box[0] + width <= frame[0] + frame[2] && box[1] + 14 <= frame[1] + frame[3];
      if (!inside || !taken.every((other) => apart(box, other))) continue;
      taken.push(box);
      return box;
    }
  return null;
}

function svgElement(name: string, attributes: Record<string, string | number>, text = ""): SVGElement {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.textContent = text;
  return made;
}
