"""Traces of models: the sizes of their gradients, and when each of them is there in a backward pass.

Those of VGG19 and ResNet-50 come with the code, in ``traces/``. Made with, and for any other model in the same way:

    python -m gradbus.commands.simulate.trace torchvision.models:resnet50 -o resnet50.json

Sizes do not depend on the machine, times do: they are those of one core. ``simulate.compute_scale`` makes of them those
of an accelerator.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from gradbus.commands.rundir.versions import machine, versions
from gradbus.commands.simulate.steps import StepWork
from gradbus.runtime.choices import import_object
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json, read_text
from gradbus.runtime.nearest import nearest

_MAX_BYTES = 4 << 20
_MARK = "forward of "
_GRADIENT_IS_THERE = "torch::autograd::AccumulateGrad"  # the profiler's name of the last thing done to a gradient

Seconds = Annotated[float, Field(ge=0)]


class TracedLayer(BaseModel):
    """A module that has parameters of its own.

    Attributes:
        shapes: of its parameters, by their names in the model. forward_s: from its start to that of the layer behind
            it. backward_s: until all of its gradients are there, from the gradients of the layer behind it on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    shapes: Mapping[str, tuple[Annotated[int, Field(ge=1)], ...]]
    forward_s: Seconds
    backward_s: Seconds

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of all its parameters, in float32."""
        return 4 * sum(math.prod(shape) for shape in self.shapes.values())


class Trace(BaseModel):
    """One forward and backward pass of a model.

    Attributes:
        model: the function that makes it. input_shape: of one sample. threads: of torch. passes: each time is a median
            of so many. machine: whose times they are. command: that made this. layers: in the order of the model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str
    batch_size: Annotated[int, Field(ge=1)]
    input_shape: tuple[Annotated[int, Field(ge=1)], ...]
    threads: Annotated[int, Field(ge=1)]
    passes: Annotated[int, Field(ge=1)]
    machine: Mapping[str, str] = {}
    command: str = ""
    layers: tuple[TracedLayer, ...] = Field(min_length=1)

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of all layers, in float32."""
        return sum(layer.gradient_bytes for layer in self.layers)

    def make_step_work(self, *, compute_scale: float = 1.0, **more: Any) -> StepWork:
        """Return what a rank does in a step, with ``compute_scale`` times the times. ``more``: other fields of
        StepWork."""
        shapes, backward_s = {}, []
        for layer in self.layers:
            shapes.update({name: torch.Size(shape) for name, shape in layer.shapes.items()})
            # The last parameter is the first to come up in a backward pass; those before it are there with it.
            backward_s += [0.0] * (len(layer.shapes) - 1) + [compute_scale * layer.backward_s]
        forward_s = compute_scale * sum(layer.forward_s for layer in self.layers)
        return StepWork(
            shapes=shapes, forward_s=forward_s, backward_s=backward_s, **{"batch_size": self.batch_size, **more}
        )

    def text(self) -> str:
        """As JSON, a layer on a line."""
        facts = self.model_dump(mode="json", exclude={"layers"})
        head = "{" + ",".join(f"\n {json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items())
        layers = ",\n  ".join(layer.model_dump_json() for layer in self.layers)
        return f'{head},\n "layers": [\n  {layers}\n ]\n}}\n'


def read_trace(name: str) -> Trace:
    """A trace that comes with the code, by its name, or from a file, by its path, which ends in ``.json``.

    Raises:
        ConfigError: there is none, or the file is no trace.
    """
    folder = files("gradbus.commands.simulate").joinpath("traces")
    known = sorted(one.name.removesuffix(".json") for one in folder.iterdir())
    try:
        if name in known:
            text = folder.joinpath(f"{name}.json").read_text(encoding="utf-8")
        elif name.endswith(".json"):
            text = read_text(Path(name), _MAX_BYTES)
        else:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}, and files *.json"
            raise ConfigError(f"simulate.trace: no trace {name!r}; {hint}")
        return Trace.model_validate(parse_json(text))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        why = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else error
        said = f"{'.'.join(map(str, why['loc']))}: {why['msg']}" if isinstance(why, dict) else str(why)
        raise ConfigError(
            f"simulate.trace: {name}: {said}. Make one with python -m gradbus.commands.simulate.trace"
        ) from None


# Taking one


class _Pass(NamedTuple):
    """Times of one pass, from the start of the forward pass: when each layer began, when each gradient was there."""

    began_s: dict[str, float]
    middle_s: float
    there_s: dict[str, float]


def take_trace(model: nn.Module, inputs: Tensor, *, passes: int = 3, name: str = "", command: str = "") -> Trace:
    """Run a model under torch's profiler, so many times and once before.

    Args:
        inputs: a batch. The loss is the mean of all outputs.
    """
    owners = {
        layer: names
        for layer, module in model.named_modules()
        if (
            names := [
                f"{layer}.{own}".strip(".") for own, one in module.named_parameters(recurse=False) if one.requires_grad
            ]
        )
    }
    parameters = dict(model.named_parameters())
    with _Observer(model, list(owners)) as observer:
        runs = [observer.run(inputs) for _ in range(1 + passes)][1:]
    began_s = {layer: statistics.median(one.began_s.get(layer, one.middle_s) for one in runs) for layer in owners}
    middle_s = statistics.median(one.middle_s for one in runs)
    there_s = {
        layer: statistics.median(max(one.there_s.get(name, one.middle_s) for name in names) for one in runs)
        for layer, names in owners.items()
    }
    forward_s = _steps(began_s, middle_s)
    backward_s, last_s = {}, middle_s
    for layer in reversed(owners):
        backward_s[layer] = max(0.0, there_s[layer] - last_s)
        last_s = max(last_s, there_s[layer])
    layers = tuple(
        TracedLayer(
            name=layer,
            shapes={one: tuple(parameters[one].shape) for one in names},
            forward_s=round(forward_s[layer], 7),
            backward_s=round(backward_s[layer], 7),
        )
        for layer, names in owners.items()
    )
    facts = {**machine(), **versions()}
    return Trace(
        model=name or type(model).__name__,
        batch_size=len(inputs),
        input_shape=tuple(inputs.shape[1:]),
        threads=torch.get_num_threads(),
        passes=passes,
        command=command,
        layers=layers,
        machine={key: str(facts[key]) for key in ("cpu", "torch") if key in facts},
    )


def _steps(began_s: Mapping[str, float], end_s: float) -> dict[str, float]:
    """From the beginning of each layer to that of the one behind it; the first from the beginning of all."""
    order = sorted(began_s, key=began_s.__getitem__)
    edges = [0.0, *(began_s[layer] for layer in order[1:]), end_s]
    return {layer: stop - start for layer, start, stop in zip(order, edges, edges[1:], strict=False)}


class _Observer:
    """Hooks on a model that mark its layers for the profiler, and note in which order its gradients come."""

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self._model = model
        self._gradients: list[str] = []
        modules = dict(model.named_modules())
        self._hooks: list[Any] = [modules[layer].register_forward_pre_hook(_mark(layer)) for layer in layers]
        for name, one in model.named_parameters():
            if one.requires_grad:
                self._hooks.append(one.register_post_accumulate_grad_hook(self._note(name)))  # type: ignore[no-untyped-call]

    def __enter__(self) -> _Observer:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def run(self, inputs: Tensor) -> _Pass:
        """One pass under the profiler."""
        self._gradients.clear()
        self._model.zero_grad(set_to_none=True)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with record_function(_MARK):
                loss = self._model(inputs).float().mean()
            torch.autograd.backward(loss)
        events = sorted(profiler.events() or [], key=lambda event: event.time_range.start)
        whole = next(event.time_range for event in events if event.name == _MARK)
        began = {
            event.name.removeprefix(_MARK): event.time_range.start
            for event in reversed(events)  # of a layer that is used twice its first use counts
            if event.name.startswith(_MARK) and event.name != _MARK
        }
        there = sorted(event.time_range.end for event in events if event.name == _GRADIENT_IS_THERE)
        return _Pass(
            {layer: 1e-6 * (at - whole.start) for layer, at in began.items()},
            1e-6 * (whole.end - whole.start),
            {name: 1e-6 * (at - whole.start) for name, at in zip(self._gradients, there, strict=True)},
        )

    def _note(self, name: str) -> Any:
        return lambda _: self._gradients.append(name)


def _mark(layer: str) -> Any:
    def mark(*_: object) -> None:
        with record_function(_MARK + layer):
            pass

    return mark


def main(arguments: Sequence[str] | None = None) -> int:
    """Take a trace of a model with random weights, and write it."""
    parser = argparse.ArgumentParser(prog="python -m gradbus.commands.simulate.trace", description=main.__doc__)
    parser.add_argument("model", help="the function that makes it, as package.module:attribute")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--input-shape", type=int, nargs="+", default=[3, 224, 224], help="of one sample")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    chosen = parser.parse_args(given)
    for name in ("batch_size", "passes", "threads", *(["input_shape"] if min(chosen.input_shape) < 1 else [])):
        if name == "input_shape" or getattr(chosen, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(chosen, name)}")
    try:
        model = import_object(chosen.model, key="model")()
    except ConfigError as error:
        parser.error(str(error))
    torch.manual_seed(0)
    torch.set_num_threads(chosen.threads)
    found = take_trace(
        model,
        torch.randn(chosen.batch_size, *chosen.input_shape),
        passes=chosen.passes,
        name=chosen.model,
        command=shlex.join(["python", "-m", "gradbus.commands.simulate.trace", *given]),
    )
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(found.text(), encoding="utf-8")
    work = found.make_step_work()
    print(
        f"{chosen.out}: {len(found.layers)} layers, {found.gradient_bytes / 1e6:.1f} MB of gradients, forward "
        f"{work.forward_s:.3f} s, backward {sum(work.backward_s):.3f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
