"""Backends: where the model runs. One interface, one test for all of them."""
