"""The base class and the types of keys that all sections of the run file share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Degree = Annotated[int, Field(ge=1, le=131_072)]
"""A degree of parallelism, or a number of devices."""
Degrees = Annotated[tuple[Degree, ...], Field(min_length=1)]
CountOrNever = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=1000)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TimeoutS = Annotated[float, Field(gt=0, le=1e7)]
"""Seconds of a wait: at most 115 days, as the clocks of threads, sockets and torch have an end."""


class Section(BaseModel):
    """A section of the run file. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
