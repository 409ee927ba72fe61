// One classic script and one style sheet: modules do not load from a disk.
import { readdirSync, readFileSync } from "node:fs";
import temml from "temml";
import { defineConfig } from "vite";

// Formulas become MathML here, so that the page ships no renderer.
const formulas = {
  name: "formulas",
  enforce: "pre" as const,
  transform(code: string, id: string) {
    if (!id.endsWith("methods.json")) return undefined;
    const methods = JSON.parse(code).map((method: { tex: string }) => ({
      ...method,
      mathml: temml.renderToString(method.tex, { displayMode: true, xml: true }),
    }));
    return JSON.stringify(methods);
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
  plugins: [formulas, licences],
  define: { "process.env.NODE_ENV": '"production"' },
  build: {
    outDir: "../static",
    emptyOutDir: false,
    target: "es2022",
    lib: { entry: "src/main.tsx", formats: ["iife"], name: "qbenchViewer", fileName: () => "viewer.js", cssFileName: "viewer" },
  },
});
