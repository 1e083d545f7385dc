"""Exit codes: 0 done, 1 failed, 2 wrong usage, 3 cancelled, 4 deadline."""

from __future__ import annotations

from weightwire.transfer.errors import CancelledError, DeadlineError, SettingsError, TransferError

DONE, FAILED, WRONG_USAGE, CANCELLED, DEADLINE = range(5)


def code_for(error: TransferError) -> int:
    if isinstance(error, CancelledError):
        return CANCELLED
    if isinstance(error, DeadlineError):
        return DEADLINE
    return WRONG_USAGE if isinstance(error, SettingsError) else FAILED
