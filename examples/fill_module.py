"""Fills a module in place from one that another instance serves: run it, it needs nothing but weightwire.

The control plane, the source and the target live in one process here. In earnest each has its own: the control plane
is `weightwire serve`, and a `ServiceClient` takes its URL.
"""

import torch
from torch import nn

from weightwire.service.client import PullRequest, ServiceClient, pull, serving
from weightwire.service.server import running_service
from weightwire.service.settings import Settings
from weightwire.transfer import ModelIdentity, Shells


class Tiny(nn.Module):
    """Tied weights and a buffer: what a loop over `parameters()` gets wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.norm = nn.BatchNorm1d(64)  # its running mean and variance are buffers
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embed.weight


model = ModelIdentity(model="example/tiny", revision="1")
running, fresh = Tiny(), Tiny()
running.norm(torch.randn(8, 64))  # moves the buffers

with (
    running_service(Settings(port=0)) as url,
    ServiceClient(url) as client,
    serving(client, Shells.from_module(running, model)),
):
    shells = Shells.from_module(fresh, model)  # no copy: these are the module's own tensors
    pulled = pull(client, PullRequest(model=model.model, revision=model.revision, shells=shells))

for name, tensor in running.state_dict().items():
    assert torch.equal(fresh.state_dict()[name], tensor), name
assert fresh.head.weight is fresh.embed.weight
print(f"{len(shells.manifest.tensors)} tensors, {pulled.result.bytes_peer} bytes from peers, verified")
