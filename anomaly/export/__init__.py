"""Features and models as files for other programs and engines."""

VERDICTS = ("good", "review", "reject")  # as a graph from pixels counts them
