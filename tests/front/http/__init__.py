"""Tests of kvyard.front.http."""
