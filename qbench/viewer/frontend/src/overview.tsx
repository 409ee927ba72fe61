// The first screen: the answer with its certainty, then what it is made of.
import * as Plot from "@observablehq/plot";
import { useMemo } from "preact/hooks";
import type { Cell, Effect, Line, Overview, Pair } from "./data";
import type { Row } from "./download";
import { Failure, Figure, Grid, plot, type GridColumn } from "./parts";
import { change, link, type State } from "./state";
import { duration, effect, fixed, harm, interval, kl, number, p, ratio, ratioTicks, score, sure, unit, UNITS, type Unit } from "./units";

const named = (line: Line) => `${line.task} ${line.metric_title}`;
const members = (found: Overview, group: string) => found.groups[group] ?? [group];

/** The cells of a line and group that have documents to look at, with those of the other group. */
const links = (found: Overview, groups: string[], line: Line) =>
  link({
    view: "documents", folder: found.folder, task: line.task, metric: line.metric,
    cells: groups.map((group) => `${members(found, group)[0]}/${line.quantizer}`),
  });

interface Mark { line: Line; of: Effect; x: number; low: number; high: number; label: string; told: string; href: string }

export function OverviewPage({ found, state }: { found: Overview; state: State }) {
  const lines = found.by_group.length ? found.by_group : found.lines;
  const [base, ...others] = Object.keys(found.groups);
  const other = others.includes(state.other) ? state.other : others[0];
  return (
    <>
      <section class="answer">
        <p class="headline">{found.verdict[0]}</p>
        {found.verdict.slice(1).map((one) => <p class="verdict">{one}</p>)}
        <p class="note">{found.about.join(" · ")}</p>
        {!found.ready && <p role="status">Intervals and tests are being computed; they appear here by themselves.</p>}
        {found.summary.length > 0 && <details><summary>In more words</summary>{found.summary.map((one) => <p>{one}</p>)}</details>}
        {found.problems.length > 0 && (
          <details class="problems"><summary>{found.problems.length} {found.problems.length === 1 ? "thing is" : "things are"} missing or wrong</summary>
            <ul>{found.problems.map((one) => <li>{one}</li>)}</ul></details>
        )}
      </section>
      {others.length > 1 && (
        <label class="choice">Against {base}:{" "}
          <select value={other} onChange={(event) => change({ other: event.currentTarget.value })}>
            {others.map((name) => <option>{name}</option>)}
          </select>
        </label>
      )}
      <Forest found={found} lines={lines} base={base} other={other} all={state.all === "forest"} />
      <HeatMaps found={found} lines={lines} />
      <Quality found={found} lines={found.lines} state={state} />
      <Pairs found={found} />
      <Cells found={found} />
    </>
  );
}

function Forest({ found, lines, base, other, all }: { found: Overview; lines: Line[]; base: string; other?: string; all: boolean }) {
  const question = other ? "differences" : "damages";
  const group = other ?? base;
  const marks = useMemo(() => lines.filter((line) => line[question][group]).map((line): Mark => {
    const of = line[question][group];
    const ends = [harm(of.low, line, of.kind), harm(of.high, line, of.kind)].sort((a, b) => a - b);
    return {
      line, of, x: harm(of.estimate, line, of.kind), low: ends[0], high: ends[1],
      label: `${line.quantizer} · ${named(line)}`,
      told: `${line.quantizer}, ${named(line)}: ${effect(of.estimate, of.kind, line.percent)} ${interval(of, line.percent)}${of.mark}, ${of.documents} documents`,
      href: links(found, other ? [base, other] : [base], line),
    };
  }).sort((a, b) => b.x - a.x), [found, lines, question, group]);
  if (!marks.length) return null;
  const certain = marks.filter((mark) => sure(mark.of));
  const few = marks.length <= 36 || all;
  const shown = few ? marks : marks.filter((mark) => sure(mark.of));
  const words = other ? [`${other} is hurt less`, `${other} is hurt more`] : ["better", "worse"];
  const rest = marks.length - certain.length;
  return (
    <>
      <div class="columns">
        {(["points", "ratio", "units"] as Unit[]).map((kind) => {
          const own = shown.filter((mark) => unit(mark.line) === kind);
          return own.length > 0 && (
            <ForestFigure key={kind} marks={own} kind={kind} words={words}
              title={other ? `How much more ${other} is hurt than ${base}, ${UNITS[kind]}` : `Damage to ${base}, ${UNITS[kind]}`}
              method={other ? "difference-of-damages" : "damage"} />
          );
        })}
      </div>
      {marks.length > 36 && rest > 0 && (
        <button class="wide" onClick={() => change({ all: all ? "" : "forest" })}>
          {all ? "Only significant differences" : `Also the ${rest} differences that are not significant`}
        </button>
      )}
      {shown.length === 0 && <p class="note">None of {marks.length} differences is significant.</p>}
    </>
  );
}

function ForestFigure({ marks, kind, words, title, method }: { marks: Mark[]; kind: Unit; words: string[]; title: string; method: string }) {
  const rows = marks.map(({ line, of }): Row => ({
    task: line.label, metric: line.metric, quantizer: line.quantizer, kind: of.kind, estimate: of.estimate,
    low: of.low, high: of.high, p: of.p, p_holm: of.p_holm, mark: of.mark, documents: of.documents,
  }));
  const draw = useMemo(() => (width: number) => {
    const narrow = width < 500;
    const order = marks.map((mark) => mark.label);
    const zero = kind === "ratio" ? 1 : 0;
    const tone = (mark: Mark) => (sure(mark.of) ? (mark.x > zero ? "var(--worse)" : "var(--better)") : "var(--unsure)");
    const shared = { y: "label", href: "href", stroke: tone } as const;
    const left = narrow ? 12 : 16 + 6.4 * Math.max(...order.map((label) => label.length));
    const ends = marks.flatMap(({ low, high }) => [low, high]).filter((end) => end > 0 && Number.isFinite(end));
    const ratios = kind === "ratio" && ratioTicks(Math.min(1, ...ends), Math.max(1, ...ends), (width - left) / 56);
    return plot({
      width, height: 64 + (narrow ? 34 : 20) * marks.length, marginLeft: left, marginBottom: 40, marginRight: 24,
      x: { type: kind === "ratio" ? "log" : "linear", grid: true, ticks: ratios || Math.max(3, width / 180) },
      y: { domain: order, label: null, axis: narrow ? null : "left", tickSize: 0 },
      marks: [
        // by itself a log axis leaves out labels that begin with a large digit
        Plot.axisX(ratios || undefined, { label: `← ${words[0]} · ${words[1]} →`, labelAnchor: "center", labelOffset: 36, ...(ratios ? { text: (value: number) => `× ${number(value, 3)}` } : { ticks: Math.max(3, width / 180) }) } as Plot.AxisXOptions),
        Plot.ruleX([zero], { stroke: "currentColor" }),
        Plot.ruleY(marks, { ...shared, x1: "low", x2: "high", strokeWidth: 2 }),
        Plot.dot(marks, { ...shared, x: "x", r: 4.5, fill: tone, ariaLabel: "told", title: "told", tip: { href: undefined, fill: "var(--paper)" } }),
        ...(narrow ? [Plot.text(marks, { y: "label", text: "label", frameAnchor: "left", dy: -12, fontSize: 11, href: "href" })] : []),
      ],
    });
  }, [marks.map((mark) => mark.told).join(), kind, title]);
  return <Figure title={title} name={`${method}-${kind}`} method={method} rows={rows} draw={draw}
    note={<>Each row is a task, its metric and a precision; bars are 95 % intervals. Coloured: significant (‡). Grey: not significant. A click shows the documents.</>} />;
}

function HeatMaps({ found, lines }: { found: Overview; lines: Line[] }) {
  const kinds = (["points", "ratio", "units"] as Unit[]).filter((kind) => lines.some((line) => unit(line) === kind && line.quantized));
  return <div class="columns">{kinds.map((kind) => <HeatMap key={kind} found={found} lines={lines} kind={kind} />)}</div>;
}

function HeatMap({ found, lines, kind }: { found: Overview; lines: Line[]; kind: Unit }) {
  const squares = useMemo(() => lines.filter((line) => unit(line) === kind && line.quantized).flatMap((line) =>
    Object.keys(line.scores).flatMap((group) => {
      const of = line.damages[group];
      const whole = lines.find((one) => one.task === line.task && one.metric === line.metric && one.quantizer === found.unquantized)?.scores[group]?.value;
      const own = line.scores[group]?.value;
      const estimate = of?.estimate ?? (typeof own === "number" && typeof whole === "number" ? (line.ratio ? Math.log(own / whole) : line.higher_is_better ? whole - own : own - whole) : null);
      if (typeof estimate !== "number") return [];
      const damage = harm(estimate, line, line.ratio ? "log ratio" : "difference");
      return [{
        group, quantizer: line.quantizer, column: named(line), damage, mark: of?.mark ?? "", task: line.task, metric: line.metric,
        told: `${group}, ${line.quantizer}, ${named(line)}: ${effect(estimate, line.ratio ? "log ratio" : "difference", line.percent)}${of ? ` ${interval(of, line.percent)}${of.mark}` : ""}`,
        href: links(found, [group], line),
      }];
    })), [found, lines, kind]);
  const draw = useMemo(() => (width: number) => {
    const groups = [...new Set(squares.map((one) => one.group))];
    const quantizers = [...new Set(squares.map((one) => one.quantizer))];
    const columns = [...new Set(squares.map((one) => one.column))];
    const level = (one: (typeof squares)[0]) => (kind === "ratio" ? Math.log(one.damage) : one.damage);
    const most = Math.max(...squares.map((one) => Math.abs(level(one))).filter(Number.isFinite), 1e-9);
    const room = (width - 176) / columns.length;
    const top = 30 + 3.9 * Math.max(...columns.map((label) => label.length)); // they slope
    return plot({
      width: Math.max(width, 176 + 44 * columns.length), height: 16 + top + groups.length * (26 + 22 * quantizers.length), marginLeft: 100, marginTop: top, marginRight: 20 + 5.2 * columns.at(-1)!.length,
      x: { domain: columns, label: null, axis: "top", tickRotate: -35, tickSize: 0 },
      y: { domain: quantizers, label: null, tickSize: 0 },
      fy: { domain: groups, label: null, axis: null },
      color: { type: "diverging-symlog", constant: Math.max(most / 50, 1e-6), domain: [-most, most], range: ["#2a78b8", "#f4f2ee", "#c8503c"], interpolate: "lab", pivot: 0 } as any,
      marks: [
        Plot.text(groups, { fy: (group) => group, text: (group) => group, frameAnchor: "top-left", dx: -95, dy: -14, fontWeight: "bold" }),
        Plot.cell(squares, { x: "column", y: "quantizer", fy: "group", fill: level, inset: 1, rx: 3, href: "href", ariaLabel: "told", title: "told" }),
        Plot.text(squares, { x: "column", y: "quantizer", fy: "group", fontSize: room < 50 ? 10 : 12, fill: (one) => (Math.abs(level(one)) > most / 2 ? "white" : "#222"), text: (one) => (kind === "ratio" ? ratio(one.damage, 2) : fixed(one.damage, 1)), pointerEvents: "none" }),
      ],
    });
  }, [squares]);
  if (!squares.length) return null;
  return <Figure title={`Damage by checkpoint, precision and task, ${UNITS[kind]}`} name={`damage-${kind}`} method="damage" draw={draw}
    rows={squares.map(({ told, href, ...rest }) => rest)} note="More is worse; blue is better than unquantized. A click shows the documents." />;
}

interface Dot { cell: string; checkpoint: string; method: string; precision: string; size: number; value: number; low: number; high: number; best: boolean; told: string; href: string }

/** Quality against size: KL or a score, over bits or GiB; a line a method, the best at each size marked. */
function Quality({ found, lines, state }: { found: Overview; lines: Line[]; state: State }) {
  const diverges = found.cells.some((cell) => kl(cell));
  const line = lines.find((one) => `${one.task} ${one.metric}` === state.metric) ?? (diverges ? undefined : lines[0]);
  const sized = found.cells.some((cell) => cell.gib); // not in older records
  const gib = sized && state.size === "gib";
  const [dots, floor] = useMemo(() => {
    const made = found.cells.flatMap((cell): Dot[] => {
      const size = gib ? cell.gib : cell.bits;
      const value = line ? scoreOf(lines, line, cell) : klOf(cell, state.task);
      if (!size || !value || !(value.value > 0 || line) || (!line && !cell.quantized)) return [];
      return [{
        cell: cell.cell, checkpoint: cell.checkpoint, method: cell.title, precision: cell.quantizer, size, ...value, best: false,
        told: `${cell.cell}: ${line ? `${named(line)} ${score(value.value / (line.percent ? 100 : 1), line)}` : `KL ${number(value.value)} nats per token`} [${number(value.low)}, ${number(value.high)}] at ${number(size)} ${gib ? "GiB" : "bits per weight"}`,
        href: link({ view: "cell", folder: found.folder, cells: [cell.cell] }),
      }];
    });
    const noise = found.cells.filter((cell) => cell.floor);
    const shown = made.filter((dot) => line || !noise.some((cell) => cell.cell === dot.cell));
    const up = line?.higher_is_better;
    for (const dot of shown) dot.best = !shown.some((one) => one.checkpoint === dot.checkpoint && one !== dot && one.size <= dot.size && (up ? one.value >= dot.value : one.value <= dot.value));
    const levels = line ? [] : noise.flatMap((cell) => kl(cell, state.task)?.mean ?? []);
    return [shown, levels.length ? Math.max(...levels) : null] as const;
  }, [found, lines, line, state.task, gib]);
  const draw = useMemo(() => (width: number) => {
    const tip = { href: undefined, fill: "var(--paper)" } as any;
    const group = (dot: Dot) => `${dot.checkpoint} ${dot.method}`;
    const alike = new Set(dots.map((dot) => dot.size)).size === 1; // caches or activations alone are quantized
    const order = [...new Set([...dots].sort((a, b) => b.value - a.value).map((dot) => dot.precision))];
    const shared = { x: alike ? "precision" : "size", y: "value", stroke: "checkpoint" } as const;
    const figure = (labels: Plot.Markish[]) => plot({
      width, height: 400, marginLeft: 60, marginBottom: 60, marginTop: 28, marginRight: 40,
      x: alike
        ? { type: "point", domain: order, label: null, tickRotate: width < 900 ? -35 : 0, grid: true }
        : { label: gib ? "GiB of all weights →" : "bits stored for a weight, scales and zeros counted →", labelOffset: 40, nice: true, grid: true },
      y: line ? { label: `↑ ${named(line)}`, grid: true } : { type: "log", label: "↑ KL, nats per token", ticks: 5, tickFormat: (value: number) => number(value, 2) },
      color: { legend: true, domain: found.checkpoints, scheme: "observable10" }, symbol: { legend: true, range: ["circle", "square", "triangle", "diamond", "star", "wye", "cross"] },
      marks: [
        ...(floor ? [Plot.ruleY([floor], { stroke: "currentColor", strokeDasharray: "2,4" }), Plot.text([floor], { y: (value) => value, text: () => "noise floor", frameAnchor: "right", dy: -6 })] : []),
        ...(alike ? [] : [Plot.line(dots, { ...shared, z: group, sort: "size", strokeOpacity: 0.35 })]),
        Plot.ruleX(dots, { x: shared.x, y1: "low", y2: "high", stroke: "checkpoint", strokeOpacity: 0.5 }),
        ...[false, true].map((best) => Plot.dot(dots.filter((dot) => dot.best === best), { ...shared, symbol: "method", fill: best ? "checkpoint" : "var(--paper)", r: 5, strokeWidth: 2, href: "href", ariaLabel: "told", title: "told", tip })),
        ...labels,
      ],
    });
    if (alike) return figure([]);
    const bare = figure([]);
    const [x, y] = [bare.scale("x")!, bare.scale("y")!];
    const taken = dots.map((dot) => [x.apply(dot.size) - 6, y.apply(dot.value) - 6, 12, 12]);
    const placed: [string, number, number][] = [];
    return figure(dots.filter((dot) => dot.best).flatMap((dot) => {
      const near = placed.some(([name, l, t]) => name === dot.precision && Math.hypot(l - x.apply(dot.size), t - y.apply(dot.value)) < 30);
      const [w, left, top] = [6.6 * dot.precision.length, x.apply(dot.size), y.apply(dot.value)];
      const places = [[8, -9], [-w / 2, -18], [-w / 2, 16], [8, 12], [-w - 8, 12], [-w - 8, -9]];
      const place = places.find(([dx, dy]) => left + dx >= 60 && left + dx + w <= width && top + dy > 34 && top + dy < 350 && taken.every(([l, t, ww, h]) => left + dx + w < l || left + dx > l + ww || top + dy + 7 < t || top + dy - 7 > t + h));
      if (near || !place) return []; // its tooltip says it
      placed.push([dot.precision, left, top]);
      taken.push([left + place[0], top + place[1] - 7, w, 14]);
      return [Plot.text([dot], { x: "size", y: "value", text: "precision", textAnchor: "start", dx: place[0], dy: place[1] })];
    }));
  }, [dots, floor]);
  if (!found.cells.some((cell) => cell.bits)) return null;
  const scored = lines.filter((one, at) => lines.findIndex((two) => two.task === one.task && two.metric === one.metric) === at);
  return (
    <>
      <p class="choice">
        <label>Quality{" "}
          <select value={line ? `${line.task} ${line.metric}` : `kl ${state.task}`} onChange={(event) => { const value = event.currentTarget.value; change(value.startsWith("kl ") ? { task: value.slice(3), metric: "" } : { task: "", metric: value }); }}>
            {diverges && <option value="kl ">KL on all tasks, by token</option>}
            {diverges && found.tasks.map((one) => <option value={`kl ${one.name}`}>KL on {one.label}</option>)}
            {scored.map((one) => <option value={`${one.task} ${one.metric}`}>{named(one)}</option>)}
          </select></label>{" "}
        {sized && <label>against <select value={gib ? "gib" : ""} onChange={(event) => change({ size: event.currentTarget.value })}><option value="">bits per weight</option><option value="gib">GiB</option></select></label>}
      </p>
      <Figure title={`${line ? named(line) : "KL divergence"} against ${gib ? "GiB" : "bits"}`} name="quality-size" method={line ? "intervals" : "kl-divergence"} draw={draw} rows={dots.map(({ told, href, ...rest }) => rest)}
        note={`A line is a method; bars are 95 % intervals. Filled: no precision of that checkpoint is as small and as good. ${line ? "" : "Lower is closer to the unquantized model. "}A click shows the cell.`} />
    </>
  );
}

function klOf(cell: Cell, task: string) {
  const of = kl(cell, task);
  return of && { value: of.mean, low: Math.max(of.mean - 1.96 * of.stderr, of.mean / 10), high: of.mean + 1.96 * of.stderr };
}

function scoreOf(lines: Line[], line: Line, cell: Cell) {
  const own = lines.find((one) => one.task === line.task && one.metric === line.metric && one.quantizer === cell.quantizer)?.scores[cell.checkpoint];
  if (typeof own?.value !== "number") return null;
  const factor = line.percent ? 100 : 1;
  return { value: factor * own.value, low: factor * (own.low ?? own.value), high: factor * (own.high ?? own.value) };
}

const ends = (title: string, of?: { low?: number; high?: number }): Row => ({ [`${title}, low`]: of?.low, [`${title}, high`]: of?.high });
const saved = (title: string, of?: Effect): Row => ({ [title]: of?.estimate, ...ends(title, of), [`${title}, p (Holm)`]: of?.p_holm });

/** One checkpoint's quantized precisions among themselves. */
function Pairs({ found }: { found: Overview }) {
  const columns = useMemo((): GridColumn[] => [
    { title: "Task", value: (pair: Pair) => pair.task, width: 120 },
    { title: "Metric", value: (pair: Pair) => pair.metric, width: 100 },
    { title: "Pair", value: (pair: Pair) => pair.pair, width: 180, grow: 2 },
    { title: "Difference", value: (pair: Pair) => pair.effect?.estimate, align: "right", save: (pair: Pair) => ({ Kind: pair.effect?.kind, ...saved("Difference", pair.effect) }), show: (pair: Pair) => pair.effect ? effect(pair.effect.estimate, pair.effect.kind, pair.percent) + pair.effect.mark : "–" },
    { title: "95 % interval", value: (pair: Pair) => pair.effect?.low, align: "right", width: 150, save: () => ({}), show: (pair: Pair) => pair.effect ? interval(pair.effect, pair.percent) : "–" },
    { title: "p (Holm)", value: (pair: Pair) => pair.effect?.p_holm, align: "right", save: () => ({}), show: (pair: Pair) => p(pair.effect?.p_holm) },
    { title: "Documents", value: (pair: Pair) => pair.documents, align: "right" },
  ], [found]);
  if (!found.pairs.length) return null;
  return <Grid title="Precisions among themselves" name="pairs" method="significance" rows={found.pairs} columns={columns} note="The first minus the second precision, paired by document." />;
}

function Cells({ found }: { found: Overview }) {
  const columns = useMemo((): GridColumn[] => [
    { title: "Cell", value: (cell: Cell) => cell.cell, grow: 2, width: 170, show: (cell: Cell) => ({ text: cell.cell, href: link({ view: "cell", folder: found.folder, cells: [cell.cell] }) }) },
    { title: "Status", value: (cell: Cell) => cell.status, show: (cell: Cell) => ({ text: cell.status, tone: cell.status, title: cell.reason }) },
    { title: "Method", value: (cell: Cell) => cell.title, width: 110 },
    { title: "Precision", value: (cell: Cell) => cell.precision, width: 100 },
    { title: "Bits per weight", value: (cell: Cell) => cell.bits, align: "right", show: (cell: Cell) => fixed(cell.bits, 2) },
    { title: "Weight error", value: (cell: Cell) => cell.weight_error, align: "right", show: (cell: Cell) => fixed(cell.weight_error, 4) },
    { title: "Took", value: (cell: Cell) => cell.seconds, align: "right", show: (cell: Cell) => duration(cell.seconds) },
    { title: "Memory, GiB", value: (cell: Cell) => cell.memory_gib, align: "right", show: (cell: Cell) => fixed(cell.memory_gib, 2) },
  ], [found]);
  return <Grid title="Cells" name="cells" rows={found.cells} columns={columns} />;
}

/** Every score, with its interval, damage and difference. */
export function ScoresPage({ found }: { found: Overview }) {
  const lines = found.by_group.length ? found.by_group : found.lines;
  const rows = useMemo(() => lines.flatMap((line) => Object.entries(line.scores).map(([group, own]) => ({ line, group, own }))), [found]);
  const columns = useMemo((): GridColumn[] => {
    const of = (name: "damages" | "deltas" | "differences", title: string): GridColumn[] => [
      { title, value: ({ line, group }) => line[name][group]?.estimate, align: "right", save: ({ line, group }) => saved(title, line[name][group]), show: ({ line, group }) => {
        const one: Effect | undefined = line[name][group];
        return one ? { text: effect(one.estimate, one.kind, line.percent) + one.mark, title: `${interval(one, line.percent)}, p ${p(one.p)}` } : "–";
      } },
    ];
    return [
      { title: "Task", value: ({ line }) => line.label, width: 120, grow: 2, show: ({ line, group }) => ({ text: line.label, href: links(found, [group], line) }) },
      { title: "Metric", value: ({ line }) => line.metric_title, width: 100, save: ({ line }) => ({ Metric: line.metric_title, Kind: line.ratio ? "log ratio" : "difference" }), show: ({ line }) => `${line.metric_title} ${line.higher_is_better ? "↑" : "↓"}` },
      { title: "Precision", value: ({ line }) => line.quantizer, width: 100 },
      { title: "Checkpoint", value: ({ group }) => group, width: 100 },
      { title: "Score", value: ({ own }) => own.value, align: "right", show: ({ own, line }) => own.status === "ok" ? score(own.value, line) : { text: own.status, tone: own.status, title: own.reason } },
      { title: "95 % interval", value: ({ own }) => own.low, align: "right", width: 130, save: ({ own }) => ends("Score", own), show: ({ own, line }) => own.low === undefined ? "–" : `[${score(own.low, line)}, ${score(own.high, line)}]` },
      ...of("deltas", "Δ"), ...of("damages", "Damage"), ...of("differences", "Difference of damages"),
      { title: "Documents", value: ({ own, line, group }) => own.documents ?? line.damages[group]?.documents, align: "right", show: ({ own, line, group }) => number(own.documents ?? line.damages[group]?.documents) },
    ];
  }, [found]);
  if (!rows.length) return <Failure text="No cell has scores yet." />;
  return <Grid title="Scores" name="scores" method="significance" rows={rows} columns={columns} height={720}
    note="Accuracies in per cent, their differences in points; × are ratios of perplexities. Damage is a loss: above 0, or above × 1, is worse. ‡ significant after Holm’s correction; the interval stands in a mark’s tooltip." />;
}
