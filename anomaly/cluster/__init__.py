"""Work on many machines: manifests, shards, Ray."""
