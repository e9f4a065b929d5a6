"""Data sets as samples. Lists files; only `ground_truth` decodes any. Refusals are `DataError`s."""
