"""TKNP: decode token parallelism and Helix as one serving system."""

__version__ = "0.1.0"
