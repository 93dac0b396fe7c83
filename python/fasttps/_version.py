"""The version, read from here by setup.py and by CMake."""

__version__ = "0.1.0"
