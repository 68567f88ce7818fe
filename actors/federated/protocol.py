"""What a controller and its clients both hold of their exchange, beside the messages: why no update comes, as a client
reports it, and how soon what is not answered is said again."""

from __future__ import annotations

TRAINING_FAILED = "training failed"
NON_FINITE_LOSS = "non-finite loss"
NON_FINITE_MODEL = "non-finite model"
FAILURES = (TRAINING_FAILED, NON_FINITE_LOSS, NON_FINITE_MODEL)
SAT_OUT = "nothing to train"  # not a failure
PAUSED = "paused"  # nor is this: the client's program wants no training for now; it may be back at any time

REPEAT_AFTER_S = 0.5  # without an answer, request again
ON_THE_WAY_S = 8.0  # most, for which frames that the transport has not delivered are not sent again
