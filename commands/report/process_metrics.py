"""What a client, and a rank of a data-parallel run, did so far, as Prometheus metrics computed when they are collected.

Collected by threads that only read what the event loop changes, each value by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gradbus.actors import ClientSummary, ElasticWorker
from gradbus.commands.report.followed import FollowedClient, FollowedHost, FollowedRank


class _Families:
    """Metrics whose first labels are those of this process."""

    def __init__(self, prefix: str, labels: dict[str, str]) -> None:
        self._prefix = prefix
        self._labels = labels
        self.found: list[Metric] = []

    def gauge(self, name: str, text: str, value: float | None) -> None:
        """Nothing is known yet: no sample is better than an invented one."""
        family = GaugeMetricFamily(f"{self._prefix}_{name}", text, labels=list(self._labels))
        if value is not None:
            family.add_metric(list(self._labels.values()), value)
        self.found.append(family)

    def counter(self, name: str, text: str, value: float) -> None:
        family = CounterMetricFamily(f"{self._prefix}_{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        self.found.append(family)

    def summary(self, done: ClientSummary, of: str) -> None:
        """Return what clients did so far; ``of``: whose updates count."""
        self.counter("rounds", f"Rounds in which an update of {of} counted", done.rounds)
        self.counter("updates_refused", "Updates that did not count", done.refused)
        self.counter("sent_bytes", "Bytes of updates sent, repairs included", done.bytes_up)
        self.counter("train_seconds", "Seconds of training", done.train_s)

    def by_name(self, name: str, text: str, values: dict[str, float]) -> None:
        """A gauge with one more label, the name of each value."""
        family = GaugeMetricFamily(f"{self._prefix}_{name}", text, labels=[*self._labels, "name"])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        self.found.append(family)


class ClientCollector(Collector):
    """One client, labelled with its job, its id, empty until it has one, and its name if it has one."""

    def __init__(self, job: str, client_id: int | None, followed: FollowedClient, name: str = "") -> None:
        self._job = job
        self._client_id = client_id
        self._name = name
        self._followed = followed

    @property
    def _labels(self) -> dict[str, str]:
        client = self._followed.client
        name = self._name if client is None else client.name
        client_id = self._client_id if client is None or client.client_id < 0 else client.client_id
        labels = {"job": self._job, "client": "" if client_id is None else str(client_id)}
        return {**labels, "name": name} if name else labels

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        families = _Families("gradbus_client", self._labels)
        client = self._followed.client
        families.gauge("up", "1 from the moment that the client has its data", client is not None)
        if client is not None:
            families.summary(client.summary, "this client")
        yield from families.found


class HostCollector(Collector):
    """A host of virtual clients, labelled with its job: sums over its clients."""

    def __init__(self, job: str, followed: FollowedHost) -> None:
        self._labels = {"job": job}
        self._followed = followed

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        families = _Families("gradbus_host", self._labels)
        host, pool = self._followed.host, self._followed.pool
        families.gauge("up", "1 from the moment that the host speaks for its clients", host is not None)
        if host is not None and pool is not None:
            families.summary(host.summary, "a client of this host")
            families.gauge("processes", "Processes that train its clients", pool.size)
            families.counter("processes_replaced", "Training processes that died and were replaced", pool.replaced)
        yield from families.found


class RankCollector(Collector):
    """One rank, labelled with its job and rank. In an elastic run the label is the number of the process."""

    def __init__(self, job: str, rank: int, followed: FollowedRank) -> None:
        self._labels = {"job": job, "rank": str(rank)}
        self._followed = followed

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        families = _Families("gradbus_rank", self._labels)
        worker, report = self._followed.worker, self._followed.report
        families.gauge("up", "1 from the moment that all ranks are there", worker is not None)
        if worker is not None:
            families.gauge("step", "Steps done in all, those before a resume included", worker.step)
            sent_bytes, received_bytes = worker.profile.exchanged
            families.counter("sent_bytes", "Payload that this rank has sent for the run", sent_bytes)
            families.counter("received_bytes", "Payload that it has received", received_bytes)
        families.counter("epochs", "Epochs finished by this process", self._followed.epochs)
        families.counter("steps_skipped", "Steps skipped for NaN or infinity", self._followed.skipped_steps)
        if isinstance(worker, ElasticWorker) and worker.generations is not None:
            families.gauge("generation", "Generation of the elastic group", worker.generations.number)
            families.gauge("members", "Processes that take part in it", len(worker.generations.members))
            families.gauge("mean_ranks", "Ranks that took part in a step of this epoch, in the mean", worker.mean_ranks)
        if report is not None:
            families.gauge("accuracy", "Accuracy of the newest evaluated model, 0 to 1", report.accuracy)
            families.gauge("eval_loss", "Its loss on the test set", report.eval_loss)
            families.gauge("train_loss", "Mean training loss of the newest epoch, all ranks", report.loss)
            families.by_name("metric", "Metrics of the test set, by name", dict(report.metrics))
            families.gauge("step_seconds", "Mean seconds of a step of the newest epoch", report.step_s_mean)
            families.gauge("wait_seconds", "Of these, waiting for the others and the network", report.wait_s_mean)
            families.gauge("step_sent_bytes", "Mean bytes that a step has sent", report.bytes_out_per_step)
        yield from families.found
