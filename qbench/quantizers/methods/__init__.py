"""Settings of the methods that come with the package, and their names. Imports no torch.

Every module of this folder is imported by ``qbench.quantizers``, so that a new method is one file
here: a dataclass with ``register``, and the functions that ``qbench.quantizers.config`` describes,
which import torch inside."""
