"""Example policies for kvyard."""
