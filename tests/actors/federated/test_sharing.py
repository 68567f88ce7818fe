"""Which tensors are shared, sent once or personal: by names alone, and what of it a model keeps bit-equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.model.sharing import Sharing, check_sharing, divide, shape_of, specs_of
from gradbus.runtime.errors import CheckpointError, ConfigError


class Net(nn.Module):
    """A frozen body, a trained layer, batch normalisation, and a head of any size and type."""

    def __init__(self, classes: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(3, 4).requires_grad_(False)
        self.mix = nn.Linear(4, 4)
        self.bn1 = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, classes, dtype=dtype)


def shared(sharing: Sharing, module: nn.Module | None = None) -> set[str]:
    return set(divide(specs_of(module or Net()), sharing).shared)


def test_the_patterns_choose_of_what_is_exchanged_and_the_rest_is_personal() -> None:
    specs = specs_of(Net())
    batch_norm = {f"bn1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    found = divide(specs, Sharing(exclude=("*bn*",)))
    assert found.shared == {"mix.weight", "mix.bias", "head.weight", "head.bias"}
    assert found.constant == {"body.weight", "body.bias"}
    assert found.personal == batch_norm
    only = divide(specs, Sharing(include=("mix.*",)))
    assert only.shared == {"mix.weight", "mix.bias"}
    assert only.constant == found.constant, "frozen parameters are sent once, though no pattern names them"
    assert only.personal == batch_norm | {"head.weight", "head.bias"}
    assert divide(specs, Sharing(exclude=("body.*",))).constant == set(), "unless they are excluded"
    assert shared(Sharing("all", include=("body.*",))) == {"body.weight", "body.bias"}
    assert divide(specs, Sharing()).personal == {"bn1.num_batches_tracked"}, "integers are never averaged"


def test_the_layout_has_what_is_shared_and_not_what_is_personal() -> None:
    def layout(sharing: Sharing, module: nn.Module) -> int:
        specs = specs_of(module)
        return shape_of(specs, divide(specs, sharing)).layout

    local_head = Sharing(exclude=("head.*",))
    assert layout(local_head, Net(2)) == layout(local_head, Net(7)) != layout(Sharing(), Net(2))
    assert layout(Sharing(), Net(2)) != layout(Sharing(), Net(7))
    assert layout(Sharing(exclude=("*.bias",)), Net()) != layout(Sharing(exclude=("*.weight",)), Net())
    assert FlatModel(Net(), Sharing()).layout == FlatModel(Net()).trained[1], "without patterns it is what it was"


@pytest.mark.parametrize(
    ("sharing", "text"),
    [
        (Sharing(exclude=("*.bn*",)), r"'\*\.bn\*' matches no tensor of the model; near are 'bn1"),
        (Sharing(include=("haed.*",)), r"'haed\.\*' matches no tensor.*near are 'head"),
        (Sharing(exclude=("*.zzz",)), r"there are 'body\.weight'"),
        (Sharing(exclude=("*",)), r"leave nothing to share. What could be: 'mix\.weight', 'mix\.bias'"),
        (Sharing(include=("body.*",)), r"leave nothing to share"),
    ],
)
def test_patterns_that_fit_nothing_are_refused_with_the_nearest_names(sharing: Sharing, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_sharing(specs_of(Net()), sharing)


def test_tied_weights_are_shared_by_all_of_their_names_or_by_none() -> None:
    module = Net(4)
    module.head.weight = module.mix.weight
    assert shared(Sharing(exclude=("*.weight",)), module) == {
        "mix.bias",
        "head.bias",
        "bn1.bias",
        "bn1.running_mean",
        "bn1.running_var",
    }
    with pytest.raises(ConfigError, match=r"'mix\.weight' and 'head\.weight' are names of one tensor"):
        divide(specs_of(module), Sharing(exclude=("head.*",)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_personal_tensors_come_back_bit_equal_in_their_own_type(dtype: torch.dtype) -> None:
    module = Net(dtype=dtype)
    model = FlatModel(module, Sharing(exclude=("head.*", "bn1.*")))
    assert model.dim == 4 * 4 + 4
    assert [name for name, _, _ in model.table] == ["mix.weight", "mix.bias"]
    with torch.no_grad():
        module.head.weight.normal_()
        module.bn1.num_batches_tracked.fill_(1 << 40)
    kept = model.read_personal()
    assert set(kept) == {name for name in module.state_dict() if name.startswith(("head", "bn1"))}
    model.write(torch.zeros(model.dim))
    assert torch.equal(module.head.weight, kept["head.weight"]), "what is shared is apart from it"
    other = FlatModel(Net(dtype=dtype, seed=5), Sharing(exclude=("head.*", "bn1.*")))
    other.write_personal(kept)
    again = other.module.state_dict()
    assert all(torch.equal(again[name], tensor) and again[name].dtype == tensor.dtype for name, tensor in kept.items())


def test_counters_are_kept_once_they_have_changed_and_only_beside_what_is_personal_by_patterns() -> None:
    module = Net()
    model = FlatModel(module)
    module.bn1.num_batches_tracked += 3
    assert model.read_personal() == {}, "no state is kept for counters alone"
    model.write_personal({})
    assert int(module.bn1.num_batches_tracked) == 0
    model.arrange(Sharing(exclude=("head.*",)))
    heads = {name for name in module.state_dict() if name.startswith("head.")}
    assert model.read_personal().keys() == heads
    module.bn1.num_batches_tracked += 3
    assert model.read_personal().keys() == {*heads, "bn1.num_batches_tracked"}


def test_tensors_that_become_personal_in_another_run_begin_as_they_were_built() -> None:
    built = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    model = FlatModel(Net(), rebuild=Net)
    model.write(torch.ones(model.dim))
    model.arrange(Sharing(exclude=("head.*",)))
    assert bool((model.module.head.weight == 1.0).all())
    model.write_personal({})
    assert torch.equal(model.module.head.weight, built["head.weight"])


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        ({"head.weight": torch.zeros(3, 4)}, r"'head\.weight' as torch\.float32 of shape \(3, 4\)"),
        ({"head.weight": torch.zeros(2, 4, dtype=torch.float64)}, r"'head\.weight' as torch\.float64"),
        ({"neck.weight": torch.zeros(1)}, r"'neck\.weight'"),
    ],
)
def test_what_was_kept_of_another_model_is_refused(kept: dict[str, Tensor], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        FlatModel(Net(), Sharing(exclude=("head.*",))).write_personal(kept)
