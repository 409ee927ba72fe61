"""Cells on many machines, through Dask (``distributed``), which is imported only here."""
