// What a number is, where it stands, with its formula and source: from docs/methods.md.
import methods from "virtual:methods";
import { link } from "./state";

type Described = (typeof methods)[number];

// MathML of our own formulas, made when the page was built: the one text that is set as markup.
const Formula = ({ of }: { of: Described }) => (of.mathml ? <div class="formula" dangerouslySetInnerHTML={{ __html: of.mathml }} /> : null);

const Reference = ({ of }: { of: Described }) => of.url ? <a href={of.url} rel="noreferrer" target="_blank">{of.reference}</a> : <>{of.reference}</>;

export function Method({ name }: { name: string }) {
  const found = methods.find((one) => one.name === name)!;
  return (
    <details class="method">
      <summary aria-label={`What is this: ${found.title}`}>?</summary>
      <div role="note"><strong>{found.title}.</strong> {found.says}
        <Formula of={found} />
        <Reference of={found} /> · <a href={link({ view: "methods" })}>all methods</a>
      </div>
    </details>
  );
}

export const Methods = () => (
  <>
    <h2 class="page">Methods</h2>
    {methods.map((one) => (
      <section class="card" id={one.name} key={one.name}>
        <h2>{one.title}</h2>
        <p>{one.says}</p>
        <Formula of={one} />
        <p><Reference of={one} /></p>
      </section>
    ))}
  </>
);
