"""Traces of models: those that come with the code, and how they are taken."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from gradbus.commands.simulate.trace import main, read_trace, take_trace
from gradbus.runtime.errors import ConfigError


@pytest.mark.parametrize(("name", "parameters"), [("vgg19", 143_667_240), ("resnet50", 25_557_032)])
def test_traces_of_the_code_have_the_sizes_of_their_models(name: str, parameters: int) -> None:
    import torchvision  # not to collect other tests: with what it imports of torch it takes 2 s

    trace = read_trace(name)
    with torch.device("meta"):
        model = getattr(torchvision.models, name)()
    work = trace.make_step_work()
    assert dict(work.shapes) == {key: one.shape for key, one in model.named_parameters()}
    assert trace.gradient_bytes == 4 * parameters
    assert trace.model == f"torchvision.models:{name}"
    assert trace.command.startswith("python -m gradbus.commands.simulate.trace torchvision.models:")
    assert 0.2 < work.forward_s / work.compute_s < 0.5  # a backward pass is about two forward passes
    assert sum(one > 0 for one in work.backward_s) > 0.9 * len(trace.layers)


def test_a_scale_of_computing_changes_times_and_no_sizes() -> None:
    trace = read_trace("resnet50")
    whole, part = trace.make_step_work(), trace.make_step_work(compute_scale=0.01, overlap=False)
    assert part.compute_s == pytest.approx(0.01 * whole.compute_s)
    assert part.shapes == whole.shapes
    assert not part.overlap


def test_layers_are_timed_by_the_profiler_in_forward_and_backward_pass() -> None:
    """The middle layer has a hundred times the work of the others; all together take no longer than the passes."""
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 4)
    )
    began_s = time.perf_counter()
    trace = take_trace(model, torch.randn(1024, 8), passes=3)
    took_s = time.perf_counter() - began_s
    assert [layer.name for layer in trace.layers] == ["0", "2", "4"]
    assert dict(trace.layers[1].shapes) == {"2.weight": (2048, 512), "2.bias": (2048,)}
    assert trace.gradient_bytes == 4 * sum(one.numel() for one in model.parameters())
    for times in ([layer.forward_s for layer in trace.layers], [layer.backward_s for layer in trace.layers]):
        assert max(times) == times[1] > 0
    assert trace.make_step_work().compute_s < took_s


def test_the_module_writes_a_trace_that_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mlp.json"
    arguments = ["gradbus.models:mnist_mlp", "--input-shape", "1", "28", "28", "--passes", "1", "-o", str(path)]
    assert main(arguments) == 0
    assert "1.6 MB of gradients" in capsys.readouterr().out
    trace = read_trace(str(path))
    assert trace.text() == path.read_text(encoding="utf-8")
    assert str(path) in trace.command
    with pytest.raises(SystemExit):
        main(["gradbus.models:mnist_mlp", "--passes", "0", "-o", str(path)])
    assert "--passes must be at least 1, got 0" in capsys.readouterr().err


def test_what_is_no_trace_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no trace 'vgg18'; did you mean 'vgg19'\?"):
        read_trace("vgg18")
    with pytest.raises(ConfigError, match=r"there are resnet50, vgg19, and files \*.json"):
        read_trace("nothing")
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(str(tmp_path / "none.json"))
    path = tmp_path / "bad.json"
    for text, said in (("{", "Expecting"), ('{"model": "m"}', "batch_size: Field required")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=said):
            read_trace(str(path))
    good = json.loads(read_trace("resnet50").text())
    good["layers"][0]["backward_s"] = -1
    path.write_text(json.dumps(good), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"layers\.0\.backward_s.*greater than or equal to 0"):
        read_trace(str(path))
