"""Policies that fail, one for each way; the proof of the guard."""
