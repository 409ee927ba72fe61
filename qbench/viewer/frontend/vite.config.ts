// One classic script and one style sheet: modules do not load from a disk.
import { readdirSync, readFileSync } from "node:fs";
import temml from "temml";
import { defineConfig } from "vite";

// The page of the statistics, docs/methods.md, is the viewer's help: of each section the first
// paragraph, the formula and the source. Formulas become MathML here, so that the page ships no renderer.
const PAGE = "../../../docs/methods.md";
const methods = {
  name: "methods",
  resolveId: (id: string) => (id === "virtual:methods" ? "\0methods" : undefined),
  load(id: string) {
    if (id !== "\0methods") return undefined;
    const sections = readFileSync(PAGE, "utf8").split(/^## /m).slice(1).map((section) => {
      const [title, ...rest] = section.split("\n");
      const body = rest.join("\n").trim();
      const tex = body.match(/```math\n([^]*?)```/)?.[1];
      const [, reference, url, plain] = body.match(/^Source: (?:\[(.*?)\]\((.*?)\)|(.*))/m) ?? [];
      return {
        name: title.toLowerCase().replaceAll(" ", "-"), title, says: body.split("\n\n")[0].replaceAll("\n", " "),
        mathml: tex ? temml.renderToString(tex, { displayMode: true, xml: true }) : "", reference: reference ?? plain ?? "", url: url ?? "",
      };
    });
    return `export default ${JSON.stringify(sections)}`;
  },
};

// The licences of what is bundled, beside it.
const licences = {
  name: "licences",
  generateBundle(this: any, _: unknown, bundle: any) {
    const bundled = Object.values<any>(bundle).flatMap((chunk) => Object.keys(chunk.modules ?? {}));
    const folders = new Set(bundled.flatMap((id) => id.match(/^.*node_modules\/(?:@[^/]+\/)?[^/]+/)?.[0].replace(/^\0/, "") ?? []));
    const source = [...folders].sort().map((folder) => {
      const { name, version, license } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
      const file = readdirSync(folder).find((one) => /^licen[cs]e/i.test(one));
      return `${name} ${version} (${license})\n\n${file ? readFileSync(`${folder}/${file}`, "utf8").trim() : ""}\n`;
    }).join(`\n${"-".repeat(80)}\n\n`);
    this.emitFile({ type: "asset", fileName: "LICENSES.txt", source });
  },
};

export default defineConfig({
  plugins: [methods, licences],
  define: { "process.env.NODE_ENV": '"production"' },
  build: {
    outDir: "../static",
    emptyOutDir: false,
    target: "es2022",
    lib: { entry: "src/main.tsx", formats: ["iife"], name: "qbenchViewer", fileName: () => "viewer.js", cssFileName: "viewer" },
  },
});
