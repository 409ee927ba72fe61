// What a number is, where it stands, with its formula and source: from docs/methods.md.
import methods from "virtual:methods";
import { link } from "./state";

type Section = (typeof methods)[number];
/** Names of columns or values, and what each means. */
export type Notes = [name: string, text: string][];

// MathML of our own formulas, made when the page was built: the one text that is set as markup.
const Formula = ({ of }: { of: Section }) => (of.mathml ? <div class="formula" dangerouslySetInnerHTML={{ __html: of.mathml }} /> : null);

const Reference = ({ of }: { of: Section }) => of.url ? <a href={of.url} rel="noreferrer" target="_blank">{of.reference}</a> : <>{of.reference}</>;

/** A "?" that opens an explanation: a section of docs/methods.md, then a line per note. */
export function Help({ title, method, notes = [] }: { title: string; method?: string; notes?: Notes }) {
  const section = methods.find((item) => item.name === method);
  if (!section && !notes.length) return null;
  return (
    <details class="method" onKeyDown={(event) => { if (event.key === "Escape") event.currentTarget.open = false; }}>
      <summary aria-label={`What is this: ${title}`}>?</summary>
      <div role="note">
        {section && <><strong>{section.title}.</strong> {section.says}<Formula of={section} /><Reference of={section} /> · <a href={link({ view: "methods" })}>all methods</a></>}
        {notes.length > 0 && <dl>{notes.map(([name, text]) => <><dt>{name}</dt><dd>{text}</dd></>)}</dl>}
      </div>
    </details>
  );
}

export const Methods = () => (
  <>
    <h2 class="page">Methods</h2>
    {methods.map((section) => (
      <section class="card" id={section.name} key={section.name}>
        <h2>{section.title}</h2>
        <p>{section.says}</p>
        <Formula of={section} />
        <p><Reference of={section} /></p>
      </section>
    ))}
  </>
);
