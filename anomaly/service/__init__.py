"""Models behind HTTP: parts are scored as they come, written down, and shown to people."""
