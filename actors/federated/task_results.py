"""What a task returns, read without trust in its form: its numbers, and the error for what cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradbus.actors.federated.task import implementation
from gradbus.runtime.user_errors import WrongResult


def as_floats(named: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the numbers that a task has found, by name, without those that are None. It may give scalars of NumPy, or
    tensors of one value. Raises whatever reading one raises."""
    return {str(name): float(value) for name, value in (named or {}).items() if value is not None}


def unreadable(task: object, method: str, found: Any, error: Exception) -> WrongResult:
    """The error for what this method of a task has returned: it says what is expected."""
    return WrongResult(
        f"{method} has returned {described(found)} that cannot be read ({error}): expected None, or an object with "
        f"num_samples and loss, if there is one accuracy, and metrics, a mapping of names to single numbers, such as "
        f"gradbus.models.EvalResult",
        implementation(task, method),
    )


def described(found: Any) -> str:
    """Describe a result in a word or two: its class, and of a mapping the first keys."""
    keys = f" with {', '.join(map(repr, list(found)[:5]))}" if isinstance(found, Mapping) and found else ""
    return "None" if found is None else f"{type(found).__name__}{keys}"
