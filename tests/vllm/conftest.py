"""These tests run in an environment of their own (`make vllm-env`); in any other, nothing here is collected."""

from __future__ import annotations

import importlib.util
import os
import warnings

# Read by vLLM when it is imported: no network, no statistics, no chatter.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_LOGGING_LEVEL="ERROR")

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob.append("test_*.py")
else:
    with warnings.catch_warnings():
        # Of deprecations, and of what this machine lacks: not ours to mend.
        warnings.simplefilter("ignore")
        import tests.vllm.engine  # noqa: F401
