// A task's documents, side by side for several cells; then one document.
import { diffWordsWithSpace } from "diff";
import { useMemo } from "preact/hooks";
import { useData, type Documents, type Overview, type Texts, type Tokens } from "./data";
import { compare, Failure, Facts, Grid, type GridColumn } from "./parts";
import { change, link, type State } from "./state";
import { nats, number } from "./units";

interface Props { found: Overview; state: State; folder: number; round: number }
interface Request { request: number; logLikelihood: number | null; greedy: boolean; answer: string | null; filter: string | null; cut: number }
/** One cell's side of a document. `right` is null where answers are neither right nor wrong. */
interface Side { values: Record<string, number>; right: boolean | null; requests: Request[]; kl: number | null }
type Fate = "kept" | "lost" | "gained" | "wrong" | "";
interface Pair { before: Side | null; after: Side | null; fate: Fate; change: number | null }
interface DocumentRow { document: number; pairs: Pair[]; text: string }

const FATES: Record<Exclude<Fate, "">, string> = { kept: "kept right", lost: "lost", gained: "gained", wrong: "both wrong" };

function sides(payload: Documents | null, metric: string, paired: boolean): Map<number, Side> {
  const made = new Map<number, Side>();
  if (!payload || payload.error) return made;
  const { document, metric: metrics, value, weight } = payload.outcomes as Record<string, any[]>;
  const binary = new Map<string, boolean>();
  document?.forEach((_, row) => binary.set(metrics[row], (binary.get(metrics[row]) ?? true) && (paired || ((value[row] === 0 || value[row] === 1) && weight[row] === 1))));
  const side = (number: number) => made.get(number) ?? made.set(number, { values: {}, right: null, requests: [], kl: null }).get(number)!;
  document?.forEach((number: number, row: number) => {
    const one = side(number);
    one.values[metrics[row]] = value[row];
    if (metrics[row] === metric && binary.get(metric)) one.right = paired ? value[row] === weight[row] : value[row] === 1;
  });
  const asked = payload.responses as Record<string, any[]> | null;
  asked?.document?.forEach((number: number, row: number) => {
    side(number).requests.push({
      request: asked.request[row], logLikelihood: asked.log_likelihood?.[row] ?? null, greedy: asked.greedy?.[row] ?? false,
      answer: asked.answer?.[row] ?? null, filter: asked.filter?.[row] ?? null, cut: asked.cut?.[row] ?? 0,
    });
  });
  payload.kl?.document.forEach((number, row) => { side(number).kl = payload.kl!.kl[row]; });
  return made;
}

const likeliest = (side: Side | null) =>
  side?.requests.filter((one) => one.logLikelihood !== null).sort((a, b) => b.logLikelihood! - a.logLikelihood!)[0]?.request;

function pair(before: Side | null, after: Side | null): Pair {
  const [was, is] = [before?.right ?? null, after?.right ?? null];
  const fate: Fate = is === null ? "" : was === null ? (is ? "kept" : "wrong") : was ? (is ? "kept" : "lost") : is ? "gained" : "wrong";
  const of = likeliest(before);
  const at = (side: Side | null) => side?.requests.find((one) => one.request === of)?.logLikelihood ?? null;
  const [old, now] = [at(before), at(after)];
  return { before, after, fate, change: old === null || now === null ? null : now - old };
}

function NoTask({ found, task }: { found: Props["found"]; task: string }) {
  const group = found.lines.some((line) => line.task === task);
  return <Failure text={group ? `${task} is a group: its documents are those of its tasks.` : `There is no task ${task} in ${found.folder}.`} />;
}

/** The rows of a task for the state's cells, and what they were made of. */
function useRows({ found, state, folder, round }: Props) {
  const task = found.tasks.findIndex((one) => one.name === state.task);
  const lines = found.lines.filter((line) => line.task === state.task);
  const metric = state.metric && lines.some((line) => line.metric === state.metric) ? state.metric : lines[0]?.metric ?? "";
  const paired = /^(f1|matthews_corrcoef)$/.test(lines.find((line) => line.metric === metric)?.aggregation ?? "");
  // Up to four cells side by side, and the unquantized cell of each one's checkpoint.
  const wanted = state.cells.slice(0, 4).map((name) => found.cells.find((cell) => cell.cell === name));
  const payload = (cell?: { cell: string; documents?: string[] }) =>
    useData<Documents>(cell?.documents?.includes("outcomes") && task >= 0 ? `${folder}/documents/${found.cells.findIndex((one) => one.cell === cell.cell)}/${task}` : null, round);
  const base = (cell?: { checkpoint: string; quantized: boolean }) =>
    cell?.quantized ? found.cells.find((one) => one.cell === `${cell.checkpoint}/${found.unquantized}`) : undefined;
  const after = [0, 1, 2, 3].map((place) => payload(wanted[place]));
  const before = [0, 1, 2, 3].map((place) => payload(base(wanted[place])));
  const texts = useData<Texts>(task >= 0 ? `${folder}/texts/${task}` : null, round);
  const cells = wanted.filter((cell) => cell !== undefined);
  const errors = [...after, ...before].flatMap((one) => (one?.error ? [one.error] : []));
  const waiting = cells.some((cell, place) => cell.documents?.includes("outcomes") && !after[place]);
  const rows = useMemo((): DocumentRow[] => {
    const now = cells.map((_, place) => sides(after[place], metric, paired));
    const was = cells.map((_, place) => sides(before[place], metric, paired));
    const numbers = [...new Set(now.flatMap((one) => [...one.keys()]))].sort((a, b) => a - b);
    return numbers.map((document) => ({
      document,
      pairs: cells.map((_, place) => pair(was[place].get(document) ?? null, now[place].get(document) ?? null)),
      text: (texts?.texts?.[document] ?? []).flat().join(" "),
    }));
  }, [...after, ...before, texts, metric, state.cells.join()]);
  const columns = useMemo(() => gridColumns(state, rows), [rows, state.show, state.search, metric]);
  const listed = useMemo(() => listOf(rows, state), [rows, state.show, state.search]);
  return { task, lines, metric, cells, errors, waiting, rows, columns, listed, texts, after };
}

function gridColumns(state: State, rows: DocumentRow[]): GridColumn[] {
  const several = state.cells.length > 1;
  const any = (has: (one: Pair) => boolean) => rows.some((row) => row.pairs.some(has));
  const named = (title: string, cell: string) => (several ? `${title} · ${cell}` : title);
  const each = (title: string, value: (one: Pair) => any, show: (one: Pair) => any): GridColumn[] =>
    state.cells.map((cell, place) => ({
      title: named(title, cell), align: "right", value: (row: DocumentRow) => row.pairs[place] && value(row.pairs[place]),
      show: (row: DocumentRow) => (row.pairs[place] ? show(row.pairs[place]) : "–"),
    }));
  const metric = state.metric || Object.keys(rows[0]?.pairs[0]?.after?.values ?? {})[0] || "";
  const [title, text] = logs(metric) ? (["Log-likelihood", nats] as const) : (["Score", number] as const);
  const score = (one: Pair) => one.after?.values[metric] ?? null;
  return [
    { title: "Document", value: (row) => row.document, width: 96, show: (row) => ({ text: String(row.document), href: link({ ...state, view: "document", document: String(row.document) }) }) },
    ...(any((one) => one.fate !== "") ? state.cells.map((cell, place): GridColumn => ({
      title: named("Answer", cell), width: 100, value: (row) => row.pairs[place]?.fate, show: (row) => { const fate = row.pairs[place]?.fate as Fate; return fate ? { text: FATES[fate], tone: fate } : "–"; },
    })) : each(title, score, (one) => text(score(one)))),
    ...(any((one) => one.change !== null) ? each("Change, nats", (one) => one.change, (one) => nats(one.change)) : []),
    ...(any((one) => one.after?.kl != null) ? each("KL", (one) => one.after?.kl, (one) => number(one.after?.kl, 3)) : []),
    ...(rows.some((row) => row.text) ? [{ title: "Text", value: (row: DocumentRow) => row.text, grow: 5, width: 160, show: (row: DocumentRow) => row.text.slice(0, 160) }] : []),
  ];
}

function listOf(rows: DocumentRow[], state: State): DocumentRow[] {
  const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
  return rows.filter((row) =>
    (!state.show || row.pairs.some((one) => one.fate === state.show)) &&
    words.every((word) => String(row.document) === word || row.text.toLowerCase().includes(word) || row.pairs.some((one) => one.after?.requests.some((asked) => asked.answer?.toLowerCase().includes(word)))));
}

export function DocumentsPage(props: Props) {
  const { found, state } = props;
  const { task, lines, metric, cells, errors, waiting, rows, columns, listed, texts } = useRows(props);
  if (task < 0) return <NoTask found={found} task={state.task} />;
  const count = (fate: string) => rows.filter((row) => row.pairs.some((one) => one.fate === fate)).length;
  return (
    <>
      <p class="path"><a rel="up" href={link({ folder: found.folder })}>{found.folder}</a> / <strong>{found.tasks[task].label}</strong> / {cells.map((cell, place) => <>{place > 0 && " and "}<a href={link({ view: "cell", folder: found.folder, cells: [cell.cell] })}>{cell.cell}</a></>)}</p>
      {[...new Set(errors)].map((one) => <Failure text={one} />)}
      <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
        <label>Metric <select value={metric} onChange={(event) => change({ metric: event.currentTarget.value })}>{lines.filter((line, place) => lines.findIndex((one) => one.metric === line.metric) === place).map((line) => <option value={line.metric}>{line.metric_title}</option>)}</select></label>
        <label>Beside <select value="" onChange={(event) => change({ cells: [...state.cells, event.currentTarget.value] })}><option value="">add a cell…</option>{found.cells.filter((cell) => cell.documents && !state.cells.includes(cell.cell)).map((cell) => <option>{cell.cell}</option>)}</select></label>
        {state.cells.length > 1 && state.cells.map((cell) => <button type="button" class="chip" aria-label={`Without ${cell}`} onClick={() => change({ cells: state.cells.filter((one) => one !== cell) })}>{cell} ✕</button>)}
        <span role="group" aria-label="Show documents">
          {count("kept") + count("wrong") + count("lost") + count("gained") > 0 && [["", "all"] as const, ...Object.entries(FATES)].map(([fate, title]) => (
            <button type="button" aria-pressed={state.show === fate} class={fate} onClick={() => change({ show: fate })}>{title} {number(fate ? count(fate) : rows.length)}</button>
          ))}
        </span>
        <input type="search" aria-label="Search texts and numbers" placeholder="number or words" value={state.search} onInput={(event) => change({ search: event.currentTarget.value })} />
      </form>
      {waiting ? <p role="status">Reading…</p> : (
        <Grid title={`${number(listed.length)} of ${number(rows.length)} documents`} name={`${state.task}-documents`} method="flips" rows={listed} columns={columns} height={680} sort={state.sort} onSort={(sort) => change({ sort })}
          note={<>Before is the unquantized cell of the same checkpoint. {cells.length > 1 && "A document counts wherever one of the cells has it so. "}Change: of the log-likelihood of what it found likeliest. {texts ? texts.missing ?? texts.error : "Reading the texts…"}</>} />
      )}
    </>
  );
}

export function DocumentPage(props: Props) {
  const { found, state, folder, round } = props;
  const { task, cells, errors, waiting, rows, columns, listed, texts, after } = useRows(props);
  const document = Number(state.document);
  const row = rows.find((one) => one.document === document);
  const order = useMemo(() => {
    const [field, way] = state.sort.split(" ");
    const by = columns[Number(field.slice(1))];
    if (!field || !by) return listed;
    const sign = way === "desc" ? -1 : 1;
    return [...listed].sort((a, b) => sign * compare(by.value(a), by.value(b), way));
  }, [listed, columns, state.sort]);
  if (task < 0) return <NoTask found={found} task={state.task} />;
  if (waiting) return <p role="status">Reading…</p>;
  const place = order.findIndex((one) => one.document === document);
  const to = (other?: DocumentRow) => other && link({ ...state, document: String(other.document) });
  return (
    <>
      <p class="path">
        <a href={link({ folder: found.folder })}>{found.folder}</a> / <a rel="up" href={link({ ...state, view: "documents", document: "" })}>{found.tasks[task].label}</a> / <strong>document {document}</strong>
        <span class="turn">{place > 0 && <a rel="prev" href={to(order[place - 1])}>← previous</a>} {place >= 0 && order[place + 1] && <a rel="next" href={to(order[place + 1])}>next →</a>}</span>
      </p>
      {[...new Set(errors)].map((one) => <Failure text={one} />)}
      {!row ? <Failure text={`There is no document ${state.document} here.`} /> : (
        <>
          <div class="columns">{row.pairs.map((one, index) => <Fates key={index} cell={cells[index].cell} of={one} />)}</div>
          <Asked row={row} cells={cells.map((cell) => cell.cell)} texts={texts?.texts?.[document]} target={texts?.targets?.[document] ?? null} missing={texts ? texts.missing ?? texts.error : "Reading the texts…"} />
          {row.pairs.map((one, index) => <Answers key={index} cell={cells[index].cell} of={one} />)}
          {cells.filter((_, index) => after[index]?.by_token.includes(document)).map((cell) => <TokenView key={cell.cell} found={found} cell={cell.cell} folder={folder} task={task} document={state.document} round={round} />)}
        </>
      )}
    </>
  );
}

const logs = (metric: string) => metric.includes("perplexity");
const before = (of: Pair, metric: string, text: (value: number) => string) =>
  [...(of.before ? [of.before] : []), of.after!].map((side) => text(side.values[metric])).join(" → ");

const Fates = ({ cell, of }: { cell: string; of: Pair }) => (
  <Facts title={cell} values={[
    ["Answer", of.fate && <span class={of.fate}>{FATES[of.fate]}</span>],
    ...Object.keys(of.after?.values ?? {}).filter((name) => !name.startsWith("byte") && !name.startsWith("bits")).map((name): [string, string] => logs(name) ? [`${name}: log-likelihood`, before(of, name, nats)] : [name, before(of, name, number)]),
    ["KL", of.after?.kl == null ? null : `${number(of.after.kl)} nats per token`],
  ]} />
);

/** Prompt and choices with log-likelihoods before and after; a shared prompt stands once. */
function Asked({ row, cells, texts, target, missing }: { row: DocumentRow; cells: string[]; texts?: string[][]; target: number | string | null; missing?: string }) {
  const scored = [...new Set(row.pairs.flatMap((one) => [...(one.after?.requests ?? []), ...(one.before?.requests ?? [])]).filter((one) => one.logLikelihood !== null).map((one) => one.request))].sort((a, b) => a - b);
  const shared = texts && texts.length > 0 && texts.every((one) => one[0] === texts[0][0]) ? texts[0][0] : null;
  const own = (request: number) => texts?.[request] && (shared === null ? texts[request] : texts[request].slice(1)).join(" ⟶ ");
  const mark = (side: Side | null, request: number) => (side && side.requests.length > 1 && likeliest(side) === request ? " likeliest" : "");
  return (
    <section class="card">
      <h2>What was asked</h2>
      {shared !== null && <pre class="text">{shared}</pre>}
      {missing && <p class="note">{missing}</p>}
      {typeof target === "string" && <><p class="note">right answer</p><pre class="text kept">{target}</pre></>}
      {scored.length > 0 && (
        <div class="scroll"><table>
          <thead><tr><th>{texts ? "Continuation" : "Request"}</th>{cells.map((cell) => <><th class="n">{cell}: before</th><th class="n">after</th><th class="n">change</th></>)}</tr></thead>
          <tbody>{scored.map((request) => (
            <tr class={request === target ? "right" : ""}>
              <td>{own(request) || (shared === null ? `request ${request}` : "the whole text")}{request === target && <span class="kept"> right answer</span>}</td>
              {row.pairs.map((one) => {
                const at = (side: Side | null) => side?.requests.find((asked) => asked.request === request && asked.logLikelihood !== null)?.logLikelihood ?? null;
                const [before, after] = [at(one.before), at(one.after)];
                return <><td class={`n${mark(one.before, request)}`}>{nats(before)}</td><td class={`n${mark(one.after, request)}`}>{nats(after)}</td><td class="n">{before === null || after === null ? "–" : nats(after - before)}</td></>;
              })}
            </tr>))}</tbody>
        </table></div>
      )}
      <p class="note">Log-likelihoods in nats; bold is the likeliest of its column.</p>
    </section>
  );
}

function Answers({ cell, of }: { cell: string; of: Pair }) {
  const written = of.after?.requests.filter((one) => one.answer !== null) ?? [];
  if (!written.length) return null;
  return (
    <section class="card">
      <h2>{cell} wrote</h2>
      {written.map((one) => {
        const before = of.before?.requests.find((other) => other.request === one.request && other.filter === one.filter && other.answer !== null)?.answer;
        const parts = before === undefined || before === null ? [{ value: one.answer!, added: false, removed: false }] : diffWordsWithSpace(before, one.answer!);
        return (
          <>
            {one.filter && <p class="note">{one.filter} took</p>}
            <pre class="text">{parts.map((part) => part.added ? <ins>{part.value}</ins> : part.removed ? <del>{part.value}</del> : part.value)}{one.cut > 0 && ` … ${number(one.cut)} more characters`}</pre>
          </>
        );
      })}
      {of.before && <p class="note"><ins>green</ins> stands only after quantization, <del>red</del> only before.</p>}
    </section>
  );
}

/** A rolling text, each token coloured by its change or its KL. */
function TokenView({ found, cell, folder, task, document, round }: { found: Overview; cell: string; folder: number; task: number; document: string; round: number }) {
  const index = found.cells.findIndex((one) => one.cell === cell);
  const tokens = useData<Tokens>(`${folder}/tokens/${index}/${task}/${document}`, round);
  if (!tokens) return null;
  if (tokens.error) return <Failure text={tokens.error} />;
  const most = tokens.kl.reduce((a, b) => Math.max(a, b), 1e-9);
  return (
    <section class="card">
      <h2>{cell}: token by token</h2>
      <p class="note">Redder: less likely than before; bluer: likelier. Underlined: the more, the larger the KL. Hold the pointer over a token for its numbers.</p>
      <p class="tokens">{tokens.texts.map((text, place) => {
        const [kl, moved] = [tokens.kl[place], tokens.change[place]];
        const tone = moved < 0 ? "var(--worse)" : "var(--better)";
        return <span title={`change ${number(moved, 3)} nats, KL ${number(kl, 3)}`} style={{ background: `color-mix(in srgb, ${tone} ${Math.min(55, 28 * Math.abs(moved))}%, transparent)`, borderBottom: `3px solid color-mix(in srgb, var(--accent) ${Math.round((100 * kl) / most)}%, transparent)` }}>{text}</span>;
      })}</p>
    </section>
  );
}
