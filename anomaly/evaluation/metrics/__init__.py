"""How good the scores are: arrays in, floats out.

A part or pixel counts as flagged when its score is *greater than* the threshold, here and
everywhere else. Metrics only measure; no threshold in use is ever taken from them.
"""
