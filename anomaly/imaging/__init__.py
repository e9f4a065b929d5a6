"""Image file -> network input: decoding, geometry, regions, batches. Imports no torch."""
