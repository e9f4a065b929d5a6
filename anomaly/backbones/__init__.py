"""Network input -> feature maps -> patch embeddings: networks, weights, hooked layers."""
