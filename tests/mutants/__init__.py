"""Mutations of the code, each of which has to break the test that names its fault: `make mutants`."""
