"""Tests of kvyard.front.text."""
