"""Base of all that is written to disk. Imports no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Written(BaseModel):
    """Immutable, unknown keys refused; what is written can be read, infinite numbers too."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")
