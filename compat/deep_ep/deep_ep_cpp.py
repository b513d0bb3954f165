"""The names that programs import from DeepEP's C++ module."""

from deep_ep.config import Config
from deep_ep.utils import EventHandle

__all__ = ["Config", "EventHandle"]
