import { render } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { CellPage } from "./cell";
import { live, useData, watch, type Index, type Overview } from "./data";
import { DocumentPage, DocumentsPage } from "./documents";
import { Methods } from "./methods";
import { OverviewPage, ScoresPage } from "./overview";
import { Failure } from "./parts";
import { link, useAddress, type State, type View } from "./state";
import { WhyPage } from "./why";
import "tabulator-tables/dist/css/tabulator_simple.min.css";
import "./style.css";

const VIEWS: [View, string][] = [["overview", "Answer"], ["scores", "Scores"], ["why", "Why"], ["methods", "Methods"]];

function App() {
  const state = useAddress();
  const [round, setRound] = useState(0);
  useEffect(() => watch(() => setRound((last) => last + 1)), []);
  useEffect(() => keys(), []);
  const index = useData<Index>("index", round);
  const folder = Math.max(0, index?.folders.findIndex((item) => item.name === state.folder) ?? 0);
  const payload = useData<Overview>(index ? `${folder}/overview` : null, round);
  const overview = useMemo(() => payload && { ...payload, folder: index!.folders[folder].name }, [payload]);
  useEffect(() => scrollTo(0, 0), [state.view, state.cells.join(), state.document]);
  useEffect(() => {
    document.title = [state.document && `document ${state.document}`, state.task, state.cells.join(" and "), overview?.name, "qbench"].filter(Boolean).join(" · ");
  }, [state, overview]);
  return (
    <>
      <header class="top">
        <h1>{overview?.folder ?? "qbench"}</h1>
        {(index?.folders.length ?? 0) > 1 && (
          <select aria-label="Results folder" value={index!.folders[folder].name}
            onChange={(event) => { location.hash = link({ folder: event.currentTarget.value }); }}>
            {index!.folders.map((item) => <option>{item.name}</option>)}
          </select>
        )}
        <nav aria-label="Views">
          {VIEWS.map(([view, title]) => (
            <a href={link({ view, folder: state.folder })} aria-current={state.view === view ? "page" : undefined}>{title}</a>
          ))}
        </nav>
        <button class="theme" title="Light or dark (t)" aria-label="Light or dark" onClick={turn}>◐</button>
      </header>
      {live && <p class="ended" role="status">The server has ended; what was loaded stays.</p>}
      <main>{!overview ? <p role="status">Reading…</p> : overview.error ? <Failure text={overview.error} /> : <Page overview={overview} state={state} folder={folder} round={round} />}</main>
      <footer>qbench {overview?.program} · keys: 1–4 views, j and k next and previous document, u up, / search, t light or dark</footer>
    </>
  );
}

function Page({ overview, state, folder, round }: { overview: Overview; state: State; folder: number; round: number }) {
  const shared = { overview, state, folder, round };
  switch (state.view) {
    case "scores": return <ScoresPage overview={overview} />;
    case "cell": return <CellPage {...shared} />;
    case "documents": return <DocumentsPage {...shared} />;
    case "document": return <DocumentPage {...shared} />;
    case "why": return <WhyPage {...shared} />;
    case "methods": return <Methods />;
    default: return <OverviewPage overview={overview} state={state} />;
  }
}

function turn(): void {
  const root = document.documentElement;
  const dark = (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = dark ? "light" : "dark";
}

function keys(): () => void {
  const pressed = (event: KeyboardEvent) => {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)) return;
    const click = (selector: string) => document.querySelector<HTMLElement>(selector)?.click();
    if (event.key === "t") turn();
    else if (event.key === "j") click("a[rel=next]");
    else if (event.key === "k") click("a[rel=prev]");
    else if (event.key === "u") click("a[rel=up]");
    else if (event.key === "/") { event.preventDefault(); document.querySelector<HTMLElement>("input[type=search]")?.focus(); }
    else if (/^[1-4]$/.test(event.key)) click(`nav a:nth-child(${event.key})`);
  };
  addEventListener("keydown", pressed);
  return () => removeEventListener("keydown", pressed);
}

render(<App />, document.getElementById("app")!);
