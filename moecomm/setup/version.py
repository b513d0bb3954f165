"""Versions of installed packages."""

from importlib.metadata import PackageNotFoundError, version

__version__ = version("moecomm")


def version_of(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
