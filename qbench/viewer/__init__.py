"""Results in a browser: a local server, a static site, a page in one file. Imports no torch. The
page's source is ``frontend`` (TypeScript); ``npm run build`` writes the shipped ``static``."""
