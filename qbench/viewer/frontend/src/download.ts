// Tables and figures as files.
export type Row = Record<string, string | number | boolean | null | undefined>;

export function save(name: string, content: BlobPart, type: string): void {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(new Blob([content], { type }));
  anchor.download = name.replace(/[^\w.-]+/g, "_");
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10_000);
}

/** A spreadsheet computes what begins like a formula: text of that kind gets an apostrophe. */
export function csv(rows: Row[]): string {
  const cell = (value: Row[string]) => {
    if (value === null || value === undefined) return "";
    const text = typeof value === "string" && /^\s*[=+\-@]/.test(value) ? `'${value}` : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const names = Object.keys(rows[0] ?? {});
  return [names.map(cell).join(","), ...rows.map((row) => names.map((name) => cell(row[name])).join(","))].join("\n") + "\n";
}

/** A figure with the colours it has now, readable without this page's style. */
export function svg(figure: Element): string {
  const drawings = [...figure.querySelectorAll("svg")];
  const drawing = drawings.sort((a, b) => b.clientWidth * b.clientHeight - a.clientWidth * a.clientHeight)[0];
  const copy = drawing.cloneNode(true) as SVGSVGElement;
  const style = getComputedStyle(document.body);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("style", `color:${style.color};background:${style.backgroundColor};font-family:sans-serif`);
  return new XMLSerializer().serializeToString(copy);
}
