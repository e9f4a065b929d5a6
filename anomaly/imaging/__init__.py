"""Image file -> network input: decoding within limits, geometry, regions. Imports no torch."""
