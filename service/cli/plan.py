"""`weightwire plan`: what would move, before anything moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, cast

import typer

from weightwire.service.cli import flags
from weightwire.service.cli.flags import Connection
from weightwire.service.cli.output import fail, print_json, start_logging, stderr
from weightwire.service.cli.plan_tables import print_plan, view_of_answer, view_of_plan
from weightwire.service.cli.topology import build_options, chosen_ranks
from weightwire.service.cli.topology_text import parse_topology
from weightwire.service.client.api import Json, ServiceClient
from weightwire.service.client.dry_runs import plan_side, preferred_source, published_identity
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.errors import SettingsError, TransferError
from weightwire.transfer.layouts import ModelIdentity, plain_layout
from weightwire.transfer.local_disk import identity_of
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import BuildOptions
from weightwire.transfer.topology_plan import Side, TopologyPlan, describe_model, plan_topologies

_TOPOLOGY = "Topology"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is to be planned.

    Attributes:
        config: Where the model is described, for a plan without a service.
        source: Topology of the source, likewise.
        target: Of the target; None takes a source's own layout, or whole tensors by checkpoint name.
        rank: One global rank of the target, or `all`.
    """

    config: Path | None
    source: str | None
    target: str | None
    rank: str
    unexpected: str
    source_options: BuildOptions
    target_options: BuildOptions
    as_json: bool

    def check(self) -> None:
        """Refuse flags that mean nothing together.

        Raises:
            SettingsError: Naming them.
        """
        if self.config is not None:
            if self.source is None or self.target is None:
                raise SettingsError("--config: expected --from and --to too, such as --from tp=8 --to tp=4,pp=2")
            return
        if self.source is not None or self.source_options != BuildOptions():
            raise SettingsError("--from…: only with --config; a running source has published its own topology")
        if self.target is None and (self.rank != "all" or self.target_options != BuildOptions()):
            raise SettingsError(
                "--rank, --vocab-multiple, --pad-heads, --expert-map: only for a topology, expected --to too"
            )

    def side(self, flag: str, text: str, options: BuildOptions) -> Side:
        return Side(
            topology=parse_topology(flag, text), options=options, unexpected=flags.unexpected_policy(self.unexpected)
        )

    def target_side(self) -> tuple[Side, range]:
        """The target, and the ranks of it that are to be planned."""
        side = self.side("--to", self.target or "", self.target_options)
        return side, chosen_ranks(self.rank, side.topology)


def plan(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            envvar="WEIGHTWIRE_MODEL",
            help="Model id, such as org/name; the service has to know it.",
            show_default=False,
        ),
    ] = None,
    service: flags.Service = flags.DEFAULT_SERVICE,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Plan without a service: folder with a config.json; headers of a checkpoint there count, too.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="With --config: topology of the source, such as tp=8,ep=8.",
            show_default=False,
            rich_help_panel=_TOPOLOGY,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Topology of the target, such as tp=4,pp=2. Default: the layout of a source.",
            show_default=False,
            rich_help_panel=_TOPOLOGY,
        ),
    ] = None,
    rank: Annotated[
        str, typer.Option("--rank", help="One global rank of the target, or all.", rich_help_panel=_TOPOLOGY)
    ] = "all",
    vocab_multiple: flags.VocabMultiple = None,
    pad_heads: flags.PadHeads = False,
    expert_map: flags.ExpertMap = None,
    from_vocab_multiple: Annotated[
        int | None,
        typer.Option(help="As --vocab-multiple, of the source.", min=1, show_default=False, rich_help_panel=_TOPOLOGY),
    ] = None,
    from_pad_heads: Annotated[
        bool, typer.Option("--from-pad-heads", help="As --pad-heads, of the source.", rich_help_panel=_TOPOLOGY)
    ] = False,
    from_expert_map: Annotated[
        Path | None,
        typer.Option(help="As --expert-map, of the source.", show_default=False, rich_help_panel=_TOPOLOGY),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            envvar="WEIGHTWIRE_CHECKPOINT",
            help="Plan for a target with this local checkpoint. Default: with what a source has published.",
            show_default=False,
        ),
    ] = None,
    revision: flags.RevisionWanted = None,
    unexpected: flags.Unexpected = "refuse",
    token: flags.Token = None,
    tls_ca: flags.TlsCa = None,
    service_pin: flags.ServicePin = None,
    proxy: flags.ProxyRule = "none",
    allow_plain_http: flags.AllowPlainHttp = False,
    json: flags.Json = False,
    log_level: flags.LogLevel = "info",
) -> int:
    """Show which tensor would come from where, and why. Nothing moves.

    With --config: between two topologies of a model that need not run anywhere; no weights are needed. Without: ask the
    service for a dry run, with --to for a target of that topology.
    """  # fmt: skip
    start_logging(log_level)
    connection = Connection(
        service=service, token=token, tls_ca=tls_ca, allow_plain_http=allow_plain_http, service_pin=service_pin,
        proxy=proxy,
    )  # fmt: skip
    try:
        asked = _Asked(
            config=config, source=source, target=target, rank=rank, unexpected=unexpected, as_json=json,
            source_options=build_options(
                vocab_multiple=from_vocab_multiple, pad_heads=from_pad_heads, expert_map=from_expert_map
            ),
            target_options=build_options(vocab_multiple=vocab_multiple, pad_heads=pad_heads, expert_map=expert_map),
        )  # fmt: skip
        asked.check()
        if config is not None:
            return _plan_offline(config, asked)
        if model is None:
            raise SettingsError("--model: is missing, expected the id of a model, or --config with a folder")
        with connection.client() as client:
            return _plan_online(client, asked, model=model, revision=revision, checkpoint=checkpoint)
    except TransferError as error:
        return fail(error, as_json=json)


def _plan_offline(config: Path, asked: _Asked) -> int:
    source = asked.side("--from", asked.source or "", asked.source_options)
    target, ranks = asked.target_side()
    identity = describe_model(config)
    with _progress(enabled=not asked.as_json) as told:
        sizes = {"source": source.topology.world_size, "target": target.topology.world_size}
        found = plan_topologies(
            identity, source, target, ranks,
            on_rank=lambda role, rank: told(f"tracing {role} rank {rank} of {sizes[role]}"),
        )  # fmt: skip
    if asked.as_json:
        print_json({**_to_json(found), "error": None})
    else:
        title = f"plan for {identity.model}, {_sizes(source.topology)} to {_sizes(target.topology)}"
        print_plan(view_of_plan(title, found))
    return 0


def _plan_online(
    client: ServiceClient, asked: _Asked, *, model: str, revision: str | None, checkpoint: Path | None
) -> int:
    if asked.target is None:
        answer = _plan_plain(client, model, revision, checkpoint)
        title = f"plan for {model}"
    else:
        target, ranks = asked.target_side()
        identity = _identity(client, model, revision, checkpoint)
        with _progress(enabled=not asked.as_json) as told:
            answer = plan_side(
                client, identity, target, ranks,
                on_rank=lambda rank: told(f"planning rank {rank} of {target.topology.world_size}"),
            )  # fmt: skip
        title = f"plan for {model}, to {_sizes(target.topology)}"
    # What runs has been traced already.
    answer = {**answer, "seconds_trace_source": 0.0}
    if asked.as_json:
        print_json(answer)
    else:
        print_plan(view_of_answer(title, answer))
    return 0


def _plan_plain(client: ServiceClient, model: str, revision: str | None, checkpoint: Path | None) -> Json:
    """For a target of whole tensors, or for one with the layout of a source."""
    if checkpoint is None:
        source = preferred_source(client, model, revision=revision)
        topology = None if source is None else Topology(**cast("dict[str, int]", source["topology"]))
        return client.plan(model, revision=revision, topology=topology)
    with Checkpoint.open(checkpoint) as disk:
        identity = identity_of(disk, model=model, revision=revision)
        layout = plain_layout(specs_of(disk), identity)
    return client.plan(model, revision=identity.revision, manifests=[layout])


def _identity(client: ServiceClient, model: str, revision: str | None, checkpoint: Path | None) -> ModelIdentity:
    if checkpoint is None:
        return published_identity(client, model, revision=revision)
    found = describe_model(checkpoint)
    return replace(found, model=model, revision=revision or found.revision)


def _to_json(plan: TopologyPlan) -> dict[str, object]:
    opaque = [("source", rank, found) for rank, found in enumerate(plan.source_opaque)]
    opaque += [("target", rank.rank, rank.opaque) for rank in plan.ranks]
    ways = plan.ways
    return {
        "seconds_trace": sum(rank.seconds_trace for rank in plan.ranks),
        "seconds_trace_source": plan.seconds_trace_source,
        "seconds_plan": sum(rank.seconds_plan for rank in plan.ranks),
        "copies": plan.copies,
        "segments": plan.copies,
        "bytes": plan.nbytes,
        "ways": {way: ways[way] for way in ("identical", "reshard", "disk", "constant")},
        "bytes_per_source_rank": dict(enumerate(plan.source_bytes)),
        "bytes_per_target_rank": {rank.rank: rank.nbytes for rank in plan.ranks},
        "uncovered": [
            {"rank": rank.rank, "tensor": name, "elements": elements}
            for rank in plan.ranks
            for name, elements in rank.uncovered.items()
        ],
        "opaque": [
            {"side": side, "rank": rank, "tensor": name, "reason": reason}
            for side, rank, found in opaque
            for name, reason in found.items()
        ],
    }


def _sizes(topology: Topology) -> str:
    sizes = {"tp": topology.tp, "pp": topology.pp, "ep": topology.ep}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"


@contextlib.contextmanager
def _progress(*, enabled: bool) -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is going on; gives the function that changes it."""
    if not enabled or not stderr.is_terminal:
        yield lambda _: None
        return
    with stderr.status("") as status:
        yield lambda text: status.update(text)
