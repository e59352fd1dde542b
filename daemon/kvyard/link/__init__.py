"""Messages between front and engine, the step record, the progress page. No torch here."""
