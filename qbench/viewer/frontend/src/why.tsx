// Why: what `qbench analyze` measured of the models, beside the damage that they took.
import * as Plot from "@observablehq/plot";
import { useMemo } from "preact/hooks";
import { useData, type Analyses, type Cell, type Overview } from "./data";
import { Failure, Figure, Grid, plot, say, type GridColumn } from "./parts";
import { change, link, type State } from "./state";
import { kl, number } from "./units";

const EPSILON = "0.3";
interface Props { found: Overview; state: State; folder: number; round: number }

export function WhyPage({ found, state, folder, round }: Props) {
  const got = useData<Analyses>(`${folder}/analysis`, round);
  if (!got) return <p role="status">Reading…</p>;
  if (got.error) return <Failure text={got.error} />;
  const measured = got.cells.filter((one) => one.measured);
  const failed = [...got.cells, ...got.sensitivities].filter((one) => one.error).map((one) => `${one.cell}: ${one.error}`);
  return (
    <>
      <h2 class="page">Why: what the models do</h2>
      {[...got.problems, ...failed].map((one) => <Failure text={one} />)}
      {!measured.length && !got.sensitivities.length ? <p class="note">Nothing was analyzed yet: <code>qbench analyze</code> measures sinks, outliers and sensitivity of the same cells.</p> : (
        <>
          {measured.length > 0 && <Measures found={found} cells={measured} />}
          {measured.length > 0 && <Damages found={found} cells={measured} />}
          {measured.length > 0 && <div class="columns"><ByLayer cells={measured} name="kurtosis" title="Kurtosis of hidden states by layer" method="kurtosis" /><ByLayer cells={measured} name="largest" title="Largest |x| of hidden states by layer" method="kurtosis" /></div>}
          {measured.length > 0 && <Heads found={found} cells={measured} state={state} />}
          <Sensitivities found={found} ones={got.sensitivities} />
          <Along cells={got.long.filter((one) => one.measured)} />
        </>
      )}
    </>
  );
}

function Measures({ found, cells }: { found: Overview; cells: any[] }) {
  const rows = useMemo(() => cells.map((one) => {
    const cell: Cell | undefined = found.cells.find((other) => other.cell === one.cell);
    return { one, measured: one.measured, kl: cell ? kl(cell)?.mean ?? null : null };
  }), [found, cells]);
  const columns = useMemo((): GridColumn[] => {
    const value = (title: string, of: (measured: any) => any, note = ""): GridColumn => ({ title, note, align: "right", value: ({ measured }) => of(measured), show: ({ measured }) => number(of(measured)) });
    return [
      { title: "Cell", width: 160, grow: 2, value: ({ one }) => one.cell, show: ({ one }) => ({ text: one.cell, href: link({ view: "cell", folder: found.folder, cells: [one.cell] }) }) },
      ...(rows.some((row) => row.kl !== null) ? [{ title: "Mean KL", align: "right" as const, value: (row: any) => row.kl, show: (row: any) => number(row.kl), note: "of the same cell’s scored tokens, nats" }] : []),
      value("Perplexity", (one) => one.perplexity),
      value("Sink rate", (one) => one.sinks[0]?.rates[EPSILON], "share of heads and texts with more than 0.3 on the first token"),
      value("First token", (one) => one.sinks[0]?.attention, "mean attention weight on it"),
      value("Zeros", (one) => one.zeros, "share of attention weights that are exactly 0"),
      value("Dormant heads", (one) => one.dormant_heads),
      value("Kurtosis", (one) => one.hidden.kurtosis),
      value("Largest |x|", (one) => Math.max(Math.abs(one.hidden.minimum), one.hidden.maximum)),
      value("Massive", (one) => one.hidden.massive, "values beyond 100 and 1,000 times the median"),
    ];
  }, [found, cells]);
  return <Grid title="Models" name="analysis" method="attention-sinks" rows={rows} columns={columns} note={cells[0]?.text && `Read: ${cells[0].text.samples} texts of ${cells[0].text.length} tokens from ${cells[0].text.source}.`} />;
}

/** KL of every quantized cell of the checkpoints that were analyzed. */
function Damages({ found, cells }: { found: Overview; cells: any[] }) {
  const rows = useMemo(() => [...new Set(cells.map((one) => one.checkpoint as string))].map((checkpoint) => ({
    checkpoint, cells: found.cells.filter((cell) => cell.checkpoint === checkpoint && kl(cell) !== null),
  })), [found, cells]);
  const columns = useMemo((): GridColumn[] => [
    { title: "Checkpoint", value: (row) => row.checkpoint, width: 120 },
    ...[...new Set(rows.flatMap((row) => row.cells.map((cell) => cell.quantizer)))].map((quantizer): GridColumn => {
      const of = (row: (typeof rows)[0]) => row.cells.find((cell) => cell.quantizer === quantizer);
      const value = (row: (typeof rows)[0]) => (of(row) ? kl(of(row)!)?.mean ?? null : null);
      return { title: quantizer, align: "right", value, show: (row) => of(row) ? { text: number(value(row)), href: link({ view: "cell", folder: found.folder, cells: [of(row)!.cell] }) } : "–" };
    }),
  ], [rows]);
  if (!rows.some((row) => row.cells.length)) return null;
  return <Grid title="Their damage: KL, nats per token" name="analysis-damage" method="kl-divergence" rows={rows} columns={columns} />;
}

function ByLayer({ cells, name, title, method }: { cells: any[]; name: string; title: string; method: string }) {
  const rows = useMemo(() => cells.flatMap((one) => one.measured.layers.map((layer: any, index: number) => ({
    cell: one.cell, layer: index, [name]: name === "largest" ? Math.max(Math.abs(layer.hidden.minimum), layer.hidden.maximum) : layer.hidden[name],
  }))), [cells, name]);
  const draw = useMemo(() => (width: number) => plot({
    width, height: 280, marginLeft: 55, marginBottom: 44, x: { label: "layer →", labelOffset: 40, ticks: [...new Set(rows.map((row) => row.layer))], tickFormat: String }, y: { type: "log", label: `↑ ${name}`, grid: true, tickFormat: (value: number) => number(value, 2) },
    color: { legend: true, scheme: "observable10" },
    marks: [Plot.line(rows, { x: "layer", y: name, stroke: "cell" }), Plot.dot(rows, { x: "layer", y: name, stroke: "cell", fill: "var(--paper)", ...say((row) => `${row.cell}, layer ${row.layer}: ${number(row[name])}`), tip: { fill: "var(--paper)" } })],
  }), [rows]);
  return <Figure title={title} name={name} method={method} rows={rows} draw={draw} />;
}

function Heads({ found, cells, state }: { found: Overview; cells: any[]; state: State }) {
  const chosen = cells.find((one) => one.cell === state.cells[0]) ?? cells[0];
  const rows = useMemo(() => cells.filter((one) => one === chosen || one.quantizer === chosen.quantizer).flatMap((one) => one.measured.layers.flatMap((layer: any, index: number) => layer.heads.map((head: any, number_: number) => ({
    cell: one.cell, layer: index, head: number_, sink_rate: head.sinks[0]?.rates[EPSILON] ?? 0, attention: head.sinks[0]?.attention ?? 0, zeros: head.zeros, entropy: head.entropy,
    href: link({ ...state, cells: [one.cell], sort: `${index}.${number_}` }),
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
  const wanted = state.sort.split(".").map(Number);
  const map = maps.find((one) => one.layer === wanted[0] && one.head === wanted[1] && (!state.show || one.text === state.show)) ?? maps.find((one) => one.layer === wanted[0] && one.head === wanted[1]) ?? maps[0];
  return (
    <>
      <label class="choice">Heads of <select value={chosen.cell} onChange={(event) => change({ cells: [event.currentTarget.value] })}>{cells.map((one) => <option>{one.cell}</option>)}</select>{" "}
        <a href={link({ view: "cell", folder: found.folder, cells: [chosen.cell] })}>its cell</a></label>
      <div class="columns">
        <Figure title="Sink rate by layer and head" name="sinks" method="attention-sinks" rows={rows.map(({ href, ...row }) => row)} draw={draw} note={maps.length ? "A click shows the attention map of a head that was kept." : undefined} />
        {map && <AttentionMap key={`${chosen.cell}${map.layer}${map.head}${map.text}`} cell={chosen.cell} map={map} maps={maps} />}
      </div>
    </>
  );
}

function AttentionMap({ cell, map, maps }: { cell: string; map: any; maps: any[] }) {
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
  return (
    <div>
      <label class="choice">Map <select value={`${map.layer}.${map.head} ${map.text}`} onChange={(event) => { const [sort, ...show] = event.currentTarget.value.split(" "); change({ cells: [cell], sort, show: show.join(" ") }); }}>
        {maps.map((one) => <option value={`${one.layer}.${one.head} ${one.text}`}>layer {one.layer}, head {one.head}, {one.text}</option>)}</select></label>
      <Figure title={`Attention of layer ${map.layer}, head ${map.head} on ${map.text}`} name="attention-map" method="attention-sinks" rows={rows} draw={draw} />
    </div>
  );
}

function Sensitivities({ found, ones }: { found: Overview; ones: any[] }) {
  const rows = useMemo(() => ones.flatMap((one) => one.units.map((unit: any) => ({
    cell: one.cell, unit: unit.name.replace(/^model\.layers\./, ""), layer: unit.layer, kl: unit.kl.value, stderr: unit.kl.stderr,
    href: link({ view: "cell", folder: found.folder, cells: [one.cell] }),
  }))), [ones]);
  const cells = [...new Set(rows.map((row) => row.cell))];
  const draw = useMemo(() => (width: number) => {
    const units = [...new Set(rows.map((row) => row.unit))];
    return plot({
      width, height: 96 + 13 * units.length, marginLeft: Math.min(190, width / 2.5), marginTop: 56,
      x: { type: "log", label: "KL when it alone is quantized, nats per token →", labelOffset: 44, grid: true, axis: "top", ticks: 4, tickFormat: (value: number) => number(value, 1) }, y: { domain: units, label: null, tickSize: 0 },
      color: { legend: true, domain: cells, scheme: "observable10" },
      marks: [Plot.dot(rows.filter((row) => row.kl > 0), { x: "kl", y: "unit", stroke: "cell", r: 4, strokeWidth: 2, href: "href", ...say((row) => `${row.cell}, ${row.unit}: ${number(row.kl)} ± ${number(row.stderr)}`), tip: { href: undefined, fill: "var(--paper)" } as any })],
    });
  }, [rows]);
  if (!rows.length) return null;
  return <Figure title="Sensitivity: one layer quantized at a time" name="sensitivity" method="sensitivity" rows={rows.map(({ href, ...row }) => row)} draw={draw} />;
}

function Along({ cells }: { cells: any[] }) {
  const rows = useMemo(() => cells.flatMap((one) => one.measured.stretches.map((part: any) => ({ cell: one.cell, position: (part.first + part.last) / 2, loss: part.loss, mass: part.mass, largest: part.largest }))).filter((row) => row.loss !== null), [cells]);
  const draw = useMemo(() => (width: number) => plot({
    width, height: 310, marginLeft: 50, marginBottom: 44, x: { label: "position in the text →", labelOffset: 40 }, y: { label: "↑ loss, nats per token", grid: true }, color: { legend: true, scheme: "observable10" },
    marks: [Plot.line(rows, { x: "position", y: "loss", stroke: "cell" }), Plot.dot(rows, { x: "position", y: "loss", stroke: "cell", ...say((row) => `${row.cell} at ${number(row.position)}: ${number(row.loss)}`), tip: { fill: "var(--paper)" } })],
  }), [rows]);
  if (!rows.length) return null;
  return <Figure title="Loss along texts longer than those of training" name="along" rows={rows} draw={draw} />;
}
