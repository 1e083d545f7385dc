"""Every error that weightwire raises, as one tree.

    TransferError
    ├── ManifestError               a manifest that cannot be right
    │   └── ManifestMismatchError   source and target disagree about tensors
    ├── DtypeError                  a dtype that nobody here knows
    ├── RegionError                 a region of no sense, or outside its storage
    ├── CheckpointError             files on disk that cannot be a checkpoint
    │   ├── CheckpointNotFoundError no weights, or a shard that is not there
    │   ├── CheckpointPathError     an index that leaves its folder
    │   └── HeaderError             a safetensors header that lies
    ├── LoadError                   a checkpoint and parameter shells that do not go together
    │   ├── ConfigError             a config.json that describes no model that can be built
    │   ├── TopologyError           a topology that the model cannot have
    │   ├── NamesError              checkpoint names that no rule knows
    │   ├── PlacementError          a tensor that does not fit the place it is meant for
    │   ├── SlotsError              slots that nothing filled, or that were filled twice
    │   └── FinishError             shells that cannot be finished, or an update that ended half way
    ├── IntegrityError              bytes that are not the promised ones
    │   ├── ChecksumError           one chunk differs from its checksum
    │   └── CoverageError           elements that nothing filled
    ├── SourceError                 one source that does not deliver
    │   ├── SourceUnreachableError  no connection, or one that broke
    │   ├── SourceUntrustedError    a certificate, or a way, that no ticket is sent over
    │   ├── SourceStalledError      connected, but no bytes
    │   ├── SourceBusyError         asks to come back later
    │   ├── SourceLeavingError      takes its weights back: others may have them
    │   ├── SourceRefusedError      answered with an error
    │   ├── FencedError             another generation, version or manifest
    │   └── ProtocolError           an answer that breaks docs/protocol.md
    ├── AccessError                 no token, or one that does not open this door
    │   ├── ForbiddenError          a good token, but not for this
    │   └── TicketError             a ticket that is forged, expired or not for this read
    ├── RequestError                a request that cannot be right
    │   ├── TooLargeError           a body over the limit
    │   └── VersionSkewError        a peer that speaks another major version
    ├── NotFoundError               no such instance, transfer, manifest, tensor
    ├── ConflictError               right for another state
    ├── SettingsError               an option or variable that cannot be right
    ├── ServiceUnreachableError     the control plane does not answer
    │   └── ServiceUntrustedError   or answers with a certificate that is not the expected one
    ├── AdmissionError              needs more memory than there is
    ├── DeviceError                 a copy from or to a device that failed
    ├── DeadlineError               the time is over
    └── CancelledError              somebody said stop

A class has a stable `code` (its name on the wire) and says whether trying again can help (`retryable`).
An error keeps its facts in `facts`: they become members of the problem document, and attributes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeAlias

Fact: TypeAlias = str | int | float | list[str] | list[dict[str, str]] | None


class TransferError(Exception):
    """Root of the tree. `str(error)` names the subject first, then what is, then what was expected."""

    code: ClassVar[str] = "transfer_failed"
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str, **facts: Fact) -> None:
        super().__init__(detail)
        self.facts: Mapping[str, Fact] = facts


class ManifestError(TransferError):
    """A manifest contradicts itself: names twice, a tensor outside its storage, a wrong digest."""

    code = "manifest_invalid"


class ManifestMismatchError(ManifestError):
    """Source and target disagree. Raised before any byte of a shell changes.

    `facts["conflicts"]` lists every difference as `{"tensor", "field", "source", "target"}`.
    """

    code = "manifest_mismatch"


class DtypeError(TransferError):
    """A dtype tag that this build of torch, or safetensors, does not have."""

    code = "dtype_unknown"


class RegionError(TransferError):
    """A region has negative sizes, or reaches outside the storage that it lies in."""

    code = "region_invalid"


class CheckpointError(TransferError):
    """The folder holds something that is not one well-formed checkpoint."""

    code = "checkpoint_invalid"


class CheckpointNotFoundError(CheckpointError):
    """No weights in the folder, or a file that the index names is absent."""

    code = "checkpoint_not_found"


class CheckpointPathError(CheckpointError):
    """The index names a file outside the checkpoint's folder."""

    code = "checkpoint_path_outside"


class HeaderError(CheckpointError):
    """A safetensors header that is truncated, overlapping, hostile or not JSON."""

    code = "checkpoint_header_invalid"


class LoadError(TransferError):
    """A checkpoint cannot be loaded into the parameter shells of a model."""

    code = "load_failed"


class ConfigError(LoadError):
    """A `config.json` that is malformed, or describes no architecture that can be built: `facts["field"]`."""

    code = "config_invalid"


class TopologyError(LoadError):
    """A topology that this model cannot have: numbers that do not divide, a rank outside of it."""

    code = "topology_impossible"


class NamesError(LoadError):
    """Checkpoint names that no rule places, drops or skips: `facts["unexpected"]` lists them."""

    code = "names_unexpected"


class PlacementError(LoadError):
    """A checkpoint tensor whose shape, dtype or value does not fit the shell: `facts["tensor"]`."""

    code = "placement_refused"


class SlotsError(LoadError):
    """Slots of shells are empty, partly filled or filled twice.

    `facts["unfilled"]` and `facts["refilled"]` list them as `name[slot]`.
    """

    code = "slots_unfilled"


class FinishError(LoadError):
    """Derived tensors or kernel forms that cannot be made of the shells as they are.

    Of an update that ended half way, `facts["new"]`, `facts["old"]` and `facts["torn"]` list slots as `name[slot]`.
    """

    code = "finish_failed"


class IntegrityError(TransferError):
    """Bytes are not the ones that the manifest promised."""

    code = "integrity_failed"


class ChecksumError(IntegrityError):
    """A chunk's bytes and its checksum disagree."""

    code = "checksum_mismatch"
    retryable = True


class CoverageError(IntegrityError):
    """Elements of a shell have no origin: no source holds them and neither does the disk.

    `facts["missing"]` names each tensor.
    """

    code = "coverage_incomplete"


class SourceError(TransferError):
    """One source did not deliver; another one, or the disk, may."""

    code = "source_failed"
    retryable = True


class SourceUnreachableError(SourceError):
    """No connection, or one that broke in the middle of an answer."""

    code = "source_unreachable"


class SourceUntrustedError(SourceError):
    """Nothing was sent: the certificate is not the one that is vouched for, or the way is not encrypted."""

    code = "source_untrusted"
    retryable = False


class SourceStalledError(SourceError):
    """The connection stands, but no byte arrived within the time allowed."""

    code = "source_stalled"


class SourceBusyError(SourceError):
    """The source serves as many readers as it wants to; `facts["retry_after_s"]` says when to come back."""

    code = "source_busy"


class SourceLeavingError(SourceError):
    """The source shuts down, or takes its weights back: there is nothing to wait for, others may have them."""

    code = "source_leaving"


class SourceRefusedError(SourceError):
    """The source, or something on the way, answered with an error: `facts["status"]`, `facts["url"]`."""

    code = "source_refused"
    retryable = False


class FencedError(SourceError):
    """The source is not the process, version or manifest that was asked for."""

    code = "source_fenced"
    retryable = False


class ProtocolError(SourceError):
    """An answer does not follow docs/protocol.md: too short, too long, or framed wrongly."""

    code = "protocol_violation"


class AccessError(TransferError):
    """No token, or one that opens nothing here."""

    code = "unauthorized"


class ForbiddenError(AccessError):
    """A good token that is not enough for this request."""

    code = "forbidden"


class TicketError(AccessError):
    """A ticket is forged, expired, or was granted for another rank, generation or version."""

    code = "ticket_invalid"


class RequestError(TransferError):
    """A request that is wrong in itself, whatever the state."""

    code = "request_invalid"


class TooLargeError(RequestError):
    """A request body over the limit, `facts["limit_bytes"]`."""

    code = "body_too_large"


class VersionSkewError(RequestError):
    """The peer speaks another major version of the protocol."""

    code = "version_skew"


class NotFoundError(TransferError):
    """Nothing of that name is known: `facts["kind"]`, `facts["name"]`."""

    code = "not_found"


class ConflictError(TransferError):
    """The request would have been right in another state."""

    code = "conflict"


class SettingsError(TransferError):
    """An option or a variable of ours that is unknown or cannot be right."""

    code = "settings_invalid"


class ServiceUnreachableError(TransferError):
    """The control plane does not answer; moving bytes does not need it."""

    code = "service_unreachable"
    retryable = True


class ServiceUntrustedError(ServiceUnreachableError):
    """Nothing was sent: the control plane's certificate has expired, is of another name, authority or fingerprint."""

    code = "service_untrusted"
    retryable = False


class AdmissionError(TransferError):
    """The transfer needs more memory than there is: `facts["needed_bytes"]`, `facts["available_bytes"]`."""

    code = "memory_insufficient"


class DeviceError(TransferError):
    """A copy between the host and a device of this process failed, or does not end."""

    code = "device_copy_failed"


class DeadlineError(TransferError):
    """The deadline passed."""

    code = "deadline_exceeded"


class CancelledError(TransferError):
    """Somebody cancelled the transfer."""

    code = "cancelled"
