"""The line: models behind HTTP, the record of answers, the page for operators, drift."""
