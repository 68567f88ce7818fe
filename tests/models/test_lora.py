"""Low-rank adapters: the formula of the paper, what is trained, and the merged model."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from gradbus.experiments.examples.client_text import ClientTextTask
from gradbus.experiments.examples.text import CharTransformer
from gradbus.models.lora import PATTERN, LoraLinear, add_lora, merge_lora

TARGETS = ("*.qkv", "*.out")


def small() -> nn.Module:
    return CharTransformer(1, width=16, layers=2, heads=2, context=8)


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_an_adapter_adds_alpha_over_r_times_b_a_to_the_weight() -> None:
    layer, x = nn.Linear(5, 3), torch.randn(7, 5)
    lora = LoraLinear(layer, rank=2, alpha=6.0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(lora(x), layer(x)), "B is zero: training begins with the layer as it was"
    nn.init.normal_(lora.lora_b)
    weight = layer.weight.double() + 6.0 / 2 * lora.lora_b.double() @ lora.lora_a.double()
    torch.testing.assert_close(lora(x).double(), x.double() @ weight.T + layer.bias.double(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lora.merged()(x), lora(x))


def test_a_model_with_adapters_trains_these_alone_and_its_names_are_as_they_were() -> None:
    model, before = small(), set(small().state_dict())
    found = add_lora(model, TARGETS, rank=2, alpha=4.0)
    assert found == [f"blocks.{block}.{layer}" for block in range(2) for layer in ("qkv", "out")]
    adapters = {f"{name}.lora_{part}" for name in found for part in "ab"}
    assert trained(model) == adapters
    assert set(model.state_dict()) == before | adapters
    assert {name for name in model.state_dict() if fnmatchcase(name, PATTERN)} == adapters
    again = small()
    add_lora(again, TARGETS, rank=2, alpha=4.0)
    assert all(torch.equal(one, again.state_dict()[name]) for name, one in model.state_dict().items())


def test_merging_gives_the_same_outputs_with_plain_layers() -> None:
    model, x = small(), torch.randint(96, (4, 8))
    add_lora(model, ("*",), rank=2, alpha=4.0)  # the head as well, whose weight is that of the embedding
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=0.1)
    embedding, expected = model.embed.weight.detach().clone(), model(x)
    assert "head" in merge_lora(model)
    assert set(model.state_dict()) == set(small().state_dict())
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(model.embed.weight, embedding)
    assert trained(model) == set()


@pytest.mark.parametrize(
    ("targets", "options", "text"),
    [
        (("*.qvk",), {}, r"named like '\*\.qvk'; there are blocks"),
        (("*.norm1",), {}, "no linear layer"),
        (("*",), {"rank": 0}, "rank >= 1"),
        (("*",), {"alpha": 0.0}, "alpha > 0"),
    ],
)
def test_targets_and_numbers_that_cannot_be_are_refused(targets: tuple[str, ...], options: dict, text: str) -> None:  # type: ignore[type-arg]
    model = small()
    with pytest.raises(ValueError, match=text):
        add_lora(model, targets, **{"rank": 2, "alpha": 4.0, **options})
    assert trained(model) == {name for name, _ in model.named_parameters()}, "it is as it was"


def test_clients_train_on_parts_of_the_text_of_their_own_and_equal_arguments_give_equal_bits() -> None:
    shape = {"width": 16, "layers": 1, "heads": 2, "context": 8}
    task = ClientTextTask(num_clients=4, samples=16, batch_size=4, model=shape, lora={"rank": 2, "alpha": 4.0})
    parts = [task.part(client_id) for client_id in range(4)]
    assert {part.numel() for part in parts} == {parts[0].numel()}
    assert len({part[:100].numpy().tobytes() for part in parts}) == 4

    def after(round_id: int, client_id: int = 1, **more: int) -> torch.Tensor:
        model = task.build_model()
        result = task.train(
            model,
            client_id=client_id,
            round_id=round_id,
            epochs=1,
            lr=0.01,
            seed=3,
            subset_size=0,
            should_stop=lambda: False,
            **more,
        )
        assert result.num_samples == (4 if more else 16)
        return torch.cat([one.detach().flatten() for one in model.parameters() if one.requires_grad])

    assert torch.equal(after(1), after(1))
    assert len({after(*key).sum().item() for key in ((1, 1), (2, 1), (1, 2))}) == 3
    assert not torch.equal(after(1), after(1, steps=1))
    assert task.evaluate(task.build_model()).loss > 0
