"""Results in a browser: a local server, a static site, a page in one file. Imports no torch. The
page's source is in ``frontend`` (TypeScript); ``npm run build`` writes ``static``, which is
shipped."""
