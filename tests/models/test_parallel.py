import functools
import itertools

import pytest
import torch
from torch import nn

from gradbus.models import (
    ClassificationTask,
    DataSplit,
    SeededDropout,
    ShardBatch,
    glyphs,
    mnist_mlp,
    num_shard_batches,
    shard_indices,
)

DATA = glyphs(train=203, test=151)
small_mlp = functools.partial(mnist_mlp, hidden=16)


def make_task(batch_size: int = 20, data: DataSplit = DATA) -> ClassificationTask:
    return ClassificationTask(small_mlp, data, batch_size=batch_size)


def walk(task: ClassificationTask, rank: int, world: int, *, epoch: int = 0, seed: int = 0) -> list[ShardBatch]:
    return list(task.batches(rank=rank, world=world, epoch=epoch, seed=seed))


@pytest.mark.parametrize("samples", [0, 1, 2, 7, 12, 13, 24, 25, 203])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_ranks_share_out_every_sample_once_in_batches_that_are_counted_right(samples: int, world: int) -> None:
    order = torch.randperm(samples)
    pieces = [list(shard_indices(order, 4, rank=rank, world=world)) for rank in range(world)]
    for rank, own in enumerate(pieces):
        assert len(own) == num_shard_batches(samples, 4, rank=rank, world=world)
        assert all(1 <= len(piece) <= 4 for piece in own)
        assert all(len(piece) == 4 for piece in own[:-1])
    counts = [len(own) for own in pieces]
    assert max(counts) - min(counts) <= 1
    together = [piece for step in itertools.zip_longest(*pieces) for piece in step if piece is not None]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *together]), order)


def test_two_ranks_see_in_each_step_what_one_process_with_the_double_batch_sees() -> None:
    one, two = make_task(40), make_task(20)
    shards = zip(walk(two, 0, 2, epoch=3), walk(two, 1, 2, epoch=3), strict=True)
    for whole, parts in zip(walk(one, 0, 1, epoch=3), shards, strict=True):
        assert torch.equal(whole.images, torch.cat([part.images for part in parts]))
        assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))


def test_the_order_is_that_of_seed_and_epoch_and_of_nothing_else() -> None:
    first, again = walk(make_task(), 1, 2), walk(make_task(), 1, 2)
    assert all(torch.equal(a.images, b.images) and a.seed == b.seed for a, b in zip(first, again, strict=True))
    for changes in ({"epoch": 1}, {"seed": 1}):
        assert not torch.equal(first[0].images, walk(make_task(), 1, 2, **changes)[0].images)


def test_masks_of_dropout_differ_between_steps_ranks_and_epochs_and_repeat() -> None:
    task = make_task()
    batches = [batch for rank in (0, 1) for epoch in (0, 1) for batch in walk(task, rank, 2, epoch=epoch)]
    assert len({batch.seed for batch in batches}) == len(batches)
    model = nn.Sequential(nn.Flatten(), SeededDropout(0.5), nn.Linear(784, 10))
    losses = [task.loss(model, batch).item() for batch in (batches[0], batches[0], batches[1])]
    assert losses[0] == losses[1] != losses[2]
    before = torch.random.get_rng_state()
    task.loss(model, batches[0]).backward()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_counts_of_all_ranks_are_those_of_the_whole_test_set(world: int) -> None:
    task = make_task()
    model = task.build_model()
    model.train()
    whole = task.evaluate(model)
    parts = [task.evaluate_shard(model, rank=rank, world=world) for rank in range(world)]
    assert whole is not None
    assert sum(part.total for part in parts if part) == whole.num_samples
    assert sum(part.correct for part in parts if part) / whole.num_samples == whole.accuracy
    assert sum(part.loss_sum for part in parts if part) / whole.num_samples == pytest.approx(whole.loss, rel=1e-5)
    assert model.training


def test_a_rank_without_test_samples_counts_nothing() -> None:
    test = DATA.test
    assert test is not None
    task = make_task(data=DataSplit(DATA.train, test.subset(torch.arange(2))))
    results = [task.evaluate_shard(task.build_model(), rank=rank, world=3) for rank in range(3)]
    assert [result.total for result in results if result] == [1, 1, 0]
    task = make_task(data=DataSplit(DATA.train))
    assert task.evaluate_shard(task.build_model(), rank=0, world=1) is None


def test_the_shard_is_refused_where_there_is_no_such_rank_or_no_sample() -> None:
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.1, got 2"):
        make_task().prepare_shard(2, 2)
    empty = DataSplit(DATA.train.subset(torch.arange(0)))
    with pytest.raises(ValueError, match="is empty"):
        make_task(data=empty).prepare_shard(0, 2)
    with pytest.raises(ValueError, match="batch_size >= 1"):
        num_shard_batches(5, 0, rank=0, world=1)
