import subprocess
import sys

import pytest
import torch
from torch import Tensor

from gradbus.models import partition

LABELS = torch.randint(10, (2000,), generator=torch.Generator().manual_seed(1))

COMPLETE = [
    "iid",
    {"kind": "dirichlet", "alpha": 0.5},
    {"kind": "dirichlet", "alpha": 100.0},
    {"kind": "shards", "shards_per_client": 2},
    {"kind": "quantity", "alpha": 0.3},
    {"kind": "feature"},
    {"kind": "feature", "by": "spread", "skew": 0.5},
    {"kind": "natural", "ids": [f"writer {place % 9}" for place in range(2000)]},
    {"kind": "by_label", "labels_per_client": 2},
]
SAMPLES = torch.rand(2000, 3, 4, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("spec", COMPLETE, ids=str)
@pytest.mark.parametrize("clients", [1, 5, 7])
def test_no_index_is_given_twice_and_none_by_chance_left_out(spec: partition.PartitionSpec, clients: int) -> None:
    shares = partition.make(spec, LABELS, clients, seed=3, samples=SAMPLES)
    given = torch.cat(shares)
    assert len(shares) == clients
    assert all(share.dtype == torch.int64 and len(share) for share in shares)
    assert len(given.unique()) == len(given)
    whole = spec == "iid" or spec["kind"] != "by_label" or 2 * clients >= 10  # fewer clients cannot hold ten labels
    if whole:
        assert torch.equal(given.sort().values, torch.arange(len(LABELS)))


@pytest.mark.parametrize("spec", COMPLETE, ids=str)
def test_the_seed_alone_decides(spec: partition.PartitionSpec) -> None:
    def shares(seed: int) -> list[Tensor]:
        torch.rand(1)
        return partition.make(spec, LABELS, 4, seed=seed, samples=SAMPLES)

    assert all(torch.equal(a, b) for a, b in zip(shares(1), shares(1), strict=True))
    if spec != COMPLETE[-1]:  # by_label: with each label held by one client there is nothing to choose
        assert any(not torch.equal(a, b) for a, b in zip(shares(1), shares(2), strict=True))


def test_another_process_comes_to_the_same_share() -> None:
    code = (
        "import torch; from gradbus.models import partition;"
        "labels = torch.randint(10, (2000,), generator=torch.Generator().manual_seed(1));"
        "print(partition.make({'kind': 'dirichlet', 'alpha': 0.5}, labels, 3, seed=5)[1].tolist())"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    here = partition.make({"kind": "dirichlet", "alpha": 0.5}, LABELS, 3, seed=5)[1]
    assert child.stdout.strip() == str(here.tolist())


def test_iid_parts_differ_in_size_by_one_at_most() -> None:
    sizes = [len(share) for share in partition.iid(LABELS[:100], 7)]
    assert max(sizes) - min(sizes) <= 1


def test_dirichlet_with_small_alpha_is_more_skewed_than_with_large() -> None:
    def skew(alpha: float) -> float:
        shares = partition.dirichlet(LABELS, 5, alpha=alpha, min_samples=1)
        counts = torch.stack([torch.bincount(LABELS[share], minlength=10) for share in shares]).float()
        return float((counts / counts.sum(0)).std(0).mean())

    assert skew(0.1) > 2 * skew(1.0) > 4 * skew(100.0)


def test_dirichlet_respects_the_minimum() -> None:
    shares = partition.dirichlet(LABELS, 10, alpha=0.1, min_samples=30)
    assert min(map(len, shares)) >= 30


def test_shards_give_a_client_few_labels() -> None:
    shares = partition.shards(LABELS, 10, shards_per_client=2)
    assert max(len(LABELS[share].unique()) for share in shares) <= 4  # a shard may span the border of two labels


def test_labels_rotate_among_the_clients() -> None:
    shares = partition.by_label(LABELS, 5, labels_per_client=2)
    assert [LABELS[share].unique().tolist() for share in shares] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_clients_with_a_label_in_common_share_its_samples_and_unheld_labels_stay_unused() -> None:
    shares = partition.by_label(LABELS, 3, holds=[[0], [0, 1], [1]])
    assert [LABELS[share].unique().tolist() for share in shares] == [[0], [0, 1], [1]]
    assert sum(map(len, shares)) == int((LABELS <= 1).sum())
    assert abs(len(shares[0]) - int((LABELS == 0).sum()) / 2) <= 1


def test_a_missing_label_in_the_middle_is_no_trouble() -> None:
    labels = torch.tensor([0, 0, 2, 2] * 10)
    for spec in COMPLETE:
        if spec == "iid" or spec["kind"] != "natural":  # which has an id for each of other samples
            assert sum(map(len, partition.make(spec, labels, 2, samples=SAMPLES[:40]))) == 40


@pytest.mark.parametrize(
    ("spec", "clients", "words"),
    [
        ("iid", 0, "clients must be >= 1"),
        ("iid", 2001, "2000 samples are too few for 2001 clients"),
        ({"kind": "dirichlet", "alpha": 0}, 2, "alpha must be > 0"),
        ({"kind": "dirichlet", "alpha": 0.5, "min_samples": 1001}, 2, "need 1001 samples each"),
        ({"kind": "dirichlet", "alpha": 1e-3, "min_samples": 500}, 4, "raise alpha or lower min_samples"),
        ({"kind": "shards", "shards_per_client": 0}, 2, "shards_per_client must be >= 1"),
        ({"kind": "shards", "shards_per_client": 1001}, 2, "2002 shards of 2000 samples"),
        ({"kind": "by_label", "labels_per_client": 11}, 2, "must be in 1..10"),
        ({"kind": "by_label", "holds": [[0]]}, 2, "1 entries for 2 clients"),
        ({"kind": "by_label", "holds": [[0], [12]]}, 2, r"labels \[12\] do not occur"),
        ({"kind": "by_label", "holds": [[0], []]}, 2, r"clients \[1\] of 2 would get no sample"),
        ("dirichlett", 2, "did you mean 'dirichlet'"),
        ({"alpha": 1}, 2, "no kind None"),
        ({"kind": "dirichlet", "alfa": 1}, 2, "did you mean 'alpha'"),
        ({"kind": "iid", "alpha": 1}, 2, "partition iid: no option 'alpha'"),
    ],
)
def test_an_impossible_request_is_refused_with_the_reason(
    spec: partition.PartitionSpec, clients: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        partition.make(spec, LABELS, clients)


def test_a_seed_in_the_spec_goes_before_the_argument() -> None:
    a = partition.make({"kind": "iid", "seed": 9}, LABELS, 2, seed=1)
    b = partition.make("iid", LABELS, 2, seed=9)
    assert torch.equal(a[0], b[0])


def test_quantity_makes_clients_of_different_sizes_with_the_same_labels() -> None:
    shares = partition.quantity(LABELS, 20, alpha=0.3, min_samples=5)
    sizes = [len(share) for share in shares]
    assert min(sizes) >= 5
    assert max(sizes) > 5 * sorted(sizes)[10]
    largest = torch.bincount(LABELS[shares[sizes.index(max(sizes))]], minlength=10) / max(sizes)
    assert float((largest - torch.bincount(LABELS) / len(LABELS)).abs().max()) < 0.05


def test_with_a_tiny_alpha_one_client_has_all_that_is_left() -> None:
    sizes = sorted(len(share) for share in partition.quantity(LABELS, 10, alpha=1e-6, min_samples=2))
    assert sizes == [2] * 9 + [1982]


@pytest.mark.parametrize(("skew", "least", "most"), [(1.0, 0.9, 1.0), (0.5, 0.2, 0.9), (0.0, 0.0, 0.05)])
def test_feature_gives_each_client_samples_of_like_brightness(skew: float, least: float, most: float) -> None:
    brightness = SAMPLES.reshape(2000, -1).mean(1)
    shares = partition.feature(LABELS, 10, samples=SAMPLES, skew=skew)
    between = torch.stack([brightness[share].mean() for share in shares]).var(correction=0)
    assert least <= float(between / brightness.var(correction=0)) <= most, "share of the variance between clients"


def test_natural_keeps_the_samples_of_an_id_together_and_deals_out_more_ids_than_clients() -> None:
    ids = [f"patient {place % 7}" for place in range(2000)]
    for clients in (3, 7):
        shares = partition.natural(LABELS, clients, ids=ids)
        held = [{ids[place] for place in share.tolist()} for share in shares]
        assert sum(map(len, held)) == 7
    assert [sorted(names) for names in held] == [[f"patient {client}"] for client in range(7)]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"kind": "quantity", "alpha": 0}, "alpha > 0"),
        ({"kind": "quantity", "min_samples": 1000}, "need 1000 samples each"),
        ({"kind": "feature", "by": "colour"}, "among mean, spread"),
        ({"kind": "feature", "skew": 1.5}, "skew <= 1"),
        ({"kind": "natural"}, "needs ids"),
        ({"kind": "natural", "ids": ["a", "b"]}, "2 ids for 2000 samples"),
        ({"kind": "natural", "ids": ["a"] * 2000}, "1 ids are too few for 4"),
    ],
)
def test_wrong_options_of_a_skew_are_refused_with_what_is_expected(spec: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        partition.make(spec, LABELS, 4, samples=SAMPLES)


def test_a_kind_that_looks_at_the_samples_says_so_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="looks at the samples"):
        partition.make("feature", LABELS, 4)
