"""Exceptions. Their messages are one line: what failed, where, and how to fix it."""


class Error(Exception):
    """A failure."""


class UsageError(Error, ValueError):
    """An invalid argument, setting or recipe."""


class DeviceError(Error, RuntimeError):
    """The device failed; this process cannot use it any more."""


for _error in (Error, UsageError, DeviceError):
    _error.__module__ = "fireclay"
