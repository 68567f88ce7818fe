"""A module as one vector: the same memory where that is possible, the same values always."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from default_dtype import default_dtype
from torch import Tensor, nn

from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 3)
        self.out = nn.Linear(3, 3)
        self.out.weight = self.into.weight


class Mixed(nn.Module):
    """Float32 and bfloat16 parameters, and a float64 buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.second = nn.Parameter(torch.tensor([3.0], dtype=torch.bfloat16))
        self.register_buffer("third", torch.tensor([[4.0], [5.0]], dtype=torch.float64))


def floats_of(module: nn.Module) -> Tensor:
    """What the vector should be, by another way."""
    parts = [t.detach().reshape(-1).float() for t in module.state_dict().values() if t.is_floating_point()]
    return torch.cat(parts)


def ramp(dim: int) -> Tensor:
    return torch.arange(dim, dtype=torch.float32) / 8


def test_making_it_keeps_the_values_and_the_order_of_the_state() -> None:
    module = small_net()
    before = floats_of(module)
    model = FlatModel(module)
    assert torch.equal(model.read(), before)
    assert torch.equal(floats_of(module), before)
    assert model.dim == before.numel() == 3 * 4 + 4 + 4 * 4 + 4 * 2 + 2


@pytest.mark.parametrize("make", [small_net, Mixed])
def test_the_vector_is_float32_whatever_the_default_dtype_of_the_script(make: Callable[[], nn.Module]) -> None:
    module = make()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with default_dtype(torch.bfloat16):
        model = FlatModel(module)
        found = [model.read(), model.vector_of(module.state_dict())]
    assert all(torch.equal(vector, floats_of(module)) and vector.dtype == torch.float32 for vector in found)
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


def test_the_module_lives_in_the_vector() -> None:
    module = small_net()
    model = FlatModel(module)
    model.read().copy_(ramp(model.dim))
    assert torch.equal(module[0].weight.detach(), ramp(model.dim)[:12].view(4, 3))
    with torch.no_grad():
        module[3].bias.fill_(-1.0)
    assert model.read()[-2:].tolist() == [-1.0, -1.0]
    assert model.read().data_ptr() == module[0].weight.data_ptr()


def test_writing_changes_the_live_vector_in_place() -> None:
    model = FlatModel(small_net())
    live = model.read()
    model.write(ramp(model.dim))
    assert model.read() is live
    assert torch.equal(live, ramp(model.dim))


def test_training_moves_the_vector() -> None:
    module = small_net()
    model = FlatModel(module)
    before = model.read().clone()
    module(torch.randn(8, 3)).square().mean().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.1 * parameter.grad
    assert not torch.equal(model.read(), before)
    assert torch.equal(model.read(), floats_of(module))


def test_running_means_travel_and_integer_counters_stay() -> None:
    module = small_net()
    model = FlatModel(module)
    module(torch.randn(8, 3))
    assert torch.equal(model.read()[12 + 4 + 8 : 12 + 4 + 12], module[1].running_mean)
    assert module[1].num_batches_tracked.item() == 1
    model.write(torch.zeros(model.dim))
    assert module[1].running_mean.tolist() == [0.0] * 4
    assert module[1].running_var.tolist() == [0.0] * 4
    assert module[1].num_batches_tracked.item() == 1


def test_tied_weights_travel_once_and_stay_tied() -> None:
    module = Tied()
    model = FlatModel(module)
    assert model.dim == 9 + 3 + 3
    model.write(ramp(model.dim))
    assert module.out.weight is module.into.weight
    assert torch.equal(module.out.weight.detach(), ramp(9).view(3, 3))


def test_a_model_of_several_dtypes_is_copied() -> None:
    module = Mixed()
    model = FlatModel(module)
    assert model.dim == 5
    vector = model.read()
    assert vector.dtype == torch.float32
    assert vector.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    vector.zero_()
    assert module.first.tolist() == [1.0, 2.0]  # a copy, not the model
    model.write(torch.tensor([5.0, 4.0, 3.5, 2.0, 1.0]))
    assert module.first.tolist() == [5.0, 4.0]
    assert (module.second.dtype, module.second.item()) == (torch.bfloat16, 3.5)
    assert (module.third.dtype, module.third.tolist()) == (torch.float64, [[2.0], [1.0]])


def test_a_layout_that_is_not_contiguous_is_read_in_logical_order() -> None:
    module = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last)
    expected = module.weight.detach().clone().reshape(-1)
    model = FlatModel(module)
    assert torch.equal(model.read(), expected)
    assert module(torch.randn(1, 2, 4, 4)).shape == (1, 3, 3, 3)


def assert_reads_and_writes(model: FlatModel, module: nn.Module) -> None:
    assert torch.equal(model.read(), floats_of(module))
    model.write(ramp(model.dim))
    assert torch.equal(floats_of(module), ramp(model.dim))
    assert torch.equal(model.read(), ramp(model.dim))


def test_parameters_that_were_replaced_are_still_read_and_written() -> None:
    module = small_net(0)
    model = FlatModel(module)
    module.load_state_dict(small_net(1).state_dict(), assign=True)
    assert_reads_and_writes(model, module)


def test_tied_parameters_that_were_replaced_by_two_are_both_written() -> None:
    module = Tied()
    model = FlatModel(module)
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)
    model.write(ramp(model.dim))
    assert torch.equal(module.into.weight, ramp(9).view(3, 3))
    assert torch.equal(module.out.weight, ramp(9).view(3, 3))
    assert torch.equal(model.read(), ramp(model.dim))


def test_a_module_that_was_converted_is_still_read_and_written() -> None:
    module = small_net()
    model = FlatModel(module)
    module.double()
    assert_reads_and_writes(model, module)
    assert module[0].weight.dtype == torch.float64


def test_a_module_whose_data_was_moved_is_still_read_and_written() -> None:
    module = small_net()
    model = FlatModel(module)
    module[0].weight.data = module[0].weight.data.clone()
    assert_reads_and_writes(model, module)


def test_a_buffer_that_was_set_anew_is_still_read_and_written() -> None:
    module = small_net()
    model = FlatModel(module)
    module[1].running_mean = torch.full((4,), 2.0)
    assert_reads_and_writes(model, module)


def test_equal_modules_have_equal_layouts_whatever_their_values() -> None:
    assert FlatModel(small_net(0)).layout == FlatModel(small_net(1)).layout
    assert 0 < FlatModel(small_net()).layout < 1 << 64


def test_names_shapes_and_dtypes_all_count_for_the_layout() -> None:
    modules = [
        nn.Sequential(nn.Linear(3, 4)),
        nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 1)),
        nn.Sequential(nn.Identity(), nn.Linear(3, 4)),  # other names
        nn.Sequential(nn.Linear(4, 3)),  # other shapes
        nn.Sequential(nn.Linear(3, 4)).double(),
        nn.Sequential(nn.Linear(3, 4)).bfloat16(),
        nn.ParameterDict({"0.weight".replace(".", "_"): nn.Parameter(torch.zeros(16))}),
    ]
    assert len({FlatModel(module).layout for module in modules}) == len(modules)


@pytest.mark.parametrize("module", [small_net(), Mixed()], ids=["in place", "copied"])
def test_a_vector_of_the_wrong_size_is_an_error_and_changes_nothing(module: nn.Module) -> None:
    model = FlatModel(module)
    before = model.read().clone()
    for shape in ((model.dim + 1,), (model.dim - 1,), (1, model.dim), (1,)):
        with pytest.raises(ValueError, match=f"for a model of {model.dim} values"):
            model.write(torch.zeros(shape))
    assert torch.equal(model.read(), before)


@pytest.mark.parametrize("make", [small_net, Tied, Mixed])
def test_named_tensors_of_the_same_model_make_its_vector(make: type[nn.Module]) -> None:
    module = make()
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    model = FlatModel(module)
    expected = model.read().clone()
    model.write(torch.zeros(model.dim))
    assert torch.equal(model.vector_of(state), expected)


def test_named_tensors_of_another_model_are_refused() -> None:
    model = FlatModel(nn.Linear(3, 4))
    with pytest.raises(KeyError, match=r"no tensor 'bias', there are \['weight'\]"):
        model.vector_of({"weight": torch.zeros(4, 3)})
    with pytest.raises(ValueError, match=r"'weight' has shape \(3, 4\), expected \(4, 3\)"):
        model.vector_of({"weight": torch.zeros(3, 4), "bias": torch.zeros(4)})


def test_a_compiled_model_has_the_layout_of_a_plain_one() -> None:
    """So that a client may compile where its controller does not. Checkpoints of gradbus 0.1 have the other one."""
    plain = FlatModel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), Sharing(buffers=(("*", "max"),)))
    whole = FlatModel(torch.compile(plain.module, backend="eager"), plain.sharing)  # type: ignore[arg-type]
    part = FlatModel(nn.Sequential(torch.compile(nn.Linear(3, 4), backend="eager"), nn.BatchNorm1d(4)), plain.sharing)
    for compiled in (whole, part):
        assert compiled.layout == plain.layout
        assert compiled.buffers.digest == plain.buffers.digest != 0
        assert compiled.layouts > plain.layouts
    assert plain.layouts == {plain.layout}
