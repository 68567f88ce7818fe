import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradbus.models import (
    ClassificationTask,
    Dataset,
    DataSplit,
    NoopTask,
    SeededDropout,
    Task,
    TrainingStopped,
    TrainResult,
    glyphs,
    mnist_cnn,
    mnist_mlp,
    seeded_global_generator,
)

DATA = glyphs(train=400, test=150)
small_mlp = functools.partial(mnist_mlp, hidden=16)


def make_task(model: Callable[..., nn.Module] = small_mlp, **options: Any) -> ClassificationTask:
    return ClassificationTask(model, DATA, num_clients=2, **options)


def train(task: Task, model: nn.Module | None = None, **changes: Any) -> tuple[torch.Tensor, TrainResult]:
    """Train a fresh model; returns its parameters as one vector, and the result."""
    model = task.build_model() if model is None else model
    options: dict[str, Any] = {
        "client_id": 0,
        "round_id": 1,
        "epochs": 1,
        "lr": 0.05,
        "seed": 0,
        "subset_size": 0,
        "should_stop": lambda: False,
    }
    result = task.train(model, **(options | changes))
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone(), result


class OwnTask:
    """No more than the documents ask of one."""

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def prepare(self, client_id: int, num_clients: int) -> None: ...

    def train(self, model: nn.Module, **command: Any) -> TrainResult:
        return TrainResult(1, 0.0)

    def evaluate(self, model: nn.Module) -> None: ...


def test_a_model_may_be_built_of_another_one_and_both_are_those_of_their_seeds() -> None:
    def alone(seed: int) -> torch.Tensor:
        with seeded_global_generator(seed):
            return torch.rand(2)

    with seeded_global_generator(1):
        first = torch.rand(1)
        inner = alone(2)
        outer = torch.cat([first, torch.rand(1)])
    assert torch.equal(inner, alone(2))
    assert torch.equal(outer, alone(1))


@pytest.mark.parametrize("task", [make_task(), NoopTask(3), OwnTask()], ids=["classification", "null", "own"])
def test_the_tasks_satisfy_the_protocol(task: Task) -> None:
    assert isinstance(task, Task)


@pytest.mark.parametrize("model", [small_mlp, mnist_cnn, functools.partial(mnist_cnn, dropout=True)])
def test_training_twice_gives_equal_bits(model: Callable[..., nn.Module]) -> None:
    task = make_task(model)
    first, result = train(task, subset_size=130, epochs=2)
    torch.rand(5)
    again, result_again = train(make_task(model), subset_size=130, epochs=2)
    assert torch.equal(first, again)
    assert result == result_again


@pytest.mark.parametrize("change", [{"client_id": 1}, {"round_id": 2}, {"seed": 1}, {"epochs": 2}, {"lr": 0.01}])
def test_client_round_and_seed_each_change_the_training(change: dict[str, Any]) -> None:
    task = make_task()
    assert not torch.equal(train(task)[0], train(task, **change)[0])


def test_training_leaves_the_global_generator_alone() -> None:
    task = make_task(functools.partial(mnist_cnn, dropout=True))
    before = torch.random.get_rng_state()
    train(task, subset_size=64)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_clients_in_threads_get_what_they_get_alone() -> None:
    alone = [train(make_task(), client_id=client)[0] for client in (0, 1)]
    shared, together = make_task(), {}

    def run(client: int) -> None:
        together[client] = train(shared, client_id=client)[0]

    threads = [threading.Thread(target=run, args=(client,)) for client in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(together[client], alone[client]) for client in (0, 1))


def test_the_result_counts_distinct_samples_and_reports_a_falling_loss() -> None:
    task, model = make_task(), small_mlp()
    _, first = train(task, model, epochs=3)
    _, later = train(task, model, epochs=3)
    assert first.num_samples == later.num_samples == 200
    assert later.loss < first.loss


@pytest.mark.parametrize(("asked", "used"), [(0, 200), (50, 50), (200, 200), (9999, 200)])
def test_the_subset_comes_from_the_share(asked: int, used: int) -> None:
    seen: list[Dataset] = []

    def look(model: nn.Module, dataset: Dataset, **_: Any) -> TrainResult:
        seen.append(dataset)
        return TrainResult(len(dataset), 0.0)

    task = make_task(train_fn=look)
    for _ in range(2):
        assert train(task, client_id=1, subset_size=asked)[1].num_samples == used
    train(task, client_id=1, subset_size=asked, round_id=2)
    share = {image.sum().item() for image in DATA.train.images[task.share(1)]}
    assert {image.sum().item() for image in seen[0].images} <= share
    assert torch.equal(seen[0].images, seen[1].images)
    if used < 200:
        assert not torch.equal(seen[0].images, seen[2].images)


def test_an_own_training_function_gets_a_seed_of_its_own_and_the_options() -> None:
    calls: list[dict[str, Any]] = []

    def record(model: nn.Module, dataset: Dataset, **options: Any) -> TrainResult:
        calls.append(options)
        return TrainResult(1, 0.5)

    task = make_task(train_fn=record)
    for client in (0, 1):
        train(task, client_id=client, epochs=4, lr=0.3)
    assert calls[0].keys() == {"epochs", "lr", "seed", "should_stop"}
    assert (calls[0]["epochs"], calls[0]["lr"]) == (4, 0.3)
    assert calls[0]["seed"] != calls[1]["seed"]


def test_training_stops_between_batches_when_asked() -> None:
    answers = iter([False, False, True])
    with pytest.raises(TrainingStopped) as caught:
        train(make_task(batch_size=10), should_stop=lambda: next(answers))
    assert caught.value.batches == 2


def test_one_step_of_sgd_is_what_pytorch_would_do() -> None:
    task = make_task(batch_size=1000, weight_decay=0.1)
    trained, _ = train(task)
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    own = DATA.train.subset(task.share(0))
    nn.functional.cross_entropy(model(own.images), own.labels).backward()
    optimizer.step()
    assert torch.allclose(trained, nn.utils.parameters_to_vector(model.parameters()), atol=1e-6)


def test_evaluation_counts_right_answers_and_keeps_the_mode() -> None:
    task = make_task()
    model = task.build_model()
    result = task.evaluate(model)
    assert DATA.test is not None
    assert result is not None
    logits = model(DATA.test.images)
    assert result.num_samples == 150
    assert result.accuracy == pytest.approx((logits.argmax(1) == DATA.test.labels).float().mean().item())
    assert result.loss == pytest.approx(nn.functional.cross_entropy(logits, DATA.test.labels).item(), rel=1e-5)
    assert model.training


def test_without_a_test_set_there_is_no_evaluation() -> None:
    task = ClassificationTask(small_mlp, DataSplit(DATA.train))
    assert task.evaluate(task.build_model()) is None


def test_a_model_that_takes_no_seed_starts_equal_everywhere() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

    before = torch.random.get_rng_state()
    a, b = (nn.utils.parameters_to_vector(make_task(model).build_model().parameters()) for _ in range(2))
    assert torch.equal(a, b)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_data_is_loaded_at_first_need_and_once() -> None:
    loads: list[int] = []

    def load() -> DataSplit:
        loads.append(1)
        return DATA

    task = ClassificationTask(small_mlp, load, num_clients=2)
    assert task.num_params == 784 * 16 + 16 + 160 + 10
    assert not loads
    threads = [threading.Thread(target=task.prepare, args=(client, 2)) for client in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1


def test_another_number_of_clients_shares_the_data_out_anew() -> None:
    task = make_task()
    assert len(task.share(0)) == 200
    task.prepare(3, 4)
    assert len(task.share(0)) == len(task.share(3)) == 100


def test_tasks_in_separate_processes_would_agree_on_the_shares() -> None:
    spec = {"kind": "dirichlet", "alpha": 0.5}
    a, b = make_task(partition=spec), make_task(partition=spec)
    a.prepare(0, 2)
    b.prepare(1, 2)
    assert torch.equal(a.share(1), b.share(1))
    assert torch.equal(torch.cat([a.share(0), b.share(1)]).sort().values, torch.arange(400))


@pytest.mark.parametrize("change", [{"epochs": 0}, {"lr": 0.0}, {"subset_size": -1}, {"client_id": 2}])
def test_training_refuses_arguments_out_of_range(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"need epochs|client_id must be in 0\.\.1, got 2: .* task.num_clients here"):
        train(make_task(), **change)


@pytest.mark.parametrize(
    "options", [{"batch_size": 0}, {"momentum": 1.0}, {"weight_decay": -1.0}, {"partition": "idd"}], ids=str
)
def test_a_task_refuses_arguments_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be >= 1|need 0 <= momentum|did you mean 'iid'"):
        make_task(**options)


def test_glyphs_are_learnt_in_a_short_training() -> None:
    task = ClassificationTask(mnist_cnn, functools.partial(glyphs, train=2000, test=500), batch_size=16)
    model = task.build_model()
    torch.set_num_threads(1)  # the last bits, and with them some points after so few steps, depend on their number
    train(task, model, epochs=2, lr=0.02)
    result = task.evaluate(model)
    assert result is not None
    assert result.accuracy > 0.88


def test_the_null_task_changes_nothing_unless_told() -> None:
    before = torch.zeros(1000)
    assert torch.equal(train(NoopTask(1000))[0], before)
    assert torch.equal(train(NoopTask(1000, delta="constant", scale=0.5))[0], before + 0.5)


def test_the_null_tasks_seeded_delta_differs_between_clients_and_rounds_and_repeats() -> None:
    task = NoopTask(1000, delta="seeded", scale=0.1)
    vector, result = train(task)
    assert torch.equal(vector, train(task)[0])
    assert not torch.equal(vector, train(task, client_id=1)[0])
    assert not torch.equal(vector, train(task, round_id=2)[0])
    assert float(vector.std()) == pytest.approx(0.1, rel=0.1)
    assert result.num_samples == 1


def test_the_null_task_can_be_stopped_and_has_nothing_to_evaluate() -> None:
    task = NoopTask(5)
    with pytest.raises(TrainingStopped):
        train(task, should_stop=lambda: True)
    assert task.evaluate(task.build_model()) is None
    task.prepare(0, 1)


@pytest.mark.parametrize(("dim", "delta"), [(0, "none"), (1, "random")])
def test_the_null_task_refuses_arguments_out_of_range(dim: int, delta: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        NoopTask(dim, delta=delta)


def test_dropout_in_a_users_model_is_reseeded_by_training() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), SeededDropout(0.5), nn.Linear(784, 10))

    task = make_task(model)
    assert torch.equal(train(task)[0], train(task)[0])


def test_what_a_client_holds_out_it_does_not_train_on() -> None:
    task = make_task(validation_share=0.25)
    for client_id in range(2):
        trained, held_out = task.share(client_id), task.held_out(client_id)
        assert len(held_out) == round(0.25 * (len(trained) + len(held_out)))
        assert sorted([*trained.tolist(), *held_out.tolist()]) == make_task().share(client_id).tolist()
        assert torch.equal(held_out, make_task(validation_share=0.25).held_out(client_id)), "it is drawn by the seed"
    assert train(task)[1].num_samples == len(task.share(0))


def test_a_client_evaluates_on_what_it_holds_out() -> None:
    task = make_task(validation_share=0.25)
    model = task.build_model()
    found = task.evaluate_local(model, client_id=1)
    images, labels = DATA.train.images[task.held_out(1)], DATA.train.labels[task.held_out(1)]
    model.eval()
    logits = model(images).detach()
    assert found is not None
    assert found.num_samples == len(labels)
    assert found.loss == pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    assert found.accuracy == int((logits.argmax(1) == labels).sum()) / len(labels)


def test_without_a_share_held_out_there_is_nothing_to_evaluate_on() -> None:
    task = make_task()
    assert len(task.held_out(0)) == 0
    assert task.evaluate_local(task.build_model(), client_id=0) is None


def test_at_least_one_sample_is_left_for_training() -> None:
    task = ClassificationTask(small_mlp, glyphs(train=10, test=10), num_clients=5, validation_share=0.9)
    assert [len(task.share(number)) for number in range(5)] == [1] * 5
    assert [len(task.held_out(number)) for number in range(5)] == [1] * 5


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="validation_share"):
        make_task(validation_share=share)
