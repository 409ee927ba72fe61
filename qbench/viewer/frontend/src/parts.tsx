// A figure and a table, each with its help and downloads; the libraries draw them.
import * as Plot from "@observablehq/plot";
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import {
  FilterModule, FormatModule, InteractionModule, ResizeTableModule, SortModule, Tabulator,
  type ColumnDefinition,
} from "tabulator-tables";
import { csv, save, svg, type Row } from "./download";
import { Help, type Notes } from "./methods";

Tabulator.registerModule([FilterModule, FormatModule, InteractionModule, ResizeTableModule, SortModule]);

/** `method`: a section of docs/methods.md; `notes`: what columns or values mean. The "?" shows both. */
interface Titled { title: string; method?: string; notes?: Notes; note?: ComponentChildren; name: string }

function Head({ title, method, notes, name, rows, figure }: Titled & { rows: () => Row[]; figure?: () => Element }) {
  return (
    <header class="part">
      <div class="title"><h2>{title}</h2><Help title={title} method={method} notes={notes} /></div>
      <span class="downloads" role="group" aria-label={`Download ${name}`}>
        {figure && <button onClick={() => save(`${name}.svg`, svg(figure()), "image/svg+xml")}>SVG</button>}
        <button onClick={() => save(`${name}.csv`, csv(rows()), "text/csv")}>CSV</button>
      </span>
    </header>
  );
}

interface Mark { node: Element; text: string }

/** What each mark of a figure says, to the pointer and to a screen reader. */
export const say = (text: (row: any) => string) => ({ title: text, ariaLabel: text });

/** Turn the links of a drawing into marks with `data-href`, so that the keyboard passes it in one stop; return the marks that have a text. */
function unlink(box: Element, title: string): Mark[] {
  for (const anchor of box.querySelectorAll("svg a")) {
    const href = anchor.getAttribute("href") ?? anchor.getAttributeNS("http://www.w3.org/1999/xlink", "href");
    for (const child of anchor.children) child.setAttribute("data-href", href ?? "");
    anchor.replaceWith(...anchor.childNodes);
  }
  const marks: Mark[] = [];
  for (const node of box.querySelectorAll("svg [aria-label]")) { // of a picture the parts have no names of their own
    const text = node.getAttribute("aria-label")!;
    if (node.tagName !== "g") marks.push({ node, text });
    node.removeAttribute("aria-label");
    node.setAttribute("data-label", text);
  }
  const drawings = [...box.querySelectorAll("svg")];
  drawings.forEach((drawing) => drawing.setAttribute("aria-hidden", "true"));
  const drawing = drawings.at(-1);
  drawing?.removeAttribute("aria-hidden");
  drawing?.setAttribute("role", "img");
  drawing?.setAttribute("aria-label", title);
  return marks;
}

/** Go where the mark at `node` leads, if anywhere. */
function open(node: Element): void {
  const href = node.closest("[data-href]")?.getAttribute("data-href");
  if (href) location.hash = href;
}

/** `draw` makes a figure for a width in pixels; `rows` are the numbers in it. */
export function Figure({ rows, draw, ...titled }: Titled & { rows: Row[]; draw: (width: number) => Element }) {
  const { title, note } = titled;
  const box = useRef<HTMLDivElement>(null);
  const marks = useRef<Mark[]>([]);
  const [width, setWidth] = useState(0);
  const [current, setCurrent] = useState(-1);
  useEffect(() => {
    const watcher = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watcher.observe(box.current!);
    return () => watcher.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (!width) return;
    box.current!.replaceChildren(draw(width));
    marks.current = unlink(box.current!, title);
    setCurrent(-1);
  }, [width, draw]);
  useLayoutEffect(() => {
    marks.current.forEach((mark, index) => mark.node.toggleAttribute("data-current", index === current));
    marks.current[current]?.node.scrollIntoView?.({ block: "nearest", inline: "nearest" });
  }, [current]);
  const pressed = (event: KeyboardEvent) => {
    const last = marks.current.length - 1;
    const next = { ArrowRight: current + 1, ArrowDown: current + 1, ArrowLeft: current - 1, ArrowUp: current - 1, Home: 0, End: last }[event.key];
    if (next !== undefined) { event.preventDefault(); setCurrent(Math.max(0, Math.min(last, next))); }
    if (event.key === "Enter" && marks.current[current]) open(marks.current[current].node);
  };
  return (
    <figure class="card">
      <Head {...titled} rows={() => rows} figure={() => box.current!} />
      <div ref={box} class="drawing" role="application" tabIndex={0} onKeyDown={pressed} onClick={(event) => open(event.target as Element)}
        aria-label={`${title}. Arrow keys go from point to point, Enter opens what is behind one.`} />
      <output class="says">{marks.current[current]?.text}</output>
      {note && <figcaption>{note}</figcaption>}
    </figure>
  );
}

/** Plot's options that all figures share. */
export const plot = (options: Plot.PlotOptions) =>
  Plot.plot({ style: { background: "transparent", fontSize: "12px", overflow: "visible" }, ...options });

export type Shown = string | { text: string; href?: string; tone?: string; title?: string };
/** `note`: what the column's numbers are, with their unit; it stands in the table's "?". `save`: what the CSV file has of it, if that is more than its value. */
export interface GridColumn {
  title: string; value: (row: any) => any; show?: (row: any) => Shown;
  align?: "left" | "right"; width?: number; grow?: number; note?: string; save?: (row: any) => Row;
}

function element(shown: Shown): HTMLElement {
  const { text, href, tone, title } = typeof shown === "string" ? { text: shown } as Exclude<Shown, string> : shown;
  const made = document.createElement(href ? "a" : "span");
  made.textContent = text;
  if (href) (made as HTMLAnchorElement).href = href;
  if (tone) made.className = tone;
  if (title) made.title = title;
  return made;
}

const SCROLLED = 24; // rows: a longer table scrolls, and says which of its rows are in sight

/** A table that draws only the rows in sight; all that it shows is text, never markup. A click on a row follows its first link. */
export function Grid({ rows, columns, height = 640, sort, onSort, ...titled }: Titled & {
  rows: any[]; columns: GridColumn[]; height?: number; sort?: string; onSort?: (sort: string) => void;
}) {
  const box = useRef<HTMLDivElement>(null);
  const [seen, setSeen] = useState("");
  const scrolls = rows.length > SCROLLED;
  useEffect(() => {
    const definitions = columns.map((column, index): ColumnDefinition => ({
      title: column.title, field: `c${index}`, hozAlign: column.align ?? "left", headerHozAlign: column.align ?? "left",
      widthGrow: column.grow ?? 1, minWidth: column.width ?? 80, sorter: (a: any, b: any, _a: any, _b: any, _column: any, way: string) => compare(a, b, way),
      titleFormatter: () => Object.assign(document.createElement("span"), { textContent: column.title, title: column.note || column.title }),
      formatter: (cell) => element((cell.getData() as any).shown[index]()),
    }));
    const [by, way] = (sort ?? "").split(" ");
    const table = new Tabulator(box.current!, {
      data: rows.map((row) => ({
        ...Object.fromEntries(columns.map((column, index) => [`c${index}`, column.value(row)])),
        shown: columns.map((column) => () => column.show?.(row) ?? String(column.value(row) ?? "–")),
      })),
      columns: definitions, layout: "fitColumns", height: scrolls ? height : undefined,
      initialSort: definitions.some((column) => column.field === by) ? [{ column: by, dir: way === "desc" ? "desc" : "asc" }] : [],
      placeholder: "No rows.",
      // a virtual table is drawn anew when it comes into sight, and a click at that moment is lost
      renderVertical: scrolls ? "virtual" : "basic",
    });
    let ready = false;
    const look = () => {
      const holder = box.current?.querySelector(".tabulator-tableholder");
      if (!ready || !holder) return;
      const places = scrolls ? table.getRows("visible").map((row) => Number(row.getPosition())) : [];
      const wide = holder.scrollWidth > holder.clientWidth + 2;
      setSeen([
        places.length && `Rows ${Math.min(...places)} to ${Math.max(...places)} of ${rows.length.toLocaleString("en-US")}; scroll for the others.`,
        wide && "Scroll sideways for more columns.",
      ].filter(Boolean).join(" "));
    };
    table.on("tableBuilt", () => {
      box.current?.querySelectorAll<HTMLElement>(".tabulator-col[role=columnheader]").forEach((head) => {
        head.tabIndex = 0;
        head.onkeydown = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); head.click(); } };
      });
      // the rows belong to the part that scrolls, which the keyboard reaches
      box.current?.removeAttribute("aria-owns");
      box.current?.querySelector(".tabulator-tableholder")?.setAttribute("role", "rowgroup");
      box.current?.querySelector(".tabulator-table")?.setAttribute("role", "none");
      ready = true;
      look();
    });
    table.on("rowClick", (event, row) => {
      const link = row.getElement().querySelector<HTMLAnchorElement>("a[href]");
      if (link && !(event.target as Element).closest("a") && !getSelection()?.toString()) link.click();
    });
    table.on("scrollVertical", look);
    table.on("dataSorted", (sorters) => {
      if (ready && onSort && sorters[0]) onSort(`${sorters[0].field} ${sorters[0].dir}`);
    });
    return () => table.destroy();
  }, [rows, columns]);
  const saved = () => rows.map((row): Row => Object.assign({}, ...columns.map((column) => column.save?.(row) ?? { [column.title]: column.value(row) ?? null })));
  const notes = [...titled.notes ?? [], ...columns.flatMap(({ title, note }): Notes => (note ? [[title, note]] : []))];
  return (
    <section class="card">
      <Head {...titled} notes={notes} rows={saved} />
      {titled.note && <p class="note">{titled.note}</p>}
      <div class={seen ? "scrolls" : ""}><div ref={box} aria-label={titled.title} /></div>
      {seen && <p class="note end">{seen}</p>}
    </section>
  );
}

/** Numbers by size, then words; what is missing comes last, up or down. */
export function compare(a: any, b: any, way: string): number {
  const missing = [a, b].map((value) => Number(value === null || value === undefined || value === ""));
  if (missing[0] || missing[1]) return (missing[0] - missing[1]) * (way === "desc" ? -1 : 1);
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

/** Names with their values, each with a note for the "?" or none; those without a value are left out. */
export function Facts({ title, method, values }: { title: string; method?: string; values: [name: string, value: ComponentChildren, note?: string][] }) {
  const shown = values.filter(([, value]) => value !== null && value !== undefined && value !== "");
  if (!shown.length) return null;
  return (
    <section class="card">
      <div class="title"><h2>{title}</h2><Help title={title} method={method} notes={shown.flatMap(([name, , note]): Notes => (note ? [[name, note]] : []))} /></div>
      <dl>{shown.map(([name, value]) => <><dt>{name}</dt><dd>{value}</dd></>)}</dl>
    </section>
  );
}

export const Failure = ({ text }: { text: string }) => <p class="failure" role="alert">{text}</p>;
