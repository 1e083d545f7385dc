"""The data plane as a library: tensors, ranks and wires; no HTTP framework, no engine, no service.

    shells = Shells.from_module(module)                       # or Shells.allocate(manifest)
    fill(shells, Origins(endpoints=…, manifests=…), control=Control(deadline_s=60))

docs/library.md has the whole of it, as a program that runs.
"""

from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.errors import TransferError
from weightwire.transfer.filling import FillResult, Origins, fill
from weightwire.transfer.inspection import Inspection, inspect_checkpoint
from weightwire.transfer.layouts import Layout, ModelIdentity, extended_layout, plain_layout
from weightwire.transfer.loading.direct import DirectLoad, load_direct
from weightwire.transfer.loading.loop import load_weights
from weightwire.transfer.loading.outcomes import LoadReport
from weightwire.transfer.local_disk import identity_of, load_checkpoint
from weightwire.transfer.local_tree import RankLoad, TreeLoader, TreeRequest
from weightwire.transfer.manifest import CheckpointSpec, Manifest, TensorEntry, Topology
from weightwire.transfer.models import BuildOptions, build_model, parse_config
from weightwire.transfer.placement import PlacedConstant, PlacedPiece, ShellPlacement
from weightwire.transfer.placing import Placed, place_shells
from weightwire.transfer.plan import Copy, DiskPiece, Plan, TensorWay
from weightwire.transfer.planning import Planner, Supply, plan_pull
from weightwire.transfer.regions import Region
from weightwire.transfer.replay import Difference, TraceCheck, check_trace, replay
from weightwire.transfer.saving import save_rank
from weightwire.transfer.session import RankProgress, TransferState
from weightwire.transfer.shells import Shells
from weightwire.transfer.staging import Staging
from weightwire.transfer.tracing import Trace, trace_placement
from weightwire.transfer.tree_shells import TreeLayout, build_rank, lay_out_tree
from weightwire.transfer.wire.limits import LimitOverrides, SourceLimits
from weightwire.transfer.wire.puller import PullOptions
from weightwire.transfer.wire.server_process import SourceProcess
from weightwire.transfer.wire.source import Access, Source, SourceIdentity
from weightwire.transfer.wire.source_server import SourceServer
from weightwire.transfer.wire.stream import Endpoint, Timeouts

__all__ = [
    "Access",
    "BuildOptions",
    "Checkpoint",
    "CheckpointSpec",
    "Control",
    "Copy",
    "Difference",
    "DirectLoad",
    "DiskPiece",
    "Endpoint",
    "FillResult",
    "Inspection",
    "Layout",
    "LimitOverrides",
    "LoadReport",
    "Manifest",
    "ModelIdentity",
    "Origins",
    "Placed",
    "PlacedConstant",
    "PlacedPiece",
    "Plan",
    "Planner",
    "PullOptions",
    "RankLoad",
    "RankProgress",
    "Region",
    "ShellPlacement",
    "Shells",
    "Source",
    "SourceIdentity",
    "SourceLimits",
    "SourceProcess",
    "SourceServer",
    "Staging",
    "Supply",
    "TensorEntry",
    "TensorWay",
    "Timeouts",
    "Topology",
    "Trace",
    "TraceCheck",
    "TransferError",
    "TransferState",
    "TreeLayout",
    "TreeLoader",
    "TreeRequest",
    "build_model",
    "build_rank",
    "check_trace",
    "extended_layout",
    "fill",
    "identity_of",
    "inspect_checkpoint",
    "lay_out_tree",
    "load_checkpoint",
    "load_direct",
    "load_weights",
    "parse_config",
    "place_shells",
    "plain_layout",
    "plan_pull",
    "replay",
    "save_rank",
    "specs_of",
    "trace_placement",
]
