// Numbers as people read them: accuracies in per cent, effects in points, perplexities as ratios.
import type { Cell, Effect, Kl, Line } from "./data";

/** With a minus only where a digit is not 0. */
const rounded = (value: number, digits: number, plus = ""): string => {
  const text = Math.abs(value).toFixed(digits);
  return `${value < 0 && Number(text) ? "−" : plus}${text}`;
};

export function number(value: number | string | null | undefined, digits = 4): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (Number.isInteger(value)) return value.toLocaleString("en-US").replace("-", "−");
  return Number(value.toPrecision(digits)).toString().replace("-", "−");
}

/** As many decimals as what stands below it has. */
export const fixed = (value: number | string | null | undefined, digits: number): string =>
  typeof value === "number" && Math.abs(value) < 1000 ? rounded(value, digits) : number(value);

/** Log-likelihoods and their changes. */
export const nats = (value: number | null | undefined): string => (typeof value === "number" ? rounded(value, 3) : "–");

export const score = (value: number | string | null | undefined, line: Pick<Line, "percent">): string =>
  line.percent && typeof value === "number" ? (100 * value).toFixed(2) : fixed(value, 3);

/** `1.032`, with three digits where it is far from 1. */
export const ratio = (value: number, digits = 3): string =>
  value >= 0.1 && value < 100 ? value.toFixed(digits) : number(value, 3);

/** `+1.04` points or `× 1.032`. */
export function effect(value: number, kind: Effect["kind"], percent: boolean): string {
  if (typeof value !== "number") return String(value);
  if (kind === "log ratio") return `× ${ratio(Math.exp(value))}`;
  return percent ? rounded(100 * value, 2, "+") : rounded(value, 3, "+");
}

export const interval = (of: Effect, percent: boolean) =>
  `[${effect(of.low, of.kind, percent)}, ${effect(of.high, of.kind, percent)}]`;

/** A loss on an axis where more is worse: points, units, or the ratio itself. */
export function harm(loss: number, line: Line, kind: Effect["kind"]): number {
  if (kind === "log ratio") return Math.exp(loss);
  return line.percent ? 100 * loss : loss;
}

export const UNITS = {
  points: "points",
  ratio: "× (ratio)",
  units: "units of the score",
} as const;
export type Unit = keyof typeof UNITS;

export const unit = (line: Line): Unit => (line.ratio ? "ratio" : line.percent ? "points" : "units");

/** Places to label on a log axis from `low` to `high`, at most `most`: 1, then numbers of few digits. By itself such an axis labels none of 0.6 to 0.9. */
export function ratioTicks(low: number, high: number, most: number): number[] {
  const gap = Math.log(high / low) / most;
  const kept = [1];
  for (const digits of [1, 2, 3])
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (let lead = 10 ** (digits - 1); lead < 10 ** digits; lead++) {
        const value = Number(`${lead}e${power - digits + 1}`);
        if (value >= low && value <= high && kept.every((tick) => Math.abs(Math.log(value / tick)) >= gap)) kept.push(value);
      }
  return kept;
}

export const sure = (of: Effect) => of.mark === "‡";
export const p = (value: number | null | undefined) =>
  value === null || value === undefined ? "–" : value < 0.0001 ? "< 0.0001" : value.toFixed(4);
export const duration = (seconds: number | undefined) =>
  seconds === undefined ? "–" : seconds < 90 ? `${seconds.toFixed(1)} s` : `${(seconds / 60).toFixed(1)} min`;

/** KL divergence of one task, or of all with its documents weighted alike, in nats per token; null if none was measured. */
export const kl = (cell: Cell, task = ""): Kl | null => cell.kl?.[task] ?? null;

/** A task and its metric, as figures write them. */
export const measure = (line: Line): string => `${line.task} ${line.metric_title}`;

/** Three digits, zeros too: numbers below each other look equally sure. */
const threeDigits = (value: number): string => (value >= 100 ? value.toFixed(0) : value.toPrecision(3));

/** `0.290 [0.270, 0.310]`. */
export const klText = (of: Kl | null): string =>
  of ? `${threeDigits(of.mean)}${of.low === null ? "" : ` [${threeDigits(of.low)}, ${threeDigits(of.high!)}]`}` : "–";

/** Places to label on a log axis: powers of ten, with 2 and 5 between if there are few of them. */
export function logTicks(low: number, high: number): number[] {
  const powers = Array.from({ length: 40 }, (_, place) => place - 20).filter((power) => 10 ** (power + 1) > low && 10 ** power <= high);
  const leads = powers.length > 3 ? [1] : [1, 2, 5];
  return powers.flatMap((power) => leads.map((lead) => Number(`${lead}e${power}`))).filter((tick) => tick >= low && tick <= high);
}

/** What a CSV file has of a KL divergence. */
export const klSaved = (of: Kl | null, title = "KL") => ({ [title]: of?.mean, [`${title}, low`]: of?.low, [`${title}, high`]: of?.high });
