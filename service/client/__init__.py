"""What a source or a target says to the service: REST calls, leases, and whole transfers."""

from weightwire.service.client.api import Grant, Lease, RankBinding, ReportedFailure, ServiceClient
from weightwire.service.client.membership import Membership
from weightwire.service.client.pulls import Pulled, PulledRank, PullEvents, PullRequest
from weightwire.service.client.sessions import pull, serving
from weightwire.service.client.target import Target

__all__ = [
    "Grant",
    "Lease",
    "Membership",
    "PullEvents",
    "PullRequest",
    "Pulled",
    "PulledRank",
    "RankBinding",
    "ReportedFailure",
    "ServiceClient",
    "Target",
    "pull",
    "serving",
]
