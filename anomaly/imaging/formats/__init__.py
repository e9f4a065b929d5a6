"""The picture formats that can be read, a module each, and what they share: `base`."""
