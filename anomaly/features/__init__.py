"""Network input -> patch embeddings: backbones, hooked layers, alignment."""
