"""Files that a test writes byte by byte, without the code under test."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Spec = tuple[str, list[int], bytes]


@pytest.fixture
def write_raw() -> Callable[[Path, object, bytes], Path]:
    """Writes a safetensors file from its header (JSON, or its very bytes) and its payload, true or not."""

    def write(path: Path, header: object, payload: bytes = b"") -> Path:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + payload)
        return path

    return write


@pytest.fixture
def write_tensors(write_raw: Callable[[Path, object, bytes], Path]) -> Callable[[Path, Mapping[str, Spec]], Path]:
    """Writes a well-formed file from tag, logical shape and bytes of each tensor."""

    def write(path: Path, tensors: Mapping[str, Spec]) -> Path:
        header, payload = dict[str, object](), b""
        for name, (tag, shape, data) in tensors.items():
            header[name] = {"dtype": tag, "shape": shape, "data_offsets": [len(payload), len(payload) + len(data)]}
            payload += data
        return write_raw(path, header, payload)

    return write
