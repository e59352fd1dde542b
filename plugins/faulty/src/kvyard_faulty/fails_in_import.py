"""Fails when it is imported."""

raise SystemExit("not on this machine")
