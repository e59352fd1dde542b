"""A serving daemon for large language models with policies that can be changed while it serves."""

__version__ = "0.1.0"
