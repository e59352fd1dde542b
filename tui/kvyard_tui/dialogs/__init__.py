"""Dialogs: each opens with nothing decided, and Enter alone never changes the daemon."""
