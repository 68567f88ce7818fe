"""Invariant I3: every round computed again, from the bytes of the updates that counted.

With fedavg, and no limits on updates, in NumPy alone: in integers as docs/architecture.md has it, by clients in
ascending order. Other strategies have steps of their own; they are run again as they are, with the same order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradbus.commands.history.reader import Event, RunHistory
from gradbus.runtime.testing.journal import model_name, update_name, weights_name

if TYPE_CHECKING:
    import numpy as np


Expect = Callable[[bool, str], None]  # whether a fact holds, and a sentence for where it does not
_ONE = float(1 << 30)  # of the fixed point
_CODE = {"strategy": "strategy", "codec": "codec", "section_codec": "codec", "downlink_codec": "codec"}


def replay(run: RunHistory, expect: Expect) -> None:
    """Compute again the rounds of runs that kept their payloads, from their first round on."""
    runs: dict[str, list[tuple[Event, list[Event]]]] = {}
    openings: dict[str, Event] = {}
    before: dict[str, dict[int, list[Event]]] = {}  # updates that the start before has counted
    bounds: dict[str, dict[int, Event]] = {}  # of each round, where clients may lie: the newest ones
    for start in run.controller:
        name = start.opening["run"]
        openings.setdefault(name, start.opening)
        rounds, last = runs.setdefault(name, []), start.opening["round"]
        if last == (rounds[-1][0] if rounds else openings[name])["round"] + 1:
            # The start before has committed it, and died before it could note it: this one has its outcome.
            rounds.append((start.opening, before[name].get(last, [])))
        counted: dict[int, list[Event]] = {}
        before[name] = counted
        for event in start.events:
            if event["event"] == "bounds":
                bounds.setdefault(name, {})[event["round"]] = event
            elif event["event"] == "counted":
                counted.setdefault(event["round"], []).append(event)
            elif event["event"] == "committed":
                rounds.append((event, counted.get(event["round"], [])))
    for name, rounds in runs.items():
        opening = openings[name]
        kept = run.has_payload(weights_name(int(name, 16), opening["round"]))
        if kept and _has_all(opening) and not own_choice(opening):
            try:
                _Replay(run, expect, opening, bounds.get(name, {})).all(rounds)
            except OSError as error:
                expect(False, f"the rounds of run {name} cannot be computed again: {error}")


def own_choice(opening: Event) -> str:
    """Return the name of a strategy or a codec that is not one of gradbus, and which of them it is; "" if all are.

    Rounds of it are not computed again: that would import a module that a file of the run names.
    """
    rules = opening.get("federated")
    for key, what in _CODE.items():
        chosen = rules.get(key) if isinstance(rules, dict) else None
        name = chosen.get("name") if isinstance(chosen, dict) else chosen
        if isinstance(name, str) and ":" in name:
            return f"{what} {name}"
    return ""


def _has_all(opening: Event) -> bool:
    """Whether the weights are all that the run went on from. Later on there may be the state of a strategy, and what
    the clients hold, and of these no history has the bytes."""
    alone = opening["federated"]["strategy"]["name"] == "fedavg" and opening["held_crc32"] == opening["crc32"]
    return bool(alone or opening["round"] == 0)


def _weight(update: Event) -> int:
    """The samples that it counted as: fewer than its client has announced, where these are capped."""
    weight: int = update["weight"] if "weight" in update else update["num_samples"]
    return weight


class _Replay:
    def __init__(self, run: RunHistory, expect: Expect, opening: Event, bounds: dict[int, Event]) -> None:
        import numpy as np

        from gradbus.actors.aggregation.bounded_strategy import bounded
        from gradbus.actors.aggregation.clipping import within_limits
        from gradbus.actors.aggregation.strategies import FedAvg
        from gradbus.runtime.choices import STRATEGIES
        from gradbus.runtime.config.federated import FederatedConfig

        self._run = run
        self._expect = expect
        self._bounds = bounds
        self._run_id = int(opening["run"], 16)
        self._has_buffers = opening.get("has_buffers") is True
        config = FederatedConfig.model_validate(opening["federated"])
        data = self._bytes_of(weights_name(self._run_id, opening["round"]))
        self._weights: np.ndarray[Any, np.dtype[np.float32]] = np.frombuffer(data, dtype="<f4").copy()
        self._held = None if config.downlink_codec.name == "fp32" else self._weights.copy()
        strategy = bounded(within_limits(STRATEGIES.make(config.strategy, self._weights.size), config), config)
        self._strategy = None if type(strategy) is FedAvg else strategy

    def all(self, rounds: list[tuple[Event, list[Event]]]) -> None:
        done = 0
        for commit, updates in rounds:
            if commit["round"] <= done:
                continue  # committed again, which another invariant checks
            done = commit["round"]
            try:
                self._round(done, sorted(updates, key=lambda update: update["client"]))
            except (OSError, ValueError) as error:
                self._expect(False, f"round {done} cannot be computed again: {error}")
                return
            crc32 = zlib.crc32(self._weights.data)
            self._expect(
                crc32 == commit["crc32"],
                f"round {done}: its updates give a model with CRC-32 {crc32:08x}, committed is {commit['crc32']:08x}",
            )
            self._follow(done)

    def _payload(self, round_id: int, update: Event) -> bytes:
        name = update_name(round_id, update["client"], update["incarnation"], update["transfer"])
        return self._without_buffers(self._bytes_of(name))

    def _without_buffers(self, payload: bytes) -> bytes:
        """Return a payload without the block of merged buffers that ends it: what they were before is not noted."""
        from gradbus.actors.aggregation.merged_buffers import split

        return bytes(split(memoryview(payload))[0]) if self._has_buffers else payload

    def _bytes_of(self, name: str) -> bytes:
        with self._run.open_payload(name) as file:
            return file.read()

    def _round(self, round_id: int, updates: list[Event]) -> None:
        import numpy as np
        import torch

        from gradbus import codecs
        from gradbus.actors.aggregation import updates as updates_format
        from gradbus.actors.aggregation.updates import Facts

        if not updates:
            return  # no client had anything to train: the model stays as it is
        base = self._weights if self._held is None else self._held
        if self._strategy is not None:
            weights = torch.from_numpy(self._weights)
            if (own := self._strategy.bounds) is not None and (noted := self._bounds.get(round_id)) is not None:
                own.set_in_force(round_id, noted["weights"], noted["norms"])
            self._strategy.begin(round_id, torch.from_numpy(base))
            for update in updates:
                payload = bytearray(self._payload(round_id, update))
                parsed = updates_format.parse(payload, expected_dim=base.size, others=self._strategy.sections)
                facts = Facts(
                    client_id=update["client"],
                    round_id=round_id,
                    num_samples=_weight(update) if self._strategy.bounds is None else update["num_samples"],
                    steps=update.get("steps", 0),
                    loss=update.get("loss"),
                    metrics=update.get("metrics", {}),
                )
                self._strategy.add(parsed, facts)
            self._strategy.finish(weights)
            return
        # In two parts, low < 2^32: a sum of what is only just allowed does not fit 64 bits.
        high, low = np.zeros(base.size, dtype=np.int64), np.zeros(base.size, dtype=np.int64)
        for update in updates:
            decoded = codecs.decode(bytearray(self._payload(round_id, update)), expected_dim=base.size)
            delta = decoded.vector.numpy().astype(np.float64)
            if not decoded.is_delta:
                delta -= base
            low += np.rint(delta * (_weight(update) * _ONE)).astype(np.int64)
            high += low >> 32
            low &= 0xFFFF_FFFF
        samples = sum(map(_weight, updates))
        total = high * 2.0**32 + low
        self._weights[:] = total * (1.0 / (samples * _ONE)) + self._weights

    def _follow(self, round_id: int) -> None:
        """With a lossy codec on the way down: update the weights that the clients hold after this round."""
        if self._held is None:
            return
        import torch

        from gradbus.codecs import add_into

        payload = bytearray(self._without_buffers(self._bytes_of(model_name(self._run_id, round_id))))
        add_into(torch.from_numpy(self._held), payload)
