"""Features and models as files for other programs and engines."""
