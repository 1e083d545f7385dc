"""Which sources are kept from targets because what they sent was damaged: a pure judgement of what targets reported.

Damage may come from the source, from the network between, or from the target itself, and one target sees no difference.
So two targets that agree take a source out. The word of one alone counts only while nobody else was served well, while
it accuses no other source, and as long as somebody else holds the same: one broken target takes away nothing that
others need. All of it is about one process and one weight version, and is forgotten after a while.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from weightwire.service.instances import Instance
from weightwire.transfer.errors import ChecksumError

DAMAGE_CODES = frozenset({ChecksumError.code})
# A source that sends nothing but damage would otherwise fill its record.
_MOST_REPORTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageReport:
    """What one target says of one source rank.

    Attributes:
        accuser: Whose word it is: the target's machine if it is known, else its instance.
        rank: Of the source; the report is about this generation and weight version of it.
        reported_at: In seconds since 1970.
    """

    accuser: str
    rank: int
    generation: int
    weight_version: int
    code: str
    detail: str
    reported_at: float

    def stands(self, instance: Instance, *, now: float, keep_s: float) -> bool:
        """Whether it still is about what the instance is, and young enough."""
        process = instance.ranks.get(self.rank)
        if process is None or process.generation != self.generation or now >= self.reported_at + keep_s:
            return False
        # A target that serves while it receives has published nothing yet.
        return process.publication is None or process.publication.weight_version == self.weight_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of one source instance.

    Attributes:
        served: Who became ready from it, and for all that is known without damage, since it has been accused or before.
    """

    instance_id: str
    reports: tuple[DamageReport, ...] = ()
    served: frozenset[str] = frozenset()

    def with_report(self, report: DamageReport) -> Record:
        """With one more; of several by one accuser about one rank the newest counts."""
        others = (r for r in self.reports if (r.accuser, r.rank) != (report.accuser, report.rank))
        return replace(self, reports=(*others, report)[-_MOST_REPORTS:])

    def standing(self, instance: Instance | None, *, now: float, keep_s: float) -> tuple[DamageReport, ...]:
        """The reports that still count; oldest first."""
        if instance is None:
            return ()
        return tuple(report for report in self.reports if report.stands(instance, now=now, keep_s=keep_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a source is not matched.

    Attributes:
        is_certain: False if one target alone says so: then it is matched as long as nobody else holds the same.
    """

    code: str
    reason: str
    is_certain: bool


def judge(
    records: Iterable[Record], instances: Iterable[Instance], *, now: float, keep_s: float
) -> Mapping[str, Verdict]:
    """The sources that are in quarantine, by instance.

    Args:
        keep_s: How long a report counts.
    """
    known = {instance.instance_id: instance for instance in instances}
    standing = dict[Record, tuple[DamageReport, ...]]()
    accused_by = defaultdict[str, set[str]](set)
    for record in records:
        standing[record] = record.standing(known.get(record.instance_id), now=now, keep_s=keep_s)
        for report in standing[record]:
            accused_by[report.accuser].add(record.instance_id)
    verdicts = dict[str, Verdict]()
    for record, reports in standing.items():
        accusers = {report.accuser for report in reports}
        if len(accusers) > 1:
            verdicts[record.instance_id] = _verdict(reports, f"{len(accusers)} targets", is_certain=True)
        elif accusers and not record.served - accusers and all(len(accused_by[each]) == 1 for each in accusers):
            verdicts[record.instance_id] = _verdict(reports, "one target", is_certain=False)
    return verdicts


def _verdict(reports: tuple[DamageReport, ...], who: str, *, is_certain: bool) -> Verdict:
    last = reports[-1]
    return Verdict(
        code=last.code,
        reason=f"in quarantine: {who} had damaged bytes from it, last from rank {last.rank}: {last.detail}",
        is_certain=is_certain,
    )
