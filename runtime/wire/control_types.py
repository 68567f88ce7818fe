"""Types of the fields of control messages, with their limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from gradbus.runtime.plain_text import plain_line, plain_text

MAX_SEQS = 256

STRICT = ConfigDict(strict=True, extra="ignore")

U32 = Annotated[int, Field(ge=0, le=0xFFFF_FFFF)]
World = Annotated[int, Field(ge=1, le=1024)]  # as many ranks as a group may have
U64 = Annotated[int, Field(ge=0, le=0xFFFF_FFFF_FFFF_FFFF)]
Round = Annotated[int, Field(ge=-1, le=0x7FFF_FFFF)]
Name = Annotated[str, Field(max_length=256)]
# What a peer says for people to read is made plain here, so that no error, log or table has to think of it.
Label = Annotated[str, Field(max_length=256), AfterValidator(plain_line)]
Text = Annotated[str, Field(max_length=32 * 1024), AfterValidator(plain_line)]
Lines = Annotated[str, Field(max_length=32 * 1024), AfterValidator(plain_text)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Ranks = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 20)]], Field(max_length=MAX_SEQS)]
Seqs = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 20)]], Field(max_length=MAX_SEQS)]
Ids = Annotated[list[U32], Field(max_length=MAX_SEQS)]
Waits = Annotated[list[Seconds], Field(max_length=MAX_SEQS)]
Options = Annotated[dict[Annotated[str, Field(max_length=64)], bool | int | float | Name], Field(max_length=32)]
Counts = Annotated[dict[Label, U64], Field(max_length=32)]
