"""Partitions of the training set among the clients.

A partitioner is a pure function of the labels, the number of clients and a seed; ``feature`` looks at the samples, too.
Every process computes the whole partition (a few milliseconds) and takes its own share; the random numbers come from
PyTorch and NumPy, whose versions should therefore be the same on all nodes. Each returns one int64 tensor of sorted
indices per client. No index appears twice, and all appear, except with ``by_label``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .seeds import derive_seed, seeded_generator

_DIRICHLET_TRIES = 1000

PartitionSpec = str | Mapping[str, Any]
"""A kind such as ``"iid"``, or a mapping ``{"kind": "dirichlet", "alpha": 0.5}`` with the keyword arguments of that
kind."""


def iid(labels: Tensor, clients: int, seed: int = 0) -> list[Tensor]:
    """Shuffle, then cut into equal parts (sizes differ by one at most).

    Raises:
        ValueError: fewer samples than clients.
    """
    _check_clients(labels, clients)
    order = torch.randperm(len(labels), generator=seeded_generator("iid", seed))
    return _sorted(order.tensor_split(clients))


def dirichlet(
    labels: Tensor, clients: int, seed: int = 0, *, alpha: float = 0.5, min_samples: int = 10
) -> list[Tensor]:
    """Divide every label by proportions drawn from a symmetric Dirichlet distribution.

    Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution (arXiv:1909.06335), with the proportions
    drawn per label, so that all samples are used. A large concentration ``alpha`` > 0 comes near to IID, with a small
    one few clients have samples of a label. It draws again until every client has ``min_samples``.

    Raises:
        ValueError: arguments out of range, or no draw out of 1000 gives every client ``min_samples``.
    """
    _check_clients(labels, clients)
    if not alpha > 0:
        raise ValueError(f"dirichlet: alpha must be > 0, got {alpha}")
    if min_samples * clients > len(labels):
        raise ValueError(f"dirichlet: {clients} clients need {min_samples} samples each, there are {len(labels)}")
    pools = _shuffled_by_label(labels, seeded_generator("dirichlet", seed))
    draw = np.random.default_rng(derive_seed("dirichlet", seed))  # PyTorch's Dirichlet takes no generator
    for _ in range(_DIRICHLET_TRIES):
        proportions = draw.dirichlet([alpha] * clients, size=len(pools))
        parts = [_cut(pool, row) for pool, row in zip(pools, proportions, strict=True)]
        shares = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        if min(map(len, shares)) >= min_samples:
            return _sorted(shares)
    raise ValueError(
        f"dirichlet: {_DIRICHLET_TRIES} draws with alpha={alpha} left one of {clients} clients below "
        f"{min_samples} samples; raise alpha or lower min_samples"
    )


def shards(labels: Tensor, clients: int, seed: int = 0, *, shards_per_client: int = 2) -> list[Tensor]:
    """Sort by label, cut into ``clients * shards_per_client`` shards, deal them out at random.

    McMahan et al., Communication-Efficient Learning (arXiv:1602.05629), section 3: with 2 shards most clients see two
    labels. Shard sizes differ by one at most.

    Raises:
        ValueError: fewer samples than shards, or ``shards_per_client`` below 1.
    """
    _check_clients(labels, clients)
    if shards_per_client < 1:
        raise ValueError(f"shards: shards_per_client must be >= 1, got {shards_per_client}")
    count = clients * shards_per_client
    if count > len(labels):
        raise ValueError(f"shards: {count} shards of {len(labels)} samples would leave some empty")
    generator = seeded_generator("shards", seed)
    pieces = torch.cat(_shuffled_by_label(labels, generator)).tensor_split(count)
    dealt = torch.randperm(count, generator=generator).view(clients, shards_per_client).tolist()
    return _sorted([torch.cat([pieces[i] for i in hand]) for hand in dealt])


def by_label(
    labels: Tensor,
    clients: int,
    seed: int = 0,
    *,
    labels_per_client: int = 2,
    holds: Sequence[Sequence[int]] | None = None,
) -> list[Tensor]:
    """Give each client the samples of certain labels only; clients with a label in common share its samples equally.

    Samples of a label without a client stay unused.

    Args:
        labels_per_client: without ``holds``, client c holds this many labels from ``c * labels_per_client`` on, modulo
            their number: 5 clients with 2 of 10 labels hold each label once.
        holds: the labels of each client, one sequence per client.

    Raises:
        ValueError: ``holds`` does not fit, names a label that does not occur, or a client would get nothing.
    """
    _check_clients(labels, clients)
    pools = dict(enumerate(_shuffled_by_label(labels, seeded_generator("by_label", seed))))
    present = [label for label, pool in pools.items() if len(pool)]
    if holds is None:
        if not 1 <= labels_per_client <= len(present):
            raise ValueError(f"by_label: labels_per_client must be in 1..{len(present)}, got {labels_per_client}")
        first = [client * labels_per_client for client in range(clients)]
        holds = [[present[(f + i) % len(present)] for i in range(labels_per_client)] for f in first]
    if len(holds) != clients:
        raise ValueError(f"by_label: holds has {len(holds)} entries for {clients} clients")
    if unknown := sorted({label for held in holds for label in held} - set(present)):
        raise ValueError(f"by_label: labels {unknown} do not occur in the data, which has {present}")

    shares: list[list[Tensor]] = [[] for _ in range(clients)]
    for label in present:
        holders = [client for client in range(clients) if label in holds[client]]
        for client, piece in zip(holders, pools[label].tensor_split(len(holders)) if holders else (), strict=True):
            shares[client].append(piece)
    if empty := [client for client in range(clients) if not sum(map(len, shares[client]))]:
        raise ValueError(f"by_label: clients {empty} of {clients} would get no sample")
    return _sorted([torch.cat(pieces) for pieces in shares])


def quantity(labels: Tensor, clients: int, seed: int = 0, *, alpha: float = 0.5, min_samples: int = 1) -> list[Tensor]:
    """Shuffle, then cut into parts whose sizes are drawn from a symmetric Dirichlet distribution: clients differ in
    how many samples they have, and not in which.

    Li, Diao, Chen, He, Federated Learning on Non-IID Data Silos (arXiv:2102.02079), "quantity skew"; here each client
    has ``min_samples`` first, and what is left is divided by the proportions. A small ``alpha`` > 0 gives few clients
    most of the samples.

    Raises:
        ValueError: arguments out of range, or fewer samples than all need.
    """
    _check_clients(labels, clients)
    if not alpha > 0 or min_samples < 1:
        raise ValueError(f"quantity: need alpha > 0 and min_samples >= 1, got {alpha} and {min_samples}")
    left = len(labels) - min_samples * clients
    if left < 0:
        raise ValueError(f"quantity: {clients} clients need {min_samples} samples each, there are {len(labels)}")
    # Of gamma variates, whose sum may be 0 with a tiny alpha: then one client has all that is left.
    drawn = np.random.default_rng(derive_seed("quantity", seed)).standard_gamma(alpha, clients)
    proportions = drawn / drawn.sum() if drawn.sum() > 0 else np.eye(1, clients)[0]
    ends = np.floor(np.cumsum(proportions) * left).astype(int).clip(max=left)
    ends[-1] = left
    sizes = np.diff(ends, prepend=0) + min_samples
    order = torch.randperm(len(labels), generator=seeded_generator("quantity", seed))
    return _sorted(torch.split(order, sizes.tolist()))


def feature(
    labels: Tensor, clients: int, seed: int = 0, *, samples: Tensor, by: str = "mean", skew: float = 1.0
) -> list[Tensor]:
    """Give each client samples that look alike: sort by a feature, and cut into equal parts, which are dealt out at
    random.

    As where sites have different scanners or cameras; Li et al. (arXiv:2102.02079), "feature distribution skew", make
    it by noise instead, where here no sample is changed.

    Args:
        samples: (N, ...), of the data set.
        by: ``mean`` of the values of a sample, which is the brightness of an image, or their ``spread``, its contrast.
        skew: 1: all is sorted; 0: nothing, as ``iid``. Between them the place of a sample is so much that in the sorted
            order, and for the rest one at random.

    Raises:
        ValueError: arguments out of range.
    """
    _check_clients(labels, clients)
    if by not in _FEATURES or not 0 <= skew <= 1:
        raise ValueError(f"feature: need by among {', '.join(_FEATURES)} and 0 <= skew <= 1, got {by!r} and {skew}")
    generator = seeded_generator("feature", seed)
    values = _FEATURES[by](samples.detach().cpu().reshape(len(samples), -1).double())
    count = len(labels)
    place = torch.empty(count, dtype=torch.float64)
    place[torch.argsort(values, stable=True)] = torch.arange(count, dtype=torch.float64)
    elsewhere = torch.randperm(count, generator=generator).double()
    parts = torch.argsort(skew * place + (1 - skew) * elsewhere, stable=True).tensor_split(clients)
    return _sorted([parts[number] for number in torch.randperm(clients, generator=generator).tolist()])


_FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda values: values.mean(1),
    "spread": lambda values: values.std(1, correction=0),
}


def natural(labels: Tensor, clients: int, seed: int = 0, *, ids: Sequence[int | str]) -> list[Tensor]:
    """Keep together what belongs together: samples with one id, of a writer, a patient or a site, are one client's.

    Args:
        ids: of each sample, in the order of the data set. With as many ids as clients the first one that occurs is
            client 0 and so on; with more, they are dealt out at random, equally many to each.

    Raises:
        ValueError: not one id for each sample, or fewer ids than clients.
    """
    _check_clients(labels, clients)
    if len(ids) != len(labels):
        raise ValueError(f"natural: {len(ids)} ids for {len(labels)} samples of the training set: one for each")
    places: dict[int | str, list[int]] = {}
    for place, one in enumerate(ids):
        places.setdefault(one, []).append(place)
    if len(places) < clients:
        raise ValueError(f"natural: {len(places)} ids are too few for {clients} clients: set so many clients at most")
    groups = [torch.tensor(group) for group in places.values()]
    order: Sequence[int] = range(clients)
    if len(groups) > clients:
        order = torch.randperm(len(groups), generator=seeded_generator("natural", seed)).tolist()
    return _sorted([torch.cat([groups[i] for i in order[client::clients]]) for client in range(clients)])


KINDS: dict[str, Callable[..., list[Tensor]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "by_label": by_label,
    "quantity": quantity,
    "feature": feature,
    "natural": natural,
}


def make(
    spec: PartitionSpec, labels: Tensor, clients: int, seed: int = 0, *, samples: Tensor | None = None
) -> list[Tensor]:
    """Partition as ``spec`` says; a ``seed`` in the spec goes before the argument. ``samples``: of the data set, for
    the kinds that look at them.

    Raises:
        ValueError: unknown kind or option (the message names the nearest), or what the partitioner itself refuses.
    """
    kind, options = parse(spec)
    own = {"samples": samples} if "samples" in inspect.signature(KINDS[kind]).parameters else {}
    if own and samples is None:
        raise ValueError(f"partition {kind} looks at the samples, which are not given")
    return KINDS[kind](labels, clients, **{"seed": seed, **options, **own})


def parse(spec: PartitionSpec) -> tuple[str, dict[str, Any]]:
    """Split ``spec`` into its kind and its options, and check the names of both.

    Raises:
        ValueError: unknown kind or option.
    """
    options = {"kind": spec} if isinstance(spec, str) else dict(spec)
    kind = options.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"partition: no kind {kind!r}{_nearest(kind, KINDS)}; there are {', '.join(KINDS)}")
    known = [name for name in inspect.signature(KINDS[kind]).parameters if name not in _GIVEN]
    for name in options:
        if name not in known:
            raise ValueError(
                f"partition {kind}: no option {name!r}{_nearest(name, known)}; there are {', '.join(known)}"
            )
    if kind == "natural" and "ids" not in options:
        raise ValueError("partition natural: needs ids, one for each sample (or, in a file of settings, path)")
    return kind, options


_GIVEN = ("labels", "clients", "samples")  # by the task, and not by the settings


def _check_clients(labels: Tensor, clients: int) -> None:
    if clients < 1:
        raise ValueError(f"clients must be >= 1, got {clients}")
    if len(labels) < clients:
        raise ValueError(f"{len(labels)} samples are too few for {clients} clients")


def _shuffled_by_label(labels: Tensor, generator: torch.Generator) -> list[Tensor]:
    """The indices of each label 0, 1, ... up to the largest, each list in random order."""
    order = torch.randperm(len(labels), generator=generator)
    order = order[torch.argsort(labels[order], stable=True)]
    return list(torch.split(order, torch.bincount(labels).tolist()))


def _cut(pool: Tensor, proportions: np.ndarray[Any, Any]) -> list[Tensor]:
    """Cut ``pool`` (N,) into consecutive pieces of the given proportions, which add up to 1."""
    ends = np.floor(np.cumsum(proportions)[:-1] * len(pool)).astype(int).clip(max=len(pool))
    return list(pool.tensor_split(ends.tolist()))


def _sorted(shares: Sequence[Tensor]) -> list[Tensor]:
    # Neighbouring indices lie near each other in memory; the order of training is drawn anew in each epoch anyway.
    return [share.sort().values for share in shares]


def _nearest(name: object, known: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
