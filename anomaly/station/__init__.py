"""A station: takes pictures when parts come, and sends verdicts to the PLC in time."""
