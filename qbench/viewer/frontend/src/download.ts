// Tables and figures as files.
import { parquetWriteBuffer } from "hyparquet-writer";
import { number } from "./units";

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

export function parquet(rows: Row[]): ArrayBuffer {
  const columnData = Object.keys(rows[0] ?? {}).map((name) => {
    const known = rows.map((row) => row[name]).filter((value) => value !== null && value !== undefined);
    const kinds = new Set(known.map((value) => typeof value));
    const type = kinds.size === 1 && kinds.has("number") ? "DOUBLE" : kinds.size === 1 && kinds.has("boolean") ? "BOOLEAN" : "STRING";
    const data = rows.map((row) => {
      const value = row[name];
      return value === null || value === undefined ? null : type === "STRING" ? String(value) : value;
    });
    return { name, data, type: type as "DOUBLE" | "BOOLEAN" | "STRING", nullable: true };
  });
  return parquetWriteBuffer({ columnData });
}

const TEX: Record<string, string> = {
  "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", $: "\\$", "#": "\\#", _: "\\_", "{": "\\{", "}": "\\}",
  "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "−": "$-$", "×": "$\\times$", "–": "--", "‡": "$\\ddagger$",
  "|": "$|$", "<": "$<$", ">": "$>$", "≈": "$\\approx$", "†": "$\\dagger$", "Δ": "$\\Delta$", "→": "$\\to$", "±": "$\\pm$", "∞": "$\\infty$", "↑": "$\\uparrow$", "↓": "$\\downarrow$",
};

export function latex(rows: Row[]): string {
  const names = Object.keys(rows[0] ?? {});
  const text = (value: Row[string]) => (typeof value === "number" ? number(value) : String(value ?? ""));
  const cell = (value: Row[string]) => [...text(value)].map((sign) => TEX[sign] ?? sign).join("");
  const first = (name: string) => rows.map((row) => text(row[name])).find((one) => !/^–?$/.test(one)) ?? "";
  const align = names.map((name) => (/^[−+×[\d]/.test(first(name)) ? "r" : "l")).join("");
  const lines = [names.map(cell), ...rows.map((row) => names.map((name) => cell(row[name])))].map((cells) => `${cells.join(" & ")} \\\\`);
  return ["% needs \\usepackage{booktabs}", `\\begin{tabular}{${align}}`, "\\toprule", lines[0], "\\midrule", ...lines.slice(1), "\\bottomrule", "\\end{tabular}", ""].join("\n");
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
