// Why: what `qbench analyze` measured of the models, beside the damage that they took.
import * as Plot from "@observablehq/plot";
import { useMemo } from "preact/hooks";
import { useData, type Analyses, type Cell, type Overview } from "./data";
import { Failure, Figure, Grid, plot, say, type GridColumn } from "./parts";
import { change, link, type State } from "./state";
import { kl, klSaved, klText, number } from "./units";

const EPSILON = "0.3";
interface Props { overview: Overview; state: State; folder: number; round: number }

export function WhyPage({ overview, state, folder, round }: Props) {
  const analyses = useData<Analyses>(`${folder}/analysis`, round);
  if (!analyses) return <p role="status">Reading…</p>;
  if (analyses.error) return <Failure text={analyses.error} />;
  const { cells, sensitivities, problems, command } = analyses;
  const measured = cells.filter((cell) => cell.measured);
  const failed = [...cells, ...sensitivities].filter((cell) => cell.error).map((cell) => `${cell.cell}: ${cell.error}`);
  return (
    <>
      <h2 class="page">Why: what the models do</h2>
      {[...problems, ...failed].map((text) => <Failure text={text} />)}
      {measured.length > 0 && (
        <>
          <Measures overview={overview} cells={measured} />
          <Damages overview={overview} cells={measured} />
          <div class="columns"><ByLayer cells={measured} name="kurtosis" title="Kurtosis of hidden states by layer" method="kurtosis" /><ByLayer cells={measured} name="largest |x|" title="Largest |x| of hidden states by layer" method="kurtosis" /></div>
          <Heads overview={overview} cells={measured} state={state} />
        </>
      )}
      <Sensitivities overview={overview} cells={sensitivities.filter((cell) => cell.units.length)} />
      <Missing command={command} measured={measured.length > 0} sensitive={sensitivities.length > 0} />
    </>
  );
}

/** The commands that measure what the folder does not have yet. */
function Missing({ command, measured, sensitive }: { command: string; measured: boolean; sensitive: boolean }) {
  const commands = [
    !measured && ["attention sinks, outliers, sparsity", command],
    !sensitive && ["which layer is hurt most by a quantizer, one layer at a time", `${command} --sensitivity QUANTIZER`],
  ].filter((item) => item !== false);
  if (!commands.length) return null;
  return (
    <section class="card">
      <h2>Not measured yet</h2>
      {commands.map(([what, line]) => <><p class="note">{what}</p><pre class="text">{line}</pre></>)}
      <p class="note">RECIPE is the recipe of this run; --checkpoint, --data and --device as the run had them.</p>
    </section>
  );
}

function Measures({ overview, cells }: { overview: Overview; cells: any[] }) {
  const columns = useMemo((): GridColumn[] => {
    const value = (title: string, of: (measured: any) => any, note: string): GridColumn => ({ title, note, align: "right", value: (cell) => of(cell.measured), show: (cell) => number(of(cell.measured)) });
    return [
      { title: "Cell", width: 160, grow: 2, value: (cell) => cell.cell, show: (cell) => ({ text: cell.cell, href: link({ view: "cell", folder: overview.folder, cells: [cell.cell] }) }) },
      value("Perplexity", (measured) => measured.perplexity, "Of the text that was read, per token."),
      value("Sink rate", (measured) => measured.sinks[0]?.rates[EPSILON], "Share of heads and texts with a mean weight of more than 0.3 on the first token, 0 to 1."),
      value("Weight on first token", (measured) => measured.sinks[0]?.attention, "Mean attention weight on it, 0 to 1."),
      value("Zeros", (measured) => measured.zeros, "Share of attention weights that are exactly 0."),
      value("Dormant heads", (measured) => measured.dormant_heads, "Share of heads whose output is below 1 % of their layer’s mean."),
      value("Kurtosis", (measured) => measured.hidden.kurtosis, "Of all hidden states at once; 3 for a normal distribution."),
      value("Largest |x|", (measured) => Math.max(Math.abs(measured.hidden.minimum), measured.hidden.maximum), "Largest hidden state, in the model’s own units."),
      value("Massive", (measured) => measured.hidden.massive, "Number of hidden states beyond 100 and beyond 1,000 times the median."),
    ];
  }, [overview, cells]);
  return <Grid title="Models" name="analysis" method="attention-sinks" rows={cells} columns={columns} note={cells[0]?.text && `Read: ${cells[0].text.samples} texts of ${cells[0].text.length} tokens from ${cells[0].text.source}.`} />;
}

/** KL of every quantized cell of the checkpoints that were analyzed. */
function Damages({ overview, cells }: { overview: Overview; cells: any[] }) {
  const [rows, columns] = useMemo(() => {
    const checkpoints = [...new Set(cells.map((cell) => cell.checkpoint as string))];
    const damaged = overview.cells.filter((cell) => checkpoints.includes(cell.checkpoint) && kl(cell) !== null);
    const of = (quantizer: string, checkpoint: string): Cell | undefined => damaged.find((cell) => cell.quantizer === quantizer && cell.checkpoint === checkpoint);
    const columns: GridColumn[] = [
      { title: "Precision", value: (quantizer) => quantizer, width: 120 },
      ...checkpoints.map((checkpoint): GridColumn => ({
        title: checkpoint, align: "right", width: 130, value: (quantizer) => { const cell = of(quantizer, checkpoint); return cell && kl(cell)!.mean; }, save: (quantizer) => { const cell = of(quantizer, checkpoint); return klSaved(cell ? kl(cell) : null, checkpoint); },
        show: (quantizer) => { const cell = of(quantizer, checkpoint); return cell ? { text: klText(kl(cell)), href: link({ view: "cell", folder: overview.folder, cells: [cell.cell] }) } : "–"; },
      })),
    ];
    return [[...new Set(damaged.map((cell) => cell.quantizer))], columns] as const;
  }, [overview, cells]);
  if (!rows.length) return null;
  return <Grid title="Their damage: KL, nats per token" name="analysis-damage" method="kl-divergence" rows={rows as any} columns={columns} />;
}

function ByLayer({ cells, name, title, method }: { cells: any[]; name: string; title: string; method: string }) {
  const rows = useMemo(() => cells.flatMap((cell) => cell.measured.layers.map(({ hidden }: any, layer: number) => ({
    cell: cell.cell, layer, [name]: name === "kurtosis" ? hidden.kurtosis : Math.max(Math.abs(hidden.minimum), hidden.maximum),
  }))), [cells, name]);
  const draw = useMemo(() => (width: number) => plot({
    width, height: 280, marginLeft: 55, marginBottom: 44, x: { label: "layer →", labelOffset: 40, ticks: layerTicks(rows, width), tickFormat: String }, y: { type: "log", label: `↑ ${name}`, grid: true, tickFormat: (value: number) => number(value, 2) },
    color: { legend: true, scheme: "observable10" },
    marks: [Plot.line(rows, { x: "layer", y: name, stroke: "cell" }), Plot.dot(rows, { x: "layer", y: name, stroke: "cell", fill: "var(--paper)", ...say((row) => `${row.cell}, layer ${row.layer}: ${number(row[name])}`), tip: { fill: "var(--paper)" } })],
  }), [rows]);
  return <Figure title={title} name={name} method={method} rows={rows} draw={draw} />;
}

/** Layers to label on an axis of this width. */
function layerTicks(rows: { layer: number }[], width: number): number[] {
  const layers = [...new Set(rows.map((row) => row.layer))];
  const step = Math.ceil(layers.length / (width / 32));
  return layers.filter((layer) => layer % step === 0);
}

function Heads({ overview, cells, state }: { overview: Overview; cells: any[]; state: State }) {
  const chosen = cells.find((cell) => cell.cell === state.cells[0]) ?? cells[0];
  const rows = useMemo(() => cells.filter((cell) => cell === chosen || cell.quantizer === chosen.quantizer).flatMap((cell) => cell.measured.layers.flatMap(({ heads }: any, layer: number) => heads.map((head: any, place: number) => ({
    cell: cell.cell, layer, head: place, sink_rate: head.sinks[0]?.rates[EPSILON] ?? 0, attention: head.sinks[0]?.attention ?? 0, zeros: head.zeros, entropy: head.entropy,
    href: link({ ...state, cells: [cell.cell], sort: `${layer}.${place}` }),
  })))), [cells, chosen]);
  const draw = useMemo(() => (width: number) => {
    const shown = [...new Set(rows.map((row) => row.cell))];
    const [layers, heads] = [Math.max(...rows.map((row) => row.layer)) + 1, Math.max(...rows.map((row) => row.head)) + 1];
    return plot({
      width, height: 80 + shown.length * (20 + 20 * layers), marginLeft: 50, marginBottom: 40,
      x: { domain: Array.from({ length: heads }, (_, head) => head), label: "head →", labelOffset: 32, tickSize: 0 }, y: { domain: Array.from({ length: layers }, (_, layer) => layer), label: "layer", tickSize: 0 }, fy: { domain: shown, label: null, axis: null },
      color: { type: "linear", domain: [0, 1], scheme: "blues", legend: true, label: "share of texts", marginLeft: 12, marginRight: 12 } as Plot.ScaleOptions,
      marks: [
        Plot.text(shown, { fy: (cell) => cell, text: (cell) => cell, frameAnchor: "top-left", dy: -12, fontWeight: "bold" }),
        Plot.cell(rows, { x: "head", y: "layer", fy: "cell", fill: "sink_rate", inset: 1, rx: 2, href: "href", title: (row: any) => `${row.cell}, layer ${row.layer}, head ${row.head}: sink rate ${number(row.sink_rate)}, first token ${number(row.attention)}, zeros ${number(row.zeros)}`, ariaLabel: (row: any) => `layer ${row.layer}, head ${row.head}: ${number(row.sink_rate)}` }),
      ],
    });
  }, [rows]);
  const maps: any[] = chosen.measured.maps ?? [];
  const [layer, head] = state.sort.split(".").map(Number);
  const ofHead = maps.filter((map) => map.layer === layer && map.head === head);
  const map = ofHead.find((map) => map.text === state.show) ?? ofHead[0] ?? maps[0];
  return (
    <>
      <label class="choice">Heads of <select value={chosen.cell} onChange={(event) => change({ cells: [event.currentTarget.value] })}>{cells.map((cell) => <option>{cell.cell}</option>)}</select>{" "}
        <a href={link({ view: "cell", folder: overview.folder, cells: [chosen.cell] })}>its cell</a></label>{" "}
      {map && <label class="choice">Map of <select value={`${map.layer}.${map.head} ${map.text}`} onChange={(event) => { const [sort, ...show] = event.currentTarget.value.split(" "); change({ cells: [chosen.cell], sort, show: show.join(" ") }); }}>
        {maps.map((item) => <option value={`${item.layer}.${item.head} ${item.text}`}>layer {item.layer}, head {item.head}, {item.text}</option>)}</select></label>}
      <div class="columns">
        <Figure title="Sink rate by layer and head" name="sinks" method="attention-sinks" rows={rows.map(({ href, ...row }) => row)} draw={draw} note={maps.length ? "A click shows the attention map of a head that was kept." : undefined} />
        {map && <AttentionMap key={`${chosen.cell}${map.layer}${map.head}${map.text}`} map={map} />}
      </div>
    </>
  );
}

function AttentionMap({ map }: { map: any }) {
  const rows = useMemo(() => map.rows.flatMap((row: number[], query: number) => row.map((weight, key) => ({ query, key, weight }))), [map]);
  const draw = useMemo(() => (width: number) => {
    const size = Math.min(width, 460);
    const word = (place: number) => map.tokens[place]?.replaceAll("\n", "⏎") ?? "";
    return plot({
      width: size, height: size, margin: 20, x: { label: "key →", ticks: [], type: "band" }, y: { label: "↓ query", ticks: [], type: "band" },
      color: { type: "sqrt", domain: [0, 1], scheme: "blues" },
      marks: [Plot.cell(rows, { x: "key", y: "query", fill: "weight", title: (row: any) => `“${word(row.query)}” → “${word(row.key)}”: ${number(row.weight)}`, tip: { fill: "var(--paper)" } })],
    });
  }, [rows]);
  return <Figure title={`Attention of layer ${map.layer}, head ${map.head} on ${map.text}`} name="attention-map" method="attention-sinks" rows={rows} draw={draw} note="Darker: a larger weight. Hold the pointer over a square for its tokens." />;
}

function Sensitivities({ overview, cells }: { overview: Overview; cells: any[] }) {
  const values = cells.flatMap((cell) => cell.units.map((unit: any) => unit.kl.value)).filter((value) => value > 0);
  if (!values.length) return null;
  return <div class="columns">{cells.map((cell) => <Sensitivity key={cell.cell} overview={overview} cell={cell} domain={[Math.min(...values), Math.max(...values)]} />)}</div>;
}

/** A row per decoder layer, a column per linear layer in it. */
function Sensitivity({ overview, cell, domain }: { overview: Overview; cell: any; domain: [number, number] }) {
  const rows = useMemo(() => cell.units.map((unit: any) => ({
    unit: unit.name, layer: unit.layer ?? "–", part: unit.name.replace(/^.*layers\.\d+\.?/, "").replace(/^(self_attn|mlp)\./, "") || "whole layer", kl: unit.kl.value, stderr: unit.kl.stderr,
    href: link({ view: "cell", folder: overview.folder, cells: [cell.cell] }),
  })), [cell]);
  const draw = useMemo(() => (width: number) => {
    const parts = [...new Set(rows.map((row: any) => row.part as string))] as string[];
    const slope = width / parts.length < 7 * Math.max(...parts.map((part) => part.length));
    return plot({
      width, height: 110 + 18 * new Set(rows.map((row: any) => row.layer)).size, marginLeft: 40, marginTop: slope ? 74 : 40, marginRight: slope ? 50 : 20,
      x: { domain: parts, axis: "top", label: null, tickSize: 0, tickRotate: slope ? -35 : 0 }, y: { label: "layer", tickSize: 0 },
      color: { type: "linear", domain: domain.map(Math.log10), scheme: "oranges", legend: true, label: "KL, nats per token", ticks: 4, tickFormat: (power: number) => number(10 ** power, 1), marginLeft: 12, marginRight: 12 } as Plot.ScaleOptions,
      marks: [Plot.cell(rows, { x: "part", y: "layer", fill: (row: any) => Math.log10(Math.max(row.kl, domain[0])), inset: 1, rx: 2, href: "href", ...say((row) => `${row.unit}: ${number(row.kl, 3)} ± ${number(row.stderr, 2)} nats per token`) })],
    });
  }, [rows]);
  return <Figure title={`Sensitivity of ${cell.cell}`} name={`sensitivity-${cell.cell}`} method="sensitivity" rows={rows.map(({ href, ...row }: any) => row)} draw={draw} note="KL divergence if this layer alone is quantized." />;
}
