"""Types of the fields of control messages, with their limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

MAX_SEQS = 256

STRICT = ConfigDict(strict=True, extra="ignore")

U32 = Annotated[int, Field(ge=0, le=0xFFFF_FFFF)]
World = Annotated[int, Field(ge=1, le=1024)]  # as many ranks as a group may have
U64 = Annotated[int, Field(ge=0, le=0xFFFF_FFFF_FFFF_FFFF)]
Round = Annotated[int, Field(ge=-1, le=0x7FFF_FFFF)]
Name = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(max_length=32 * 1024)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Ranks = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 20)]], Field(max_length=MAX_SEQS)]
Seqs = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 20)]], Field(max_length=MAX_SEQS)]
Ids = Annotated[list[U32], Field(max_length=MAX_SEQS)]
Waits = Annotated[list[Seconds], Field(max_length=MAX_SEQS)]
Counts = Annotated[dict[Name, U64], Field(max_length=32)]
