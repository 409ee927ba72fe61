// One cell: scores, damage, the audit layer by layer, settings, what a run cost; and how its key
// differs from another's.
import * as Plot from "@observablehq/plot";
import { useMemo } from "preact/hooks";
import { useData, type Overview } from "./data";
import { Failure, Facts, Figure, Grid, plot, say, type GridColumn } from "./parts";
import { change, link, type State } from "./state";
import { duration, number, score } from "./units";

interface Props { found: Overview; state: State; folder: number; round: number }

export function CellPage({ found, state, folder, round }: Props) {
  const index = found.cells.findIndex((cell) => cell.cell === state.cells[0]);
  const cell = found.cells[index];
  const page = useData<any>(cell?.documents ? `${folder}/cell/${index}` : null, round);
  const other = found.cells.findIndex((one) => one.cell === state.other);
  const beside = useData<any>(found.cells[other]?.documents ? `${folder}/cell/${other}` : null, round);
  if (!cell) return <Failure text={`There is no cell ${state.cells[0] ?? ""} in ${found.folder}.`} />;
  const top = <p class="path"><a rel="up" href={link({ folder: found.folder })}>{found.folder}</a> / <strong>{cell.cell}</strong> <span class={cell.status}>{cell.status}</span></p>;
  if (!cell.documents) return <>{top}<Failure text={cell.reason} /></>;
  if (!page) return <>{top}<p role="status">Reading…</p></>;
  if (page.error) return <>{top}<Failure text={page.error} /></>;
  return (
    <>
      {top}
      {page.reason && <Failure text={page.reason} />}
      <div class="columns">
        <Facts title="What ran" values={[
          ["Method", `${page.title}, ${page.precision_name}`], ["Attention", page.attention], ["Normalizer", page.normalizer],
          ["Bits per weight", number(cell.bits)], ["Begun", page.started.replace("T", " ").slice(0, 19)], ["Took", duration(page.seconds)],
          ["Machine", `${page.environment.hardware}, ${page.environment.device}`],
          ["Why", <a href={link({ view: "why", folder: found.folder, cells: [cell.cell] })}>what its model does</a>],
        ]} />
        <Audit audit={page.audit} weights={page.precision.weights !== null} />
        <Scoring of={page.scoring} training={page.training} />
      </div>
      <Tasks found={found} page={page} />
      <Modules page={page} />
      <Grid title="Stages" name="stages" rows={page.stages} columns={STAGES} />
      <Settings found={found} page={page} beside={beside} other={state.other} />
    </>
  );
}

const STAGES: GridColumn[] = [
  { title: "Stage", value: (stage) => stage.name, width: 110 },
  { title: "Seconds", value: (stage) => stage.seconds, align: "right", show: (stage) => stage.seconds.toFixed(1) },
  { title: "Memory, GiB", value: (stage) => stage.peak_memory_gib, align: "right", width: 110, show: (stage) => stage.peak_memory_gib.toFixed(2) },
  { title: "Detail", value: (stage) => stage.detail, grow: 4, width: 120 },
];

const leak = (of: any) => `${number(of.moved)}${of.declared ? ", declared" : ""} (rounding: ${number(of.tolerance)})`;

function Audit({ audit, weights }: { audit: any; weights: boolean }) {
  if (!audit) return null;
  const percent = (share: number) => `${(100 * share).toFixed(1)} %`;
  return <Facts title="Audit" values={[
    ["Verdict", audit.passed ? "passed" : `not passed: ${audit.problems.join("; ")}`],
    ["Weights quantized", weights ? percent(audit.coverage) : "none"], ["Weight error", weights ? number(audit.weight_error) : null],
    ["Levels", weights ? number(audit.levels) : null], ["Logits moved by", number(audit.logits_moved)],
    ["Left out", audit.left_out.join(", ")],
    ["Activations", audit.activations && `${number(audit.activations.bits)} bits, error ${number(audit.activations.error)}, ${percent(audit.activations.clipped)} clipped`],
    ["KV cache", audit.kv_cache && `keys ${number(audit.kv_cache.key_error)}, values ${number(audit.kv_cache.value_error)} error, ${number(audit.kv_cache.bytes_per_token)} bytes per token`],
    ["Moved by batch-mates", audit.batch_mates && leak(audit.batch_mates)],
    ["Moved by the last token", audit.causality && leak(audit.causality)],
    ["Heads pruned", audit.heads && `${audit.heads.pruned.length} of ${audit.heads.total}`],
  ]} />;
}

function Scoring({ of, training }: { of: any; training: any }) {
  if (!of) return null;
  const exact = of.difference_from_exact;
  return <Facts title="Scoring" values={[
    ["Mode", `${of.mode}, softmax in ${of.softmax_dtype}`], ["Batching", of.batching],
    ["Requests", number(of.requests)], ["Tokens", number(of.tokens)], ["Truncated", of.truncated ? number(of.truncated) : null],
    ["From exact", exact && `${number(exact.mean_per_token)} nats per token on ${number(exact.documents)} documents, ${exact.changed_answers} answers changed`],
    ["Scored exactly", Object.entries(of.exact_tasks ?? {}).map(([task, why]) => `${task}: ${why}`).join("; ")],
    ["Trained", training && `${training.recipe}, seed ${training.seed}`],
  ]} />;
}

function Tasks({ found, page }: { found: Overview; page: any }) {
  const rows = useMemo(() => page.scores.map((score: any) => ({ score, damage: page.damage?.tasks?.[score.task] })), [page]);
  const columns = useMemo((): GridColumn[] => {
    const percent = (score: any) => found.lines.find((line) => line.task === score.task && line.metric === score.metric)?.percent;
    const flip = (name: string) => ({ score, damage }: any) => damage?.flips?.[score.metric]?.[name];
    return [
      { title: "Task", value: ({ score }) => score.label, grow: 2, width: 130, show: ({ score }) => ({ text: score.label, href: link({ view: "documents", folder: found.folder, task: score.task, metric: score.metric, cells: [page.cell] }) }) },
      { title: "Metric", value: ({ score }) => score.metric, width: 110 },
      { title: "Score", value: ({ score }) => score.value, align: "right", show: (row) => score(row.score.value, { percent: !!percent(row.score) }) },
      { title: "± SE", value: ({ score }) => score.stderr, align: "right", show: (row) => score(row.score.stderr, { percent: !!percent(row.score) }) },
      { title: "Lost", value: flip("right_to_wrong"), align: "right", note: "right before, wrong now" },
      { title: "Gained", value: flip("wrong_to_right"), align: "right", note: "wrong before, right now" },
      { title: "Mean KL", value: ({ damage }) => damage?.distributions?.kl.mean, align: "right", show: ({ damage }) => number(damage?.distributions?.kl.mean) },
      { title: "KL p99", value: ({ damage }) => damage?.distributions?.kl.p99, align: "right", show: ({ damage }) => number(damage?.distributions?.kl.p99) },
      { title: "Documents", value: ({ score }) => score.documents, align: "right" },
    ];
  }, [found, page]);
  return <Grid title="Tasks" name={`${page.cell}-tasks`} method="flips" rows={rows} columns={columns}
    note={page.damage?.reason ? `Damage is not to be had: ${page.damage.reason}` : "A task’s name leads to its documents."} />;
}

function Modules({ page }: { page: any }) {
  const modules: any[] = page.audit?.modules ?? [];
  const bars = (title: string, name: string) => {
    const draw = (width: number) => plot({
      width, height: 46 + 13 * modules.length, marginLeft: Math.min(250, width / 2), marginTop: 26,
      x: { label: null, axis: "top", grid: true, ticks: 4 }, y: { domain: modules.map((one) => one.name), label: null, tickSize: 0, tickFormat: (text: string) => text.replace(/^model\.layers\./, "") },
      marks: [Plot.barX(modules, { x: name, y: "name", fill: "var(--accent)", insetTop: 1, insetBottom: 1, ...say((one) => `${one.name}: ${number(one[name])}`), tip: { fill: "var(--paper)" } }), Plot.ruleX([0])],
    });
    return <Figure title={title} name={`${page.cell}-${name}`} method="audit" draw={draw} rows={modules.map((one) => ({ layer: one.name, [name]: one[name] }))} />;
  };
  const inputs: any[] = page.audit?.activations?.modules ?? [];
  const figures = useMemo(() => [bars("Weight error by layer", "weight_error"), bars("Bits per weight by layer", "bits_per_weight"), bars("Levels by layer", "levels")], [page]);
  if (!modules.length) return null;
  return (
    <details class="fold"><summary>Layer by layer ({modules.length} layers)</summary>
      <div class="columns three">{figures}</div>
      {inputs.length > 0 && <Grid title="What the layers take in" name="inputs" rows={inputs} columns={INPUTS} />}
    </details>
  );
}

const INPUTS: GridColumn[] = [
  { title: "Layer", value: (one) => one.name, grow: 3, width: 200 },
  { title: "Error", value: (one) => one.error, align: "right", show: (one) => number(one.error) },
  { title: "Clipped", value: (one) => one.clipped, align: "right", show: (one) => number(one.clipped) },
  { title: "Levels", value: (one) => one.levels, align: "right" },
];

function Settings({ found, page, beside, other }: { found: Overview; page: any; beside: any; other: string }) {
  const rows = useMemo(() => {
    const theirs: Record<string, string> = beside?.key_parts ?? {};
    const names = [...new Set([...Object.keys(page.key_parts), ...Object.keys(theirs)])];
    return names.map((name) => ({ name, a: page.key_parts[name] ?? "(absent)", b: theirs[name] ?? "(absent)" })).filter((row) => !beside || row.a !== row.b);
  }, [page, beside]);
  const columns = useMemo((): GridColumn[] => [
    { title: "Part of the key", value: (row) => row.name, width: 190, grow: 2 },
    { title: page.cell, value: (row) => row.a, grow: 3, width: 150, show: (row) => ({ text: row.a, title: row.a }) },
    ...(beside ? [{ title: other, value: (row: any) => row.b, grow: 3, width: 150, show: (row: any) => ({ text: row.b, title: row.b }) }] : []),
  ], [page, beside]);
  return (
    <>
      <label class="choice">What differs from{" "}
        <select value={other} onChange={(event) => change({ other: event.currentTarget.value })}>
          <option value="">(all settings)</option>
          {found.cells.filter((one) => one.documents && one.cell !== page.cell).map((one) => <option>{one.cell}</option>)}
        </select>
      </label>
      <Grid title={beside ? "Key parts that differ" : "Settings: what the key is of"} name={`${page.cell}-key`} rows={rows} columns={columns} height={420} />
    </>
  );
}
