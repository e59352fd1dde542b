"""HTTP API, control API, supervisor, journal, text and metrics: the process that never imports torch."""
