"""Textual widgets that draw lines of toned text."""
