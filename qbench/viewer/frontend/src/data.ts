// Payloads: of the server, of a site's files, or of the page itself. qbench/viewer/data.py makes them.
import { useEffect, useState } from "preact/hooks";

export type Text = string | null;
export interface Effect {
  kind: "difference" | "log ratio";
  estimate: number; low: number; high: number;
  p: number; p_holm: number | null; mark: string; documents: number;
}
export interface Score { status: string; value: number | null; reason?: string; documents?: number | null; low?: number; high?: number }
export interface Line {
  task: string; label: string; metric: string; metric_title: string; higher_is_better: boolean;
  percent: boolean; ratio: boolean; aggregation: string; quantizer: string; quantized: boolean;
  scores: Record<string, Score>;
  deltas: Record<string, Effect>; damages: Record<string, Effect>; differences: Record<string, Effect>;
}
/** Nats per token, with a 95 % interval or null. */
export interface Kl { mean: number; low: number | null; high: number | null }
export interface Cell {
  cell: string; checkpoint: string; quantizer: string; title: string; precision: string;
  quantized: boolean; floor: boolean; status: "ok" | "failed" | "missing"; reason: string;
  bits?: number | null; gib?: number | null; weight_error?: number | null; seconds?: number; memory_gib?: number | null;
  kl?: Record<string, Kl>; documents?: string[];
}
export interface Overview {
  error?: string; ready: boolean; name: string; folder: string; program: string;
  checkpoints: string[]; groups: Record<string, string[]>; unquantized: Text;
  tasks: { name: string; label: string }[]; cells: Cell[];
  lines: Line[]; by_group: Line[]; verdict: string[]; about: string[]; summary: string[]; problems: string[];
}
export interface Index { folders: { name: string }[] }
export type Column = (number | string | boolean | null)[];
export interface Documents {
  error?: string; cell: string; task: string;
  outcomes: Record<string, Column>; responses: Record<string, Column> | null;
  kl: { document: number[]; kl: number[] } | null; by_token: number[];
}
export interface Texts { error?: string; task: string; missing?: string; texts: Record<string, string[][]>; targets: Record<string, number | string | null> }
/** The tokens of a document's samples; `agrees`: whether both models' likeliest token is the same, where it was kept. */
export interface Sample { texts: string[]; kl: (number | null)[]; change: (number | null)[]; agrees: (number | null)[] }
export interface Tokens { error?: string; cell: string; samples: Sample[] }
export interface Analyses { error?: string; problems: string[]; command: string; cells: any[]; sensitivities: any[] }

const source = document.documentElement.dataset.source ?? "server";
const waiting = new Map<string, (payload: any) => void>();
const kept = new Map<string, Promise<any>>();

(window as any).qbenchData = (name: string, payload: unknown) => waiting.get(name)?.(payload);

/** Whether payloads may change while the page is open. */
export const live = source === "server";

export function load<T>(name: string): Promise<T> {
  if (!kept.has(name)) {
    kept.set(name, fetchPayload(name).catch((error: Error) => ({ error: error.message })));
    if (kept.size > 200) kept.delete(kept.keys().next().value!);
  }
  return kept.get(name)!;
}

async function fetchPayload(name: string): Promise<any> {
  if (live) {
    const answer = await fetch(`data/${name}.json`);
    if (!answer.ok) throw new Error(`The server answered ${answer.status} for ${name}.`);
    return answer.json();
  }
  return new Promise((resolve) => {
    const script = document.createElement("script");
    waiting.set(name, resolve);
    script.src = `data/${name}.js`;
    script.onerror = () => resolve({ error: `data/${name}.js is missing beside this page.` });
    document.head.append(script);
  });
}

/** Calls `changed` when files of a folder did, or its intervals are ready. */
export function watch(changed: () => void): void {
  if (!live) return;
  let last = "";
  const look = async () => {
    try {
      const now = await (await fetch("data/state.json")).text();
      if (last && now !== last) {
        kept.clear();
        changed();
      }
      last = now;
      document.body.classList.remove("away");
    } catch {
      document.body.classList.add("away"); // the server has ended
    }
    setTimeout(look, 2000);
  };
  void look();
}

/** A payload, loaded again whenever `round` changes; null while it is on its way. */
export function useData<T>(name: string | null, round = 0): T | null {
  const [loaded, set] = useState<{ name: string; payload: T } | null>(null);
  useEffect(() => {
    let current = true;
    if (name !== null) void load<T>(name).then((payload) => current && set({ name, payload }));
    return () => { current = false; };
  }, [name, round]);
  return loaded && loaded.name === name ? loaded.payload : null;
}
