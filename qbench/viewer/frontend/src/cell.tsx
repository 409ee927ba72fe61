// One cell: scores, damage, the audit layer by layer, settings, what a run cost; and how its key
// differs from another's.
import * as Plot from "@observablehq/plot";
import { useMemo } from "preact/hooks";
import { useData, type Overview } from "./data";
import { Failure, Facts, Figure, Grid, plot, say, type GridColumn } from "./parts";
import { change, link, type State } from "./state";
import { duration, kl, klText, number, score } from "./units";

interface Props { overview: Overview; state: State; folder: number; round: number }

export function CellPage({ overview, state, folder, round }: Props) {
  const index = overview.cells.findIndex((cell) => cell.cell === state.cells[0]);
  const cell = overview.cells[index];
  const page = useData<any>(cell?.documents ? `${folder}/cell/${index}` : null, round);
  const other = overview.cells.findIndex((item) => item.cell === state.other);
  const beside = useData<any>(overview.cells[other]?.documents ? `${folder}/cell/${other}` : null, round);
  if (!cell) return <Failure text={`There is no cell ${state.cells[0] ?? ""} in ${overview.folder}.`} />;
  const top = <p class="path"><a rel="up" href={link({ folder: overview.folder })}>{overview.folder}</a> / <strong>{cell.cell}</strong> <span class={cell.status}>{cell.status}</span></p>;
  if (!cell.documents) return <>{top}<Failure text={cell.reason} /></>;
  if (!page) return <>{top}<p role="status">Reading…</p></>;
  if (page.error) return <>{top}<Failure text={page.error} /></>;
  return (
    <>
      {top}
      {page.reason && <Failure text={page.reason} />}
      <div class="columns">
        <Facts title="What ran" values={[
          ["Method", `${page.title}, ${page.precision_name}`, "The format: bits of weights (W), activations (A) and KV cache (KV)."],
          ["Attention", page.attention, "Attention function / how it was computed."],
          ["Bits per weight", number(cell.bits), "As stored, scales and zero points counted."], ["Size", cell.gib && `${number(cell.gib, 3)} GiB`, "Of all weights as stored."],
          ["KL", kl(cell) && `${klText(kl(cell))} nats per token`, "KL divergence from the unquantized model, mean over the documents of all tasks, with its 95 % interval."],
          ["Model", page.source], ["Data", page.data && `${page.data}${page.limit ? `, limit ${page.limit}` : ""}`],
          ["Begun", page.started.replace("T", " ").slice(0, 19)], ["Took", duration(page.seconds), "From loading to the record."],
          ["Machine", `${page.environment.hardware}, ${page.environment.device}`],
          ["Trained", page.training && `${page.training.recipe}, seed ${page.training.seed}`],
          ["Why", <a href={link({ view: "why", folder: overview.folder, cells: [cell.cell] })}>what its model does</a>],
        ]} />
        <Audit audit={page.audit} weights={page.precision.weights !== null} />
        <Scoring of={page.scoring} />
      </div>
      <Tasks overview={overview} page={page} />
      <Modules page={page} />
      <Grid title="Stages" name="stages" rows={page.stages} columns={STAGES} />
      <Settings overview={overview} page={page} beside={beside} other={state.other} />
    </>
  );
}

const STAGES: GridColumn[] = [
  { title: "Stage", value: (stage) => stage.name, width: 110, note: "load: the model; quantize: its weights, or reading them; audit: what was quantized, how well; evaluate: all tasks." },
  { title: "Seconds", value: (stage) => stage.seconds, align: "right", note: "Wall-clock time of the stage.", show: (stage) => stage.seconds.toFixed(1) },
  { title: "Peak memory, GiB", value: (stage) => stage.peak_memory_gib, align: "right", width: 110, note: "Of the GPU; on a CPU the process’s.", show: (stage) => stage.peak_memory_gib.toFixed(2) },
  { title: "Detail", value: (stage) => stage.detail, grow: 4, width: 120 },
];

const leak = (of: any) => `${number(of.moved)}${of.declared ? ", declared" : ""} (rounding: ${number(of.tolerance)})`;

function Audit({ audit, weights }: { audit: any; weights: boolean }) {
  if (!audit) return null;
  const percent = (share: number) => `${(100 * share).toFixed(1)} %`;
  const { activations, kv_cache: cache, batch_mates: mates, causality, heads } = audit;
  return <Facts title="Audit" method="audit" values={[
    ["Verdict", audit.passed ? "passed" : `not passed: ${audit.problems.join("; ")}`],
    ["Weights quantized", weights ? percent(audit.coverage) : "none", "Share of all weights outside embeddings and LM head."],
    ["Weight error", weights ? number(audit.weight_error) : null, "‖W′ − W‖ / ‖W‖ over all quantized matrices."],
    ["Levels", weights ? number(audit.levels) : null, "Most distinct values in one group of weights."],
    ["Logits moved by", number(audit.logits_moved), "Largest change of a logit on a probe text."],
    ["Left out", audit.left_out.join(", "), "Weight matrices that stay unquantized."],
    ["Activations", activations && `${number(activations.bits)} bits, error ${number(activations.error)}, ${percent(activations.clipped)} clipped`, "Error: ‖x′ − x‖ / ‖x‖ on a probe text. Clipped: share of values beyond the largest that their scale allows."],
    ["KV cache", cache && `error of keys ${number(cache.key_error)}, of values ${number(cache.value_error)}; ${number(cache.bytes_per_token)} bytes per token`, "Error: ‖K′ − K‖ / ‖K‖ on a probe text."],
    ["Moved by the batch", mates && leak(mates), "Largest change of a logit if the other texts of the batch change; beside it what rounding may do. Declared: the method’s own doing."],
    ["Moved by later tokens", causality && leak(causality), "Largest change of an earlier logit if the last token changes."],
    ["Heads pruned", heads && `${heads.pruned.length} of ${heads.total}`],
  ]} />;
}

function Scoring({ of }: { of: any }) {
  if (!of) return null;
  const exact = of.difference_from_exact;
  return <Facts title="Scoring" method="fast-scoring" values={[
    ["Mode", `${of.mode}, softmax in ${of.softmax_dtype}`, "exact: equal to lm-eval’s own scoring of each request alone. fast: within a stated tolerance of it."], ["Batching", of.batching],
    ["Requests", number(of.requests), "Continuations and windows that were scored."], ["Tokens", number(of.tokens), "Of the batches, padding included."],
    ["Truncated", of.truncated ? number(of.truncated) : null, "Requests longer than the context."],
    ["From exact", exact && `${number(exact.mean_per_token)} nats per token on ${number(exact.documents)} documents, ${exact.changed_answers} answers changed`, "Fast minus exact scores on a sample."],
    ["Scored exactly", Object.entries(of.exact_tasks ?? {}).map(([task, why]) => `${task}: ${why}`).join("; ")],
  ]} />;
}

function Tasks({ overview, page }: { overview: Overview; page: any }) {
  const rows = useMemo(() => page.scores.map((score: any) => ({ score, damage: page.damage?.tasks?.[score.task] })), [page]);
  const columns = useMemo((): GridColumn[] => {
    const percent = (score: any) => overview.lines.find((line) => line.task === score.task && line.metric === score.metric)?.percent;
    const flip = (name: string) => ({ score, damage }: any) => damage?.flips?.[score.metric]?.[name];
    return [
      { title: "Task", value: ({ score }) => score.label, grow: 2, width: 130, show: ({ score }) => ({ text: score.label, href: link({ view: "documents", folder: overview.folder, task: score.task, metric: score.metric, cells: [page.cell] }) }) },
      { title: "Metric", value: ({ score }) => score.metric, width: 110 },
      { title: "Score", value: ({ score }) => score.value, align: "right", note: "Accuracies in per cent, perplexities as they are.", show: (row) => score(row.score.value, { percent: !!percent(row.score) }) },
      { title: "± SE", value: ({ score }) => score.stderr, align: "right", note: "Standard error as lm-eval gives it.", show: (row) => score(row.score.stderr, { percent: !!percent(row.score) }) },
      { title: "Lost", value: flip("right_to_wrong"), align: "right", note: "Documents right in the unquantized cell and wrong here." },
      { title: "Gained", value: flip("wrong_to_right"), align: "right", note: "Documents wrong in the unquantized cell and right here." },
      { title: "Mean KL, nats", value: ({ damage }) => damage?.distributions?.kl.mean, align: "right", width: 100, note: "KL divergence from the unquantized model per token, mean over all scored tokens of the task.", show: ({ damage }) => number(damage?.distributions?.kl.mean) },
      { title: "KL p99, nats", value: ({ damage }) => damage?.distributions?.kl.p99, align: "right", width: 100, note: "The value that 99 % of the tokens stay below.", show: ({ damage }) => number(damage?.distributions?.kl.p99) },
      { title: "Documents", value: ({ score }) => score.documents, align: "right", show: ({ score }) => number(score.documents) },
    ];
  }, [overview, page]);
  return <Grid title="Tasks" name={`${page.cell}-tasks`} method="flips" rows={rows} columns={columns}
    note={page.damage?.reason ? `Damage was not measured: ${page.damage.reason}` : "A task’s name leads to its documents."} />;
}

function Modules({ page }: { page: any }) {
  const modules: any[] = page.audit?.modules ?? [];
  const bars = (title: string, name: string, note: string) => {
    const draw = (width: number) => plot({
      width, height: 46 + 13 * modules.length, marginLeft: Math.min(250, width / 2), marginTop: 26,
      x: { label: null, axis: "top", grid: true, ticks: 4 }, y: { domain: modules.map((module) => module.name), label: null, tickSize: 0, tickFormat: (text: string) => text.replace(/^model\.layers\./, "") },
      marks: [Plot.barX(modules, { x: name, y: "name", fill: "var(--accent)", insetTop: 1, insetBottom: 1, ...say((module) => `${module.name}: ${number(module[name])}`), tip: { fill: "var(--paper)" } }), Plot.ruleX([0])],
    });
    return <Figure title={title} name={`${page.cell}-${name}`} method="audit" notes={[[name.replaceAll("_", " "), note]]} draw={draw} rows={modules.map((module) => ({ layer: module.name, [name]: module[name] }))} />;
  };
  const inputs: any[] = page.audit?.activations?.modules ?? [];
  const figures = useMemo(() => [bars("Weight error by layer", "weight_error", "‖W′ − W‖ / ‖W‖."), bars("Bits per weight by layer", "bits_per_weight", "As stored, scales and zero points counted."), bars("Levels by layer", "levels", "Most distinct values in one group.")], [page]);
  if (!modules.length) return null;
  return (
    <details class="fold"><summary>Layer by layer ({modules.length} layers)</summary>
      <div class="columns three">{figures}</div>
      {inputs.length > 0 && <Grid title="What the layers take in" name="inputs" rows={inputs} columns={INPUTS} />}
    </details>
  );
}

const INPUTS: GridColumn[] = [
  { title: "Layer", value: (input) => input.name, grow: 3, width: 200 },
  { title: "Error", value: (input) => input.error, align: "right", note: "‖x′ − x‖ / ‖x‖ on a probe text.", show: (input) => number(input.error) },
  { title: "Clipped", value: (input) => input.clipped, align: "right", note: "Share of values beyond the largest that their scale allows.", show: (input) => number(input.clipped) },
  { title: "Levels", value: (input) => input.levels, align: "right", note: "Most distinct values under one scale." },
];

function Settings({ overview, page, beside, other }: { overview: Overview; page: any; beside: any; other: string }) {
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
          {overview.cells.filter((item) => item.documents && item.cell !== page.cell).map((item) => <option>{item.cell}</option>)}
        </select>
      </label>
      <Grid title={beside ? "Key parts that differ" : "Settings"} notes={[["Part of the key", "What can change a score: a cell with the same key is not computed again."]]} name={`${page.cell}-key`} rows={rows} columns={columns} height={420} />
    </>
  );
}
