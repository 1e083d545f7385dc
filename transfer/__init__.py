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
from weightwire.transfer.layouts import ModelIdentity, extended_layout, plain_layout
from weightwire.transfer.loading.direct import DirectLoad, load_direct
from weightwire.transfer.loading.loop import load_weights
from weightwire.transfer.loading.outcomes import LoadReport
from weightwire.transfer.local_disk import identity_of, load_checkpoint
from weightwire.transfer.local_tree import RankLoad, TreeLoader, TreeRequest
from weightwire.transfer.manifest import CheckpointSpec, Manifest, TensorEntry, Topology
from weightwire.transfer.models import BuildOptions, build_model, parse_config
from weightwire.transfer.planning import Plan, plan_pull
from weightwire.transfer.regions import Region
from weightwire.transfer.saving import save_rank
from weightwire.transfer.session import RankProgress, TransferState
from weightwire.transfer.shells import Shells
from weightwire.transfer.tracing import Trace, trace_placement
from weightwire.transfer.wire.puller import PullOptions
from weightwire.transfer.wire.source import Access, Source, SourceIdentity, SourceLimits
from weightwire.transfer.wire.source_server import SourceServer
from weightwire.transfer.wire.stream import Endpoint, Timeouts

__all__ = [
    "Access",
    "BuildOptions",
    "Checkpoint",
    "CheckpointSpec",
    "Control",
    "DirectLoad",
    "Endpoint",
    "FillResult",
    "Inspection",
    "LoadReport",
    "Manifest",
    "ModelIdentity",
    "Origins",
    "Plan",
    "PullOptions",
    "RankLoad",
    "RankProgress",
    "Region",
    "Shells",
    "Source",
    "SourceIdentity",
    "SourceLimits",
    "SourceServer",
    "TensorEntry",
    "Timeouts",
    "Topology",
    "Trace",
    "TransferError",
    "TransferState",
    "TreeLoader",
    "TreeRequest",
    "build_model",
    "extended_layout",
    "fill",
    "identity_of",
    "inspect_checkpoint",
    "load_checkpoint",
    "load_direct",
    "load_weights",
    "parse_config",
    "plain_layout",
    "plan_pull",
    "save_rank",
    "specs_of",
    "trace_placement",
]
