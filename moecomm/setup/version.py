"""The version of the package, as installed."""

from importlib.metadata import version

__version__ = version("moecomm")
