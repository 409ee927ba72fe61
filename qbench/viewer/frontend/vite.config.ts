// One classic script and one style sheet: modules do not load from a disk.
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

export default defineConfig({
  plugins: [formulas],
  define: { "process.env.NODE_ENV": '"production"' },
  build: {
    outDir: "../static",
    emptyOutDir: false,
    target: "es2022",
    lib: { entry: "src/main.tsx", formats: ["iife"], name: "qbenchViewer", fileName: () => "viewer.js", cssFileName: "viewer" },
  },
});
