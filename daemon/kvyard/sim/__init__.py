"""The same core and the same policy objects in virtual time."""
