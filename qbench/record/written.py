"""Base of all that is written to disk, and the words that it may hold. Imports no torch.

A results folder may be somebody else's: names that become paths, and texts that are shown in one
line, are held to these patterns when they are read.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NAME = r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}"  # of a checkpoint or quantizer; names folders
Name = Annotated[str, Field(pattern=f"^{NAME}$")]
DIGEST = "^[0-9a-f]{64}$"
Digest = Annotated[str, Field(pattern=DIGEST)]  # SHA-256
_CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029"
LINE, TASK = f"^[^{_CONTROL}]*$", rf"^[^{_CONTROL}/\\]+$"
Line = Annotated[str, Field(pattern=LINE, max_length=1000)]  # without line breaks
TaskName = Annotated[str, Field(pattern=TASK, max_length=200)]


class Written(BaseModel):
    """Immutable, unknown keys refused; what is written can be read, infinite numbers too."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")
