"""A target in standard-library Python: what docs/protocol.md asks of one, and nothing of weightwire.

    python examples/minimal_client.py http://127.0.0.1:8700 org/name FOLDER

writes one file of raw bytes for each tensor. The standard library has no xxh3: where the package `xxhash` is absent,
the checksums of the frames are not compared, and the last line says so.
"""

import http.client
import importlib
import itertools
import json
import math
import re
import struct
import sys
import time
from pathlib import Path
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

try:
    xxh3 = importlib.import_module("xxhash").xxh3_64_intdigest
except ImportError:
    xxh3 = None

service, model, folder = sys.argv[1:]
born = time.time_ns() // 1_000_000  # the generation: new, and higher, for each process
me = f"minimal-{born}"


def call(method: str, path: str, body: object = None) -> bytes:
    """One call of the control plane. Where it wants a token: `Authorization: Bearer TOKEN`."""
    headers = {"Content-Type": "application/json", "Weightwire-Protocol": "1.0"}
    request = Request(service + path, json.dumps(body).encode() if body else None, headers, method=method)
    with urlopen(request, timeout=10) as answer:
        return bytes(answer.read())


rank = {"rank": 0, "generation": born}
call("PUT", f"/v1/instances/{me}", {"model": model, "epoch": born, "ranks": [{**rank, "url": None}], "lease_s": 3600})
target = {"instance_id": me, "epoch": born, "ranks": [rank]}
grant = json.loads(call("POST", "/v1/transfers", {"model": model, "target": target}))
source = grant["ranks"][0]["sources"][0]
manifest = json.loads(call("GET", f"/v1/manifests/{source['manifest_digest']}"))
if manifest["topology"]["tp"] * manifest["topology"]["pp"] > 1:
    sys.exit(f"{source['instance_id']}: each of its ranks has a part of the model, which takes more than this to join")
bases = [0, *itertools.accumulate(manifest["storages"])]
connection = http.client.HTTPConnection(urlsplit(source["url"]).netloc, timeout=10)
question = {key: source[key] for key in ("generation", "weight_version")} | {
    "manifest": source["manifest_digest"],
    "target": {"instance_id": me, "rank": 0},
}
done = 0
for tensor in manifest["tensors"]:
    shape, itemsize = tensor["shape"], max([8, *map(int, re.findall(r"\d+", tensor["dtype"])[:1])]) // 8
    row_major = [math.prod(max(1, size) for size in shape[axis + 1 :]) for axis in range(len(shape))]
    strides = [stride * itemsize for stride in tensor.get("strides", row_major)]
    region = [bases[tensor["storage"]] + tensor["offset"] * itemsize, [*shape, itemsize], [*strides, 1]]
    body = json.dumps({**question, "regions": [region]})
    connection.request("POST", "/v1/read", body, {"Authorization": f"Ticket {source['ticket']}"})
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(f"{tensor['name']}: {answer.status} {answer.read().decode()}")
    with open(Path(folder) / quote(tensor["name"], safe=""), "wb") as file:
        while header := answer.read(8):
            kind, length = struct.unpack("!4sI", header)
            payload = answer.read(length)
            if kind != b"DATA":
                sys.exit(f"{tensor['name']}: {payload.decode()}")
            verdict, digest = struct.unpack("!4sQ", answer.read(12))
            if verdict != b"GOOD" or (xxh3 and xxh3(payload) != digest):
                sys.exit(f"{tensor['name']}: {length} bytes are not what the source vouches for, {verdict!r}")
            done += file.write(payload)
        if file.tell() != math.prod([*shape, itemsize]):
            sys.exit(f"{tensor['name']}: ends after {file.tell()} bytes")
report = {"generation": born, "state": "ready", "bytes_total": done, "bytes_peer": done, "bytes_disk": 0}
call("POST", f"/v1/transfers/{grant['transfer_id']}/ranks/0/progress", report)
call("DELETE", f"/v1/instances/{me}?epoch={born}")
print(f"{len(manifest['tensors'])} tensors, {done} bytes, checksums {'compared' if xxh3 else 'not compared'}")
