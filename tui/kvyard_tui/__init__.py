"""The terminal screen that operators watch."""
