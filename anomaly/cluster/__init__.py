"""Work on many machines: Ray's actors compute features of training images, or scores."""
