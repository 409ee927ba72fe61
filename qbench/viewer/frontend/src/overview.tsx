// The first screen: the verdict, then the figures and tables that it rests on.
import * as Plot from "@observablehq/plot";
import { useMemo } from "preact/hooks";
import type { Cell, Effect, Line, Overview } from "./data";
import type { Row } from "./download";
import { Failure, Figure, Grid, plot, type GridColumn } from "./parts";
import { Quality } from "./quality";
import { change, link, type State } from "./state";
import { duration, effect, fixed, harm, interval, kl, klSaved, klText, measure, number, p, ratio, ratioTicks, score, sure, unit, UNITS, type Unit } from "./units";

const members = (overview: Overview, group: string) => overview.groups[group] ?? [group];

/** The cells of a line and group that have documents to look at, with those of the other group. */
const links = (overview: Overview, groups: string[], line: Line) =>
  link({
    view: "documents", folder: overview.folder, task: line.task, metric: line.metric,
    cells: groups.map((group) => `${members(overview, group)[0]}/${line.quantizer}`),
  });

interface Mark { line: Line; of: Effect; x: number; low: number; high: number; label: string; text: string; href: string }

export function OverviewPage({ overview, state }: { overview: Overview; state: State }) {
  const lines = overview.by_group.length ? overview.by_group : overview.lines;
  const [base, ...others] = Object.keys(overview.groups);
  const other = others.includes(state.other) ? state.other : others[0];
  const [headline, ...rest] = overview.verdict[0]?.split(/(?<=\.) (?=[A-Z])/) ?? [];
  return (
    <>
      <section class="answer">
        {overview.about.map((line) => <p class="note about">{line}</p>)}
        <p class="headline">{headline}</p>
        {[rest.join(" "), ...overview.verdict.slice(1)].filter(Boolean).map((text) => <p class="verdict">{text}</p>)}
        {!overview.ready && <p role="status">Intervals and tests are being computed; they appear here by themselves.</p>}
        {overview.summary.length > 0 && <details><summary>In more words</summary>{overview.summary.map((sentence) => <p>{sentence}</p>)}</details>}
        {overview.problems.length > 0 && (
          <details class="problems"><summary>{overview.problems.length} {overview.problems.length === 1 ? "thing is" : "things are"} missing or wrong</summary>
            <ul>{overview.problems.map((problem) => <li>{problem}</li>)}</ul></details>
        )}
      </section>
      <Quality overview={overview} state={state} />
      {others.length > 1 && (
        <label class="choice">Against {base}:{" "}
          <select value={other} onChange={(event) => change({ other: event.currentTarget.value })}>
            {others.map((name) => <option>{name}</option>)}
          </select>
        </label>
      )}
      <Forest overview={overview} lines={lines} base={base} other={other} all={state.all === "forest"} />
      <HeatMaps overview={overview} lines={lines} />
      <Cells overview={overview} />
    </>
  );
}

function Forest({ overview, lines, base, other, all }: { overview: Overview; lines: Line[]; base: string; other?: string; all: boolean }) {
  const contrast = other ? "differences" : "damages";
  const group = other ?? base;
  const marks = useMemo(() => lines.filter((line) => line[contrast][group]).map((line): Mark => {
    const of = line[contrast][group];
    const ends = [harm(of.low, line, of.kind), harm(of.high, line, of.kind)].sort((a, b) => a - b);
    return {
      line, of, x: harm(of.estimate, line, of.kind), low: ends[0], high: ends[1],
      label: `${line.quantizer} · ${measure(line)}`,
      text: `${line.quantizer}, ${measure(line)}: ${effect(of.estimate, of.kind, line.percent)} ${interval(of, line.percent)}${of.mark}, ${of.documents} documents`,
      href: links(overview, other ? [base, other] : [base], line),
    };
  }).sort((a, b) => b.x - a.x), [overview, lines, contrast, group]);
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
          const marked = shown.filter((mark) => unit(mark.line) === kind);
          return marked.length > 0 && (
            <ForestFigure key={kind} marks={marked} kind={kind} words={words}
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
        Plot.dot(marks, { ...shared, x: "x", r: 4.5, fill: tone, ariaLabel: "text", title: "text", tip: { href: undefined, fill: "var(--paper)" } }),
        ...(narrow ? [Plot.text(marks, { y: "label", text: "label", frameAnchor: "left", dy: -12, fontSize: 11, href: "href", stroke: "var(--paper)", strokeWidth: 4, fill: "currentColor" })] : []),
      ],
    });
  }, [marks.map((mark) => mark.text).join(), kind, title]);
  return <Figure title={title} name={`${method}-${kind}`} method={method} rows={rows} draw={draw}
    note={<>Each row is a task, its metric and a precision; bars are 95 % intervals. Coloured: significant (‡). Grey: not significant. A click shows the documents.</>} />;
}

function HeatMaps({ overview, lines }: { overview: Overview; lines: Line[] }) {
  const kinds = (["points", "ratio", "units"] as Unit[]).filter((kind) => lines.some((line) => unit(line) === kind && line.quantized));
  return <div class="columns">{kinds.map((kind) => <HeatMap key={kind} overview={overview} lines={lines} kind={kind} />)}</div>;
}

function HeatMap({ overview, lines, kind }: { overview: Overview; lines: Line[]; kind: Unit }) {
  const squares = useMemo(() => lines.filter((line) => unit(line) === kind && line.quantized).flatMap((line) =>
    Object.keys(line.scores).flatMap((group) => {
      const of = line.damages[group];
      const before = lines.find((item) => item.task === line.task && item.metric === line.metric && item.quantizer === overview.unquantized)?.scores[group]?.value;
      const after = line.scores[group]?.value;
      const estimate = of?.estimate ?? (typeof after === "number" && typeof before === "number" ? (line.ratio ? Math.log(after / before) : line.higher_is_better ? before - after : after - before) : null);
      if (typeof estimate !== "number") return [];
      const damage = harm(estimate, line, line.ratio ? "log ratio" : "difference");
      return [{
        group, quantizer: line.quantizer, column: measure(line), damage, mark: of?.mark ?? "", task: line.task, metric: line.metric,
        text: `${group}, ${line.quantizer}, ${measure(line)}: ${effect(estimate, line.ratio ? "log ratio" : "difference", line.percent)}${of ? ` ${interval(of, line.percent)}${of.mark}` : ""}`,
        href: links(overview, [group], line),
      }];
    })), [overview, lines, kind]);
  const draw = useMemo(() => (width: number) => {
    const groups = [...new Set(squares.map((square) => square.group))];
    const quantizers = [...new Set(squares.map((square) => square.quantizer))];
    const columns = [...new Set(squares.map((square) => square.column))];
    const level = (square: (typeof squares)[0]) => (kind === "ratio" ? Math.log(square.damage) : square.damage);
    const most = Math.max(...squares.map((square) => Math.abs(level(square))).filter(Number.isFinite), 1e-9);
    const left = Math.min(18 + 6.6 * Math.max(...quantizers.map((name) => name.length)), width / 2.4);
    const room = (width - left - 76) / columns.length;
    const top = 30 + 3.9 * Math.max(...columns.map((label) => label.length)); // they slope
    return plot({
      width: Math.max(width, left + 76 + 44 * columns.length), height: 16 + top + groups.length * (26 + 22 * quantizers.length), marginLeft: left, marginTop: top, marginRight: 20 + 5.2 * columns.at(-1)!.length,
      x: { domain: columns, label: null, axis: "top", tickRotate: -35, tickSize: 0 },
      y: { domain: quantizers, label: null, tickSize: 0 },
      fy: { domain: groups, label: null, axis: null },
      color: { type: "diverging-symlog", constant: Math.max(most / 50, 1e-6), domain: [-most, most], range: ["#2a78b8", "#f4f2ee", "#c8503c"], interpolate: "lab", pivot: 0 } as any,
      marks: [
        Plot.text(groups, { fy: (group) => group, text: (group) => group, frameAnchor: "top-left", dx: 4 - left, dy: -14, fontWeight: "bold" }),
        Plot.cell(squares, { x: "column", y: "quantizer", fy: "group", fill: level, inset: 1, rx: 3, href: "href", ariaLabel: "text", title: "text" }),
        Plot.text(squares, { x: "column", y: "quantizer", fy: "group", fontSize: room < 50 ? 10 : 12, fill: (square) => (Math.abs(level(square)) > most / 2 ? "white" : "#222"), text: (square) => (kind === "ratio" ? ratio(square.damage, 2) : fixed(square.damage, 1)), pointerEvents: "none" }),
      ],
    });
  }, [squares]);
  if (!squares.length) return null;
  return <Figure title={`Damage by checkpoint, precision and task, ${UNITS[kind]}`} name={`damage-${kind}`} method="damage" draw={draw}
    rows={squares.map(({ text, href, ...rest }) => rest)} note="More is worse; blue is better than unquantized. A click shows the documents." />;
}

const ends = (title: string, of?: { low?: number; high?: number }): Row => ({ [`${title}, low`]: of?.low, [`${title}, high`]: of?.high });
const saved = (title: string, of?: Effect): Row => ({ [title]: of?.estimate, ...ends(title, of), [`${title}, p (Holm)`]: of?.p_holm });

function Cells({ overview }: { overview: Overview }) {
  const columns = useMemo((): GridColumn[] => [
    { title: "Cell", value: (cell: Cell) => cell.cell, grow: 2, width: 170, note: "Checkpoint / precision.", show: (cell: Cell) => ({ text: cell.cell, href: link({ view: "cell", folder: overview.folder, cells: [cell.cell] }) }) },
    { title: "Status", value: (cell: Cell) => cell.status, note: "failed: it has no scores, and its page says why. missing: it has not run yet.", show: (cell: Cell) => ({ text: cell.status, tone: cell.status, title: cell.reason }) },
    { title: "Method", value: (cell: Cell) => cell.title, width: 110 },
    { title: "Format", value: (cell: Cell) => cell.precision, width: 90, note: "Bits of weights (W), activations (A) and KV cache (KV)." },
    { title: "Bits per weight", value: (cell: Cell) => cell.bits, align: "right", width: 90, note: "As stored, scales and zero points counted.", show: (cell: Cell) => fixed(cell.bits, 2) },
    { title: "Size, GiB", value: (cell: Cell) => cell.gib, align: "right", note: "Of all weights as stored; – in records of earlier versions.", show: (cell: Cell) => fixed(cell.gib, 3) },
    { title: "KL", value: (cell: Cell) => kl(cell)?.mean, align: "right", width: 172, grow: 1.5, note: "KL divergence from the unquantized model, nats per token, mean over the documents of all tasks, with its 95 % interval.", save: (cell: Cell) => klSaved(kl(cell)), show: (cell: Cell) => klText(kl(cell)) },
    { title: "Weight error", value: (cell: Cell) => cell.weight_error, align: "right", note: "‖W′ − W‖ / ‖W‖ over all quantized matrices.", show: (cell: Cell) => fixed(cell.weight_error, 4) },
    { title: "Took", value: (cell: Cell) => cell.seconds, align: "right", note: "From loading to the record.", show: (cell: Cell) => duration(cell.seconds) },
    { title: "Peak memory, GiB", value: (cell: Cell) => cell.memory_gib, align: "right", width: 90, show: (cell: Cell) => fixed(cell.memory_gib, 2) },
  ], [overview]);
  return <Grid title="Cells" name="cells" rows={overview.cells} columns={columns} />;
}

/** Every score, with its interval, damage and difference. */
export function ScoresPage({ overview }: { overview: Overview }) {
  const lines = overview.by_group.length ? overview.by_group : overview.lines;
  const rows = useMemo(() => lines.flatMap((line) => Object.entries(line.scores).map(([group, cell]) => ({ line, group, cell }))), [overview]);
  const columns = useMemo((): GridColumn[] => {
    const of = (name: "damages" | "deltas" | "differences", title: string, note: string): GridColumn => ({
      title, note, value: ({ line, group }) => line[name][group]?.estimate, align: "right", save: ({ line, group }) => saved(title, line[name][group]), show: ({ line, group }) => {
        const of: Effect | undefined = line[name][group];
        return of ? { text: effect(of.estimate, of.kind, line.percent) + of.mark, title: `${interval(of, line.percent)}, p ${p(of.p)}` } : "–";
      },
    });
    return [
      { title: "Task", value: ({ line }) => line.label, width: 120, grow: 2, show: ({ line, group }) => ({ text: line.label, href: links(overview, [group], line) }) },
      { title: "Metric", value: ({ line }) => line.metric_title, width: 100, note: "↑ higher is better, ↓ lower is better.", save: ({ line }) => ({ Metric: line.metric_title, Kind: line.ratio ? "log ratio" : "difference" }), show: ({ line }) => `${line.metric_title} ${line.higher_is_better ? "↑" : "↓"}` },
      { title: "Precision", value: ({ line }) => line.quantizer, width: 100 },
      { title: "Checkpoint", value: ({ group }) => group, width: 100 },
      { title: "Score", value: ({ cell }) => cell.value, align: "right", note: "Accuracies in per cent, perplexities as they are.", show: ({ cell, line }) => cell.status === "ok" ? score(cell.value, line) : { text: cell.status, tone: cell.status, title: cell.reason } },
      { title: "95 % interval", value: ({ cell }) => cell.low, align: "right", width: 130, save: ({ cell }) => ends("Score", cell), show: ({ cell, line }) => cell.low === undefined ? "–" : `[${score(cell.low, line)}, ${score(cell.high, line)}]` },
      of("deltas", "Δ", "The score minus the first checkpoint’s at the same precision: points, or × for a ratio of perplexities."),
      of("damages", "Damage", "What quantization costs this checkpoint: points lost, or × the perplexity. Above 0, or above × 1, is worse."),
      of("differences", "Difference of damages", "This checkpoint’s damage minus the first checkpoint’s; ‡: significant after Holm’s correction. The interval stands in the tooltip."),
      { title: "Documents", value: ({ cell, line, group }) => cell.documents ?? line.damages[group]?.documents, align: "right", show: ({ cell, line, group }) => number(cell.documents ?? line.damages[group]?.documents) },
    ];
  }, [overview]);
  if (!rows.length) return <Failure text="No cell has scores yet." />;
  return <Grid title="Scores" name="scores" method="significance" rows={rows} columns={columns} height={720}
    note="Accuracies in per cent, their differences in points; × are ratios of perplexities. Damage is a loss: above 0, or above × 1, is worse. ‡: significant after Holm’s correction." />;
}
