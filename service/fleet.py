"""The fleet at one moment, as choices about sources see it: instances, and the transfers that run between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from weightwire.service.grants import GrantedInstance, Transfer, granted_relay
from weightwire.service.instances import Instance
from weightwire.service.records import Table
from weightwire.service.registry import INSTANCES
from weightwire.service.store import Transaction
from weightwire.service.waves import Member, Tiers
from weightwire.transfer.manifest import Topology

# Apart from those that have ended, since choices look at all of these, and ended ones stay for a day.
RUNNING = Table("transfer", Transfer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Attributes:
    instances: By id, those whose leases ran out included.
    running: Transfers whose target is heard of and still the same, and whose time is not over.
    """

    instances: Mapping[str, Instance]
    running: Sequence[Transfer]
    now: float

    @classmethod
    def read(cls, transaction: Transaction, now: float) -> Fleet:
        instances = {instance.instance_id: instance for instance in INSTANCES.scan(transaction)}
        running = [
            transfer
            for transfer in RUNNING.scan(transaction)
            if transfer.deadline_at > now and _lives(transfer, instances.get(transfer.target_instance), now)
        ]
        return cls(instances=instances, running=running, now=now)

    def relays(
        self, *, model: str, held: tuple[str | None, int | None], topology: Topology, ranks: Collection[int]
    ) -> dict[str, GrantedInstance]:
        """What targets that are receiving `held`, a revision and weight version, can give to ranks of that topology."""
        found: dict[str, GrantedInstance] = {}
        for transfer in self.running:
            if (transfer.model, (transfer.revision, transfer.weight_version), transfer.topology) != (
                model,
                held,
                topology,
            ):
                continue
            granted = granted_relay(transfer, self.instances[transfer.target_instance], ranks, now=self.now)
            if granted is not None:
                found[transfer.target_instance] = granted
        return found

    def is_paused(self, instance_id: str) -> bool:
        """Whether somebody said that it takes no readers."""
        return self.instances[instance_id].limits.max_readers == 0

    def members(self, relays: Collection[str] = ()) -> list[Member]:
        """Every target that is receiving.

        Args:
            relays: Ids of those that can serve a certain joiner.
        """
        return [
            Member(
                instance_id=transfer.target_instance,
                tiers=self._living_tiers(transfer),
                relays=transfer.relay and transfer.target_instance in relays,
                joined_at=transfer.created_at,
            )
            for transfer in self.running
        ]

    def _living_tiers(self, transfer: Transfer) -> Tiers:
        tiers: dict[int, list[str]] = {}
        for granted in transfer.instances:
            tiers.setdefault(granted.standby, [])
            if self._lives(granted):
                tiers[granted.standby].append(granted.instance_id)
        return tuple(tuple(tiers[standby]) for standby in sorted(tiers))

    def _lives(self, granted: GrantedInstance) -> bool:
        """Whether an instance is still that which was granted, and a relay is still receiving, or through with it."""
        instance = self.instances.get(granted.instance_id)
        if instance is None:
            return False
        for source in granted.ranks:
            process = instance.ranks.get(source.rank)
            if process is None or process.generation != source.generation or not process.is_live(self.now):
                return False
        return not granted.relay or self._relays_or_holds(granted, instance)

    def _relays_or_holds(self, granted: GrantedInstance, instance: Instance) -> bool:
        if all(instance.ranks[source.rank].publication is not None for source in granted.ranks):
            return True
        return any(transfer.relay and transfer.target_instance == granted.instance_id for transfer in self.running)


def _lives(transfer: Transfer, target: Instance | None, now: float) -> bool:
    if target is None or target.expires_at <= now or target.epoch != transfer.target_epoch:
        return False
    current = {process.rank: process.generation for process in target.ranks.values()}
    return all(current.get(rank.rank) == rank.generation for rank in transfer.ranks)
