"""Images -> predictions: the stages of a trained model, wired to one another."""
