"""What goes wrong, in one line that says what, where and how to mend it."""


class Error(Exception):
    """Something could not be done."""


class UsageError(Error, ValueError):
    """Something was asked for wrongly: an argument, a setting, a recipe."""


class DeviceError(Error, RuntimeError):
    """The device failed; this process cannot compute on it any more."""


for _error in (Error, UsageError, DeviceError):
    _error.__module__ = "fireclay"
