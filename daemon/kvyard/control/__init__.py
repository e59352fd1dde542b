"""Client and schema of the control socket."""
