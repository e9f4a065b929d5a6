"""One line: takes pictures when parts come, and says the verdicts to the machine in time."""
