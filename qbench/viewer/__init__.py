"""Results in a browser: a local server, a static site, a page in one file. Imports no torch.

``data`` makes JSON of records, ``server`` and ``export`` hand it to the page, whose source is in
``frontend`` (TypeScript; ``npm run build`` writes ``static``, which is what is shipped).
"""
