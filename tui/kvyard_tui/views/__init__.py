"""View models: pure functions from what is known to lines of toned text. No Textual here."""
