// What is shown, in the address: every state has a permanent link.
import { useEffect, useState } from "preact/hooks";

export type View = "overview" | "scores" | "cell" | "documents" | "document" | "why" | "methods";
export interface State {
  view: View; folder: string; cells: string[]; task: string; document: string;
  metric: string; show: string; search: string; other: string; sort: string; all: string; size: string;
}
const NAMES = ["view", "folder", "task", "document", "metric", "show", "search", "other", "sort", "all", "size"] as const;

export function read(hash: string = location.hash): State {
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  const state = Object.fromEntries(NAMES.map((name) => [name, fields.get(name) ?? ""])) as unknown as State;
  return { ...state, view: state.view || "overview", cells: fields.getAll("cell") };
}

/** The address of a state; what is left out is as in an untouched view. */
export function link(state: Partial<State>): string {
  const fields = new URLSearchParams();
  for (const name of NAMES) if (state[name]) fields.set(name, state[name] as string);
  for (const cell of state.cells ?? []) fields.append("cell", cell);
  return `#${fields.toString().replaceAll("%2F", "/")}`;
}

export function change(part: Partial<State>): void {
  const next = link({ ...read(), ...part });
  if (next === location.hash) return;
  history.replaceState(null, "", next);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useAddress(): State {
  const [state, set] = useState(read());
  useEffect(() => {
    const changed = () => set(read());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return state;
}
