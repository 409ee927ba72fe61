// A task's documents, side by side for several cells; then one document.
import { diffWordsWithSpace } from "diff";
import { useMemo } from "preact/hooks";
import { useData, type Cell, type Documents, type Overview, type Sample, type Texts, type Tokens } from "./data";
import { compare, Failure, Facts, Grid, type GridColumn, type Shown } from "./parts";
import { Help, type Notes } from "./methods";
import { change, link, type State } from "./state";
import { nats, number } from "./units";

interface Props { overview: Overview; state: State; folder: number; round: number }
interface Request { request: number; logLikelihood: number | null; greedy: boolean; answer: string | null; filter: string | null; cut: number }
/** One cell's side of a document. `right` is null where answers are neither right nor wrong. */
interface Side { values: Record<string, number>; right: boolean | null; requests: Request[]; kl: number | null }
type Fate = "kept" | "lost" | "gained" | "wrong" | "";
interface Pair { before: Side | null; after: Side | null; fate: Fate; change: number | null }
interface DocumentRow { document: number; pairs: Pair[]; answers: string[]; text: string }

const ASKED: Notes = [
  ["before, after", "Log-likelihood of the continuation by the unquantized and by the quantized model, in nats."],
  ["change", "After minus before: below 0 the continuation became less likely."],
];
const TOKENS: Notes = [
  ["colour", "KL divergence at the token in nats: white at 0, full red from 1 on."],
  ["underlined", "Another token is the likeliest now, or this one is less than half as likely."],
  ["bar", "Where the cell’s own answer parts from the unquantized model’s."],
];

/** Metrics of generated answers that are neither right nor wrong. */
const OF_ANSWERS: Record<string, string> = {
  agreed_tokens: "Tokens of its own answer before it differs from the unquantized model’s.", length: "Tokens of the answer.",
  repeats: "Share of stretches of 8 tokens that stand earlier in the answer.", stops: "1: the answer ended by itself.",
};
const FATES: Record<Exclude<Fate, "">, string> = { kept: "kept right", lost: "lost", gained: "gained", wrong: "both wrong" };

function sides(payload: Documents | null, metric: string): Map<number, Side> {
  const made = new Map<number, Side>();
  if (!payload || payload.error) return made;
  const { document, metric: metrics, value, weight } = payload.outcomes as Record<string, any[]>;
  const binary = new Map<string, boolean>();
  document?.forEach((_, row) => binary.set(metrics[row], (binary.get(metrics[row]) ?? true) && (value[row] === 0 || value[row] === 1) && weight[row] === 1));
  const side = (number: number) => made.get(number) ?? made.set(number, { values: {}, right: null, requests: [], kl: null }).get(number)!;
  document?.forEach((number: number, row: number) => {
    side(number).values[metrics[row]] = value[row];
    if (metrics[row] === metric && binary.get(metric) && !(metric in OF_ANSWERS)) side(number).right = value[row] === 1;
  });
  const responses = payload.responses as Record<string, any[]> | null;
  responses?.document?.forEach((number: number, row: number) => {
    side(number).requests.push({
      request: responses.request[row], logLikelihood: responses.log_likelihood?.[row] ?? null, greedy: responses.greedy?.[row] ?? false,
      answer: responses.answer?.[row] ?? null, filter: responses.filter?.[row] ?? null, cut: responses.cut?.[row] ?? 0,
    });
  });
  payload.kl?.document.forEach((number, row) => { side(number).kl = payload.kl!.kl[row]; });
  return made;
}

const likeliest = (side: Side | null) =>
  side?.requests.filter((request) => request.logLikelihood !== null).sort((a, b) => b.logLikelihood! - a.logLikelihood!)[0]?.request;

function pair(before: Side | null, after: Side | null): Pair {
  const [was, is] = [before?.right ?? null, after?.right ?? null];
  const fate: Fate = is === null ? "" : was === null ? (is ? "kept" : "wrong") : was ? (is ? "kept" : "lost") : is ? "gained" : "wrong";
  const of = likeliest(before);
  const at = (side: Side | null) => side?.requests.find((request) => request.request === of)?.logLikelihood ?? null;
  const [old, now] = [at(before), at(after)];
  return { before, after, fate, change: old === null || now === null ? null : now - old };
}

/** What a side answered: what it wrote, or the choice that `metric` takes; null if record and texts do not say. */
function answerOf(side: Side, metric: string, texts?: string[][]): string | null {
  const written = side.requests.filter((request) => request.answer !== null).at(-1); // what a filter took comes last
  if (written) return written.answer;
  const choices = side.requests.filter((request) => request.logLikelihood !== null);
  const text = (request: number) => texts?.[request]?.slice(1).join(" ").trim() ?? "";
  if (choices.length < 2) return (choices[0]?.greedy && text(choices[0].request)) || null;
  const perCharacter = metric.endsWith("_norm");
  if (perCharacter && !texts) return null;
  const value = (choice: Request) => choice.logLikelihood! / (perCharacter ? Math.max(1, text(choice.request).length) : 1);
  const { request } = choices.reduce((best, choice) => (value(choice) > value(best) ? choice : best));
  return text(request) || `choice ${request + 1}`;
}

/** `yes → no`, or one answer if both sides gave the same; "" if neither is in the record. */
function said(of: Pair, metric: string, texts?: string[][]): string {
  const [before, after] = [of.before, of.after].map((side) => side && (answerOf(side, metric, texts)?.replace(/\s+/g, " ").slice(0, 60) ?? "?"));
  if ((before ?? "?") === "?" && after === "?") return "";
  return before === null || before === after ? after! : `${before} → ${after}`;
}

/** A document's prompt, which its requests may share, and what they continue it with. */
const textOf = (requests: string[][]) => requests.every((request) => request[0] === requests[0][0])
  ? [requests[0][0], ...requests.map((request) => request.slice(1).join(" "))].filter(Boolean).join(" ¦ ") : requests.flat().join(" ¦ ");

function NoTask({ overview, task }: { overview: Props["overview"]; task: string }) {
  const group = overview.lines.some((line) => line.task === task);
  return <Failure text={group ? `${task} is a group: its documents are those of its tasks.` : `There is no task ${task} in ${overview.folder}.`} />;
}

/** The rows of a task for the state's cells, and what they were made of. */
function useRows({ overview, state, folder, round }: Props) {
  const task = overview.tasks.findIndex((item) => item.name === state.task);
  const lines = overview.lines.filter((line) => line.task === state.task);
  const metric = state.metric && lines.some((line) => line.metric === state.metric) ? state.metric : lines[0]?.metric ?? "";
  // Up to four cells side by side, and the unquantized cell of each cell's checkpoint.
  const chosen = state.cells.slice(0, 4).map((name) => overview.cells.find((cell) => cell.cell === name));
  const payload = (cell?: { cell: string; documents?: string[] }) =>
    useData<Documents>(cell?.documents?.includes("outcomes") && task >= 0 ? `${folder}/documents/${overview.cells.findIndex((item) => item.cell === cell.cell)}/${task}` : null, round);
  const base = (cell?: { checkpoint: string; quantized: boolean }) =>
    cell?.quantized ? overview.cells.find((item) => item.cell === `${cell.checkpoint}/${overview.unquantized}`) : undefined;
  const after = [0, 1, 2, 3].map((place) => payload(chosen[place]));
  const before = [0, 1, 2, 3].map((place) => payload(base(chosen[place])));
  const texts = useData<Texts>(task >= 0 ? `${folder}/texts/${task}` : null, round);
  const cells = chosen.filter((cell) => cell !== undefined);
  const errors = [...after, ...before].flatMap((item) => (item?.error ? [item.error] : []));
  const waiting = cells.some((cell, place) => cell.documents?.includes("outcomes") && !after[place]);
  const rows = useMemo((): DocumentRow[] => {
    const now = cells.map((_, place) => sides(after[place], metric));
    const was = cells.map((_, place) => sides(before[place], metric));
    const numbers = [...new Set(now.flatMap((side) => [...side.keys()]))].sort((a, b) => a - b);
    return numbers.map((document) => {
      const requests = texts?.texts?.[document];
      const pairs = cells.map((_, place) => pair(was[place].get(document) ?? null, now[place].get(document) ?? null));
      return { document, pairs, answers: pairs.map((item) => said(item, metric, requests)), text: requests ? textOf(requests) : "" };
    });
  }, [...after, ...before, texts, metric, state.cells.join()]);
  const columns = useMemo(() => gridColumns(state, rows), [rows, state.show, state.search, metric]);
  const listed = useMemo(() => listOf(rows, state), [rows, state.show, state.search]);
  return { task, lines, metric, cells, errors, waiting, rows, columns, listed, texts, after };
}

function gridColumns(state: State, rows: DocumentRow[]): GridColumn[] {
  const any = (has: (item: Pair) => boolean) => rows.some((row) => row.pairs.some(has));
  const titled = (title: string, cell: string) => (state.cells.length > 1 ? `${title} · ${cell}` : title);
  const each = (title: string, note: string, value: (item: Pair) => any, show: (item: Pair) => Shown, more: Partial<GridColumn> = { align: "right" }): GridColumn[] =>
    state.cells.map((cell, place) => ({
      title: titled(title, cell), note, ...more, value: (row: DocumentRow) => row.pairs[place] && value(row.pairs[place]),
      show: (row: DocumentRow) => (row.pairs[place] ? show(row.pairs[place]) : "–"),
    }));
  const metric = state.metric || Object.keys(rows[0]?.pairs[0]?.after?.values ?? {})[0] || "";
  const [title, text] = logs(metric) ? (["Log-likelihood, nats", nats] as const) : (["Score", number] as const);
  const score = (item: Pair) => item.after?.values[metric] ?? null;
  const answers = state.cells.flatMap((cell, place): GridColumn[] => (rows.some((row) => row.answers[place]) ? [{
    title: titled("Said, before → after", cell), note: SAID, grow: 2, width: 130, value: (row) => row.answers[place], show: (row) => row.answers[place] || "–",
  }] : []));
  return [
    { title: "Document", value: (row) => row.document, width: 96, note: "Its number in the task’s data, from 0.", show: (row) => ({ text: String(row.document), href: link({ ...state, view: "document", document: String(row.document) }) }) },
    ...(any((item) => item.fate !== "")
      ? each("Answer", "kept right, lost, gained or both wrong: the quantized cell beside the unquantized one.", (item) => item.fate, ({ fate }) => (fate ? { text: FATES[fate], tone: fate } : "–"), { width: 100 })
      : each(title, "This cell’s value of the chosen metric.", score, (item) => text(score(item)))),
    ...answers,
    ...(any((item) => item.change !== null) ? each("Change, nats", "Change of the log-likelihood of the continuation that the unquantized cell found likeliest.", (item) => item.change, (item) => nats(item.change)) : []),
    ...(any((item) => item.after?.kl != null) ? each("KL, nats", "KL divergence from the unquantized model per token, mean over the document’s scored tokens.", (item) => item.after?.kl, (item) => number(item.after?.kl, 3)) : []),
    ...(rows.some((row) => row.text) ? [{ title: "Text", value: (row: DocumentRow) => row.text, grow: 5, width: 160, show: (row: DocumentRow) => row.text.slice(0, 160) }] : []),
  ];
}

const SAID = "The choice that was likeliest, or the answer that was written; ? is not in the record.";
const NOT_RECORDED = "What was said instead is not in the record: scoring keeps the log-likelihood of the expected text and whether each of its tokens was the likeliest, not which other token was. A task that generates, as in recipes/generation.yaml, keeps the words.";

function listOf(rows: DocumentRow[], state: State): DocumentRow[] {
  const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
  return rows.filter((row) =>
    (!state.show || row.pairs.some((item) => item.fate === state.show)) &&
    words.every((word) => String(row.document) === word || row.text.toLowerCase().includes(word) || row.answers.some((answer) => answer.toLowerCase().includes(word)) || row.pairs.some((item) => item.after?.requests.some((request) => request.answer?.toLowerCase().includes(word)))));
}

export function DocumentsPage(props: Props) {
  const { overview, state } = props;
  const { task, lines, metric, cells, errors, waiting, rows, columns, listed, texts } = useRows(props);
  if (task < 0) return <NoTask overview={overview} task={state.task} />;
  const count = (fate: string) => rows.filter((row) => row.pairs.some((item) => item.fate === fate)).length;
  return (
    <>
      <p class="path"><a rel="up" href={link({ folder: overview.folder })}>{overview.folder}</a> / <strong>{overview.tasks[task].label}</strong> / {cells.map((cell, place) => <>{place > 0 && " and "}<a href={link({ view: "cell", folder: overview.folder, cells: [cell.cell] })}>{cell.cell}</a></>)}</p>
      {[...new Set(errors)].map((error) => <Failure text={error} />)}
      <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
        <label>Metric <select value={metric} onChange={(event) => change({ metric: event.currentTarget.value })}>{lines.filter((line, place) => lines.findIndex((item) => item.metric === line.metric) === place).map((line) => <option value={line.metric}>{line.metric_title}</option>)}</select></label>
        <label>Beside <select value="" onChange={(event) => change({ cells: [...state.cells, event.currentTarget.value] })}><option value="">add a cell…</option>{overview.cells.filter((cell) => cell.documents && !state.cells.includes(cell.cell)).map((cell) => <option>{cell.cell}</option>)}</select></label>
        {state.cells.length > 1 && state.cells.map((cell) => <button type="button" class="chip" aria-label={`Without ${cell}`} onClick={() => change({ cells: state.cells.filter((name) => name !== cell) })}>{cell} ✕</button>)}
        <span role="group" aria-label="Show documents">
          {count("kept") + count("wrong") + count("lost") + count("gained") > 0 && [["", "all"] as const, ...Object.entries(FATES)].map(([fate, title]) => (
            <button type="button" aria-pressed={state.show === fate} class={fate} onClick={() => change({ show: fate })}>{title} {number(fate ? count(fate) : rows.length)}</button>
          ))}
        </span>
        <input type="search" aria-label="Search texts and numbers" placeholder="number or words" value={state.search} onInput={(event) => change({ search: event.currentTarget.value })} />
      </form>
      {waiting ? <p role="status">Reading…</p> : (
        <Grid title={`${number(listed.length)} of ${number(rows.length)} documents`} name={`${state.task}-documents`} method="flips" rows={listed} columns={columns} height={680} sort={state.sort} onSort={(sort) => change({ sort })}
          note={<>Before is the unquantized cell of the same checkpoint. {cells.length > 1 && "A document is counted if one of the cells has it so. "}{state.show === "lost" && listed.every((row) => row.answers.every((answer) => answer === "" || answer.endsWith("?"))) && `${NOT_RECORDED} `}{texts ? texts.missing ?? texts.error : "Reading the texts…"}</>} />
      )}
    </>
  );
}

export function DocumentPage(props: Props) {
  const { overview, state, folder, round } = props;
  const { task, cells, errors, waiting, rows, columns, listed, texts, after } = useRows(props);
  const document = Number(state.document);
  const row = rows.find((item) => item.document === document);
  const order = useMemo(() => {
    const [field, way] = state.sort.split(" ");
    const by = columns[Number(field.slice(1))];
    if (!field || !by) return listed;
    const sign = way === "desc" ? -1 : 1;
    return [...listed].sort((a, b) => sign * compare(by.value(a), by.value(b), way));
  }, [listed, columns, state.sort]);
  if (task < 0) return <NoTask overview={overview} task={state.task} />;
  if (waiting) return <p role="status">Reading…</p>;
  const place = order.findIndex((item) => item.document === document);
  const to = (other?: DocumentRow) => other && link({ ...state, document: String(other.document) });
  return (
    <>
      <p class="path">
        <a href={link({ folder: overview.folder })}>{overview.folder}</a> / <a rel="up" href={link({ ...state, view: "documents", document: "" })}>{overview.tasks[task].label}</a> / <strong>document {document}</strong>
        <span class="turn">{place > 0 && <a rel="prev" href={to(order[place - 1])}>← previous</a>} {place >= 0 && order[place + 1] && <a rel="next" href={to(order[place + 1])}>next →</a>}</span>
      </p>
      {[...new Set(errors)].map((error) => <Failure text={error} />)}
      {!row ? <Failure text={`There is no document ${state.document} here.`} /> : (
        <>
          <div class="columns">{row.pairs.map((item, index) => <Fates key={index} cell={cells[index].cell} of={item} said={row.answers[index]} />)}</div>
          <Requests row={row} cells={cells.map((cell) => cell.cell)} texts={texts?.texts?.[document]} target={texts?.targets?.[document] ?? null} missing={texts ? texts.missing ?? texts.error : "Reading the texts…"} />
          {row.pairs.map((item, index) => {
            const cell = cells[index];
            const read = cell.quantized && after[index]?.by_token.includes(document);
            return (
              <>
                {!(read && state.task === "answers") && <Answers cell={cell.cell} of={item} />}
                {read && <TokenView key={cell.cell} overview={overview} cell={cell} of={item} folder={folder} task={task} document={state.document} round={round} />}
              </>
            );
          })}
        </>
      )}
    </>
  );
}

const logs = (metric: string) => metric.includes("perplexity");
const before = (of: Pair, metric: string, text: (value: number) => string) =>
  [...(of.before ? [of.before] : []), of.after!].map((side) => text(side.values[metric])).join(" → ");

const Fates = ({ cell, of, said }: { cell: string; of: Pair; said: string }) => (
  <Facts title={cell} values={[
    ["Answer", of.fate && <span class={of.fate}>{FATES[of.fate]}</span>, "The quantized cell beside the unquantized one."],
    ["Said", said, SAID],
    ...Object.keys(of.after?.values ?? {}).filter((name) => !name.startsWith("byte") && !name.startsWith("bits")).map((name): [string, string, string] => logs(name)
      ? [`${name}: log-likelihood`, `${before(of, name, nats)} nats`, "Of the document’s scored text, unquantized → quantized."] : [name.replaceAll("_", " "), before(of, name, number), OF_ANSWERS[name] ?? "This document’s value of the metric, unquantized → quantized."]),
    ["KL", of.after?.kl == null ? null : `${number(of.after.kl)} nats per token`, "KL divergence from the unquantized model, mean over the document’s scored tokens."],
  ]} />
);

/** Prompt and choices with log-likelihoods before and after; a shared prompt is shown once. */
function Requests({ row, cells, texts, target, missing }: { row: DocumentRow; cells: string[]; texts?: string[][]; target: number | string | null; missing?: string }) {
  const requests = row.pairs.flatMap((item) => [...(item.after?.requests ?? []), ...(item.before?.requests ?? [])]);
  const scored = [...new Set(requests.filter((item) => item.logLikelihood !== null).map((item) => item.request))].sort((a, b) => a - b);
  const shared = texts && texts.length > 0 && texts.every((item) => item[0] === texts[0][0]) ? texts[0][0] : null;
  const continuation = (request: number) => texts?.[request] && (shared === null ? texts[request] : texts[request].slice(1)).join(" ⟶ ");
  const mark = (side: Side | null, request: number) => (side && side.requests.length > 1 && likeliest(side) === request ? " likeliest" : "");
  const lost = scored.length === 1 && row.pairs.some((item) => item.after?.requests.some((request) => request.logLikelihood !== null && !request.greedy) && item.after.right !== null);
  return (
    <section class="card">
      <div class="title"><h2>What was asked</h2>{scored.length > 0 && <Help title="What was asked" method="kl-divergence" notes={ASKED} />}</div>
      {shared !== null && <pre class="text">{shared}</pre>}
      {missing && <p class="note">{missing}</p>}
      {typeof target === "string" && <><p class="note">right answer</p><pre class="text kept">{target}</pre></>}
      {scored.length > 0 && (
        <div class="scroll"><table>
          <thead><tr><th>{texts ? "Continuation" : "Request"}</th>{cells.map((cell) => <><th class="n">{cells.length > 1 && `${cell}: `}before</th><th class="n">after</th><th class="n">change</th></>)}</tr></thead>
          <tbody>{scored.map((request) => (
            <tr class={request === target ? "right" : ""}>
              <td>{continuation(request) || (shared === null ? `request ${request}` : "the whole text")}{request === target && <span class="kept"> right answer</span>}</td>
              {row.pairs.map((item) => {
                const at = (side: Side | null) => side?.requests.find((other) => other.request === request && other.logLikelihood !== null)?.logLikelihood ?? null;
                const [before, after] = [at(item.before), at(item.after)];
                return <><td class={`n${mark(item.before, request)}`}>{nats(before)}</td><td class={`n${mark(item.after, request)}`}>{nats(after)}</td><td class="n">{before === null || after === null ? "–" : nats(after - before)}</td></>;
              })}
            </tr>))}</tbody>
        </table></div>
      )}
      {scored.length > 0 && <p class="note">Log-likelihoods in nats; {scored.length > 1 && "bold is the likeliest of its column; "}before is the unquantized cell. {lost && NOT_RECORDED}</p>}
    </section>
  );
}

function Answers({ cell, of }: { cell: string; of: Pair }) {
  const written = of.after?.requests.filter((request) => request.answer !== null) ?? [];
  if (!written.length) return null;
  return (
    <section class="card">
      <h2>{cell} wrote</h2>
      {written.map((request) => {
        const before = of.before?.requests.find((other) => other.request === request.request && other.filter === request.filter && other.answer !== null)?.answer;
        const parts = before === undefined || before === null ? [{ value: request.answer!, added: false, removed: false }] : diffWordsWithSpace(before, request.answer!);
        return (
          <>
            {request.filter && <p class="note">{request.filter} took</p>}
            <pre class="text">{parts.map((part) => part.added ? <ins>{part.value}</ins> : part.removed ? <del>{part.value}</del> : part.value)}{request.cut > 0 && ` … ${number(request.cut)} more characters`}</pre>
          </>
        );
      })}
      {of.before && <p class="note"><ins>green</ins> stands only after quantization, <del>red</del> only before.</p>}
    </section>
  );
}

/** Tokens that a cell read, coloured by its KL: a whole text, or the unquantized model's answer beside the cell's own. */
function TokenView({ overview, cell, of, folder, task, document, round }: { overview: Overview; cell: Cell; of: Pair; folder: number; task: number; document: string; round: number }) {
  const index = overview.cells.findIndex((item) => item.cell === cell.cell);
  const tokens = useData<Tokens>(`${folder}/tokens/${index}/${task}/${document}`, round);
  if (!tokens) return null;
  if (tokens.error) return <Failure text={tokens.error} />;
  const written = (side: Side | null, sample: number) => side?.requests.find((request) => request.request === sample && request.filter === null)?.answer ?? null;
  return (
    <>
      {tokens.samples.map((sample, place) => {
        const [reference, answer] = [written(of.before, place), written(of.after, place)];
        if (answer === null || reference === null) return <section class="card"><div class="title"><h2>{cell.cell}: token by token</h2><Help title={`${cell.cell}, token by token`} method="kl-divergence" notes={TOKENS} /></div><Coloured sample={sample} /></section>;
        const shared = commonLength(reference, answer);
        const suffix = tokens.samples.length > 1 ? `, sample ${place + 1}` : "";
        return (
          <div class="columns">
            <section class="card"><div class="title"><h2>{cell.checkpoint}/{overview.unquantized} answered{suffix}, read by {cell.quantizer}</h2><Help title={`The answer read by ${cell.quantizer}`} method="kl-divergence" notes={TOKENS} /></div><Coloured sample={sample} part={answer === reference ? undefined : shared} /></section>
            <section class="card"><h2>{cell.cell} answered{suffix}</h2>
              <p class="note">{answer === reference ? "The same answer." : "The bar is where the two answers part."}</p>
              <p class="tokens">{answer.slice(0, shared)}{answer !== reference && <span class="parts">{answer.slice(shared)}</span>}</p></section>
          </div>
        );
      })}
    </>
  );
}

/** The number of characters that both texts begin with. */
function commonLength(a: string, b: string): number {
  let length = 0;
  while (length < Math.min(a.length, b.length) && a[length] === b[length]) length++;
  return length;
}

/** Tokens with a background by KL; a bar before the one that holds character `part`. */
function Coloured({ sample, part }: { sample: Sample; part?: number }) {
  let start = 0;
  return (
    <>
      <p class="note">Redder: a larger KL, full at 1 nat. Underlined: another token is the likeliest now, or this one is less than half as likely. Hold the pointer over a token for its numbers.</p>
      <p class="tokens">{sample.texts.map((text, place) => {
        const [kl, change, agrees] = [sample.kl[place], sample.change[place], sample.agrees[place]];
        const parts = part !== undefined && start <= part && part < start + text.length;
        start += text.length;
        const hurt = agrees === 0 || (change !== null && change < Math.log(0.5));
        const says = [kl !== null && `KL ${number(kl, 3)} nats`, change !== null && `log-probability ${change > 0 ? "+" : ""}${nats(change)}`, agrees !== null && (agrees ? "the likeliest token is the same" : "another token is the likeliest")];
        return <span class={[hurt && "hurt", parts && "parts"].filter(Boolean).join(" ") || undefined} title={says.filter(Boolean).join(", ")} style={{ background: `color-mix(in srgb, var(--worse) ${Math.round(55 * Math.min(1, kl ?? 0))}%, transparent)` }}>{text}</span>;
      })}</p>
    </>
  );
}
