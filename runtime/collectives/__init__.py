"""Collectives as awaitables: a group of equal ranks over the bus."""

from gradbus.runtime.collectives.arithmetic import ReduceOp
from gradbus.runtime.collectives.formation import Member
from gradbus.runtime.collectives.group import Group, GroupStats, check_group, join_group
from gradbus.runtime.collectives.handle import CollectiveHandle
from gradbus.runtime.collectives.reductions import ALGORITHMS, Algorithm

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "CollectiveHandle",
    "Group",
    "GroupStats",
    "Member",
    "ReduceOp",
    "check_group",
    "join_group",
]
