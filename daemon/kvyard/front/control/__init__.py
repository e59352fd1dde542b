"""The control socket's server."""
